"""Who a machine is: one Ed25519 key file, made on first use, and the id that follows from it.

The id is a hash of the public key, so a restarted worker is the same worker and nobody else can take
its id. Knows nothing of HTTP (see `signing`) or of who is admitted.

Covered: two processes that start at once agree on one key; a key file that others can read, that is
damaged or of another kind is refused with the remedy. Not covered: a passphrase on the file; file modes
on Windows; public keys of small order, under which anybody can sign (whoever makes one harms its own id).
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import NewType

from blake3 import blake3
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from blocktrain.errors import UserError

WorkerId = NewType("WorkerId", str)

PUBLIC_KEY_BYTES = 32
SIGNATURE_BYTES = 64
WORKER_ID_CHARACTERS = 32
MAX_KEY_FILE_BYTES = 4096

# What os.link says on file systems without hard links (exFAT, Google Drive, some network mounts).
_NO_HARD_LINKS = {errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.EMLINK, errno.EACCES, errno.EINVAL}


class IdentityError(UserError):
    """A key file that cannot be used; the person at this keyboard can mend it."""


def worker_id_of(public_key: bytes) -> WorkerId:
    digest = blake3(public_key).digest(length=WORKER_ID_CHARACTERS // 2)
    return WorkerId(digest.hex())


def verify(public_key: bytes, data: bytes, signature: bytes) -> bool:
    """Whether `signature` is the key owner's over `data`; False for a malformed key or signature too."""
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, data)
    except (InvalidSignature, ValueError):
        return False
    return True


@dataclass(frozen=True)
class Identity:
    """A private key and what the world may know of it; prints as its worker id only."""

    private_key: Ed25519PrivateKey = field(repr=False)
    public_key: bytes = field(init=False, repr=False)
    worker_id: WorkerId = field(init=False)

    def __post_init__(self) -> None:
        public_key = self.private_key.public_key().public_bytes_raw()
        object.__setattr__(self, "public_key", public_key)
        object.__setattr__(self, "worker_id", worker_id_of(public_key))

    @classmethod
    def generate(cls) -> Identity:
        return cls(Ed25519PrivateKey.generate())

    def sign(self, data: bytes) -> bytes:
        return self.private_key.sign(data)


def load_or_create(path: Path) -> Identity:
    """The identity in the key file at `path`, which is made (mode 0600) when there is none."""
    try:
        if not os.path.lexists(path):
            _create(path, Identity.generate())
        return _load(path)
    except OSError as error:
        raise IdentityError(
            f"cannot use the key file {path}: {error.strerror or error}; expected a file this user may read "
            "and write, or a folder to make it in; fix the permissions or name another path"
        ) from None


def _create(path: Path, identity: Identity) -> None:
    """Make the file whole or not at all; when another process was first, its file stays."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    pem = identity.private_key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        _write_new(draft, pem)
        os.link(draft, path)
    except FileExistsError:
        pass
    except OSError as error:
        if error.errno not in _NO_HARD_LINKS or not draft.exists():
            raise
        with contextlib.suppress(FileExistsError):
            _write_new(path, pem)
    finally:
        draft.unlink(missing_ok=True)


def _write_new(path: Path, content: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _load(path: Path) -> Identity:
    with path.open("rb") as file:
        _refuse_open_mode(path, os.fstat(file.fileno()).st_mode)
        pem = file.read(MAX_KEY_FILE_BYTES + 1)
    try:
        key = load_pem_private_key(pem, password=None)
    except (ValueError, TypeError):
        raise _not_a_key(path, f"{len(pem)} bytes that are not one") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise _not_a_key(path, "a key of another kind")
    return Identity(key)


def _refuse_open_mode(path: Path, mode: int) -> None:
    if os.name == "posix" and stat.S_IMODE(mode) & 0o077:
        raise IdentityError(
            f"the key file {path} can be read by other users: expected mode 0600, found "
            f"{stat.S_IMODE(mode):04o}; run `chmod 600 {path}`, and make a new key if others had access"
        )


def _not_a_key(path: Path, found: str) -> IdentityError:
    return IdentityError(
        f"{path} is not a usable key file: expected an unencrypted Ed25519 key in PEM, found {found}; "
        "restore it from a backup, or move it away to start as a new worker"
    )
