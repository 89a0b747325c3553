"""A run carries its text: a worker joins with an address and nothing else, and trains as one that has it.

The workers' own `builtin` text is another one (OTHER_BUILTIN), as it is under another Python version.
"""

from __future__ import annotations

import dataclasses
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest
import torch
from moto.server import ThreadedMotoServer

from blocktrain.client.cache import BlobCache
from blocktrain.client.coordinator import RequestRefused, public_client
from blocktrain.client.texts import FetchedText
from blocktrain.config import Recipe
from blocktrain.data.batches import Drawing
from blocktrain.data.bpe import train_bpe
from blocktrain.data.dataset import Dataset, shard_files
from blocktrain.data.prepare import PrepareOptions, prepare
from blocktrain.local.assembly import save_model
from blocktrain.training.checkpoint import load_checkpoint
from blocktrain.training.snapshot import snapshot_hash, tensors_of
from blocktrain.wire.identity import Identity
from tests.end_to_end.swarm_kit import (
    OTHER_BUILTIN,
    Coordinator,
    Kit,
    Program,
    _read_body,
    _read_head,
    tiny_recipe,
    until,
)
from tests.end_to_end.test_one_worker_equals_the_local_loop import local_loop_hash


@pytest.fixture(scope="session")
def dataset(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Some documents as BPE tokens in several small shards."""
    folder = tmp_path_factory.mktemp("dataset")
    words = text.read_text().split(" ")
    (folder / "texts").mkdir()
    for n in range(0, len(words), 100):
        (folder / "texts" / f"{n:06d}.txt").write_text(f"{n} " + " ".join(words[n : n + 100]))
    (folder / "tokenizer.json").write_bytes(train_bpe([text.read_text()], 300))
    options = PrepareOptions(
        sources=(str(folder / "texts"),),
        tokenizer=str(folder / "tokenizer.json"),
        shard_tokens=4096,
        held_out=0.1,
        pooling=0.05,
    )
    prepare(options, folder / "set", processes=1, watch=lambda *_: None)
    return Dataset.open(folder / "set")


def with_dataset(dataset: Dataset) -> Recipe:
    return tiny_recipe(Path("builtin"), data={"dataset": str(dataset.folder)})


def join(kit: Kit, url: str, name: str = "worker") -> Program:
    """One command, no text: an address is all."""
    options = ["--data-dir", str(kit.folder / name), "--device", "cpu"]
    return kit.start(name, ["worker", "--coordinator", url, *options], {OTHER_BUILTIN: "1"})


class Stall:
    """HTTP to a port that passes half of one answer on and then nothing more."""

    def __init__(self, port: int, path_has: str) -> None:
        self.port, self.path_has = port, path_has
        self.stalled, self.ended, self.ranges = threading.Event(), threading.Event(), list[str]()
        self._server = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._server.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while not self.ended.is_set():
            try:
                client, _ = self._server.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        try:
            with client, socket.create_connection(("127.0.0.1", self.port)) as upstream:
                near, far = client.makefile("rb"), upstream.makefile("rb")
                while head := _read_head(near):
                    upstream.sendall(head + _read_body(near, head))
                    answer = _read_head(far)
                    body = b"" if head.startswith(b"HEAD") else _read_body(far, answer)
                    asked = head.startswith(b"GET") and self.path_has.encode() in head.split(b"\r\n")[0]
                    if asked:
                        self.ranges += [
                            line.decode() for line in head.split(b"\r\n") if line.lower().startswith(b"range")
                        ]
                    if asked and not self.stalled.is_set():
                        client.sendall(answer + body[: len(body) // 2])
                        self.stalled.set()
                        self.ended.wait()
                        return
                    client.sendall(answer + body)
        except OSError:
            pass

    def close(self) -> None:
        self.ended.set()
        self._server.close()


@contextmanager
def moto() -> Iterator[int]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    try:
        yield server.get_host_and_port()[1]
    finally:
        server.stop()


def test_a_worker_with_another_builtin_text_joins_and_its_updates_are_merged(
    kit: Kit, tmp_path: Path
) -> None:
    recipe = tiny_recipe(Path("builtin"))
    recipe = dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, max_bytes=600_000))
    coordinator = Coordinator(kit, recipe).start()
    worker = join(kit, coordinator.url)
    status = coordinator.finished()
    assert worker.wait(30) == 0, worker.text()
    assert status.blocks[0].head_hash == local_loop_hash(recipe, tmp_path / "local")


def test_held_out_shards_are_refused_to_a_worker_and_given_to_a_judge(kit: Kit, dataset: Dataset) -> None:
    recipe = with_dataset(dataset)
    coordinator = Coordinator(kit, recipe).start()
    worker, judge = Identity.generate(), Identity.generate()
    (coordinator.data_dir / "judges.txt").write_text(f"{judge.worker_id}\n")
    manifest = dataset.manifest
    for identity, allowed in ((worker, False), (judge, True)):
        client = public_client(coordinator.url, identity)
        client.audience = client.run().run_id
        assert len(client.fetch(f"/v1/data/{manifest.training[0].sha256}")) > 4096
        for entry in (manifest.held_out[0], manifest.pooling[0]):
            with pytest.raises(RequestRefused) as refused:
                client.fetch(f"/v1/data/{entry.sha256}")
            assert refused.value.reason == "not_judge"
            target = kit.folder / f"{identity.worker_id}-{entry.name}"
            path, size = f"/v1/judge/data/{entry.sha256}", 2 * entry.tokens
            if allowed:
                client.download(path, target, size, signed=True)
                assert target.read_bytes() == (dataset.folder / entry.name).read_bytes()
            else:
                with pytest.raises(RequestRefused) as refused:
                    client.download(path, target, size, signed=True)
                assert refused.value.reason == "not_judge"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("store", ["folder", "s3"])
def test_a_killed_download_goes_on_and_the_worker_equals_the_local_loop(
    kit: Kit, dataset: Dataset, tmp_path: Path, store: str
) -> None:
    """With BPE tokens, from a worker that has no copy of the text; over the folder store and over S3."""
    recipe = with_dataset(dataset)
    with moto() as port:
        proxy = Stall(port, "/text/")
        options, environment = [], {}
        if store == "s3":
            httpx2.put(f"http://127.0.0.1:{port}/bucket").raise_for_status()
            options = ["--blobs", "s3://bucket/run"]
            environment = {
                "AWS_ACCESS_KEY_ID": "test",
                "AWS_SECRET_ACCESS_KEY": "test",
                "AWS_REGION": "us-east-1",
                "AWS_ENDPOINT_URL": proxy.url,
                "AWS_ALLOW_HTTP": "true",
            }
        coordinator = Coordinator(kit, recipe, options=options, environment=environment).start()
        url = coordinator.url
        if store == "folder":
            proxy.close()
            proxy = Stall(coordinator.port, "/v1/data/")
            url = proxy.url
        # Not the manifest, which comes first and whole: the first shard of the first assignment.
        first = shard_files(dataset.manifest, recipe.seed, 0, context=recipe.model.context)[0]
        proxy.path_has = dataset.manifest.training[first].sha256
        worker = join(kit, url)
        until("half a shard has come", proxy.stalled.is_set)
        begun = (kit.folder / "worker").rglob
        until("some is on the disk", lambda: any(one.stat().st_size for one in begun("*.partial")))
        worker.kill()
        worker = join(kit, url)
        status = coordinator.finished()
        assert worker.wait(60) == 0, worker.text()
        assert any("range: bytes=" in one.lower() for one in proxy.ranges)
        assert status.blocks[0].head_hash == local_loop_hash(recipe, tmp_path / "local")
        assert coordinator.verify().merges == recipe.swarm.rounds
        places = (coordinator.url, str(coordinator.data_dir)) if store == "folder" else ()
        for number, place in enumerate(places):
            save_model(place, tmp_path / f"model-{number}")
            model = load_checkpoint(tmp_path / f"model-{number}", torch.device("cpu"))
            assert model.tokenizer.vocabulary == dataset.manifest.vocabulary
            assert snapshot_hash(tensors_of(model.blocks[0])) == status.blocks[0].head_hash
        proxy.close()


def test_a_flipped_or_cut_shard_is_refused_and_fetched_again(kit: Kit, dataset: Dataset) -> None:
    coordinator = Coordinator(kit, with_dataset(dataset)).start()
    client = public_client(coordinator.url)
    lines: list[str] = []
    cache = BlobCache(kit.folder / "cache", 1 << 30)
    entry = dataset.manifest.training[0]
    whole = (dataset.folder / entry.name).read_bytes()
    for damaged in (whole[:100] + bytes([whole[100] ^ 1]) + whole[101:], whole[:-2]):
        cache.put(f"{entry.sha256}.text", damaged)
        text = FetchedText(client, client.run(), cache, lines.append)
        assert text.tokens(entry).tobytes() == whole
        assert "damaged" in lines[-1] or "truncated" in lines[-1]
    # A begun download of something else.
    cache.remove(f"{entry.sha256}.text")
    cache.partial(f"{entry.sha256}.text").write_bytes(b"x" * 50)
    text = FetchedText(client, client.run(), cache, lines.append)
    assert text.tokens(entry).tobytes() == whole


def test_a_cache_smaller_than_a_shard_still_trains(kit: Kit, dataset: Dataset) -> None:
    coordinator = Coordinator(kit, with_dataset(dataset)).start()
    client = public_client(coordinator.url)
    cache = BlobCache(kit.folder / "cache", 10)
    text = FetchedText(client, client.run(), cache, print)
    for shard in range(4):
        drawing = Drawing(seed=7, batch=4, context=32)
        here, there = (drawing.windows(one, shard, 0, None) for one in (text, dataset))
        assert [file.tobytes() for file in here.files] == [file.tobytes() for file in there.files]
    assert len(list(cache.folder.iterdir())) == 1
