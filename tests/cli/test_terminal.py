"""What strangers' weights may do to a terminal: nothing."""

from __future__ import annotations

from blocktrain.local.terminal import harmless, harmless_bytes


def test_a_terminal_gets_no_escape_sequence_bell_or_carriage_return() -> None:
    assert harmless_bytes(b"a\x1b[2Jb\x07\rc\x7f\n\td") == b"a?[2Jb??c?\n\td"
    shown = harmless("a\x1b]0;title\x07b\x9bc\n\td")
    assert not any(ord(character) < 32 and character not in "\n\t" for character in shown)
    assert "\x9b" not in shown
    assert shown.endswith("c\n\td")


def test_other_text_is_left_alone() -> None:
    assert harmless("naïve ✓ 漢字") == "naïve ✓ 漢字"
    assert harmless_bytes("naïve ✓".encode()) == "naïve ✓".encode()
