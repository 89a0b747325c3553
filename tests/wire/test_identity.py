"""Key files: one identity per file, made whole or not at all, refused when it is not private."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from blocktrain.wire.identity import Identity, IdentityError, load_or_create, verify, worker_id_of


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    return tmp_path / "keys" / "worker.pem"


def test_restarted_worker_is_the_same_worker(key_file: Path) -> None:
    first, second = load_or_create(key_file), load_or_create(key_file)
    assert first.worker_id == second.worker_id == worker_id_of(first.public_key)
    assert len(first.worker_id) == 32
    assert int(first.worker_id, 16) >= 0


def test_two_workers_have_two_ids(tmp_path: Path) -> None:
    assert load_or_create(tmp_path / "a").worker_id != load_or_create(tmp_path / "b").worker_id


def test_key_file_is_private_and_leaves_no_draft(key_file: Path) -> None:
    load_or_create(key_file)
    assert stat.S_IMODE(key_file.stat().st_mode) == 0o600
    assert stat.S_IMODE(key_file.parent.stat().st_mode) == 0o700
    assert list(key_file.parent.iterdir()) == [key_file]


def test_processes_that_start_at_once_agree_on_one_key(key_file: Path) -> None:
    found: list[str] = []
    barrier = threading.Barrier(8)

    def start() -> None:
        barrier.wait(timeout=10)
        found.append(load_or_create(key_file).worker_id)

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=10)
    assert len(found) == 8
    assert len(set(found)) == 1


def test_key_is_made_where_hard_links_do_not_exist(key_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    assert load_or_create(key_file).worker_id == load_or_create(key_file).worker_id
    assert list(key_file.parent.iterdir()) == [key_file]


@pytest.mark.skipif(os.name != "posix", reason="file modes")
@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o622])
def test_key_file_others_can_read_is_refused_with_the_remedy(key_file: Path, mode: int) -> None:
    load_or_create(key_file)
    key_file.chmod(mode)
    with pytest.raises(IdentityError, match=f"0600, found {mode:04o}; run `chmod 600"):
        load_or_create(key_file)


@pytest.mark.parametrize(
    "content", [b"", b"not a key", b"\x00" * 100_000, b"-----BEGIN PRIVATE KEY-----\nAAAA\n"]
)
def test_damaged_key_file_is_refused_and_kept(key_file: Path, content: bytes) -> None:
    load_or_create(key_file)
    key_file.write_bytes(content)
    with pytest.raises(IdentityError, match="not a usable key file"):
        load_or_create(key_file)
    assert key_file.read_bytes() == content


def test_truncated_key_file_is_refused(key_file: Path) -> None:
    load_or_create(key_file)
    key_file.write_bytes(key_file.read_bytes()[:-30])
    with pytest.raises(IdentityError, match="not a usable key file"):
        load_or_create(key_file)


def test_key_of_another_kind_is_refused(key_file: Path) -> None:
    load_or_create(key_file)
    pem = generate_private_key(SECP256R1()).private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    key_file.write_bytes(pem)
    with pytest.raises(IdentityError, match="a key of another kind"):
        load_or_create(key_file)


def test_folder_in_place_of_a_key_file_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(IdentityError, match="cannot use the key file"):
        load_or_create(tmp_path)


def test_key_file_under_a_file_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(IdentityError, match="cannot use the key file"):
        load_or_create(tmp_path / "file" / "key.pem")


def test_signature_of_the_owner_verifies_and_no_other() -> None:
    alice, mallory = Identity.generate(), Identity.generate()
    signature = alice.sign(b"data")
    assert verify(alice.public_key, b"data", signature)
    assert not verify(alice.public_key, b"date", signature)
    assert not verify(mallory.public_key, b"data", signature)
    assert not verify(alice.public_key, b"data", signature[:-1])
    assert not verify(b"short", b"data", signature)


def test_identity_prints_no_secret() -> None:
    alice = Identity.generate()
    assert repr(alice) == f"Identity(worker_id={alice.worker_id!r})"
