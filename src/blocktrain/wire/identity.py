"""Who a machine is: one Ed25519 key file, made on first use, and the id that follows from it.

The id is a hash of the public key, so a restarted worker is the same worker and nobody else can take
its id. Knows nothing of HTTP (see `signing`) or of who is admitted.

Covered: two processes that start at once agree on one key; a key file that others can read, that is
damaged or of another kind is refused with the remedy. Not covered: a passphrase on the file; file modes
on Windows; public keys of small order, under which anybody can sign (its maker harms its own id).
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field
from functools import lru_cache
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
from blocktrain.files import create_private

WorkerId = NewType("WorkerId", str)

PUBLIC_KEY_BYTES = 32
WORKER_ID_CHARACTERS = 32
MAX_KEY_FILE_BYTES = 4096


class IdentityError(UserError):
    """A key file that cannot be used; the person at this keyboard can mend it."""


def worker_id_of(public_key: bytes) -> WorkerId:
    # 128 bits: short enough to read aloud in part, long enough that nobody finds a second key for an id.
    digest = blake3(public_key).digest(length=WORKER_ID_CHARACTERS // 2)
    return WorkerId(digest.hex())


@lru_cache(maxsize=4096)
def _key(public_key: bytes) -> Ed25519PublicKey:
    return Ed25519PublicKey.from_public_bytes(public_key)


def verify(public_key: bytes, data: bytes, signature: bytes) -> bool:
    """Whether `signature` is the key owner's over `data`; False for a malformed key or signature too."""
    try:
        _key(public_key).verify(signature, data)
    # A malformed key is an answer and not an error: ledgers come from strangers.
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
        # lexists: a dangling link must be refused below and not silently replaced by a new identity.
        if not os.path.lexists(path):
            key = Identity.generate().private_key
            create_private(path, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        return _load(path)
    except OSError as error:
        raise IdentityError(
            f"cannot use the key file {path}: {error.strerror or error}; expected a file this user may read "
            "and write, or a folder to make it in; fix the permissions or name another path"
        ) from None


def _load(path: Path) -> Identity:
    with path.open("rb") as file:
        # The mode of the open file, so that nobody can swap it between the look and the read.
        mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
        if os.name == "posix" and mode & 0o077:
            raise IdentityError(
                f"the key file {path} can be read by other users: expected mode 0600, found {mode:04o}; "
                f"run `chmod 600 {path}`, and make a new key if others had access"
            )
        # Bounded: somebody may name a disk image by mistake.
        pem = file.read(MAX_KEY_FILE_BYTES + 1)
    try:
        key = load_pem_private_key(pem, password=None)
    except (ValueError, TypeError):
        raise _not_a_key(path, f"{len(pem)} bytes that are not one") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise _not_a_key(path, "a key of another kind")
    return Identity(key)


def _not_a_key(path: Path, found: str) -> IdentityError:
    return IdentityError(
        f"{path} is not a usable key file: expected an unencrypted Ed25519 key in PEM, found {found}; "
        "restore it from a backup, or move it away to start as a new worker"
    )
