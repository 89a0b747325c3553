"""What readings mean: one pure function per topic, from a reading to a finding with cause and remedy.

Knows no sockets, files or clock; `machine` and `network` make the readings, and the tests make others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import IntEnum
from typing import Literal

from blocktrain.wire.signing import DEFAULT_WINDOW_SECONDS
from blocktrain.wording import size

OLDEST_PYTHON = (3, 11)
OLDEST_TORCH, FIRST_TOO_NEW_TORCH = (2, 11), (2, 14)
"""As pyproject.toml demands; a test holds the two together."""
MIN_FREE_DISK_BYTES = 1_000_000_000
COMFORTABLE_DISK_BYTES = 5_000_000_000
"""A worker's cache (4 GB unless told otherwise) and its training state."""
MIN_FILES, COMFORTABLE_FILES = 256, 2048
"""A coordinator holds one descriptor for each connection and takes up to 2,000."""
CERTIFICATE_WARNING_DAYS = 14
LOOPBACK = ("127.", "::1", "localhost")


class Severity(IntEnum):
    OK = 0
    WARNING = 1
    ERROR = 2


@dataclass(frozen=True)
class Finding:
    topic: str
    severity: Severity
    found: str
    cause: str | None = None
    """Why it is so; None where nothing is wrong."""
    remedy: str | None = None

    def to_dict(self) -> dict[str, str | None]:
        return {
            "topic": self.topic,
            "severity": self.severity.name.lower(),
            "found": self.found,
            "cause": self.cause,
            "remedy": self.remedy,
        }


def worst(findings: Iterable[Finding]) -> Severity:
    return max((finding.severity for finding in findings), default=Severity.OK)


def _ok(topic: str, found: str) -> Finding:
    return Finding(topic, Severity.OK, found)


# --- readings of this machine


@dataclass(frozen=True)
class Versions:
    python: tuple[int, ...]
    torch: str
    blocktrain: str


@dataclass(frozen=True)
class Device:
    name: str
    """As `--device` takes it."""
    description: str = ""
    free_bytes: int | None = None
    problem: str | None = None
    """Why it cannot be used."""


@dataclass(frozen=True)
class Disk:
    folder: str
    free_bytes: int | None
    writable: bool


@dataclass(frozen=True)
class Tcp:
    """None where the system does not say."""

    congestion_control: str | None
    slow_start_after_idle: bool | None


@dataclass(frozen=True)
class Need:
    """What training one block of a recipe takes."""

    recipe: str
    num_bytes: int


# --- readings of the network


@dataclass(frozen=True)
class CoordinatorReading:
    """How far a request for the run came."""

    url: str
    failed_at: Literal["name", "connection", "tls", "answer"] | None
    error: str = ""
    kind: Literal["coordinator", "gateway", "other"] | None = None
    run_name: str = ""
    clock_seconds: float | None = None
    """Its clock minus ours, at the middle of the request."""
    round_trip_seconds: float = 0.0


@dataclass(frozen=True)
class Certificate:
    error: str | None
    """Why it is not trusted here."""
    names: tuple[str, ...]
    not_after: datetime | None
    self_signed: bool
    sha256: str = ""


@dataclass(frozen=True)
class StageProbe:
    address: str
    outcome: Literal["welcome", "refused", "no connection", "timeout", "no stage"]
    sentence: str
    """What it said, or why nothing came."""


# --- findings


def about_versions(reading: Versions) -> list[Finding]:
    python = ".".join(map(str, reading.python))
    found = []
    if reading.python[:2] < OLDEST_PYTHON:
        found.append(
            Finding("python", Severity.ERROR, f"Python {python}", "BlockTrain needs Python 3.11 or later",
                    "make the environment again with a newer one: make PYTHON=python3.12 demo")
        )  # fmt: skip
    else:
        found.append(_ok("python", f"Python {python}, blocktrain {reading.blocktrain}"))
    torch_version = _numbers(reading.torch)
    oldest, too_new = ("{}.{}".format(*one) for one in (OLDEST_TORCH, FIRST_TOO_NEW_TORCH))
    newest = f"{FIRST_TOO_NEW_TORCH[0]}.{FIRST_TOO_NEW_TORCH[1] - 1}"
    if not OLDEST_TORCH <= torch_version < FIRST_TOO_NEW_TORCH:
        found.append(
            Finding("torch", Severity.ERROR, f"torch {reading.torch}",
                    f"BlockTrain is tested with torch {oldest} to {newest}",
                    f"pip install 'torch>={oldest},<{too_new}' in this environment")
        )  # fmt: skip
    else:
        found.append(_ok("torch", f"torch {reading.torch}"))
    return found


def _numbers(version: str) -> tuple[int, int]:
    major, _, rest = version.partition(".")
    minor = rest.partition(".")[0]
    return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else (0, 0)


def about_device(reading: Device) -> Finding:
    if reading.problem is not None:
        return Finding("device", Severity.ERROR, f"{reading.name} cannot be used", reading.problem,
                       "use --device cpu, or mend the driver and try again")  # fmt: skip
    free = "" if reading.free_bytes is None else f", {size(reading.free_bytes)} of memory free"
    return _ok("device", f"{reading.name}: {reading.description}{free}")


def about_blocks(device: Device, needs: Sequence[Need], *, of_run: bool = False) -> Finding:
    """Which blocks fit. `of_run`: the needs are those of the run to join, and must be met."""
    listed = ", ".join(f"{need.recipe} {size(need.num_bytes)}" for need in needs)
    if device.free_bytes is None:
        return _ok("blocks", f"one block needs at most: {listed}; free memory is not known here")
    missing = [need for need in needs if need.num_bytes > device.free_bytes]
    fitting = ", ".join(f"{need.recipe} ({size(need.num_bytes)})" for need in needs if need not in missing)
    if not missing:
        return _ok("blocks", f"{size(device.free_bytes)} free; training one block fits: {fitting}")
    lacking = ", ".join(f"{need.recipe} ({size(need.num_bytes)})" for need in missing)
    severity = Severity.ERROR if of_run else Severity.WARNING if not fitting else Severity.OK
    found = f"fits: {fitting or 'none'}; does not: {lacking}"
    if severity is Severity.OK:
        return _ok("blocks", found)
    return Finding(
        "blocks", severity, found, f"{device.name} has {size(device.free_bytes)} of free memory",
        "close other programs, use another machine, or train fewer layers per block, a smaller "
        "model.width or training.batch",
    )  # fmt: skip


def about_disk(reading: Disk) -> Finding:
    if not reading.writable:
        return Finding("disk", Severity.ERROR, f"{reading.folder} cannot be written to",
                       "the folder belongs to somebody else or is mounted read-only",
                       "name another folder with --data-dir")  # fmt: skip
    if reading.free_bytes is None:
        return _ok("disk", f"{reading.folder}: free space is not known here")
    found = f"{size(reading.free_bytes)} free at {reading.folder}"
    if reading.free_bytes >= COMFORTABLE_DISK_BYTES:
        return _ok("disk", found)
    severity = Severity.ERROR if reading.free_bytes < MIN_FREE_DISK_BYTES else Severity.WARNING
    return Finding("disk", severity, found,
                   "a worker keeps snapshots (4 GB unless told otherwise) and its training state there",
                   "free some space, name another --data-dir, or use less with --cache-gb")  # fmt: skip


def about_files(limit: int | None) -> Finding:
    if limit is None or limit >= COMFORTABLE_FILES:
        return _ok("open files", "no limit known" if limit is None else f"limit {limit}")
    severity = Severity.ERROR if limit < MIN_FILES else Severity.WARNING
    return Finding("open files", severity, f"limit {limit}",
                   "every connection takes one; a worker needs few, a coordinator or gateway one per client",
                   "ulimit -n 65536 before starting, or LimitNOFILE=65536 in a systemd unit")  # fmt: skip


def about_tcp(reading: Tcp) -> Finding:
    """Linux shrinks the window of an idle connection: at 200 ms round trip, frames of 76 kB came at 2.9
    tokens/s instead of 12.7. BBR is not affected."""
    control = reading.congestion_control
    if reading.slow_start_after_idle is None:
        return _ok("tcp", f"congestion control {control or 'not known here'}")
    idle = "on" if reading.slow_start_after_idle else "off"
    found = f"congestion control {control}, slow start after idle {idle}"
    if not reading.slow_start_after_idle or control == "bbr":
        return _ok("tcp", found)
    return Finding("tcp", Severity.WARNING, found,
                   "an idle connection starts slowly again, which costs a gateway and its stages round trips "
                   "on long lines; training is not affected",
                   "on hosts that serve: sysctl -w net.ipv4.tcp_slow_start_after_idle=0")  # fmt: skip


def about_proxy(variables: Mapping[str, str], url: str | None) -> Finding:
    if not variables:
        return _ok("proxy", "no proxy variables")
    named = ", ".join(f"{name}={value}" for name, value in sorted(variables.items()))
    to = f" to {url}" if url else ""
    return Finding("proxy", Severity.WARNING, named,
                   f"a worker connects directly{to} and ignores these; `generate --url` and `chat --url` "
                   "follow them",
                   "where only the proxy leads outside, ask for direct outbound access; add local gateways "
                   "to NO_PROXY")  # fmt: skip


FAILURES = {
    "name": ("the name has no address here: misspelt, or DNS does not work",
             "check the address; try `getent hosts NAME`"),
    "connection": ("nothing listens there, or a firewall is in between",
                   "check address and port with its operator; is the coordinator running, with --host "
                   "0.0.0.0? Is the port open?"),
    "tls": ("the encrypted connection was not accepted", "see the finding about TLS"),
    "answer": ("the connection is open, but no proper answer came",
               "try https:// in place of http://; otherwise ask its operator to look at its log"),
}  # fmt: skip


def about_coordinator(reading: CoordinatorReading) -> Finding:
    if reading.failed_at is not None:
        cause, remedy = FAILURES[reading.failed_at]
        return Finding("coordinator", Severity.ERROR, f"{reading.url}: {reading.error}", cause, remedy)
    if reading.kind == "gateway":
        return Finding("coordinator", Severity.ERROR, f"{reading.url} is a gateway, not a coordinator",
                       "it serves text and has no run to join",
                       f"talk to it with `blocktrain chat --url {reading.url}`; a run's address usually has "
                       "port 8420")  # fmt: skip
    if reading.kind == "other":
        return Finding("coordinator", Severity.ERROR, f"{reading.url} is no coordinator: {reading.error}",
                       "another program listens there, or one of another version",
                       "check the address and port with its operator")  # fmt: skip
    milliseconds = 1000 * reading.round_trip_seconds
    return _ok("coordinator", f"{reading.url} runs {reading.run_name!r} ({milliseconds:.0f} ms)")


def about_clock(reading: CoordinatorReading) -> Finding | None:
    """Signed requests are good for a window of time; half of it is a warning."""
    skew = reading.clock_seconds
    if skew is None:
        return None
    way = "behind" if skew > 0 else "ahead of"
    found = f"{abs(skew):.1f} s {way} the coordinator's"
    uncertain = reading.round_trip_seconds / 2
    if abs(skew) - uncertain <= DEFAULT_WINDOW_SECONDS / 2:
        return _ok("clock", found)
    refused = abs(skew) > DEFAULT_WINDOW_SECONDS
    return Finding("clock", Severity.ERROR if refused else Severity.WARNING, found,
                   f"requests are signed with the time; {DEFAULT_WINDOW_SECONDS} s off are refused",
                   "set this machine's clock: timedatectl set-ntp true; if it is right, tell the "
                   "coordinator's operator")  # fmt: skip


def about_tls(url: str, reading: Certificate | None, now: datetime, pin: str | None = None) -> Finding | None:
    """`pin` is the SHA-256 of the one certificate that the person's link has a worker believe."""
    if reading is None:
        if url.startswith("https://") or _is_local(url):
            return None
        return Finding("tls", Severity.WARNING, f"{url} is plain HTTP",
                       "others on the way can read what is sent; they cannot alter it unnoticed",
                       "ask for an https:// address (docs/host.md)")  # fmt: skip
    names = ", ".join(reading.names) or "no name"
    found = "no certificate"
    if reading.not_after is not None:
        found = f"certificate for {names}, valid until {reading.not_after:%Y-%m-%d}"
    if pin is not None:
        if reading.sha256 == pin:
            return _ok("tls", f"{found}; it is the one that the link pins")
        return Finding("tls", Severity.ERROR, f"{found}, SHA-256 {reading.sha256[:16] or 'none'}…",
                       f"the link pins another one, {pin[:16]}…: the operator has a new certificate, or "
                       "another machine answers", "ask the run's host for a new link")  # fmt: skip
    expired = reading.not_after is not None and reading.not_after <= now
    if reading.error is not None or expired:
        cause, remedy = _tls_trouble(reading, expired)
        return Finding("tls", Severity.ERROR, found, cause, remedy)
    if reading.not_after is not None and (reading.not_after - now).days < CERTIFICATE_WARNING_DAYS:
        return Finding("tls", Severity.WARNING, found,
                       f"it expires in {(reading.not_after - now).days} days; then nobody can connect",
                       "ask the operator whether it is renewed by itself")  # fmt: skip
    return _ok("tls", found)


def _tls_trouble(reading: Certificate, expired: bool) -> tuple[str, str]:
    if expired:
        return "the certificate has expired", "the operator must renew it; check this machine's date too"
    if reading.self_signed:
        return ("the certificate is self-signed, so nothing proves whose it is",
                "ask the run's host for a link with a pin (`blocktrain invite` prints them), or get the "
                "certificate and set SSL_CERT_FILE to it")  # fmt: skip
    if reading.not_after is None:
        return (f"no certificate came: {reading.error}",
                "this port may speak plain HTTP; try the address with http://")  # fmt: skip
    return (str(reading.error), "check that the address is the one on the certificate, and SSL_CERT_FILE")


def _is_local(url: str) -> bool:
    host = url.partition("://")[2].lstrip("[")
    return host.startswith(LOOPBACK)


def about_text(problem: str | None) -> Finding:
    """Whether this machine has the run's text, or can fetch it; the sentence already says what to do."""
    if problem is None:
        return _ok("text", "this machine has the run's text, or gets it from the coordinator")
    return Finding("text", Severity.ERROR, "this machine does not have the run's text", problem,
                   "name the run's text with --corpus, here and for the worker")  # fmt: skip


def about_stage(reading: StageProbe) -> Finding:
    topic, address = "stage", reading.address
    if reading.outcome in ("welcome", "refused"):
        said = "" if reading.outcome == "welcome" else f" ({reading.sentence})"
        found = f"{address} is a stage and answers{said}"
        if not _is_local(f"tcp://{address}"):
            return _ok(topic, found)
        return Finding(topic, Severity.WARNING, found, "this address leads to this machine only",
                       "start it with --listen 0.0.0.0:PORT and run this on the gateway's machine, with the "
                       "address other machines use")  # fmt: skip
    causes = {
        "no connection": ("nothing listens there, or a firewall refuses",
                          "start `blocktrain stage … --listen 0.0.0.0:PORT` and open the port"),
        "timeout": ("packets are dropped on the way: a firewall, or a router without a forwarded port",
                    "open the port, forward it on the router, or serve from a machine with a public address"),
        "no stage": ("another program listens there, or the stage speaks TLS and the address lacks its pin",
                     "use the address that the stage prints when it starts, with its #PIN"),
    }  # fmt: skip
    cause, remedy = causes[reading.outcome]
    return Finding(topic, Severity.ERROR, f"{address}: {reading.sentence}", cause, remedy)
