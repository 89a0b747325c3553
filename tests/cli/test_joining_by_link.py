"""One link joins: it carries address, invitation and certificate pin (A2.13, A2.21, A3)."""

from __future__ import annotations

import signal
import socket
import ssl
import subprocess
from pathlib import Path

import httpx2
import pytest

from blocktrain.client.address import RunLink
from blocktrain.client.coordinator import public_client
from blocktrain.client.traffic import CertificateMismatch
from blocktrain.coordinator.operator_notes import keep_address, kept_address, opening_lines
from blocktrain.errors import UserError
from blocktrain.listening import lan_address, open_port, url_for_others
from blocktrain.wire.messages import StatusAnswer
from tests.cli.program import ENVIRONMENT, command, run_main, run_program
from tests.cli.servers import coordinator_at, make_certificate
from tests.forked import quick_python
from tests.tiny import prose, tiny_recipe

TOKEN = "eyJ.c2ln-_"


@pytest.mark.parametrize(
    "link",
    [
        RunLink("http://10.0.0.5:8420"),
        RunLink("http://10.0.0.5:8420", TOKEN),
        RunLink("https://run.example", TOKEN, "ab" * 32),
    ],
)
def test_a_link_says_what_it_carries_and_needs_no_quotes_in_a_shell(link: RunLink) -> None:
    assert RunLink.parse(str(link)) == link
    said = subprocess.run(["bash", "-c", f"printf %s {link}"], capture_output=True, text=True, check=True)
    assert said.stdout == str(link)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("10.0.0.5:8420", "is not the address of a coordinator"),
        ("http://h:1#invite", "damaged"),
        ("http://h:1#invite=a,invite=b", "damaged"),
        ("https://h:1#pin=abc", "64 hex digits"),
        (f"http://h:1#pin={'ab' * 32}", "expected https://"),
    ],
)
def test_a_damaged_link_is_refused_in_words(text: str, told: str) -> None:
    with pytest.raises(UserError, match=told):
        RunLink.parse(text)


def test_a_pinned_certificate_is_believed_and_no_other(tmp_path: Path) -> None:
    """No SSL_CERT_FILE: the link is all that the client has."""
    (tmp_path / "text.txt").write_bytes(prose(4000))
    recipe = tiny_recipe(f"data.corpus={tmp_path / 'text.txt'}")
    tls = make_certificate(tmp_path / "tls", days_left=30)
    pin = tls.pin()
    with coordinator_at(tmp_path / "run", recipe, tls=tls) as url:
        with public_client(f"{url}#pin={pin}") as client:
            assert client.status().name == recipe.name
        with (
            public_client(f"{url}#pin={'00' * 32}") as client,
            pytest.raises(CertificateMismatch, match="ask for a new link"),
        ):
            client.status()
        shown = run_program("status", f"{url}#pin={pin}")
        assert shown.code == 0, shown.err
        page = httpx2.get(url, verify=ssl.create_default_context(cafile=str(tls.certificate)))
        assert page.headers["cross-origin-opener-policy"] == "same-origin"


def test_one_link_joins_a_self_signed_run_and_takes_its_model_out(tmp_path: Path) -> None:
    """The whole way of a friend: join by invitation, take the model out before and after."""
    (tmp_path / "text.txt").write_bytes(prose(4000))
    recipe = tiny_recipe(
        f"data.corpus={tmp_path / 'text.txt'}",
        "swarm.rounds=1",
        "swarm.steps_per_round=1",
        "swarm.replicas=1",
        "trust.judge=off",
        "trust.admission=invite",
    )
    tls, folder = make_certificate(tmp_path / "tls", days_left=30), tmp_path / "run"
    with coordinator_at(folder, recipe, tls=tls) as url:
        keep_address(folder, url, tls.pin())
        line = run_main("invite", "--data-dir", folder).out.strip()
        assert line.startswith(f"blocktrain join {url}#invite=")
        link = line.split()[-1]
        begun = run_main("checkpoint", link, "--to", tmp_path / "begun").out
        assert "rounds 0, 0 of 1" in begun
        joined = run_program(
            "join", link, "--data-dir", tmp_path / "anna", "--device", "cpu", "--label", "anna",
            "--corpus", tmp_path / "text.txt",
        )  # fmt: skip
        assert joined.code == 0, joined.err
        for what in ("run      run at https://", "device   cpu", "memory   about", "disk     up to 4 GB"):
            assert what in joined.err
        assert joined.err.index("network  each round about") < joined.err.index("joined https://")
        with public_client(f"{url}#pin={tls.pin()}") as client:
            assert client.status().finished
        watched = run_program("status", f"{url}#pin={tls.pin()}", "--watch")  # ends with the run
        assert (watched.code, "finished" in watched.out) == (0, True)
        ended = run_main("checkpoint", link, "--to", tmp_path / "ended").out
        assert "rounds 1, 1 of 1" in ended
        again = run_program(  # as the refusal of a link without an invitation says
            "join", f"{url}#pin={tls.pin()}", "--invite", RunLink.parse(link).invite,
            "--data-dir", tmp_path / "bert", "--corpus", tmp_path / "text.txt",
        )  # fmt: skip
        assert again.code == 2
        assert "the invitation is used already" in again.complaint


def test_invitations_need_an_address_unless_only_tokens_are_asked_for(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_bytes(prose(4000))
    with coordinator_at(tmp_path / "run", tiny_recipe(f"data.corpus={tmp_path / 'text.txt'}")):
        pass
    invite = ("invite", "--data-dir", tmp_path / "run")
    lost = run_main(*invite)
    assert (lost.code, "start it once, or name it with --address" in lost.complaint) == (2, True)
    named = run_main(*invite, "--address", "https://run.example", "--count", "2").out.splitlines()
    assert len(named) == 2
    assert all(line.startswith("blocktrain join https://run.example#invite=") for line in named)
    assert " " not in run_main(*invite, "--token").out.strip()
    here = run_main(*invite, "--address", "http://127.0.0.1:8420")
    assert "http://127.0.0.1:8420 can be reached from this machine only" in here.err


@pytest.fixture
def status(tmp_path: Path) -> StatusAnswer:
    (tmp_path / "text.txt").write_bytes(prose(4000))
    recipe = tiny_recipe(f"data.corpus={tmp_path / 'text.txt'}")
    with coordinator_at(tmp_path / "run", recipe) as url, public_client(url) as client:
        return client.status()


def test_a_host_is_told_which_run_it_is_and_what_to_send_to_friends(status: StatusAnswer) -> None:
    link = "http://10.0.0.5:8420"
    lines = "\n".join(opening_lines(status, "open", Path("data"), link))
    assert f"{status.run_id[:12]}: new, {status.rounds} rounds; anybody may join; data in data" in lines
    assert "friends  blocktrain join http://10.0.0.5:8420" in lines
    half = status.model_copy(
        update={"blocks": tuple(one.model_copy(update={"head_version": 4}) for one in status.blocks)}
    )
    assert f"goes on at round 4/{status.rounds}" in opening_lines(half, "open", Path("data"), link)[0]
    ended = half.model_copy(update={"finished": True})
    assert f"finished after {status.rounds} rounds" in opening_lines(ended, "open", Path("data"), link)[0]
    assert "can be reached from this machine only" not in lines
    here = "\n".join(opening_lines(status, "open", Path("data"), "http://127.0.0.1:8420#pin=ab"))
    assert (
        "(http://127.0.0.1:8420 can be reached from this machine only: start it with --host 0.0.0.0" in here
    )
    closed = "\n".join(opening_lines(status, "invite", Path("data"), link))
    assert "by invitation" in closed
    assert "blocktrain invite --data-dir data" in closed


def test_a_coordinator_for_everybody_names_its_address_on_the_network(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_bytes(prose(4000))
    arguments = ("coordinator", "demo", "--data-dir", tmp_path / "data", "--host", "0.0.0.0", "--port", "0")
    more = (
        "--set",
        f"data.corpus={tmp_path / 'text.txt'}",
        "--set",
        "model.width=32",
        "--set",
        "model.heads=2",
    )
    started = subprocess.Popen(
        command(*arguments, *more, python=quick_python()),
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert started.stdout is not None
    assert started.stderr is not None
    ready = started.stdout.readline()
    port = ready.rsplit(":", 1)[-1].strip()
    # A second one is told of the first, and not of the port that both want.
    second = run_main("coordinator", "demo", "--data-dir", tmp_path / "data", "--port", port)
    assert (second.code, "another coordinator is using" in second.complaint) == (2, True)
    started.send_signal(signal.SIGTERM)
    said = started.communicate(timeout=60)[1]
    assert said.endswith("\nstopped; the same command goes on from here\n")
    address = lan_address() or "127.0.0.1"
    assert ready.startswith("coordinator ready url=http://127.0.0.1:")
    assert f"friends  blocktrain join http://{address}:{port}" in said
    assert kept_address(tmp_path / "data") == (f"http://{address}:{port}", None)
    assert "Uvicorn" not in said
    assert "Waiting for application startup" not in said


def test_one_address_is_named_as_it_is() -> None:
    with open_port("127.0.0.1", 0) as opened:
        assert url_for_others(opened) == f"http://127.0.0.1:{opened.getsockname()[1]}"
    with open_port("0.0.0.0", 0) as everywhere:
        assert everywhere.family == socket.AF_INET
        assert url_for_others(everywhere).startswith("http://")
