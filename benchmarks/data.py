"""What text on disk costs: preparing it beside the `tokenizers` library alone, and training from it beside
training from memory.

    python benchmarks/data.py TEXT [--vocabulary 16384] [--tokenizer FILE] [--megabytes 115] [--json FILE]
    python benchmarks/data.py --synthetic GIGABYTES [--work FOLDER] [--json FILE]
    python benchmarks/data.py --throughput DATASET [--device cuda] [--json FILE]

TEXT: both have the same cores, tokenizer and documents, one after the other. The library encodes in batches
with all its threads and throws the tokens away; prepare runs as a user runs it, both readings, hashes,
near-duplicates, writing and start included. Memory is the sum over its processes (proportional set size,
sampled). A core's rate is that of a second of processor time, so that a busy machine changes it less. Exit
code 1 unless prepare has 0.7 of the library's rate and at most 500 MB; a rate alone is no claim, as the
library itself has 2 MB/s on one core and 10 on another.

--synthetic: as many bytes of made-up documents, which no disk holds: a stand-in for the package `datasets`
makes them while `data prepare hf:synthetic` reads them, twice. Exit code 1 above 500 MB. With --work a run
that was cut off is gone on with, as `data prepare` goes on; memory is then the largest of all its runs, and
times are their sums.

--throughput: one trainer takes the same steps from mapped shards and from tokens on its device, in
alternating segments, so that what disturbs one disturbs the other. DATASET is a folder that `data prepare`
made; torch, numpy and safetensors are all it needs. Exit code 1 unless the median of the pairs' ratios is at
least 0.98.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from provenance import check_claims, write_report

from blocktrain.data.sources import Reading, find_sources, read_documents

MIN_RATIO, MAX_MEGABYTES = 0.7, 500.0
MIN_THROUGHPUT = 0.98
BATCH_DOCUMENTS = 256


def library_rate(text: str, tokenizer: str, limit: int, start: str | None) -> float:
    """Megabytes a second of the library, documents already in memory."""
    from tokenizers import Tokenizer

    library = Tokenizer.from_file(tokenizer)
    documents, size = [], 0
    for document in read_documents(find_sources([text])[0], Reading(document_start=start)):
        documents.append(document.decode())
        size += len(document)
        if size >= limit:
            break
    begun = time.perf_counter()
    for first in range(0, len(documents), BATCH_DOCUMENTS):
        for encoding in library.encode_batch_fast(documents[first : first + BATCH_DOCUMENTS]):
            assert encoding.ids
    return size / 1e6 / (time.perf_counter() - begun)


def tree_use(root: int) -> tuple[float, float]:
    """Megabytes of a process and its children, pages they share counted once, and their processor seconds."""
    total, ticks, waiting = 0, 0, [root]
    while waiting:
        pid = waiting.pop()
        try:
            rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
            stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            waiting += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
        except OSError:
            continue
        total += next((int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:")), 0)
        ticks += sum(map(int, stat[11:15]))  # its own, and those of children it waited for
    return total / 1000, ticks / os.sysconf("SC_CLK_TCK")


def prepare_rate(
    source: str, flags: list[str], cores: int, folder: Path
) -> tuple[float, float, float, dict[str, Any]]:
    """Megabytes a second, megabytes a second of processor time, peak megabytes, and what the dataset is."""
    command = [sys.executable, "-m", "blocktrain", "data"]
    flags = ["--out", str(folder / "set"), "--processes", str(cores), *flags]
    # Seconds, seconds of processor time and peak of runs that were cut off: they had no end to report at.
    used = folder / "used.json"
    seconds_before, processor_before, peak = json.loads(used.read_text()) if used.exists() else (0, 0, 0)
    begun, looks, processor = time.perf_counter(), 0, 0.0
    process = subprocess.Popen([*command, "prepare", source, *flags], stdout=subprocess.DEVNULL)
    while process.poll() is None:
        memory, now = tree_use(process.pid)
        peak, processor, looks = max(peak, memory), max(processor, now), looks + 1
        if looks % 20 == 0:
            spent = [seconds_before + time.perf_counter() - begun, processor_before + processor, peak]
            used.with_suffix(".new").write_text(json.dumps(spent))
            used.with_suffix(".new").replace(used)
        time.sleep(0.1)
    seconds, processor = seconds_before + time.perf_counter() - begun, processor_before + processor
    if process.returncode:
        sys.exit("prepare failed")
    shown = subprocess.run([*command, "info", str(folder / "set"), "--json"], check=True, capture_output=True)
    made = json.loads(shown.stdout)
    taken = sum(made[split]["bytes"] for split in ("training", "pooling", "held_out"))
    return taken / 1e6 / seconds, taken / 1e6 / processor, peak, made


SYNTHETIC = """
import random

def load_dataset(name, *rest, **options):
    chance = random.Random(0)
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["".join(chance.choices(letters, k=chance.randint(2, 9))) for _ in range(5000)]
    sentences = [" ".join(chance.choices(words, k=12)) + ". " for _ in range(20_000)]
    left = BYTES
    while left > 0:
        text = "".join(chance.choices(sentences, k=100))
        left -= len(text)
        yield {"text": text}
"""


def synthetic_rate(gigabytes: float, cores: int, folder: Path) -> tuple[float, float, float, dict[str, Any]]:
    """As `prepare_rate`, of text that is made while it is read."""
    (folder / "datasets.py").write_text(SYNTHETIC.replace("BYTES", str(round(gigabytes * 1e9))))
    path = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), path]))
    flags = ["--tokenizer", _trained(folder, "hf:synthetic", 4096)]
    return prepare_rate("hf:synthetic", flags, cores, folder)


def _trained(folder: Path, source: str, vocabulary: int) -> str:
    """The path of a new tokenizer, or of that of an earlier run in this folder."""
    file = folder / "tokenizer.json"
    if not file.exists():
        flags = ["--out", str(file), "--vocabulary", str(vocabulary)]
        command = [sys.executable, "-m", "blocktrain", "data", "tokenizer", "train", source, *flags]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return str(file)


def throughput(
    folder: Path, device_name: str, pairs: int, seconds: float, wanted_width: int | None
) -> dict[str, Any]:
    """Steps a second from shards and from memory, and the median ratio of neighbouring segments."""
    import torch
    from torch import Tensor

    from blocktrain.config import resolve_recipe
    from blocktrain.data.batches import DatasetBatches, Drawing
    from blocktrain.data.dataset import Dataset
    from blocktrain.data.shards import window_offsets
    from blocktrain.model.objective import Objective
    from blocktrain.training.inner import BlockTrainer, build_codebook

    dataset, device = Dataset.open(folder), torch.device(device_name)
    on_gpu = device.type == "cuda"
    # 32,768 tokens a step on a GPU, as in docs/experiments.md; on a CPU what takes a tenth of a second.
    context = 512 if on_gpu else 128
    width = wanted_width or (384 if on_gpu else 128)
    recipe = resolve_recipe(
        {
            "model": {
                "width": width,
                "heads": max(1, width // (64 if on_gpu else 32)),
                "context": context,
                "blocks": 4,
                "layers_per_block": 3 if on_gpu else 1,
            },
            "training": {"batch": 64 if on_gpu else 8, "reference": False},
        }
    )
    batch = recipe.training.batch
    mapped = DatasetBatches(dataset, Drawing(seed=0, batch=batch, context=context), device)

    class Held:
        """The same windows, from tokens that lie on the device."""

        def __init__(self) -> None:
            self.windows = Drawing(seed=0, batch=batch, context=context).windows(dataset, 0, 0, None)
            self.firsts = np.cumsum([0, *map(len, self.windows.files)])
            tokens = np.concatenate([np.asarray(one, np.int32) for one in self.windows.files])
            self.tokens = torch.from_numpy(tokens).to(device)
            self.reach = torch.arange(context + 1, device=device)

        def batch(self, shard: int, step: int, block: int | None = None) -> tuple[Tensor, Tensor]:
            ends = self.windows.ends
            starts = window_offsets(dataset.sha256, 0, shard, step, count=batch, choices=self.windows.choices)
            files = np.searchsorted(ends, starts, "right")
            places = starts - np.concatenate([[0], ends])[files] + self.firsts[files]
            offsets = torch.from_numpy(places).to(device, non_blocking=True)
            rows = self.tokens[offsets[:, None] + self.reach].long()
            return rows[:, :-1], rows[:, 1:]

    held = Held()
    for step in range(3):
        assert torch.equal(mapped.batch(0, step)[1], held.batch(0, step)[1]), "the batches differ"
    vocabulary = dataset.manifest.vocabulary
    objective = Objective(recipe.model, recipe.objective, vocabulary=vocabulary)
    block = objective.build(0, seed=0).to(device)
    trainer = BlockTrainer(recipe, objective, block, 0, mapped, build_codebook(recipe, vocabulary).to(device))

    def segment(source: DatasetBatches | Held, first: int, count: int) -> float:
        trainer.shards = source
        begun = time.perf_counter()
        for step in range(first, first + count):
            trainer.step(step, 0)
        if on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter() - begun

    segment(mapped, 0, 20 if on_gpu else 3)  # compilation and first allocations
    count = max(3, round(seconds * 5 / segment(held, 0, 5)))
    taken: dict[str, list[float]] = {"shards": [], "memory": []}
    for pair in range(pairs):
        for name in ("shards", "memory") if pair % 2 else ("memory", "shards"):
            source = mapped if name == "shards" else held
            taken[name].append(segment(source, pair * count, count))
    mapped.close()
    ratios = [memory / shards for memory, shards in zip(taken["memory"], taken["shards"], strict=True)]
    rates = {f"{name}_steps_s": round(count / statistics.median(one), 2) for name, one in taken.items()}
    name = torch.cuda.get_device_name(device) if on_gpu else f"cpu, {torch.get_num_threads()} threads"
    return {
        **rates,
        "ratio": round(statistics.median(ratios), 4),
        "ratios": [round(one, 4) for one in sorted(ratios)],
        "steps_per_segment": count,
        "tokens_per_step": batch * context,
        "width": width,
        "device": name,
        "torch": torch.__version__,
        "dataset": dataset.sha256,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("text", nargs="?", help="a text or jsonl file, packed or not")
    what.add_argument("--synthetic", type=float, metavar="GIGABYTES", help="prepare made-up text")
    what.add_argument("--throughput", type=Path, metavar="DATASET", help="train from this prepared folder")
    parser.add_argument("--vocabulary", type=int, default=16_384)
    parser.add_argument("--tokenizer", help="use this one instead of training one")
    parser.add_argument("--megabytes", type=float, default=115.0)
    parser.add_argument("--document-start", help="as in `data prepare`")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--width", type=int, help="of the block that --throughput trains")
    parser.add_argument("--pairs", type=int, default=15, help="segments from shards and from memory")
    parser.add_argument("--seconds", type=float, default=1.0, help="of one segment")
    parser.add_argument("--work", type=Path, help="keep the prepared folder here, and go on with it")
    parser.add_argument("--json", type=Path, help="also write the result here")
    options = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    result: dict[str, Any] = {"load_before": os.getloadavg()[0], "cores": cores}
    claims: dict[str, bool] = {}
    if options.throughput is not None:
        result |= throughput(
            options.throughput, options.device, options.pairs, options.seconds, options.width
        )
        kept_up = result["ratio"] >= MIN_THROUGHPUT
        finish(options.json, result, {f"at least {MIN_THROUGHPUT} of the speed from memory": kept_up})
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.work or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        if options.synthetic is not None:
            rate, core_rate, peak, made = synthetic_rate(options.synthetic, cores, folder)
        else:
            limit = int(options.megabytes * 1e6)
            start = options.document_start.replace("\\n", "\n") if options.document_start else None
            tokenizer = options.tokenizer or _trained(folder, options.text, options.vocabulary)
            flags = ["--tokenizer", tokenizer, "--max-bytes", str(limit)]
            flags += [] if start is None else ["--document-start", start]
            rate, core_rate, peak, made = prepare_rate(options.text, flags, cores, folder)
            alone = library_rate(options.text, tokenizer, limit, start)
            result |= {"tokenizers_mb_s": round(alone, 2), "ratio": round(rate / alone, 2)}
            claims[f"at least {MIN_RATIO} of the library's rate"] = rate / alone >= MIN_RATIO
    claims[f"at most {MAX_MEGABYTES} MB"] = peak <= MAX_MEGABYTES
    result |= {
        "prepare_mb_s": round(rate, 2),
        "prepare_mb_per_processor_s": round(core_rate, 2),
        "peak_mb": round(peak),
        "dataset": made,
    }
    finish(options.json, result, claims)


def finish(path: Path | None, result: dict[str, Any], claims: dict[str, bool]) -> None:
    """Show what was found, and fail where a claim does not hold."""
    print(json.dumps(result, indent=1))
    write_report(path, "data", result)
    sys.exit(check_claims(claims))


if __name__ == "__main__":
    main()
