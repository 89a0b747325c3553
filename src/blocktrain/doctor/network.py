"""Readings of the network: how far a request comes, a certificate, a clock, a stage's greeting.

Every step has a time-out, and answers are cut off at a size; nothing that comes back is trusted beyond a
schema. Reads only: a coordinator is asked for its run, a stage is greeted and left.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
import socket
import ssl
import time
from collections.abc import Callable
from typing import Literal
from urllib.parse import SplitResult, urlsplit

import httpx2
from cryptography import x509
from pydantic import ValidationError

from blocktrain.client.address import RunLink, port_of
from blocktrain.client.coordinator import (
    CoordinatorClient,
    RequestRefused,
    UntrustedCertificate,
    public_client,
)
from blocktrain.client.run import load_run_text, run_setup
from blocktrain.client.traffic import CertificateMismatch
from blocktrain.doctor.findings import Certificate, CoordinatorReading, Need, StageProbe
from blocktrain.doctor.machine import need_of
from blocktrain.errors import BlocktrainError, RecipeError, WireError
from blocktrain.serving.transport import Address, ConnectionLostError, connect
from blocktrain.wire.frame_metadata import Failure, Hello, ModelShape, decode_metadata, encode_metadata
from blocktrain.wire.frames import GREETING_LIMITS, FrameType, Header, encode_frame
from blocktrain.wire.messages import RunAnswer

CONNECT_SECONDS = 10.0
GREETING_SECONDS = 3.0
MAX_LAYERS, MAX_WIDTH = 1024, 1 << 17
"""A run that asks for more is told apart before anything of that size is laid out."""


def read_coordinator(
    link: RunLink, clock: Callable[[], float]
) -> tuple[CoordinatorReading, RunAnswer | None]:
    """How far a request for the run comes, and the run. Asks as a worker does: proxies are not used."""
    url, place = link.url, urlsplit(link.url)
    try:
        with socket.create_connection((place.hostname, port_of(place)), CONNECT_SECONDS):
            pass
    except socket.gaierror as error:
        return CoordinatorReading(url, "name", error.strerror or str(error)), None
    except OSError as error:
        failed = error.strerror or str(error) or "no answer in time"
        return CoordinatorReading(url, "connection", failed), None
    with public_client(str(link), attempts=1) as client:
        begun, at = clock(), time.monotonic()
        try:
            content = client.fetch("/v1/run")
            seconds = time.monotonic() - at
            run = RunAnswer.model_validate_json(content)
        except RequestRefused as refusal:
            # The commonest mix-up: both print an address, and people paste the wrong one.
            if _is_gateway(client):
                return CoordinatorReading(url, None, "", "gateway"), None
            return CoordinatorReading(url, None, f"/v1/run answers {refusal.status}", "other"), None
        except ValidationError as error:
            problem = f"its answer does not fit protocol 1 ({error.errors()[0]['msg']})"
            return CoordinatorReading(url, None, problem, "other"), None
        except (WireError, UntrustedCertificate) as error:
            by_tls = "SSL" in str(error) or isinstance(error, CertificateMismatch)
            return CoordinatorReading(url, "tls" if by_tls else "answer", str(error)), None
    # The server read its clock somewhere within the round trip: its middle is wrong by half of it at most.
    skew = run.server_time - (begun + seconds / 2)
    name = str(run.recipe.get("name", ""))[:200]
    return CoordinatorReading(url, None, "", "coordinator", name, skew, seconds), run


def _is_gateway(client: CoordinatorClient) -> bool:
    try:
        return bool(json.loads(client.fetch("/v1/models"))["object"] == "list")
    except RequestRefused as refusal:
        return refusal.code == "invalid_api_key"
    except (WireError, ValueError, KeyError, TypeError, RecursionError):
        return False


def read_certificate(url: str) -> Certificate | None:
    """The certificate an https:// address shows, trusted or not; None without TLS or a connection."""
    place = urlsplit(url)
    if place.scheme != "https":
        return None
    error = None
    try:
        shown = _handshake(place, httpx2.create_ssl_context())
    except ssl.SSLCertVerificationError as refused:
        error, shown = refused.verify_message, _shown(place)
    except (OSError, ssl.SSLError) as failed:
        error, shown = str(failed), _shown(place)
    if shown is None:
        return None if error is None else Certificate(error, (), None, False)
    certificate = x509.load_der_x509_certificate(shown)
    own = certificate.issuer == certificate.subject
    digest = hashlib.sha256(shown).hexdigest()
    return Certificate(error, _names(certificate), certificate.not_valid_after_utc, own, digest)


def _handshake(place: SplitResult, context: ssl.SSLContext) -> bytes | None:
    assert place.hostname is not None
    with (
        socket.create_connection((place.hostname, port_of(place)), CONNECT_SECONDS) as plain,
        context.wrap_socket(plain, server_hostname=place.hostname) as encrypted,
    ):
        return encrypted.getpeercert(binary_form=True)


def _shown(place: SplitResult) -> bytes | None:
    """Look at a certificate without believing it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    # Nothing is sent over it but the handshake.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    try:
        return _handshake(place, context)
    except OSError:
        return None


def _names(certificate: x509.Certificate) -> tuple[str, ...]:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return ()
    return tuple(str(name.value) for name in names)


def run_need(run: RunAnswer, device_type: str) -> Need:
    """What one block of the run takes of such a device."""
    setup = run_setup(run.recipe, run.vocabulary)
    recipe = setup.recipe
    for model in map(recipe.model.of_block, range(recipe.model.blocks)):
        if model.layers_per_block > MAX_LAYERS or model.width > MAX_WIDTH:
            raise RecipeError(
                f"the run asks for blocks of {model.layers_per_block} layers and width {model.width}; no "
                "machine trains that"
            )
    return need_of(setup, device_type)


def read_text_problem(run: RunAnswer, corpus: str | None) -> str | None:
    try:
        if corpus is not None or run.dataset is None:
            load_run_text(run_setup(run.recipe, run.vocabulary), run, corpus)
    except BlocktrainError as error:
        return str(error)
    return None


def read_stage(text: str) -> StageProbe:
    return asyncio.run(_greeted(Address.parse(text)))


async def _greeted(address: Address) -> StageProbe:
    """Say HELLO for a model that nobody has: a stage refuses it with a sentence, and is thereby known."""
    try:
        stream = await connect(address, CONNECT_SECONDS)
    except ConnectionLostError as error:
        outcome: Literal["timeout", "no connection"] = (
            "timeout" if "no answer in time" in str(error) else "no connection"
        )
        return StageProbe(str(address), outcome, str(error))
    except WireError as error:
        return StageProbe(str(address), "no stage", str(error))
    nobody = "0" * 64
    model = ModelShape("doctor", nobody, nobody, 256, 1, 1, 1)
    try:
        async with asyncio.timeout(GREETING_SECONDS):
            hello = encode_metadata(Hello(secrets.token_hex(32), model))
            await stream.write(encode_frame(Header(FrameType.HELLO), hello))
            frame = await stream.read(GREETING_LIMITS)
        if frame.type == FrameType.REFUSED:
            return StageProbe(str(address), "refused", decode_metadata(frame, Failure).sentence)
        outcome_found = frame.type == FrameType.WELCOME
        return StageProbe(str(address), "welcome" if outcome_found else "no stage", frame.type.name)
    except (WireError, TimeoutError) as error:
        return StageProbe(str(address), "no stage", f"no answer of a stage: {error or 'none in time'}")
    finally:
        stream.abort()
