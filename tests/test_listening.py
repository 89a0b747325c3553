"""A server says where it can be reached."""

from __future__ import annotations

import socket
import sys

import pytest

from blocktrain.listening import interface_addresses, lan_address, open_port, url_of


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_the_shown_address_can_be_opened(host: str) -> None:
    with open_port(host, 0) as opened:
        opened.listen()
        port = opened.getsockname()[1]
        assert url_of(opened, "https") == f"https://127.0.0.1:{port}"
        socket.create_connection(("127.0.0.1", port), timeout=10).close()


def test_an_ipv6_address_is_shown_in_brackets() -> None:
    with open_port("::1", 0) as opened:
        assert url_of(opened) == f"http://[::1]:{opened.getsockname()[1]}"


@pytest.mark.skipif(sys.platform != "linux", reason="interfaces are read on Linux only")
def test_a_machine_without_a_way_out_still_has_an_address_for_its_network() -> None:
    found = interface_addresses()
    assert "127.0.0.1" not in found
    if found:  # a machine without any network has none
        assert lan_address() in found
