"""Serving over emulated links: modes x round-trip time x stages, with real TCP (see links.py).

    python benchmarks/serving.py CHECKPOINT --rtt 0,20,50,100,200 --stages 1,2,3,5
    python benchmarks/serving.py CHECKPOINT --check-lossless --prompts 200 --tokens 40 --kills 20
    python benchmarks/serving.py CHECKPOINT --clients 1,8,32,64      throughput: clients.py
    python benchmarks/serving.py --cost --clients 1,8,64             processor time per token: clients.py
    python benchmarks/serving.py --table T8          the litepaper's large shapes: large_shapes.py

Blocks are dealt out over stage processes, each in a network namespace of its own; the engine runs in the
gateway's. Prompts are held-out text of the checkpoint's corpus. Every row states text bytes per traversal
and per second, time per traversal (draft included) and bytes on the wire; `verify` must write the same
text as `ar` or the run fails. One request at a time: these are latencies; `--clients` is throughput. Exits 1
when five stages take more than MAX_FAN_OUT of one stage's time, or `verify` is slower than `ar` at 100 ms.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, cast

import clients
from links import Wan, available, host_ip
from provenance import check_claims, write_report

from blocktrain.starting import prepare_to_serve

PORT = 7000
PROMPT_BYTES = 128
MAX_FAN_OUT, FAN_OUT_RTT = 1.1, 100
LOAD_STAGES = 3


def deal(num_blocks: int, num_stages: int) -> list[str]:
    """Blocks dealt out in turn, as --blocks takes them."""
    return [",".join(map(str, range(i, num_blocks, num_stages))) for i in range(num_stages)]


@contextlib.contextmanager
def running_stages(
    wan: Wan | None,
    checkpoint: Path,
    blocks: list[str],
    device: str = "cpu",
    with_graphs: Collection[int] = (),
) -> Iterator[list[str]]:
    """Stage processes on the hosts, or on this one; gives their addresses. On a GPU, these stages replay
    captured passes."""
    processes = []
    try:
        for i, part in enumerate(blocks):
            command = [sys.executable, __file__, "--role", "stage", str(checkpoint), "--blocks", part]
            command += ["--device", device, *(["--graphs"] if i in with_graphs else [])]
            command += ["--listen", f"{host_ip(i)}:{PORT}" if wan is not None else "127.0.0.1:0"]
            inside = command if wan is None else wan.inside(wan.hosts[i], command)
            processes.append(subprocess.Popen(inside, stdout=subprocess.PIPE, text=True))
        addresses = []
        for process in processes:
            assert process.stdout is not None
            ready = re.match(r"stage ready listen=(\S+)", process.stdout.readline())
            assert ready is not None, "a stage did not start"
            addresses.append(ready[1])
        yield addresses
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait()


def measure_point(wan: Wan, arguments: argparse.Namespace, addresses: list[str]) -> list[dict[str, Any]]:
    """Rows of one (stages, RTT): the engine runs in the gateway's namespace."""
    command = [sys.executable, __file__, "--role", "engine", str(arguments.checkpoint)]
    command += ["--addresses", ",".join(addresses), "--modes", arguments.modes]
    command += ["--prompts", str(arguments.prompts), "--tokens", str(arguments.tokens)]
    command += ["--temperature", str(arguments.temperature)]
    command += ["--text", str(arguments.text)] if arguments.text is not None else []
    done = subprocess.run(
        wan.inside(wan.gateway, command), stdout=subprocess.PIPE, text=True, check=True, timeout=1800
    )
    rows: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return rows


def run_benchmark(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    config = json.loads((arguments.checkpoint / "config.json").read_text())
    num_blocks = len(config["blocks"])
    rows: list[dict[str, Any]] = []
    print(HEADER)
    for stages in numbers(arguments.stages):
        if stages > num_blocks:
            print(f"  (skipped: {stages} stages for {num_blocks} blocks)")
            continue
        with (
            Wan(stages, rate_mbit=arguments.rate_mbit) as wan,
            running_stages(wan, arguments.checkpoint, deal(num_blocks, stages)) as addresses,
        ):
            for rtt in numbers(arguments.rtt):
                wan.set_rtt(rtt)
                for row in measure_point(wan, arguments, addresses):
                    rows.append({"stages": stages, "rtt_ms": rtt, **row})
                    print(line(rows[-1]), flush=True)
    return rows


def run_load(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Throughput, see clients.py."""
    blocks = deal(len(json.loads((arguments.checkpoint / "config.json").read_text())["blocks"]), LOAD_STAGES)
    command = [sys.executable, __file__, "--role", "load", str(arguments.checkpoint)]
    for name in ("clients", "segments", "seconds", "prompts", "tokens", "text"):
        if getattr(arguments, name) is not None:
            command += [f"--{name}", str(getattr(arguments, name))]
    rows: list[dict[str, Any]] = []
    print(clients.HEADER)
    for rtt in numbers(arguments.rtt):
        with contextlib.ExitStack() as running:
            wan = running.enter_context(Wan(len(blocks), rate_mbit=arguments.rate_mbit)) if rtt else None
            addresses = running.enter_context(running_stages(wan, arguments.checkpoint, blocks))
            asked = [*command, "--addresses", ",".join(addresses)]
            if wan is not None:
                wan.set_rtt(rtt)
                asked = wan.inside(wan.gateway, asked)
            done = subprocess.run(asked, stdout=subprocess.PIPE, text=True, check=True, timeout=3600)
            for row in json.loads(done.stdout.splitlines()[-1]):
                rows.append({"rtt_ms": rtt, **row})
                print(clients.line(rows[-1]), flush=True)
    return rows


HEADER = "stages  RTT ms  mode       codec   K  bytes/trav  bytes/s  p50 ms  p99 ms  wire out/B   in/B  exact"


def line(row: dict[str, Any]) -> str:
    return (
        f"{row['stages']:6d}  {row['rtt_ms']:6d}  {row['mode']:9s}  {row['codec']:5s}  "
        f"{row['mean_draft']:4.1f}  {row['bytes_per_traversal']:8.2f}  {row['bytes_per_second']:7.1f}  "
        f"{row['p50_ms']:6.1f}  {row['p99_ms']:6.1f}  {row['sent_per_byte']:10.0f}  "
        f"{row['received_per_byte']:5.0f}  {row['exact_passes']:5d}"
    )


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def fan_out_ratio(rows: list[dict[str, Any]]) -> float | None:
    """Time per traversal of five stages against one, in `ar`; None if not measured."""
    found = {r["stages"]: r["p50_ms"] for r in rows if (r["rtt_ms"], r["mode"]) == (FAN_OUT_RTT, "ar")}
    return found[5] / found[1] if {1, 5} <= found.keys() else None


def speedups(rows: list[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], float]]:
    """Rows of other modes, and how much faster than `ar` each is."""
    plain = {(r["stages"], r["rtt_ms"], r["codec"]): r["bytes_per_second"] for r in rows if r["mode"] == "ar"}
    for row in rows:
        before = plain.get((row["stages"], row["rtt_ms"], row["codec"]))
        if row["mode"] != "ar" and before:
            yield row, row["bytes_per_second"] / before


def claims_of(rows: list[dict[str, Any]]) -> dict[str, bool]:
    ratio, claims = fan_out_ratio(rows), {}
    if ratio is None:
        print("five stages against one: not measured (needs --stages 1,...,5 and --rtt 100)")
    else:
        print(f"five stages against one at RTT {FAN_OUT_RTT} ms: {ratio:.3f} x per traversal")
        claims[f"five stages take at most {MAX_FAN_OUT} of one"] = ratio <= MAX_FAN_OUT
    for row, gain in speedups(rows):
        point = f"stages {row['stages']} RTT {row['rtt_ms']} ms {row['codec']}"
        print(f"  {point}: {row['mode']} {gain:.2f} x ar")
        if row["mode"] == "verify" and row["rtt_ms"] >= FAN_OUT_RTT:
            claims[f"verify is faster than ar ({point})"] = gain > 1
    return claims


# ---- the stage and engine processes ----


def stage_role(arguments: argparse.Namespace) -> None:
    import torch

    from blocktrain.serving.stage.main import parse_blocks, run_stage
    from blocktrain.serving.stage.stage import StageConfig
    from blocktrain.serving.transport import Address

    run_stage(
        arguments.checkpoint,
        parse_blocks(arguments.blocks),
        StageConfig(listen=Address.parse(arguments.listen)),
        device=torch.device(arguments.device),
        threads=1,
        graphs=arguments.graphs,
        announce=lambda text: print(text, flush=True),
    )


def held_out_prompts(checkpoint: Path, count: int, text: Path | None) -> list[list[int]]:
    import torch

    from blocktrain.data.corpora import load_corpus
    from blocktrain.training.checkpoint import load_checkpoint

    loaded = load_checkpoint(checkpoint, torch.device("cpu"), only=[0])
    if text is not None:
        valid = text.read_bytes()
    else:
        valid = load_corpus(loaded.recipe.data, loaded.recipe.evaluation.pooling_bytes).valid
    step = max(1, (len(valid) - PROMPT_BYTES) // count)
    return [[int(t) for t in loaded.tokenizer.encode(valid[i * step :][:PROMPT_BYTES])] for i in range(count)]


def parse_mode(entry: str) -> tuple[str, int | None, str]:
    """`verify@16:q8` is verify with 16 drafted tokens and whole rows as Q8; without @ the length adapts, and
    without a codec the best tokens alone travel."""
    name, _, codec = entry.partition(":")
    mode, _, draft = name.partition("@")
    return mode, int(draft) if draft else None, codec or "best"


async def engine_role(arguments: argparse.Namespace) -> None:
    import torch

    from blocktrain.serving.engine.remote import EngineConfig, RemoteEngine
    from blocktrain.serving.transport import Address
    from blocktrain.wire.frames import Codec

    torch.set_num_threads(1)
    prompts = held_out_prompts(arguments.checkpoint, arguments.prompts, arguments.text)
    addresses = [Address.parse(text) for text in arguments.addresses.split(",")]
    rows, texts = [], []
    for entry in arguments.modes.split(","):
        mode, draft, codec = parse_mode(entry)
        config = EngineConfig(stages=addresses)
        if codec != "best":
            config = EngineConfig(stages=addresses, codec=Codec[codec.upper()], best_tokens=0)
        engine = RemoteEngine(arguments.checkpoint, config)
        await engine.start()
        await write(engine, prompts[0], 24, mode, draft, arguments.temperature)
        samples = [
            await write(engine, prompt, arguments.tokens, mode, draft, arguments.temperature)
            for prompt in prompts
        ]
        name = mode if draft is None else f"{mode}@{draft}"
        rows.append({"mode": name, "codec": codec, **summary(samples)})
        texts.append([text for text, _, _ in samples])
        await engine.close()
    assert all(text == texts[0] for text in texts), "modes and codecs wrote different texts"
    print(json.dumps(rows))


async def write(
    engine: Any, prompt: list[int], tokens: int, mode: str, draft: int | None, temperature: float
) -> tuple[list[int], Any, list[float]]:
    from blocktrain.serving.engine.requests import GenerationRequest, Mode

    request = GenerationRequest(
        prompt,
        tokens,
        seed=1,
        temperature=temperature,
        mode=cast(Mode, mode),
        draft_tokens=draft,
        deadline_seconds=600,
    )
    generation = engine.generate(request)
    text: list[int] = []
    gaps: list[float] = []
    last = time.monotonic()
    async for chunk in generation:
        now = time.monotonic()
        text += chunk.tokens
        gaps.append(now - last)
        last = now
    return text, generation.stats, gaps


def summary(samples: list[tuple[list[int], Any, list[float]]]) -> dict[str, Any]:
    """One token is one byte of text here; the first traversal of a request also builds the caches."""
    stats = [stat for _, stat, _ in samples]
    gaps = [gap for _, _, times in samples for gap in times]
    size = sum(len(text) for text, _, _ in samples)
    return {
        "text_bytes": size,
        "bytes_per_traversal": size / sum(s.traversals for s in stats),
        "bytes_per_second": size / sum(s.seconds for s in stats),
        "p50_ms": 1000 * statistics.median(gaps),
        "p99_ms": 1000 * statistics.quantiles(gaps, n=100)[-1],
        "sent_per_byte": sum(s.wire_bytes_sent for s in stats) / size,
        "received_per_byte": sum(s.wire_bytes_received for s in stats) / size,
        "mean_draft": sum(s.drafted for s in stats) / sum(s.traversals for s in stats),
        "exact_passes": sum(s.exact_passes for s in stats),
    }


def lossless_role(arguments: argparse.Namespace) -> None:
    import torch
    from lossless import run_check

    torch.set_num_threads(1)
    prompts = held_out_prompts(arguments.checkpoint, arguments.prompts, arguments.text)
    num_blocks = len(json.loads((arguments.checkpoint / "config.json").read_text())["blocks"])
    write_report(arguments.json, "lossless", run_check(arguments, prompts, num_blocks))


def main() -> None:
    prepare_to_serve()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("checkpoint", type=Path, nargs="?")
    parser.add_argument("--table", choices=["T8"], help="the litepaper's large shapes, see large_shapes.py")
    parser.add_argument("--quick", action="store_true", help="with --table: tiny shapes on the CPU")
    parser.add_argument("--only", default=None, help="with --table: names of shapes, separated by commas")
    parser.add_argument("--most-seconds", type=float, default=150.0, help="with --table: of a shape")
    parser.add_argument("--role", choices=["benchmark", "stage", "engine", "load"], default="benchmark")
    parser.add_argument("--check-lossless", action="store_true", help="see lossless.py; no emulated links")
    parser.add_argument("--kills", type=int, default=1, help="with --check-lossless: at least so many")
    parser.add_argument("--rtt", default=None, help="milliseconds; default 0,20,50,100,200")
    parser.add_argument("--stages", default="1,2,3,5")
    parser.add_argument("--modes", default="ar,verify", help="such as ar, verify, verify@16, verify:q8")
    parser.add_argument("--text", type=Path, help="prompts come from here; default: the held-out text")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--clients", help="numbers of clients at once, see clients.py; --rtt 0,100 then")
    parser.add_argument("--cost", action="store_true", help="processor time per token, see clients.py")
    parser.add_argument("--segments", type=int, default=3, help="with --clients: of each mode")
    parser.add_argument("--seconds", type=float, default=3.0, help="with --clients: of a segment")
    parser.add_argument("--rate-mbit", type=float, default=100.0)
    parser.add_argument("--json", type=Path, default=None, help="also write the rows here")
    parser.add_argument("--blocks", default="")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--graphs", action="store_true")
    parser.add_argument("--listen", default="")
    parser.add_argument("--addresses", default="")
    arguments = parser.parse_args()
    if arguments.table:
        from large_shapes import run_table

        return run_table(
            quick=arguments.quick,
            json_path=arguments.json,
            only=arguments.only,
            most_seconds=arguments.most_seconds,
            graphs=arguments.graphs,
        )
    if arguments.cost:
        rows = clients.run_cost(numbers(arguments.clients or "1,8,64"), texts=2)
        write_report(arguments.json, "serving-cost", rows)
        sys.exit(check_claims(clients.cost_claims_of(rows)))
    if arguments.checkpoint is None:
        parser.error("expected a checkpoint, --cost or --table")
    if arguments.check_lossless:
        return lossless_role(arguments)
    if arguments.role == "stage":
        return stage_role(arguments)
    if arguments.role == "engine":
        return asyncio.run(engine_role(arguments))
    if arguments.role == "load":
        prompts = held_out_prompts(arguments.checkpoint, arguments.prompts, arguments.text)
        return asyncio.run(clients.load_role(arguments, prompts))
    arguments.rtt = arguments.rtt or ("0,100" if arguments.clients else "0,20,50,100,200")
    if not available() and arguments.rtt != "0":
        sys.exit("the emulated links need root and /dev/net/tun")
    if arguments.clients:
        rows = run_load(arguments)
        write_report(arguments.json, "serving-clients", rows)
        sys.exit(check_claims(clients.claims_of(rows)))
    rows = run_benchmark(arguments)
    write_report(arguments.json, "serving", rows)
    sys.exit(check_claims(claims_of(rows)))


if __name__ == "__main__":
    main()
