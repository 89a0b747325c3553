"""Real servers for the command line's tests: a coordinator on a free port, with or without TLS."""

from __future__ import annotations

import datetime
import ipaddress
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from blocktrain.config import Recipe
from blocktrain.coordinator.main import Tls
from blocktrain.coordinator.service import opened
from blocktrain.data.corpora import load_corpus
from tests.coordinator.background import listening


@contextmanager
def coordinator_at(
    data_dir: Path, recipe: Recipe, *, clock: Callable[[], float] = time.time, tls: Tls | None = None
) -> Iterator[str]:
    """The URL of a coordinator for this recipe and its text."""
    corpus = load_corpus(recipe.data, recipe.evaluation.pooling_bytes)
    with (
        opened(recipe, corpus, data_dir, clock=clock, scoring=False) as coordinator,
        listening(coordinator, tls) as url,
    ):
        yield url


def make_certificate(folder: Path, days_left: float) -> Tls:
    """A self-signed certificate for 127.0.0.1 that ends in so many days, or ended so many days ago."""
    key = Ed25519PrivateKey.generate()
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "run.example")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=400))
        .not_valid_after(now + datetime.timedelta(days=days_left))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False
        )
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, algorithm=None)
    )
    folder.mkdir(exist_ok=True)
    tls = Tls(folder / "cert.pem", folder / "key.pem")
    tls.certificate.write_bytes(certificate.public_bytes(Encoding.PEM))
    tls.key.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return tls


def closed_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
