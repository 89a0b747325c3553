"""A run carries its text: a worker joins with an address and nothing else, and trains as one that has it.

The workers' own `builtin` text is another one (OTHER_BUILTIN), as it is under another Python version; where
this machine has another patch version of its Python, a slow test runs a worker under that.
"""

from __future__ import annotations

import dataclasses
import hashlib
import http.server
import os
import resource
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch

from blocktrain.client import places
from blocktrain.client.cache import BlobCache
from blocktrain.client.coordinator import RequestRefused, public_client
from blocktrain.client.places import Nearness
from blocktrain.client.texts import FetchedText
from blocktrain.config import Recipe
from blocktrain.data.batches import Drawing
from blocktrain.data.corpora import builtin_text
from blocktrain.data.dataset import Dataset, shard_files
from blocktrain.errors import StorageError, WireError
from blocktrain.local.assembly import save_model
from blocktrain.training.checkpoint import load_checkpoint
from blocktrain.training.snapshot import tensors_of
from blocktrain.wire.hashing import snapshot_hash
from blocktrain.wire.identity import Identity
from tests.end_to_end.http_proxy import StallProxy
from tests.end_to_end.swarm_kit import Coordinator, Kit, Program, tiny_recipe
from tests.end_to_end.test_one_worker_equals_the_local_loop import local_loop_hash
from tests.forked import OTHER_BUILTIN
from tests.waiting import until


def with_dataset(dataset: Dataset) -> Recipe:
    return tiny_recipe(Path("builtin"), data={"dataset": str(dataset.folder)})


def join(kit: Kit, url: str) -> Program:
    """One command, no text: an address is all."""
    options = ["--data-dir", str(kit.folder / "worker"), "--device", "cpu"]
    return kit.start("worker", ["worker", "--coordinator", url, *options], {OTHER_BUILTIN: "1"})


@contextmanager
def moto() -> Iterator[int]:
    from moto.server import ThreadedMotoServer

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
    assert worker.wait() == 0, worker.text()
    assert status.blocks[0].head_hash == local_loop_hash(recipe, tmp_path / "local")


def other_python() -> str | None:
    """A Python of another patch version that can load the libraries of this one."""
    here = sys.version_info
    found = shutil.which(f"python{here.major}.{here.minor}", path=os.defpath)
    if found is None or Path(found).resolve() == Path(sys.executable).resolve():
        return None
    asked = [found, "-c", "import platform; print(platform.python_version())"]
    told = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    return found if told != ".".join(map(str, here[:3])) else None


@pytest.mark.slow  # it imports torch once more; the same with an emulated difference: the test above
@pytest.mark.timeout(600)
@pytest.mark.skipif(other_python() is None, reason="one Python here")
def test_a_worker_of_another_python_joins_a_run_on_builtin_text(kit: Kit, tmp_path: Path) -> None:
    recipe = tiny_recipe(Path("builtin"))
    recipe = dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, max_bytes=600_000))
    coordinator = Coordinator(kit, recipe).start()
    command = [str(other_python()), "-m", "blocktrain", "worker", "--coordinator", coordinator.url]
    # All but this Python's own library: that one must be the other's.
    places = [one for one in sys.path if "site-packages" in one or not one.startswith(sys.base_prefix)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(places), "OMP_NUM_THREADS": "1"}
    told = "from blocktrain.data.corpora import *; print(hashlib.sha256(builtin_text()).hexdigest())"
    asked = subprocess.run(
        [command[0], "-c", told], env=environment, capture_output=True, text=True, check=True
    )
    assert asked.stdout.strip() != hashlib.sha256(builtin_text()).hexdigest(), "their builtin texts are equal"
    worker = [*command, "--data-dir", str(kit.folder / "worker"), "--device", "cpu"]
    done = subprocess.run(worker, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert coordinator.finished().blocks[0].head_hash == local_loop_hash(recipe, tmp_path / "local")


def test_held_out_shards_are_refused_to_a_worker_and_given_to_a_judge(kit: Kit, dataset: Dataset) -> None:
    recipe = with_dataset(dataset)
    coordinator = Coordinator(kit, recipe).start()
    worker, judge = Identity.generate(), Identity.generate()
    (coordinator.data_dir / "judges.txt").write_text(f"{judge.worker_id}\n")
    manifest = dataset.manifest
    for identity, allowed in ((worker, False), (judge, True)):
        client = kit.open(public_client(coordinator.url, identity))
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


@pytest.mark.parametrize("store", ["folder", "s3"])
def test_a_killed_download_goes_on_and_the_worker_equals_the_local_loop(
    kit: Kit, dataset: Dataset, tmp_path: Path, store: str
) -> None:
    """With BPE tokens, from a worker that has no copy of the text; over the folder store and over S3."""
    recipe = with_dataset(dataset)
    with moto() as port:
        proxy = StallProxy(port, "/text/")
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
            proxy = StallProxy(coordinator.port, "/v1/data/")
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
        assert worker.wait() == 0, worker.text()
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
    client = coordinator.client()
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
    cache.partial(f"{entry.sha256}.text", 0).write_bytes(b"x" * 50)
    text = FetchedText(client, client.run(), cache, lines.append)
    assert text.tokens(entry).tobytes() == whole


class Served(http.server.SimpleHTTPRequestHandler):
    """A folder over HTTP, without ranges."""

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


@contextmanager
def web_server(folder: Path) -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Served, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_mirrors_are_asked_first_and_one_that_serves_something_else_is_left(
    kit: Kit, dataset: Dataset, tmp_path: Path
) -> None:
    manifest = dataset.manifest
    good, bad = tmp_path / "good", tmp_path / "bad"
    for folder in (good, bad):
        shutil.copytree(dataset.folder, folder, ignore=shutil.ignore_patterns("held-*", "pool-*"))
    for entry in manifest.training:
        content = bytearray((bad / entry.name).read_bytes())
        content[7] ^= 1
        (bad / entry.name).write_bytes(content)
    (bad / "tokenizer.json").write_bytes(b"{")
    with socket.create_server(("127.0.0.1", 0)) as unused:
        nobody = f"http://127.0.0.1:{unused.getsockname()[1]}"
    with web_server(good) as fine, web_server(bad) as lying:
        recipe = tiny_recipe(
            Path("builtin"),
            data={"dataset": str(dataset.folder), "mirrors": f"{nobody} {lying}/ {fine} {fine}/nothing"},
        )
        coordinator = Coordinator(kit, recipe).start()
        client = coordinator.client()
        lines: list[str] = []
        text = FetchedText(client, client.run(), BlobCache(kit.folder / "cache", 1 << 30), lines.append)
        for entry in manifest.training:
            assert text.tokens(entry).tobytes() == (dataset.folder / entry.name).read_bytes()
        assert text.tokenizer().vocabulary == manifest.vocabulary
        told = [line for line in lines if "serves something else" in line]
        assert len(told) == 1, "it is not asked again"
        assert "expected sha256" in told[0]
        assert any("did not answer" in line for line in lines)
        assert not any("downloading it again" in line for line in lines), "the coordinator was not needed"
        # A mirror is not blamed for what was damaged here, or begun by another that broke off.
        entry, second = manifest.training[:2]
        text._cache.remove(f"{second.sha256}.text")
        text._cache.partial(f"{second.sha256}.text", 0).write_bytes(b"x" * 50)
        text._cache.put(f"{entry.sha256}.text", b"x" * 50)
        text._checked.clear()
        for one in (entry, second):
            assert text.tokens(one).tobytes() == (dataset.folder / one.name).read_bytes()
        assert [line for line in lines if "serves something else" in line] == told
        # Nobody but the coordinator: the text still comes.
        (good / manifest.training[0].name).unlink()
        again = FetchedText(client, client.run(), BlobCache(kit.folder / "other", 1 << 30), lines.append)
        assert again.tokens(manifest.training[0]).tobytes() == text.tokens(manifest.training[0]).tobytes()


def test_a_mirror_that_is_nearer_than_the_coordinator_is_left_and_the_text_still_comes(
    kit: Kit, dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    def seen_from_a_volunteer(address: str) -> Nearness:
        return Nearness.PRIVATE if address == "127.0.0.2" else Nearness.PUBLIC

    monkeypatch.setattr(places, "nearness_of", seen_from_a_volunteer)
    data = {"dataset": str(dataset.folder), "mirrors": "http://127.0.0.2:1/admin"}
    coordinator = Coordinator(kit, tiny_recipe(Path("builtin"), data=data)).start()
    client, lines = coordinator.client(), list[str]()
    text = FetchedText(client, client.run(), BlobCache(kit.folder / "cache", 1 << 30), lines.append)
    for entry in dataset.manifest.training:
        assert text.tokens(entry).tobytes() == (dataset.folder / entry.name).read_bytes()
    (told,) = [line for line in lines if "mirror" in line]
    assert told.startswith(
        "not asking mirror http://127.0.0.2:1/admin (the coordinator sends this machine to"
    )


def test_a_full_disk_during_a_download_is_said_and_the_download_goes_on_later(
    kit: Kit, dataset: Dataset
) -> None:
    coordinator = Coordinator(kit, with_dataset(dataset)).start()
    client = coordinator.client()
    cache = BlobCache(kit.folder / "cache", 1 << 30)
    text = FetchedText(client, client.run(), cache, print)
    entry = dataset.manifest.training[0]
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    # The limit of one file stands for the disk's: writing beyond it fails in the same way.
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(StorageError, match=r"cannot keep the run's text.*free some space"):
            text.tokens(entry)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    name = f"{entry.sha256}.text"
    assert cache.path(name) is None, "half of it is not taken for the whole"
    assert cache.partial(name, 0).stat().st_size == 4096
    assert text.tokens(entry).tobytes() == (dataset.folder / entry.name).read_bytes()


def test_a_worker_of_a_run_whose_shard_has_tokens_beyond_the_vocabulary_refuses_it(
    kit: Kit, dataset: Dataset, tmp_path: Path
) -> None:
    """Whoever made the dataset wrote right hashes: only a look at the tokens can tell."""
    folder = tmp_path / "bad"
    shutil.copytree(dataset.folder, folder)
    entry = dataset.manifest.training[0]
    content = b"\xff\xff" * entry.tokens
    (folder / entry.name).write_bytes(content)
    changed = dataclasses.replace(entry, sha256=hashlib.sha256(content).hexdigest())
    manifest = dataclasses.replace(dataset.manifest, training=(changed, *dataset.manifest.training[1:]))
    (folder / "dataset.json").write_bytes(manifest.to_bytes())
    coordinator = Coordinator(kit, with_dataset(Dataset(folder, manifest))).start()
    client = coordinator.client()
    lines: list[str] = []
    text = FetchedText(client, client.run(), BlobCache(kit.folder / "cache", 1 << 30), lines.append)
    with pytest.raises(WireError, match="came damaged 3 times"):
        text.tokens(changed)
    assert f"has token 65535, the vocabulary has {manifest.vocabulary}" in lines[0]


def test_a_cache_smaller_than_a_shard_still_trains(kit: Kit, dataset: Dataset) -> None:
    coordinator = Coordinator(kit, with_dataset(dataset)).start()
    client = coordinator.client()
    cache = BlobCache(kit.folder / "cache", 10)
    text = FetchedText(client, client.run(), cache, print)
    for shard in range(4):
        drawing = Drawing(seed=7, batch=4, context=32)
        here, there = (drawing.windows(one, shard, 0, None) for one in (text, dataset))
        assert [file.tobytes() for file in here.files] == [file.tobytes() for file in there.files]
    assert len(list(cache.folder.iterdir())) == 1
