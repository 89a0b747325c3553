"""How fast `blocktrain data prepare` turns text into BPE shards, beside the `tokenizers` library alone.

    python benchmarks/data.py TEXT [--vocabulary 16384] [--tokenizer FILE] [--megabytes 115] [--json FILE]

Both have the same cores, tokenizer and documents, one after the other. The library encodes in batches with
all its threads and throws the tokens away; prepare runs as a user runs it, both readings, hashes,
near-duplicates, writing and start included. Memory is the sum over its processes (proportional set size,
sampled).

Exit code 1 unless prepare has 0.7 of the library's rate, 10 MB/s a core and at most 500 MB.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from blocktrain.data.sources import Reading, find_sources, read_documents

MIN_RATIO, MIN_CORE_RATE, MAX_MEGABYTES = 0.7, 10.0, 500.0
BATCH_DOCUMENTS = 256


def library_rate(text: Path, tokenizer: Path, limit: int, start: str | None) -> float:
    """Megabytes a second of the library, documents already in memory."""
    from tokenizers import Tokenizer

    library = Tokenizer.from_file(str(tokenizer))
    documents, size = [], 0
    for document in read_documents(find_sources([str(text)])[0], Reading(document_start=start)):
        documents.append(document.decode())
        size += len(document)
        if size >= limit:
            break
    begun = time.perf_counter()
    for first in range(0, len(documents), BATCH_DOCUMENTS):
        for encoding in library.encode_batch_fast(documents[first : first + BATCH_DOCUMENTS]):
            assert encoding.ids
    return size / 1e6 / (time.perf_counter() - begun)


def tree_megabytes(root: int) -> float:
    """Memory of a process and its children; pages they share count once."""
    total, waiting = 0, [root]
    while waiting:
        pid = waiting.pop()
        try:
            rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
            waiting += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
        except OSError:
            continue
        total += next((int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:")), 0)
    return total / 1000


def prepare_rate(
    text: Path, tokenizer: Path, limit: int, start: str | None, cores: int
) -> tuple[float, float, dict[str, Any]]:
    """Megabytes a second, peak megabytes, and what the dataset is."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "blocktrain", "data"]
        flags = ["--out", f"{folder}/set", "--tokenizer", str(tokenizer), "--max-bytes", str(limit)]
        flags += ["--processes", str(cores)]
        if start is not None:
            flags += ["--document-start", start]
        begun, peak = time.perf_counter(), 0.0
        process = subprocess.Popen([*command, "prepare", str(text), *flags], stdout=subprocess.DEVNULL)
        while process.poll() is None:
            peak = max(peak, tree_megabytes(process.pid))
            time.sleep(0.1)
        seconds = time.perf_counter() - begun
        if process.returncode:
            sys.exit("prepare failed")
        shown = subprocess.run([*command, "info", f"{folder}/set", "--json"], check=True, capture_output=True)
        made = json.loads(shown.stdout)
    taken = sum(made[split]["bytes"] for split in ("training", "pooling", "held_out"))
    return taken / 1e6 / seconds, peak, made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("text", type=Path, help="a text or jsonl file, packed or not")
    parser.add_argument("--vocabulary", type=int, default=16_384)
    parser.add_argument("--tokenizer", type=Path, help="use this one instead of training one")
    parser.add_argument("--megabytes", type=float, default=115.0)
    parser.add_argument("--document-start", help="as in `data prepare`")
    parser.add_argument("--json", type=Path, help="also write the result here")
    options = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    limit = int(options.megabytes * 1e6)
    start = options.document_start.replace("\\n", "\n") if options.document_start else None
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = options.tokenizer or Path(folder) / "tokenizer.json"
        if options.tokenizer is None:
            flags = ["--out", str(tokenizer), "--vocabulary", str(options.vocabulary)]
            command = [sys.executable, "-m", "blocktrain", "data", "tokenizer", "train", str(options.text)]
            subprocess.run([*command, *flags], check=True, stdout=subprocess.DEVNULL)
        rate, peak, made = prepare_rate(options.text, tokenizer, limit, start, cores)
        alone = library_rate(options.text, tokenizer, limit, start)
    result = {
        "prepare_mb_s": round(rate, 2),
        "tokenizers_mb_s": round(alone, 2),
        "ratio": round(rate / alone, 2),
        "prepare_mb_s_per_core": round(rate / cores, 2),
        "cores": cores,
        "peak_mb": round(peak),
        "load_before": os.getloadavg()[0],
        "dataset": made,
    }
    print(json.dumps(result, indent=1))
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1))
    claims = {
        f"at least {MIN_RATIO} of the library's rate": rate / alone >= MIN_RATIO,
        f"at least {MIN_CORE_RATE} MB/s a core": rate / cores >= MIN_CORE_RATE,
        f"at most {MAX_MEGABYTES} MB": peak <= MAX_MEGABYTES,
    }
    failed = [claim for claim, holds in claims.items() if not holds]
    if failed:
        sys.exit(f"not so: {'; '.join(failed)}")


if __name__ == "__main__":
    main()
