"""A coverage-guided fuzzer (atheris, which drives libFuzzer) on everything that reads a stranger's bytes.

The readers and their samples are those of the test suite (`tests/adversaries/readers.py`); the first byte of
an input chooses the reader. A finding is an exception that the reader is not meant to raise, more memory than
`--rss-mb` or an input that takes more than ten seconds; exceptions are collected and the run goes on.

    pip install atheris
    python benchmarks/fuzz.py [--minutes 60] [--rss-mb 2048] [--corpus DIR]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
INSTRUMENTED = [
    "blocktrain.wire",
    "blocktrain.config",
    "blocktrain.data.dataset",
    "blocktrain.training.snapshot",
    "blocktrain.coordinator.http.downloads",
    "blocktrain.coordinator.http.signed_requests",
    "blocktrain.serving.gateway.openai_messages",
    "http_message_signatures",
    "http_sfv",
    "tests.adversaries",
]
LONGEST_INPUT = 16_384
SLOW_SECONDS = 10
STATUS = re.compile(r"#(\d+)\s+(\S+)\s+cov: (\d+) ft: (\d+) corp: (\d+)/\S+.*rss: (\d+)Mb")


def write_samples(corpus: Path) -> int:
    from tests.adversaries.readers import readers

    corpus.mkdir(parents=True, exist_ok=True)
    inputs = [bytes([number]) + sample for number, one in enumerate(readers()) for sample in one.samples]
    for data in inputs:
        (corpus / hashlib.sha256(data).hexdigest()[:16]).write_bytes(data)
    return len(inputs)


def fuzz(corpus: Path, findings: Path, options: argparse.Namespace) -> None:
    """In a process of its own: libFuzzer ends the process when it is done."""
    import atheris

    with atheris.instrument_imports(include=INSTRUMENTED):
        from tests.adversaries.readers import readers
    known: set[str] = set()

    def one_input(data: bytes) -> None:
        reader = readers()[data[0] % len(readers())] if data else readers()[0]
        try:
            reader.read(data[1:])
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            name = f"{reader.name}: {type(error).__name__} at {Path(place.filename).name}:{place.lineno}"
            if name not in known:
                known.add(name)
                with findings.open("a") as file:
                    file.write(
                        json.dumps({"finding": name, "input": data.hex(), "error": str(error)[:300]}) + "\n"
                    )

    seconds = int(60 * options.minutes)
    limits = [f"-max_total_time={seconds}", f"-rss_limit_mb={options.rss_mb}", f"-timeout={SLOW_SECONDS}"]
    atheris.Setup(
        [sys.argv[0], *limits, f"-max_len={LONGEST_INPUT}", "-print_final_stats=1", str(corpus)], one_input
    )
    atheris.Fuzz()


def summary(log: str, findings: Path, seconds: float, code: int) -> dict[str, object]:
    lines = STATUS.findall(log)
    executions, _, coverage, features, inputs, _ = lines[-1] if lines else ("0",) * 6
    found = [json.loads(line) for line in findings.read_text().splitlines()] if findings.exists() else []
    return {
        "seconds": round(seconds),
        "executions": int(executions),
        "coverage": int(coverage),
        "features": int(features),
        "coverage_of_samples": int(next((line[2] for line in lines if line[1] == "INITED"), 0)),
        "corpus": int(inputs),
        "largest_rss_mb": max((int(line[5]) for line in lines), default=0),
        "exit_code": code,
        "findings": found,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--rss-mb", type=int, default=2048)
    parser.add_argument("--corpus", type=Path, help="Kept between runs; a temporary folder by default.")
    parser.add_argument("--findings", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    sys.path.insert(0, str(ROOT))
    if options.findings is not None:
        fuzz(options.corpus, options.findings, options)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        found = supervised(options, Path(folder))
    print(json.dumps(found, indent=1))
    return 1 if found["exit_code"] or found["findings"] else 0


def supervised(options: argparse.Namespace, folder: Path) -> dict[str, object]:
    """Run the fuzzer in a process of its own and read what it said."""
    corpus, findings, log = options.corpus or folder / "corpus", folder / "findings", folder / "log"
    write_samples(corpus)
    command = [sys.executable, __file__, "--minutes", str(options.minutes), "--rss-mb", str(options.rss_mb)]
    begun = time.monotonic()
    with log.open("w") as file:
        more = ["--corpus", str(corpus), "--findings", str(findings)]
        code = subprocess.run(command + more, stdout=file, stderr=file, cwd=folder).returncode
    said = log.read_text(errors="replace")
    if code:
        print(said[-3000:], file=sys.stderr)
    return summary(said, findings, time.monotonic() - begun, code)


if __name__ == "__main__":
    sys.exit(main())
