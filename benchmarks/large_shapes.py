"""Table T8: the litepaper's six serving shapes, random weights, three stage processes on one device.

    python benchmarks/serving.py --table T8 --json t8.json          (one H200, about 3 minutes)
    python benchmarks/serving.py --table T8 --quick                 (tiny shapes on the CPU)

These are *timing* rows: the weights are random, so the text means nothing; how many tokens a traversal
really carries comes from trained models (`benchmarks/serving.py CHECKPOINT`, `benchmarks/sweep.py`).

A traversal is the `euler` chain: gateway -> stage 0 -> stage 1 -> stage 2 -> gateway, over real TCP on the
loopback device in the project's frames. A hop carries ids, a seed and one vector over the vocabulary per
row (z = a z0 + p_bar E, with z0 drawn again from the seed), not d floats. The wide-area network is a delay
in the receiver: a frame that has arrived whole is held for NETWORK_SECONDS / 4, since a traversal has four
hops. There is no rate limit and no loss. A row writes `rows` new positions behind a cached context.

The published counts fit B (L_b (12 d^2 + 13 d) + 2 d^2 + 384 d) with L_b = 4: layers with biases, a noise
and an output map, and tables of 256 bytes and 128 positions. Weights that do not fit on the device are
streamed from pinned host memory in every traversal, d x d matrices one by one through a ring of slots.
Exits 1 when a shape cannot run or takes longer than the litepaper says.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import math
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from provenance import check_claims, write_report
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))
from blocktrain.config import ObjectiveConfig
from blocktrain.model.block import make_codebook
from blocktrain.model.noise import levels, noise_share, precondition
from blocktrain.wire.frames import (
    HEADER_BYTES,
    Codec,
    Frame,
    FrameLimits,
    FrameType,
    Header,
    code_range,
    decode_body,
    decode_header,
    decode_rows,
    encode_frame,
    encode_ids,
    row_bytes,
)

VOCABULARY = 256
CONTEXT = 128
LAYERS_PER_BLOCK = 4
HEAD_WIDTH = 128
NUM_STAGES = 3
NETWORK_SECONDS = 0.24
NUM_HOPS = NUM_STAGES + 1
RING_SLOTS = 2
RESERVE_BYTES = 5 * 2**30
"""Left free on the device: activations, caches, graphs and the allocator's own rounding."""
JOINED = {
    **{"q": (3, 1), "k": (0, 0), "v": (0, 0), "up0": (4, 1), "down0": (1, 4)},
    **{f"{name}{i}": (0, 0) for name in ("up", "down") for i in (1, 2, 3)},
}
"""Rows and columns, in squares, of the matrix that begins with this square; none for one inside another."""
SQUARES = ("q", "k", "v", "out", *(f"up{i}" for i in range(4)), *(f"down{i}" for i in range(4)))
"""The matrices of a layer as d x d pieces, in the order they are used."""
OBJECTIVE = ObjectiveConfig()
GIB = 2.0**30
ROW_BYTES = row_bytes(Codec.Q8, VOCABULARY)


@dataclass(frozen=True)
class Shape:
    name: str
    blocks: int
    width: int
    rows: int
    """Tokens of one traversal."""
    litepaper_seconds: float | None
    traversals: int = 12

    @property
    def parameters(self) -> int:
        layer = 12 * self.width**2 + 13 * self.width
        per_block = LAYERS_PER_BLOCK * layer + 2 * self.width**2 + (VOCABULARY + CONTEXT) * self.width
        return self.blocks * per_block

    @property
    def square_bytes(self) -> int:
        return 2 * self.width**2


TABLE = (
    Shape("0.040B", 3, 512, 64, 0.245, 40),
    Shape("0.632B", 3, 2048, 128, 0.340, 20),
    Shape("10.08B", 3, 8192, 128, 0.382, 20),
    Shape("50.98B", 3, 18432, 32, 1.314),
    Shape("67.98B", 4, 18432, 16, 1.939),
    Shape("75.80B", 5, 17408, 8, 1.799),
)
QUICK = (Shape("tiny", 3, 128, 16, None, 3), Shape("tiny5", 5, 256, 8, None, 3))


# ---- frames over blocking sockets --------------------------------------------------------------------


class Wire:
    """One direction of a hop. What arrives is held until `delay` seconds after its last byte came."""

    def __init__(self, connection: socket.socket, delay: float) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection, self.delay = connection, delay
        self.bytes_sent = 0
        self.limits = FrameLimits(payload_bytes=CONTEXT * (4 + row_bytes(Codec.F32, VOCABULARY)))

    def send(self, header: Header, payload: bytes = b"") -> None:
        raw = encode_frame(header, b"", payload)
        self.connection.sendall(raw)
        self.bytes_sent += len(raw)

    def receive(self) -> Frame:
        header = decode_header(self._exactly(HEADER_BYTES), self.limits)
        body = self._exactly(header.body_bytes)
        hold_until(time.monotonic() + self.delay)
        return decode_body(header, body)

    def _exactly(self, count: int) -> bytes:
        parts = bytearray()
        while len(parts) < count:
            part = self.connection.recv(count - len(parts))
            if not part:
                raise ConnectionError("the peer closed the connection")
            parts += part
        return bytes(parts)


def hold_until(moment: float) -> None:
    """Sleeping overshoots by up to a millisecond, which four hops of the smallest shape would show."""
    while (left := moment - time.monotonic()) > 0:
        if left > 0.002:
            time.sleep(left - 0.002)


# ---- weights: resident on the device, or streamed through a ring of slots ------------------------------


class Squares(Protocol):
    """A block's d x d matrices by name, in the order of use."""

    def multiply(self, x: Tensor, name: str, bias: Tensor | None = None) -> Tensor: ...

    def widen(self, x: Tensor, names: list[str], bias_KD: Tensor) -> Tensor:
        """Products of x with each matrix, side by side."""

    def narrow(self, x: Tensor, names: list[str], bias_D: Tensor) -> Tensor:
        """The sum of each matrix's product with its part of x."""


class Resident:
    """Everything on the device; matrices that are used together lie in one, named by the first of them."""

    def __init__(self, matrices: dict[str, Tensor]) -> None:
        self.matrices = matrices

    def multiply(self, x: Tensor, name: str, bias: Tensor | None = None) -> Tensor:
        return F.linear(x, self.matrices[name], bias)

    def widen(self, x: Tensor, names: list[str], bias_KD: Tensor) -> Tensor:
        return F.linear(x, self.matrices[names[0]], bias_KD.flatten())

    def narrow(self, x: Tensor, names: list[str], bias_D: Tensor) -> Tensor:
        return F.linear(x, self.matrices[names[0]], bias_D)


class Streamed:
    """Resident matrices beside ones that come from pinned host memory, always in the same order.

    The copy of a matrix is queued as soon as the slot it goes to was used, so the ring fills again while
    the traversal is elsewhere.
    """

    def __init__(
        self, resident: dict[str, Tensor], order: list[str], width: int, device: torch.device
    ) -> None:
        self.resident, self.order, self.device = resident, order, device
        self.position = {name: i for i, name in enumerate(order)}
        self.host = torch.empty(
            (len(order), width, width), dtype=torch.float16, pin_memory=device.type == "cuda"
        )
        num_slots = min(RING_SLOTS, len(order))
        self.slots = torch.empty((num_slots, width, width), dtype=torch.float16, device=device)
        self.used = 0
        self._cuda = device.type == "cuda"
        if self._cuda:
            self._copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._filled = [
                torch.cuda.Event()  # type: ignore[no-untyped-call]
                for _ in range(num_slots)
            ]

    def start(self) -> None:
        """Fill the ring; the host copies must be complete."""
        for number in range(len(self.slots)):
            self._fetch(number)

    def multiply(self, x: Tensor, name: str, bias: Tensor | None = None) -> Tensor:
        if name in self.resident:
            return F.linear(x, self.resident[name], bias)
        number = self.used
        assert self.position[name] == number % len(self.order), "streamed matrices are used in order"
        slot = number % len(self.slots)
        if self._cuda:
            torch.cuda.current_stream().wait_event(self._filled[slot])
        y = F.linear(x, self.slots[slot], bias)
        self.used += 1
        self._fetch(number + len(self.slots))
        return y

    def widen(self, x: Tensor, names: list[str], bias_KD: Tensor) -> Tensor:
        parts = [self.multiply(x, name, bias) for name, bias in zip(names, bias_KD, strict=True)]
        return torch.cat(parts, dim=-1)

    def narrow(self, x: Tensor, names: list[str], bias_D: Tensor) -> Tensor:
        y = bias_D
        for name, part in zip(names, x.chunk(len(names), dim=-1), strict=True):
            y = y + self.multiply(part, name)
        return y

    def _fetch(self, number: int) -> None:
        """Copy the `number`-th use's matrix into its slot, behind everything queued so far."""
        slot, source = number % len(self.slots), self.host[number % len(self.order)]
        if not self._cuda:
            self.slots[slot].copy_(source)
            return
        self._copies.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._copies):
            self.slots[slot].copy_(source, non_blocking=True)
            self._filled[slot].record()


def square_names(blocks: Sequence[int]) -> list[str]:
    """All d x d matrices of these blocks, in the order of use."""
    names = []
    for block in blocks:
        names.append(f"{block}/noise")
        for layer in range(LAYERS_PER_BLOCK):
            names += [f"{block}/{layer}/{square}" for square in SQUARES]
        names.append(f"{block}/output")
    return names


def spread(names: list[str], count: int) -> list[str]:
    """`count` of the names, as far apart as possible, so that copying overlaps with computing."""
    return [names[i * len(names) // count] for i in range(count)]


# ---- the blocks of one stage ------------------------------------------------------------------------------


class StageModel:
    """The blocks of one stage with random weights, and the keys and values of one session's context."""

    def __init__(self, shape: Shape, blocks: list[int], num_streamed: int, device: torch.device) -> None:
        self.shape, self.blocks, self.device = shape, blocks, device
        self.num_parameters = 0
        self.fingerprints: list[str] = []
        self.squares = self._make_squares(num_streamed)
        self.vectors = {block: self._make_vectors(block) for block in blocks}
        codebook = make_codebook(VOCABULARY, shape.width, seed=7)
        self.codebook = codebook.to(device, torch.float16)
        heads = max(1, shape.width // HEAD_WIDTH)
        cache = (len(blocks) * LAYERS_PER_BLOCK, 2, heads, CONTEXT, shape.width // heads)
        self.cache = torch.zeros(cache, dtype=torch.float16, device=device)
        self.heads = heads
        self.sigmas = levels(OBJECTIVE, shape.blocks)

    # -- random weights --

    def _make_squares(self, num_streamed: int) -> Squares:
        names = square_names(self.blocks)
        streamed = spread(names, num_streamed)
        if not streamed:
            return Resident(self._make_joined(names))
        resident = {name: self._random_square(name) for name in names if name not in set(streamed)}
        squares = Streamed(resident, streamed, self.shape.width, self.device)
        for i, name in enumerate(streamed):
            squares.host[i].copy_(self._random_square(name, out=squares.slots[0]))
        squares.start()
        return squares

    def _make_joined(self, names: list[str]) -> dict[str, Tensor]:
        """q, k, v under each other, and up0 to up3; down0 to down3 side by side."""
        width, joined = self.shape.width, {}
        for name in names:
            rows, columns = JOINED.get(name.rpartition("/")[2], (1, 1))
            if rows * columns:
                size = (rows * width, columns * width)
                joined[name] = torch.empty(size, dtype=torch.float16, device=self.device)
                current, place = joined[name], 0
            part = slice(place * width, (place + 1) * width)
            if current.shape[1] > width:
                current[:, part] = self._random_square(name)
            else:
                self._random_square(name, out=current[part])
            place += 1
        return joined

    def _random_square(self, name: str, out: Tensor | None = None) -> Tensor:
        width = self.shape.width
        if out is None:
            out = torch.empty((width, width), dtype=torch.float16, device=self.device)
        self._fill(out, name, width**-0.5)
        return out

    def _fill(self, tensor: Tensor, name: str, scale: float) -> None:
        """Random values of a seed that no other tensor has; a sample of them goes into the fingerprint."""
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "little")
        tensor.normal_(0, scale, generator=torch.Generator(self.device).manual_seed(seed))
        self.num_parameters += tensor.numel()
        sample = tensor[0, :256].cpu().numpy().tobytes()
        self.fingerprints.append(hashlib.sha256(sample).hexdigest())

    def _make_vectors(self, block: int) -> dict[str, Tensor]:
        """Tables, biases and norms: (256 + 128) d and 13 d for each layer."""
        width = self.shape.width
        sizes: dict[str, tuple[int, ...]] = {"bytes": (VOCABULARY, width), "positions": (CONTEXT, width)}
        for layer in range(LAYERS_PER_BLOCK):
            sizes |= {f"{layer}/biases": (9, width), f"{layer}/norms": (4, width)}
        vectors = {}
        for name, size in sizes.items():
            vectors[name] = torch.empty(size, dtype=torch.float16, device=self.device)
            self._fill(vectors[name], f"{block}/{name}", 0.02)
        return vectors

    @property
    def streamed_bytes(self) -> int:
        if isinstance(self.squares, Streamed):
            return len(self.squares.order) * self.shape.square_bytes
        return 0

    # -- one pass --

    def forward(self, ids_R: Tensor, positions_R: Tensor, z0_RD: Tensor, p_bar_RV: Tensor) -> Tensor:
        """Euler steps of this stage's blocks. Returns the new p_bar, or the last block's log-probs."""
        for block in self.blocks:
            sigma = self.sigmas[block]
            z_RD = noise_share(self.sigmas[0], sigma) * z0_RD + p_bar_RV @ self.codebook.float()
            log_p_RV = self._block(block, ids_R, positions_R, z_RD, sigma)
            if block == self.shape.blocks - 1:
                return log_p_RV
            kept = self.sigmas[block + 1] / sigma
            p_bar_RV = kept * p_bar_RV + (1 - kept) * log_p_RV.exp()
        return p_bar_RV

    def _block(self, block: int, ids_R: Tensor, positions_R: Tensor, z_RD: Tensor, sigma: float) -> Tensor:
        vectors = self.vectors[block]
        c = precondition(torch.tensor(sigma), OBJECTIVE.sigma_data)
        x_RD = vectors["bytes"][ids_R] + vectors["positions"][positions_R]
        x_RD = x_RD + self.squares.multiply((float(c.c_in) * z_RD).half(), f"{block}/noise")
        mask_RS = torch.arange(CONTEXT, device=self.device) <= positions_R[:, None]
        for layer in range(LAYERS_PER_BLOCK):
            x_RD = self._layer(block, layer, x_RD, positions_R, mask_RS)
        f_RD = self.squares.multiply(F.layer_norm(x_RD, (self.shape.width,)), f"{block}/output")
        z_hat_RD = float(c.c_out) * f_RD.float() + float(c.c_skip) * z_RD
        return F.log_softmax(OBJECTIVE.logit_scale * z_hat_RD @ self.codebook.float().T, dim=-1)

    def _layer(self, block: int, layer: int, x_RD: Tensor, positions_R: Tensor, mask_RS: Tensor) -> Tensor:
        width, name = self.shape.width, f"{block}/{layer}"
        biases, norms = self.vectors[block][f"{layer}/biases"], self.vectors[block][f"{layer}/norms"]
        y_RD = F.layer_norm(x_RD, (width,), 1 + norms[0], norms[1])
        qkv = self.squares.widen(y_RD, [f"{name}/{part}" for part in "qkv"], biases[:3])
        attended_RD = self._attend(block, layer, qkv, positions_R, mask_RS)
        x_RD = x_RD + self.squares.multiply(attended_RD, f"{name}/out", biases[3])
        y_RD = F.layer_norm(x_RD, (width,), 1 + norms[2], norms[3])
        hidden = F.gelu(self.squares.widen(y_RD, [f"{name}/up{i}" for i in range(4)], biases[4:8]))
        return x_RD + self.squares.narrow(hidden, [f"{name}/down{i}" for i in range(4)], biases[8])

    def _attend(self, block: int, layer: int, qkv: Tensor, positions_R: Tensor, mask_RS: Tensor) -> Tensor:
        """Attention over the cached context, the new positions included."""
        q, k, v = qkv.view(len(qkv), 3, self.heads, -1).permute(1, 2, 0, 3)
        cache = self.cache[self.blocks.index(block) * LAYERS_PER_BLOCK + layer]
        cache[0].index_copy_(1, positions_R, k)
        cache[1].index_copy_(1, positions_R, v)
        y = F.scaled_dot_product_attention(q[None], cache[0][None], cache[1][None], attn_mask=mask_RS)
        return y[0].transpose(0, 1).reshape(len(qkv), -1)


class Pass:
    """A hop's payload in, the next hop's out, for a fixed number of rows.

    Decoding and encoding of rows (Q8, as frames.py has it) run on the device; where all weights are
    resident the whole is one CUDA graph. What is left to the processor is two copies.
    """

    def __init__(self, model: StageModel, rows: int) -> None:
        device, width = model.device, model.shape.width
        self.model, self.rows = model, rows
        self.first, self.last = model.blocks[0] == 0, model.blocks[-1] == model.shape.blocks - 1
        size = rows if self.first else rows * (1 + ROW_BYTES)
        pinned = device.type == "cuda"
        self.arrived = torch.zeros(size, dtype=torch.uint8, pin_memory=pinned)
        self.payload = torch.zeros(size, dtype=torch.uint8, device=device)
        self.base = torch.zeros(1, dtype=torch.int64, device=device)
        self.steps = torch.arange(rows, device=device)
        self.z0 = torch.zeros((rows, width), device=device)
        self.generator = torch.Generator(device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.output = self._forward()
        self.leaving = torch.zeros(self.output.shape, dtype=torch.uint8, pin_memory=pinned)
        if device.type == "cuda" and isinstance(model.squares, Resident):
            self._capture()

    def _capture(self) -> None:
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self._forward()
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.output = self._forward()

    def _forward(self) -> Tensor:
        ids = self.payload[: self.rows]
        if self.first:
            p_bar = torch.zeros((self.rows, VOCABULARY), device=self.model.device)
        else:
            p_bar = decode_on_device(self.payload[self.rows :].view(self.rows, -1)).exp()
        rows = self.model.forward(ids.long(), self.base + self.steps, self.z0, p_bar)
        if self.last:
            return encode_on_device(rows).flatten()
        return torch.cat([ids, encode_on_device(rows.clamp(min=1e-30).log()).flatten()])

    def run(self, payload: bytes, base: int, seed: int) -> bytes:
        self.arrived.numpy()[:] = np.frombuffer(payload, np.uint8)
        self.payload.copy_(self.arrived, non_blocking=True)
        self.base.fill_(base)
        self.generator.manual_seed(seed)
        self.z0.normal_(generator=self.generator)
        if self.graph is not None:
            self.graph.replay()
        else:
            self.output = self._forward()
        self.leaving.copy_(self.output, non_blocking=True)
        if self.model.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        return self.leaving.numpy().tobytes()


def encode_on_device(rows_RV: Tensor) -> Tensor:
    """Rows as the codec Q8 has them: an fp32 maximum and a byte for each token."""
    span, top = code_range(Codec.Q8)
    maxima = rows_RV.amax(dim=-1, keepdim=True)
    codes = (top * ((maxima - rows_RV).clamp(0, span) / span).sqrt()).round().to(torch.uint8)
    return torch.cat([maxima.contiguous().view(torch.uint8), codes], dim=1)


def decode_on_device(records: Tensor) -> Tensor:
    span, top = code_range(Codec.Q8)
    maxima = records[:, :4].clone().view(torch.float32)
    return maxima - span * (records[:, 4:].float() / top).square()


# ---- a stage process --------------------------------------------------------------------------------------


@torch.inference_mode()
def stage_process(device: torch.device, delay: float) -> None:
    """Obeys JSON lines on stdin: `free`, `build`, `connect`, then serves until GOODBYE."""
    listener = socket.create_server(("127.0.0.1", 0))
    initialise(device)
    say(port=listener.getsockname()[1])
    model: StageModel | None = None
    for line in sys.stdin:
        order = json.loads(line)
        if order["do"] == "free":
            say(free=free_bytes(device))
        elif order["do"] == "build":
            began = time.monotonic()
            model = StageModel(Shape(**order["shape"]), order["blocks"], order["streamed"], device)
            passes = {rows: Pass(model, rows) for rows in order["rows"]}
            say(
                parameters=model.num_parameters,
                fingerprints=model.fingerprints,
                streamed_bytes=model.streamed_bytes,
                seconds=time.monotonic() - began,
            )
        elif order["do"] == "connect":
            assert model is not None, "build comes first"
            onward = Wire(socket.create_connection(("127.0.0.1", order["port"])), delay)
            inward = Wire(listener.accept()[0], delay)
            say(connected=True)
            serve_stage(model, passes, inward, onward)
            return


def initialise(device: torch.device) -> None:
    """Make the context and the libraries' workspaces now, so that `free` counts them."""
    torch.set_num_threads(1)
    x = torch.ones((64, 64), dtype=torch.float16, device=device)
    float((x @ x).sum())


def free_bytes(device: torch.device) -> int | None:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None


def say(**values: Any) -> None:
    print(json.dumps(values), flush=True)


def serve_stage(model: StageModel, passes: dict[int, Pass], inward: Wire, onward: Wire) -> None:
    """Frames in, frames on; the compute time of each traversal is said at the end."""
    last = model.blocks[-1] == model.shape.blocks - 1
    kind = FrameType.LOG_PROBS if last else FrameType.TRAVERSE
    compute: dict[int, list[float]] = {rows: [] for rows in passes}
    while (frame := inward.receive()).type != FrameType.GOODBYE:
        header = frame.header
        if frame.type == FrameType.PING:
            onward.send(header)
            continue
        began = time.monotonic()
        payload = passes[header.rows].run(frame.payload, header.base, header.session)
        compute[header.rows].append(time.monotonic() - began)
        onward.send(replace(header, type=kind, codec=Codec.Q8), payload)
    onward.send(frame.header)
    say(
        compute=compute,
        bytes_sent=onward.bytes_sent,
        peak_bytes=torch.cuda.max_memory_allocated() if model.device.type == "cuda" else None,
    )


# ---- the gateway ------------------------------------------------------------------------------------------


class StageProcess:
    def __init__(self, device: str, delay: float) -> None:
        command = [sys.executable, __file__, "--role", "stage", "--device", device, "--delay", str(delay)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def tell(self, **order: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()

    def hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"a stage process ended with status {self.process.wait()}")
        heard: dict[str, Any] = json.loads(line)
        return heard


@contextlib.contextmanager
def running_stages(device: str, delay: float) -> Iterator[list[StageProcess]]:
    stages = [StageProcess(device, delay) for _ in range(NUM_STAGES)]
    try:
        yield stages
    finally:
        for stage in stages:
            stage.process.kill()
            stage.process.wait()


def deal_blocks(num_blocks: int) -> list[list[int]]:
    """Consecutive blocks for each stage, the first ones taking the rest."""
    counts = [num_blocks // NUM_STAGES + (i < num_blocks % NUM_STAGES) for i in range(NUM_STAGES)]
    return [list(range(sum(counts[:i]), sum(counts[: i + 1]))) for i in range(NUM_STAGES)]


def plan_streaming(shape: Shape, free: int | None, minimum: int = 0) -> list[int]:
    """Matrices each stage streams: none where the weights fit beside the reserve."""
    excess = 0 if free is None else 2 * shape.parameters - (free - RESERVE_BYTES)
    if excess <= 0 and not minimum:
        return [0] * NUM_STAGES
    rings = NUM_STAGES * RING_SLOTS * shape.square_bytes
    needed = max(minimum, math.ceil((excess + rings) / shape.square_bytes))
    return [needed // NUM_STAGES + (i < needed % NUM_STAGES) for i in range(NUM_STAGES)]


@dataclass
class Built:
    streamed_bytes: int
    seconds: float


def build(stages: list[StageProcess], shape: Shape, streamed_at_least: int) -> tuple[list[int], Built]:
    """Weights in every stage; gives the ports they listen on and what they hold."""
    ports = [int(stage.hear()["port"]) for stage in stages]
    stages[-1].tell(do="free")
    streaming = plan_streaming(shape, stages[-1].hear()["free"], streamed_at_least)
    for stage, blocks, streamed in zip(stages, deal_blocks(shape.blocks), streaming, strict=True):
        rows = sorted({1, shape.rows, CONTEXT})
        stage.tell(do="build", shape=asdict(shape), blocks=blocks, streamed=streamed, rows=rows)
    heard = [stage.hear() for stage in stages]
    prints = [text for part in heard for text in part["fingerprints"]]
    parameters = sum(part["parameters"] for part in heard)
    assert parameters == shape.parameters, f"expected {shape.parameters} parameters, found {parameters}"
    assert len(set(prints)) == len(prints), "two weight tensors are the same"
    streamed_bytes = sum(part["streamed_bytes"] for part in heard)
    return ports, Built(streamed_bytes, max(part["seconds"] for part in heard))


def join(stages: list[StageProcess], ports: list[int], delay: float) -> tuple[Wire, Wire]:
    """Gateway to the first stage, each to the next, the last back to the gateway."""
    listener = socket.create_server(("127.0.0.1", 0))
    onward = [*ports[1:], listener.getsockname()[1]]
    for stage, port in zip(stages, onward, strict=True):
        stage.tell(do="connect", port=port)
    out = Wire(socket.create_connection(("127.0.0.1", ports[0])), delay)
    back = Wire(listener.accept()[0], delay)
    for stage in stages:
        stage.hear()
    return out, back


def traverse(
    out: Wire, back: Wire, ids: list[int], base: int, seed: int
) -> tuple[NDArray[np.float64], float]:
    """One traversal: the last block's log-probs of every row, and seconds."""
    began = time.monotonic()
    header = Header(FrameType.TRAVERSE, session=seed, base=base, rows=len(ids))
    out.send(header, encode_ids(ids, VOCABULARY))
    frame = back.receive()
    rows = decode_rows(frame.payload, frame.header.codec, frame.header.rows, VOCABULARY)
    return rows, time.monotonic() - began


def measure(out: Wire, back: Wire, shape: Shape) -> dict[str, Any]:
    """Latencies of pings, sweeps and plain decoding through the same stages."""
    pings = []
    for _ in range(3):
        began = time.monotonic()
        out.send(Header(FrameType.PING))
        back.receive()
        pings.append(time.monotonic() - began)
    traverse(out, back, prompt_ids(), 0, seed=0)  # caches of a whole context
    unknown, base = [0] * shape.rows, CONTEXT - shape.rows
    first_rows, _ = traverse(out, back, unknown, base, seed=1)
    sweep = [traverse(out, back, unknown, base, seed)[1] for seed in range(1, shape.traversals + 2)]
    token, plain = 0, []
    for position in range(CONTEXT - shape.traversals - 2, CONTEXT):
        rows, seconds = traverse(out, back, [token], position, seed=position)
        token = int(rows[0].argmax())
        plain.append(seconds)
    return {"ping": pings, "first_rows": first_rows, "sweep": sweep[1:], "plain": plain[2:]}


def prompt_ids() -> list[int]:
    ids: list[int] = np.random.default_rng(1).integers(0, VOCABULARY, CONTEXT).tolist()
    return ids


@torch.inference_mode()
def check_against_one_process(shape: Shape, served: NDArray[np.float64]) -> float:
    """The largest difference of likely log-probs between the three stages and one process without a wire."""
    model = StageModel(shape, list(range(shape.blocks)), 0, torch.device("cpu"))
    local, whole = Pass(model, shape.rows), Pass(model, CONTEXT)
    whole.run(bytes(prompt_ids()), 0, 0)
    coded = local.run(bytes(shape.rows), CONTEXT - shape.rows, 1)
    expected = decode_rows(coded, Codec.Q8, shape.rows, VOCABULARY)
    likely = expected > expected.max(axis=-1, keepdims=True) - 3
    difference = float(np.abs(expected - served)[likely].max())
    assert difference < 0.2, f"the served chain differs from the local one by {difference:.3f} nats"
    return difference


def run_shape(shape: Shape, device: str, network_seconds: float, streamed_at_least: int) -> dict[str, Any]:
    delay = network_seconds / NUM_HOPS
    with running_stages(device, delay) as stages:
        ports, built = build(stages, shape, streamed_at_least)
        out, back = join(stages, ports, delay)
        measured = measure(out, back, shape)
        out.send(Header(FrameType.GOODBYE))
        back.receive()
        ends = [stage.hear() for stage in stages]
    if device == "cpu":
        difference = check_against_one_process(shape, measured["first_rows"])
        print(f"  (differs by at most {difference:.4f} nats from the same blocks in one process)")
    return row_of(shape, built, measured, ends, device)


def row_of(
    shape: Shape, built: Built, measured: dict[str, Any], ends: list[dict[str, Any]], device: str
) -> dict[str, Any]:
    sweep, plain = measured["sweep"], measured["plain"]
    compute = sum(statistics.median(end["compute"][str(shape.rows)][2:]) for end in ends)
    ids, coded = shape.rows, shape.rows * row_bytes(Codec.Q8, VOCABULARY)
    wire = NUM_HOPS * HEADER_BYTES + NUM_STAGES * ids + NUM_STAGES * coded
    p50 = statistics.median(sweep)
    return {
        "shape": shape.name,
        "blocks": shape.blocks,
        "layers_per_block": LAYERS_PER_BLOCK,
        "width": shape.width,
        "distinct_parameters": shape.parameters,
        "weights": "random weights, fp16; the text means nothing",
        "device": device_name(device),
        "processes": f"{NUM_STAGES} stages and a gateway on one machine",
        "network": network_label(measured["ping"]),
        "mode": "sweep, euler chain",
        "rows": shape.rows,
        "context": CONTEXT,
        "traversals": len(sweep),
        "p50_seconds": p50,
        "p99_seconds": percentile(sweep, 99),
        "tokens_per_second": shape.rows / p50,
        "ping_seconds": statistics.median(measured["ping"]),
        "compute_seconds": compute,
        "wire_bytes_per_traversal": wire,
        "hidden_state_bytes_per_hop_instead": shape.rows * shape.width * 2,
        "resident_gib": (2 * shape.parameters - built.streamed_bytes) / GIB,
        "streamed_gib": built.streamed_bytes / GIB,
        "peak_device_gib": sum(end["peak_bytes"] or 0 for end in ends) / GIB,
        "build_seconds": built.seconds,
        "ar_p50_seconds": statistics.median(plain),
        "ar_p99_seconds": percentile(plain, 99),
        "ar_tokens_per_second": 1 / statistics.median(plain),
        "litepaper_seconds": shape.litepaper_seconds,
    }


def percentile(values: list[float], q: float) -> float:
    return float(np.percentile(values, q))


def device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else "CPU"


def network_label(pings: list[float]) -> str:
    control = Path("/proc/sys/net/ipv4/tcp_congestion_control")
    name = control.read_text().strip() if control.exists() else "unknown"
    return (
        f"TCP over loopback ({name}), each of {NUM_HOPS} hops delayed in the receiver; four hops without "
        f"computing measured {statistics.median(pings):.4f} s; no rate limit"
    )


HEADING = (
    "shape     parameters   d      B  rows  p50 s   p99 s   paper s  tok/s   compute ms  "
    "wire B  resident  streamed GiB  ar p50 s  ar tok/s"
)


def line(row: dict[str, Any]) -> str:
    paper = f"{row['litepaper_seconds']:.3f}" if row["litepaper_seconds"] else "  -  "
    return (
        f"{row['shape']:8s} {row['distinct_parameters']:12d}  {row['width']:5d}  {row['blocks']}  "
        f"{row['rows']:4d}  {row['p50_seconds']:.4f}  {row['p99_seconds']:.4f}  {paper}  "
        f"{row['tokens_per_second']:6.1f}  {1000 * row['compute_seconds']:9.2f}  "
        f"{row['wire_bytes_per_traversal']:7d}  {row['resident_gib']:8.2f}  {row['streamed_gib']:7.2f}  "
        f"      {row['ar_p50_seconds']:.4f}    {row['ar_tokens_per_second']:.2f}"
    )


def claims_of(rows: Sequence[dict[str, Any]]) -> dict[str, bool]:
    """No row may take longer than the litepaper says; the tiny shapes claim nothing."""
    return {
        f"{row['shape']} takes at most the litepaper's {row['litepaper_seconds']} s": row["p50_seconds"]
        <= row["litepaper_seconds"]
        for row in rows
        if row["litepaper_seconds"] is not None
    }


def run_table(
    *, quick: bool, json_path: Path | None, only: str | None, network_seconds: float = NETWORK_SECONDS
) -> None:
    device = "cpu" if quick else "cuda"
    shapes = [shape for shape in (QUICK if quick else TABLE) if only is None or shape.name in only.split(",")]
    rows: list[dict[str, Any]] = []
    failed: list[str] = []
    print("random weights: timings only, the text means nothing")
    print(HEADING, flush=True)
    for number, shape in enumerate(shapes):
        # The quick run streams a few matrices too, so that this path is tried without a large device.
        try:
            rows.append(run_shape(shape, device, network_seconds, 7 if quick and number else 0))
        except (RuntimeError, ConnectionError) as error:
            # The other shapes still count: a run on a lent machine is not repeated lightly.
            failed.append(f"{shape.name}: {error}")
            print(f"{shape.name:8s} failed: {error}", flush=True)
            continue
        print(line(rows[-1]), flush=True)
        write_report(json_path, "t8", rows)
    if rows:
        print(rows[-1]["network"])
    if failed:
        sys.exit("\n".join(failed))
    if not shapes:
        sys.exit(f"no shape is called {only}; there are {', '.join(one.name for one in TABLE)}")
    sys.exit(check_claims(claims_of(rows)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--role", choices=["stage"], required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--delay", type=float, default=0.0)
    arguments = parser.parse_args()
    stage_process(torch.device(arguments.device), arguments.delay)


if __name__ == "__main__":
    main()
