"""What training a block takes of a device's memory, what is free there, and whether the one fits the other.

The need is a formula, asked before anything is allocated: by the doctor, by workers, by the schedule and by
`training.micro_batch = "auto"`. Not covered: what other programs take later.
"""

from __future__ import annotations

import dataclasses
import os
from functools import lru_cache
from pathlib import Path

import torch
from torch import nn

from blocktrain.config import ModelConfig, ObjectiveConfig, Recipe, TrainingConfig
from blocktrain.errors import DeviceError
from blocktrain.model.cross_entropy import rows_at_once
from blocktrain.model.families import denoises
from blocktrain.model.objective import Objective
from blocktrain.training.muon import STACK_VALUES
from blocktrain.training.optimizer import split_parameters

RESIDENT_ON_CPU = 1.5
"""A process that trains on a CPU has at least so many times the estimate resident: 1.5 to 2.4 times it, by
`benchmarks/micro_batches.py`. The estimate leaves out what the backward pass holds for a moment, and what the
allocator keeps."""
CGROUP = Path("/sys/fs/cgroup")
MEMORY_FILE = Path("/proc/meminfo")


def free_memory(device: torch.device) -> tuple[int | None, int | None]:
    """Free and total bytes of a device, each None where the system does not say; a container's limit counts
    where it is lower."""
    if device.type == "cuda":
        free_there, total_there = torch.cuda.mem_get_info(device)
        # The allocator keeps what the block before gave back: 45 GB of an H200 after `gpt2-small`, which
        # would leave the next block half of the sequences at once.
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return free_there + kept, total_there
    try:
        total: int | None = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        total = None
    # Not MemFree: the page cache counts as used there, and a machine that has read a corpus looks full.
    free = meminfo("MemAvailable") or total
    limit, used = number_in(CGROUP / "memory.max"), number_in(CGROUP / "memory.current")
    if limit is not None and used is not None and (free is None or limit - used < free):
        return max(0, limit - used), limit
    return free, total


def training_bytes(
    recipe: Recipe,
    objective: Objective,
    device_type: str = "cpu",
    *,
    block: int | None = None,
    micro_batch: int | None = None,
    parts: int = 1,
) -> int:
    """What training a block (the last, unless named) needs, without training it; its state may be in `parts`
    on several devices.

    In fp32 8 % from what `PeakMemory` counts. On CUDA the families whose layers are compiled one by one are
    within 6 % of 13 peaks of the allocator (tests/training/test_memory_on_cuda.py); ours stays below: bf16
    and compilation took 0.55 of it at width 384, bf16 alone 0.93 at width 1024 (docs/history).
    """
    block = recipe.model.blocks - 1 if block is None else block
    model, training = recipe.model.of_block(block), recipe.training
    matrices, rest = _num_values(objective.model, objective.config, objective.vocabulary, block)
    if micro_batch is None:
        micro_batch = 1 if training.micro_batch == "auto" else training.micro_batch or training.batch
    tokens = min(micro_batch, training.batch) * model.context
    # Muon keeps one moment per matrix value, AdamW two.
    per_matrix_value = 8 if training.optimizer == "adamw" else 2 if training.momentum == "bfloat16" else 4
    state = 8 * (matrices + rest) + per_matrix_value * matrices + 8 * rest
    if parts > 1:
        # Whole at one moment are the layer that runs and the one that comes next, with the gradients of one,
        # and all that is outside the layers.
        state = state // parts + 12 * matrices // model.layers_per_block + 8 * rest
    behind = objective.downstream(block)
    # The inputs of the parts behind stay; of the parts themselves and of the own one, one is there at a time.
    state += (2 if device_type == "cuda" else 4) * len(behind) * tokens * model.width
    visitor = max(
        (_visitor_bytes(recipe, objective, device_type, part, tokens) for part in behind), default=0
    )
    if device_type == "cuda" and not denoises(model):
        own = _compiled_bytes(model, training, objective.vocabulary, matrices, tokens)
        return state + max(own, visitor)
    kept, whole = model.width, _kept_values(model)
    num_layers = model.layers_per_block
    layers = num_layers * kept + whole if training.recompute else num_layers * whole
    values = tokens * (3 * model.width + layers)
    if objective.holds_logits(tokens):
        values += tokens * 2 * objective.vocabulary
    else:
        values += objective.vocabulary * (model.width + 2 * rows_at_once(objective.vocabulary))
    # Saved for the backward pass are the weights too, as autograd counts.
    return state + max(4 * ((matrices + rest) // parts + values), visitor)


def _visitor_bytes(recipe: Recipe, objective: Objective, device_type: str, part: int, tokens: int) -> int:
    """What a frozen part behind the one in training takes while it is its turn: weights and activations."""
    model = recipe.model.of_block(part)
    weights = sum(_num_values(recipe.model, objective.config, objective.vocabulary, part))
    layers = 1 if recipe.training.recompute else model.layers_per_block
    values = weights + tokens * (layers * _kept_values(model) + model.layers_per_block * model.width)
    if part == recipe.model.blocks - 1:
        # The last part alone has an output map.
        rows = tokens if objective.holds_logits(tokens) else rows_at_once(objective.vocabulary)
        values += 2 * rows * objective.vocabulary
    return (2 if device_type == "cuda" else 4) * values


@lru_cache(maxsize=256)
def _num_values(model: ModelConfig, config: ObjectiveConfig, vocabulary: int, block: int) -> tuple[int, int]:
    """Values of a block that Muon trains, and those that it does not. Kept, since a plan and `auto` ask again
    and again, and 80 layers without values still take a second to build."""
    with torch.device("meta"):
        built = Objective(model, config, vocabulary=vocabulary).build(block, seed=0)
    matrices, rest = (sum(p.numel() for p in part) for part in split_parameters(built))
    return matrices, rest


def _kept_values(model: ModelConfig) -> int:
    """Values that one layer keeps of a token for the backward pass, without compilation. The factors of ours
    were counted at widths 64 and 128, the others follow from what each operation saves."""
    if not denoises(model):
        queries, keys, inner = _widths(model)
        return 6 * model.width + 3 * queries + 2 * keys + 4 * inner
    attention = 10 + (2 if model.convolution else 0) if model.mixer == "attention" else 0
    return model.width * (3 + 2 * model.feedforward + attention)


def _widths(model: ModelConfig) -> tuple[int, int, int]:
    """Of queries, keys and the feed-forward layer."""
    head, inner = model.channels_per_head, model.feedforward_width or model.feedforward * model.width
    return model.heads * head, (model.kv_heads or model.heads) * head, inner


def _compiled_bytes(
    model: ModelConfig, training: TrainingConfig, vocabulary: int, matrices: int, tokens: int
) -> int:
    """What a step takes beside its state on CUDA: the largest of its three phases, in bf16."""
    width, num_layers = model.width, model.layers_per_block
    queries, keys, inner = _widths(model)
    # What the compiled layer saves for its backward pass (counted on a CPU, where the graph is cut the same
    # way): its input, two norms and the sum between them, queries, attention twice, keys and values, three
    # of the feed-forward layer, and all its matrices in two bytes.
    saved = 2 * tokens * (4 * width + 3 * queries + 2 * keys + 3 * inner) + 2 * matrices // num_layers
    kept = 2 * tokens * width if training.recompute else saved
    # In the backward pass of the last layer its gradients come on top: three of the width for a token, and
    # one byte for a value of its matrices. This and the rest were held beside 13 peaks of an H200
    # (tests/training/test_memory_on_cuda.py).
    again = saved if training.recompute else 0
    backward = num_layers * kept + again + 6 * tokens * width + matrices // num_layers
    rows = min(tokens, rows_at_once(vocabulary))
    # Of a chunk the logits and their gradients, and one of both is still there from the chunk before.
    output = num_layers * kept + 4 * tokens * width + 6 * rows * vocabulary + 8 * vocabulary * width
    if tokens == training.batch * model.context:
        # One micro-batch alone: at the output map the layers and the embedding have no gradients yet, in the
        # last layer those before it have none, and when they have, its activations are gone. Counted with
        # them, a vocabulary of 128,256 was estimated at 12.9 GB and took 11.2 GB on an H200.
        embedding = 0 if model.tied else vocabulary * width
        output -= 4 * (matrices + embedding)
        before = matrices - matrices // num_layers
        backward -= min(4 * (before + embedding), (num_layers - 1) * kept)
    stack = 20 * min(matrices, STACK_VALUES) if training.optimizer == "muon" else 0
    return max(backward, output, stack)


def block_needs(
    recipe: Recipe,
    objective: Objective,
    device_type: str = "cpu",
    *,
    ranks: int = 1,
    sharded: bool = False,
) -> list[int]:
    """What training each block needs of one device; blocks may differ. Each of several ranks has a share of
    the batch, and of a sharded block also of its state."""
    share = dataclasses.replace(recipe.training, batch=-(-recipe.training.batch // ranks))
    own, parts = dataclasses.replace(recipe, training=share), ranks if sharded else 1
    blocks = range(recipe.model.blocks)
    return [training_bytes(own, objective, device_type, block=block, parts=parts) for block in blocks]


def usable_memory(device: torch.device, limit: int | None = None) -> int | None:
    """What an estimate may come to: what is free, of a CPU's memory the part that an estimate leaves out
    taken off, up to a limit that its owner set."""
    free, _ = free_memory(device)
    if free is not None and device.type != "cuda":
        free = int(
            (free + (meminfo("SwapFree") or 0)) / RESIDENT_ON_CPU
        )  # swap is slow, but the user's choice
    return min((one for one in (free, limit) if one is not None), default=None)


def check_fits(recipe: Recipe, needed: int, usable: int | None, device: torch.device) -> None:
    """Refuse to train a block that needs more than there is. Without this the kernel kills the process some
    seconds later (exit code 137 and no word), or its neighbours."""
    if usable is not None and needed > usable:
        room = f"has room for {usable / 1e9:.1f} GB"
        if device.type == "cpu":
            room += f" (a process takes at least {RESIDENT_ON_CPU:g} times what is estimated)"
        training = recipe.training
        settings = [] if training.micro_batch in (1, "auto") else ["training.micro_batch = 1"]
        settings += [] if training.recompute else ["training.recompute = true"]
        raise DeviceError(
            f"training one block of {recipe.name} needs about {needed / 1e9:.1f} GB of memory, and "
            f"{device} {room}; close other programs, use another machine or "
            "--device, or, where the recipe is yours, set "
            f"{' and '.join([*settings, 'a smaller model.width'])}, model.layers_per_block or training.batch"
        )


def fitting_micro_batch(recipe: Recipe, objective: Objective, block: nn.Module, index: int | None) -> int:
    """The most sequences at once that fit beside the block, whose weights are on its device already. One at
    least: what does not fit then says so itself."""
    device = next(block.parameters()).device
    free = usable_memory(device)
    if free is None:
        return recipe.training.batch
    # What `largest_micro_batch` asks for has the weights in it, and what is free has not.
    weights = sum(one.numel() * one.element_size() for one in block.parameters())
    return largest_micro_batch(recipe, objective, device.type, free + weights, index) or 1


def largest_micro_batch(
    recipe: Recipe,
    objective: Objective,
    device_type: str,
    free: float,
    block: int | None = None,
    *,
    most: int | None = None,
) -> int | None:
    """The most sequences at once, halved from `most` (the batch), that `free` bytes hold; None where they do
    not hold even one."""
    size = recipe.training.batch if most is None else most
    while True:
        needed = training_bytes(recipe, objective, device_type, block=block, micro_batch=size)
        # A tenth stays free: the formula is that good, and so are other programs' manners.
        if needed <= 0.9 * free:
            return size
        if size == 1:
            return None
        size = (size + 1) // 2


def meminfo(key: str) -> int | None:
    try:
        for line in MEMORY_FILE.read_text().splitlines():
            name, _, value = line.partition(":")
            if name == key:
                return 1024 * int(value.split()[0])
    except (OSError, ValueError, IndexError):
        pass
    return None


def number_in(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
