"""Signed requests: what is covered cannot change, every refusal has its reason and its remedy."""

from __future__ import annotations

import base64
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blocktrain.wire.identity import Identity, verify
from blocktrain.wire.signing import (
    DigestCheck,
    Reason,
    SignatureError,
    VerifiedRequest,
    _parameters,
    _plain_parameters,
    body_digest,
    fresh_nonce,
    sign_request,
    verify_request,
)

NOW = 1_800_000_000.0
ALICE = Identity.generate()
BODY = b"an update"
TARGET = "/v1/updates/ab%20c?block=3&x=%2F"


def signed(**changes: Any) -> dict[str, str]:
    arguments: dict[str, Any] = {
        "now": NOW,
        "nonce": fresh_nonce(),
        "content_digest": body_digest(BODY),
        "content_length": len(BODY),
    }
    return sign_request(ALICE, "PUT", TARGET, **(arguments | changes))


def verified(headers: Any, **changes: Any) -> VerifiedRequest:
    arguments: dict[str, Any] = {"method": "PUT", "path_and_query": TARGET, "now": NOW + 2} | changes
    return verify_request(arguments.pop("method"), arguments.pop("path_and_query"), headers, **arguments)


def refusal(headers: Any, **changes: Any) -> SignatureError:
    with pytest.raises(SignatureError) as caught:
        verified(headers, **changes)
    return caught.value


def test_signed_request_names_its_worker() -> None:
    request = verified(signed(nonce="n" * 16))
    assert request.worker_id == ALICE.worker_id
    assert request.public_key == ALICE.public_key
    assert (request.nonce, request.created) == ("n" * 16, int(NOW))
    assert (request.content_digest, request.content_length) == (body_digest(BODY), len(BODY))


def test_request_without_body_is_signed_too() -> None:
    headers = sign_request(ALICE, "GET", "/v1/blocks/0", now=NOW, nonce=fresh_nonce())
    assert "Content-Length" not in headers
    request = verify_request("GET", "/v1/blocks/0", headers, now=NOW)
    assert request.content_length == 0
    request.digest_check().finish()


def test_content_length_of_zero_is_as_good_as_none() -> None:
    headers = sign_request(ALICE, "POST", "/v1/join", now=NOW, nonce=fresh_nonce())
    assert verify_request("POST", "/v1/join", headers | {"Content-Length": "0"}, now=NOW).content_length == 0


def test_signature_is_over_the_base_that_rfc_9421_prescribes() -> None:
    headers = signed(nonce="abcdefghijklmnop", audience="run-7")
    parameters = (
        '("@method" "@path" "@query" "content-digest" "content-length")'
        f';created={int(NOW)};keyid="{ALICE.public_key.hex()}";alg="ed25519"'
        ';nonce="abcdefghijklmnop";tag="blocktrain/run-7"'
    )
    base = (
        '"@method": PUT\n'
        '"@path": /v1/updates/ab%20c\n'
        '"@query": ?block=3&x=%2F\n'
        f'"content-digest": sha-256=:{base64.b64encode(body_digest(BODY)).decode()}:\n'
        f'"content-length": {len(BODY)}\n'
        f'"@signature-params": {parameters}'
    )
    assert headers["Signature-Input"] == f"blocktrain={parameters}"
    signature = base64.b64decode(headers["Signature"].removeprefix("blocktrain=:").removesuffix(":"))
    assert verify(ALICE.public_key, base.encode(), signature)


def test_header_names_may_come_in_any_case_and_as_pairs() -> None:
    headers = signed()
    pairs = [(name.lower(), f" {value}\t") for name, value in headers.items()]
    assert verified([("host", "proxy"), *pairs, ("x-forwarded-for", "1.2.3.4")]).worker_id == ALICE.worker_id


@pytest.mark.parametrize("missing", ["Signature", "Signature-Input"])
def test_request_without_signature_is_unsigned(missing: str) -> None:
    headers = signed()
    del headers[missing]
    assert refusal(headers).reason is Reason.UNSIGNED
    assert refusal({}).reason is Reason.UNSIGNED


@pytest.mark.parametrize(
    "change",
    [
        {"method": "POST"},
        {"path_and_query": "/v1/updates/ab%20d?block=3&x=%2F"},
        {"path_and_query": "/v1/updates/ab%20c?block=4&x=%2F"},
        {"path_and_query": "/v1/updates/ab%20c?block=3&x=/"},
        {"path_and_query": "/v1/updates/ab%20c"},
    ],
)
def test_changed_method_path_or_query_breaks_the_signature(change: dict[str, str]) -> None:
    assert refusal(signed(), **change).reason is Reason.BAD_SIGNATURE


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("Content-Length", "10"),
        ("Content-Digest", f"sha-256=:{base64.b64encode(body_digest(b'other')).decode()}:"),
    ],
)
def test_changed_length_or_digest_breaks_the_signature(name: str, value: str) -> None:
    assert refusal(signed() | {name: value}).reason is Reason.BAD_SIGNATURE


@pytest.mark.parametrize(
    ("found", "put"),
    [
        (r"created=\d+", f"created={int(NOW) + 1}"),
        (r'nonce="[^"]+"', 'nonce="0000000000000000"'),
        (r'keyid="[^"]+"', f'keyid="{Identity.generate().public_key.hex()}"'),
    ],
    ids=["created", "nonce", "keyid"],
)
def test_changed_time_nonce_or_key_breaks_the_signature(found: str, put: str) -> None:
    headers = signed()
    headers["Signature-Input"] = re.sub(found, put, headers["Signature-Input"])
    assert refusal(headers).reason is Reason.BAD_SIGNATURE


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("Signature-Input", "nonsense("),
        ("Signature-Input", "a" * 5000),
        ("Signature-Input", "blocktrain=1"),
        ("Signature", "blocktrain=:AAAA"),
        ("Signature", "other=:AAAA:"),
        ("Content-Length", "-1"),
        ("Content-Length", "9, 9"),
        ("Content-Length", "1e9"),
        ("Content-Digest", "md5=:AAAA:"),
        ("Content-Digest", ""),
    ],
)
def test_unreadable_field_is_malformed(name: str, value: str) -> None:
    assert refusal(signed() | {name: value}).reason is Reason.MALFORMED


@pytest.mark.parametrize(
    ("found", "put"),
    [
        (r' "content-digest"', ""),
        (r' "content-length"', ""),
        (r'"@method" ', ""),
        (r' "@query"', ""),
        (r'nonce="[^"]+"', 'nonce="short"'),
        (r';nonce="[^"]+"', ""),
        (r'keyid="[^"]+"', 'keyid="me"'),
        (r"created=\d+;", ""),
        (r'alg="ed25519"', 'alg="hmac-sha256"'),
    ],
)
def test_signature_that_covers_less_is_refused_even_when_it_is_genuine(found: str, put: str) -> None:
    headers = resigned(re.sub(found, put, signed()["Signature-Input"]))
    assert refusal(headers).reason in (Reason.MALFORMED, Reason.BAD_SIGNATURE)


def resigned(signature_input: str) -> dict[str, str]:
    """A genuine signature by Alice over whatever components the input lists."""
    values = {
        "@method": "PUT",
        "@path": TARGET.partition("?")[0],
        "@query": "?" + TARGET.partition("?")[2],
        "content-digest": signed()["Content-Digest"],
        "content-length": str(len(BODY)),
    }
    parameters = signature_input.removeprefix("blocktrain=")
    names = re.findall(r'"([^"]+)"', parameters[: parameters.index(")")])
    base = "".join(f'"{name}": {values[name]}\n' for name in names) + f'"@signature-params": {parameters}'
    signature = base64.b64encode(ALICE.sign(base.encode())).decode()
    return signed() | {"Signature-Input": signature_input, "Signature": f"blocktrain=:{signature}:"}


def test_the_resigning_test_helper_makes_genuine_signatures() -> None:
    assert verified(resigned(signed()["Signature-Input"])).worker_id == ALICE.worker_id


def test_request_signed_for_another_run_is_refused() -> None:
    headers = signed(audience="run-1")
    assert verified(headers, audience="run-1").worker_id == ALICE.worker_id
    assert refusal(headers, audience="run-2").reason is Reason.MALFORMED
    assert refusal(headers).reason is Reason.MALFORMED


@pytest.mark.parametrize("target", ["v1/x", "*", "http://host/v1", "/v1#x", "/v1 x", "/v1\n", "/\u00e9", ""])
def test_target_that_is_not_an_encoded_path_is_malformed(target: str) -> None:
    assert refusal(signed(), path_and_query=target).reason is Reason.MALFORMED
    with pytest.raises(SignatureError):
        sign_request(ALICE, "GET", target, now=NOW, nonce=fresh_nonce())


@pytest.mark.parametrize(("offset", "word"), [(-121, "ahead"), (121.5, "behind"), (86_400, "behind")])
def test_clock_skew_names_both_times_and_the_remedy(offset: float, word: str) -> None:
    error = refusal(signed(), now=NOW + offset, window_seconds=120)
    assert error.reason is Reason.CLOCK_SKEW
    assert "client time 2027-01-15T08:00:00Z" in error.sentence
    assert "server time 2027-01-1" in error.sentence
    assert f"s {word}" in error.sentence
    assert "check the clock" in error.sentence


@pytest.mark.parametrize("offset", [-120, 0, 120])
def test_time_within_the_window_is_accepted(offset: float) -> None:
    assert verified(signed(), now=NOW + offset, window_seconds=120).created == NOW


def test_absurd_time_is_clock_skew_and_not_a_crash() -> None:
    signature_input = re.sub(r"created=\d+", "created=999999999999999", signed()["Signature-Input"])
    assert refusal(resigned(signature_input)).reason is Reason.CLOCK_SKEW


def test_request_past_its_own_expiry_is_expired() -> None:
    headers = signed(expires_seconds=10)
    assert verified(headers, now=NOW + 10).created == NOW
    error = refusal(headers, now=NOW + 11)
    assert error.reason is Reason.EXPIRED
    assert "sign it again" in error.sentence


def test_refusal_shows_strangers_text_only_quoted_and_cut() -> None:
    error = refusal(signed(), path_and_query="/<script>\r\n\x1b[31m" + "a" * 500)
    assert error.sentence.isprintable()
    assert error.sentence.isascii()
    assert len(error.sentence) < 600


def outcome(headers: Any) -> str:
    try:
        return verified(headers).worker_id
    except SignatureError as error:
        return error.sentence


field_names = st.sampled_from(["Signature", "Signature-Input", "Content-Digest", "Content-Length"])
byte_fields = st.binary(max_size=40).map(lambda raw: f"blocktrain=:{base64.b64encode(raw).decode()}:")


@given(st.lists(st.tuples(field_names, st.text(max_size=60) | byte_fields), max_size=5))
@settings(max_examples=150, deadline=None)
def test_arbitrary_fields_are_refused_and_never_crash(fields: list[tuple[str, str]]) -> None:
    genuine = list(signed(nonce="n" * 16).items())
    replaced = {name for name, _ in fields}
    for headers in (fields, [pair for pair in genuine if pair[0] not in replaced] + fields, genuine + fields):
        assert outcome(headers).isprintable()


@given(st.sampled_from(["Signature", "Signature-Input"]), st.integers(0, 400), st.characters(codec="latin-1"))
@settings(max_examples=150, deadline=None)
def test_one_changed_character_of_a_signature_never_names_another_worker(
    name: str, position: int, character: str
) -> None:
    headers = signed(nonce="n" * 16)
    value = headers[name]
    position %= len(value)
    headers[name] = value[:position] + character + value[position + 1 :]
    try:
        request = verified(headers)
    except SignatureError:
        return
    assert request.worker_id == ALICE.worker_id
    assert request.nonce == "n" * 16


def test_body_is_checked_while_it_streams() -> None:
    check = verified(signed()).digest_check()
    for position in range(len(BODY)):
        check.update(memoryview(BODY)[position : position + 1])
    check.finish()


@pytest.mark.parametrize("body", [b"", BODY[:-1], b"An update"])
def test_body_that_was_cut_or_changed_is_a_digest_mismatch(body: bytes) -> None:
    check = DigestCheck(body_digest(BODY), len(BODY))
    check.update(body)
    with pytest.raises(SignatureError) as caught:
        check.finish()
    assert caught.value.reason is Reason.DIGEST_MISMATCH


def test_endless_body_is_refused_at_the_first_byte_too_many() -> None:
    check = DigestCheck(body_digest(BODY), len(BODY))
    check.update(BODY)
    with pytest.raises(SignatureError, match="signed length"):
        check.update(b"x")


def test_replay_key_is_what_a_database_makes_unique() -> None:
    first, second = verified(signed()), verified(signed())
    assert first.replay_key != second.replay_key
    assert first.replay_key == f"{ALICE.worker_id}:{first.nonce}"
    assert first.forget_after == NOW + 120


PLAIN = "/v1/assignments/abc/heartbeat"
"""A target that `verify_request` reads by itself; any other goes to the library."""


@pytest.mark.parametrize("body", [b"", BODY])
def test_plain_form_says_what_the_library_says(body: bytes) -> None:
    length, tag = len(body), "blocktrain/run"
    headers = sign_request(
        ALICE, "POST", PLAIN, now=NOW, nonce="n" * 16, content_digest=body_digest(body),
        content_length=length, audience="run",
    )  # fmt: skip
    fields = {name.lower(): value for name, value in headers.items()}
    by_hand = _plain_parameters("POST", PLAIN, fields, length, tag)
    assert by_hand == {"created": int(NOW), "keyid": ALICE.public_key.hex(), "nonce": "n" * 16}
    assert by_hand.items() <= _parameters("POST", PLAIN, fields, length, tag).items()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"method": "DELETE"}, Reason.BAD_SIGNATURE),
        ({"path_and_query": PLAIN + "s"}, Reason.BAD_SIGNATURE),
        ({"path_and_query": PLAIN + "?x"}, Reason.BAD_SIGNATURE),
        ({"audience": "another"}, Reason.MALFORMED),
        ({"Content-Length": "8"}, Reason.BAD_SIGNATURE),
        ({"Content-Length": "0"}, Reason.BAD_SIGNATURE),
        ({"Content-Digest": f"sha-256=:{'A' * 43}=:"}, Reason.BAD_SIGNATURE),
        ({"Signature": f"blocktrain=:{'A' * 86}==:"}, Reason.BAD_SIGNATURE),
    ],
)  # fmt: skip
def test_changed_request_of_the_plain_form_is_refused(change: dict[str, str], reason: Reason) -> None:
    arguments = {"method": "POST", "path_and_query": PLAIN, "audience": "run"}
    headers = sign_request(
        ALICE, "POST", PLAIN, now=NOW, nonce="n" * 16, content_digest=body_digest(BODY),
        content_length=len(BODY), audience="run",
    )  # fmt: skip
    assert verified(headers, **arguments).worker_id == ALICE.worker_id
    headers |= {name: value for name, value in change.items() if name not in arguments}
    arguments |= {name: value for name, value in change.items() if name in arguments}
    assert refusal(headers, **arguments).reason == reason
