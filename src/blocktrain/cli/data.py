"""The verbs of data: `data prepare|info|verify` and `data tokenizer train`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from blocktrain.errors import DataError, StoppedError

if TYPE_CHECKING:
    from rich.console import Console

MAX_PROCESSES = 32
"""One process reads for all of them, at about 400 MB/s; more than this many would wait for it."""

SourcesArgument = Annotated[
    list[str],
    typer.Argument(help="Files (text, jsonl, parquet; also .gz, .zst, .xz), folders, or hf:NAME[:CONFIG]."),
]
FieldOption = Annotated[str, typer.Option("--field", help="Where jsonl objects and rows have their text.")]
StartOption = Annotated[
    str | None,
    typer.Option(
        "--document-start",
        help="Text files: a document begins wherever this stands (\\n for a line feed). Without it a file is "
        "one document, a long file one for every 16 kB, cut at blank lines.",
    ),
]
FolderArgument = Annotated[Path, typer.Argument(help="The folder that `data prepare` wrote.")]

data_verbs = typer.Typer(help="Make, show and check datasets.", no_args_is_help=True)
tokenizer_verbs = typer.Typer(help="Make tokenizers.", no_args_is_help=True)
data_verbs.add_typer(tokenizer_verbs, name="tokenizer")


@data_verbs.command()
def prepare(
    sources: SourcesArgument,
    out: Annotated[Path, typer.Option("--out", help="Folder to write; new, or begun by the same command.")],
    tokenizer: Annotated[
        str, typer.Option("--tokenizer", help="`byte`, a tokenizer.json, or a model's name on the Hub.")
    ] = "byte",
    shard_tokens: Annotated[
        int, typer.Option("--shard-tokens", help="Tokens of a shard; a worker fetches a few shards a round.")
    ] = 1 << 22,
    held_out: Annotated[
        float, typer.Option("--held-out", metavar="SHARE", help="Share of the documents that is scored only.")
    ] = 0.01,
    pooling: Annotated[
        float, typer.Option("--pooling", metavar="SHARE", help="Share that fits composition weights.")
    ] = 0.005,
    held_out_from: Annotated[
        list[str],
        typer.Option("--held-out-from", help="Hold out this source instead of a share; repeatable."),
    ] = [],  # noqa: B006
    clusters: Annotated[
        int, typer.Option("--clusters", help="Sort documents into this many kinds, a shard holds one kind.")
    ] = 1,
    field: FieldOption = "text",
    document_start: StartOption = None,
    max_bytes: Annotated[
        int | None, typer.Option("--max-bytes", help="Stop reading after so much text.")
    ] = None,
    processes: Annotated[
        int | None, typer.Option("--processes", help="Default: one for each core.", min=1, max=256)
    ] = None,
) -> None:
    """Make a dataset: tokens in shards, with held-out documents apart. Stopped or killed, it goes on."""
    from blocktrain.data.prepare import PrepareOptions
    from blocktrain.data.prepare import prepare as make_dataset
    from blocktrain.local.terminal import ByteProgress

    options = PrepareOptions(
        sources=tuple(sources), tokenizer=tokenizer, shard_tokens=shard_tokens, held_out=held_out,
        pooling=pooling, held_out_from=tuple(held_out_from), clusters=clusters, field=field,
        document_start=_unescaped(document_start), max_bytes=max_bytes,
    )  # fmt: skip
    if processes is None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        processes = min(cores, MAX_PROCESSES)
    try:
        with ByteProgress(_console()).shown() as progress:
            make_dataset(options, out, processes=processes, watch=progress.moved)
    except KeyboardInterrupt:
        raise StoppedError("stopped; the same command goes on from there") from None
    _print_info(out, as_json=False)


@data_verbs.command()
def info(
    folder: FolderArgument, as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False
) -> None:
    """Say what a dataset holds: splits, tokens, bytes, clusters, tokenizer and identity."""
    _print_info(folder, as_json=as_json)


@data_verbs.command()
def verify(folder: FolderArgument) -> None:
    """Check every shard and the tokenizer against the manifest: hashes, lengths, tokens in the vocabulary."""
    from blocktrain.data.dataset import SPLITS, Dataset, check_shard
    from blocktrain.local.terminal import ByteProgress

    dataset = Dataset.open(folder)
    manifest = dataset.manifest
    entries = [entry for split in SPLITS for entry in manifest.split(split)]
    width = manifest.dtype.itemsize
    total, done, problems = sum(entry.tokens * width for entry in entries), 0, []
    with ByteProgress(_console()).shown() as progress:
        for entry in entries:
            try:
                check_shard(folder / entry.name, entry, manifest)
            except DataError as error:
                problems.append(str(error))
            done += entry.tokens * width
            progress.moved("checking", done, total)
    try:
        dataset.tokenizer()
    except DataError as error:
        problems.append(str(error))
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise DataError(problems[0] + more)
    typer.echo(f"{folder} is whole: {len(entries)} shards, dataset {manifest.identity}")


@tokenizer_verbs.command()
def train(
    sources: SourcesArgument,
    out: Annotated[Path, typer.Option("--out", help="File to write, such as tokenizer.json.")],
    vocabulary: Annotated[int, typer.Option("--vocabulary", help="How many tokens, 257 or more.")] = 16_384,
    max_bytes: Annotated[
        int, typer.Option("--max-bytes", help="Learn from so much text, chosen over all sources.", min=1)
    ] = 32_000_000,
    field: FieldOption = "text",
    document_start: StartOption = None,
) -> None:
    """Train a byte-level BPE tokenizer on a sample of the sources. The same sources give the same file."""
    from blocktrain.data.bpe import FileTokenizer, train_bpe
    from blocktrain.data.dataset import writing
    from blocktrain.data.prepare import sampled_documents
    from blocktrain.data.sources import Reading, find_sources
    from blocktrain.files import write_whole
    from blocktrain.local.terminal import ByteProgress

    reading = Reading(field=field, document_start=_unescaped(document_start))
    with ByteProgress(_console()).shown() as progress:
        texts = sampled_documents(find_sources(sources), reading, max_bytes, progress.moved)
    learned = sum(map(len, texts))
    _console().print(f"learning {vocabulary} tokens from {learned / 1e6:.1f} MB", highlight=False)
    content = train_bpe((text.decode() for text in texts), vocabulary)
    made = FileTokenizer(content, str(out))
    with writing(out):
        write_whole(out, content)
    if made.vocabulary < vocabulary:
        typer.echo(f"the text has no more than {made.vocabulary} tokens to give", err=True)
    typer.echo(f"wrote {out}: {made.vocabulary} tokens, sha256 {made.sha256}")


def _unescaped(text: str | None) -> str | None:
    """A shell cannot type a line feed easily."""
    return None if text is None else text.replace("\\n", "\n").replace("\\t", "\t")


def _print_info(folder: Path, *, as_json: bool) -> None:
    from blocktrain.data.dataset import SPLITS, Dataset, total

    manifest = Dataset.open(folder).manifest
    rows = {split: (len(manifest.split(split)), *total(manifest.split(split))) for split in SPLITS}
    by_cluster = [0] * manifest.clusters
    for entry in manifest.training:
        by_cluster[entry.cluster] += entry.tokens
    if as_json:
        names = ("shards", "tokens", "documents", "bytes")
        told = {split: dict(zip(names, row, strict=True)) for split, row in rows.items()}
        about = {
            "dataset": manifest.identity,
            "tokenizer": manifest.tokenizer,
            "vocabulary": manifest.vocabulary,
        }
        print(
            json.dumps(
                {**about, **told, "left_out": manifest.left_out, "cluster_tokens": by_cluster}, indent=1
            )
        )
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("", "shards", "documents", "tokens", "bytes", "bytes/token")
    for split, (shards, tokens, documents, size) in rows.items():
        cells = (f"{shards:,}", f"{documents:,}", f"{tokens:,}", f"{size:,}", f"{size / tokens:.3f}")
        table.add_row(split.replace("_", "-"), *cells)
    console = Console(highlight=False)
    console.print(table)
    tokenizer = manifest.tokenizer if manifest.tokenizer == "byte" else f"sha256 {manifest.tokenizer[:16]}…"
    console.print(f"tokenizer {tokenizer}, {manifest.vocabulary:,} tokens, {manifest.dtype.name}")
    if manifest.clusters > 1:
        console.print(f"training tokens by cluster: {', '.join(f'{count:,}' for count in by_cluster)}")
    if manifest.left_out:
        console.print(f"left out: {manifest.left_out:,} near-duplicates of held-out or pooling documents")
    console.print(f"dataset {manifest.identity}", soft_wrap=True)


def _console() -> Console:
    from rich.console import Console

    return Console(stderr=True)
