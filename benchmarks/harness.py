"""lm-eval's `local-completions` against a gateway, with two tasks made of a held-out text.

    pip install 'lm_eval[api]' transformers
    python benchmarks/harness.py CHECKPOINT --text valid.txt

Starts a gateway in this process, writes the tokenizer that `blocktrain export` writes, and runs the program
`lm_eval` as a user would, without the Hub: rolling likelihood of some pages (bits per byte), and choosing the
true continuation of a text among four. The likelihood must be what the engine itself says of the same pages,
or the run fails. lm_eval is not among this project's dependencies.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from provenance import write_report

PAGE_BYTES, BEGINNING_BYTES, ENDING_BYTES = 900, 200, 60
CHOICES = 4
NEAR = 0.03
"""Bits per byte: lm-eval gives the last window of a page a full context, the engine what is left."""

PAGES_TASK = """
task: held_out_pages
dataset_path: json
dataset_kwargs: {data_files: {test: PAGES}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{page}}"
metric_list: [{metric: bits_per_byte}]
"""
ENDINGS_TASK = """
task: held_out_endings
dataset_path: json
dataset_kwargs: {data_files: {test: ENDINGS}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{beginning}}"
doc_to_choice: "{{endings}}"
doc_to_target: "{{right}}"
target_delimiter: ""
metric_list: [{metric: acc}]
"""


def pieces(text: bytes, count: int, size: int) -> list[str]:
    """Pieces spread over the text, plain ASCII so that a letter is a byte."""
    plain = text.decode(errors="ignore").encode("ascii", errors="ignore").decode()
    step = max(1, (len(plain) - size) // count)
    return [plain[i * step :][:size] for i in range(count)]


def ending_documents(text: bytes, count: int) -> list[dict[str, Any]]:
    """Beginnings, each with its own ending among those of others."""
    texts = pieces(text, count * CHOICES, BEGINNING_BYTES + ENDING_BYTES)
    documents = []
    for i in range(count):
        group = texts[i * CHOICES : (i + 1) * CHOICES]
        right = i % CHOICES
        endings = [one[BEGINNING_BYTES:] for one in group]
        documents.append({"beginning": group[right][:BEGINNING_BYTES], "endings": endings, "right": right})
    return documents


def write_tasks(folder: Path, pages: list[str], endings: list[dict[str, Any]]) -> None:
    for name, rows in (("pages", [{"page": page} for page in pages]), ("endings", endings)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, task in (("pages", PAGES_TASK), ("endings", ENDINGS_TASK)):
        path = json.dumps(str(folder / f"{name}.jsonl"))
        (folder / f"{name}.yaml").write_text(task.replace(name.upper(), path, 1))


def run_lm_eval(folder: Path, url: str, model: str, context: int) -> dict[str, dict[str, Any]]:
    settings = f"model={model},base_url={url}/v1/completions,tokenizer={folder / 'exported'}"
    settings += f",max_length={context},num_concurrent=2,tokenizer_backend=huggingface"
    command = [sys.executable, "-m", "lm_eval", "--model", "local-completions", "--model_args", settings]
    command += ["--include_path", str(folder), "--tasks", "held_out_pages,held_out_endings"]
    command += ["--output_path", str(folder / "out")]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "hub")}
    offline |= {"OPENAI_API_KEY": "none", "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run(command, check=True, env={**os.environ, **offline}, timeout=1800)
    found = next((folder / "out").rglob("results_*.json"))
    results: dict[str, dict[str, Any]] = json.loads(found.read_text())["results"]
    return results


async def own_bits_per_byte(checkpoint: Path, pages: list[str]) -> float:
    """What the engine says of the same pages behind a line feed, which is lm-eval's beginning here."""
    from blocktrain.serving.engine.local import LocalEngine

    engine = LocalEngine(checkpoint)
    await engine.start()
    scored = [await engine.score([10, *page.encode()], deadline_seconds=600) for page in pages]
    await engine.close()
    nats = -sum(token.logprob for tokens in scored for token in tokens)
    return nats / math.log(2) / sum(len(page) for page in pages)


def evaluate(checkpoint: Path, text: bytes, num_pages: int, num_endings: int) -> dict[str, Any]:
    from blocktrain.cli.export import export
    from blocktrain.serving.engine.local import LocalEngine
    from blocktrain.serving.gateway.main import background_gateway

    pages, endings = pieces(text, num_pages, PAGE_BYTES), ending_documents(text, num_endings)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_tasks(folder, pages, endings)
        export(str(checkpoint), folder / "exported")
        engine = LocalEngine(checkpoint)
        with background_gateway(engine) as url:
            results = run_lm_eval(folder, url, engine.model.name, engine.model.context)
    return {
        "bits_per_byte": results["held_out_pages"]["bits_per_byte,none"],
        "own_bits_per_byte": asyncio.run(own_bits_per_byte(checkpoint, pages)),
        "endings_right": results["held_out_endings"]["acc,none"],
        "pages": num_pages,
        "endings": num_endings,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--text", type=Path, required=True, help="held-out text that the tasks are made of")
    parser.add_argument("--pages", type=int, default=4)
    parser.add_argument("--endings", type=int, default=12)
    parser.add_argument("--json", type=Path, help="also write the result here")
    options = parser.parse_args()
    if importlib.util.find_spec("lm_eval") is None:
        sys.exit("lm_eval is not installed: pip install 'lm_eval[api]' transformers")
    result = evaluate(options.checkpoint, options.text.read_bytes(), options.pages, options.endings)
    print(json.dumps(result, indent=1))
    write_report(options.json, "harness", result)
    difference = abs(result["bits_per_byte"] - result["own_bits_per_byte"])
    assert difference <= NEAR, f"lm-eval and the engine differ by {difference:.4f} bits per byte"


if __name__ == "__main__":
    main()
