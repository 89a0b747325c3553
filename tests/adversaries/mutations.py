"""Bytes that are nearly right: one seed gives the same endless stream of them everywhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from random import Random

LONGEST = 1 << 15
TOKENS = (
    b"\0", b"\xff" * 8, b"\r\n", b'"', b"{", b"[" * 200, b"}", b"\\u0000", b"\xed\xa0\x80", b"NaN", b"1e999",
    b"-1", b"9" * 400, b"null", b"true", b"../", b"<script>", b"%00", b";", b":", b",", b"=", b"\x80",
    b"\x7f\xff\xff\xff",
)  # fmt: skip


def flipped(data: bytearray, random: Random) -> None:
    for _ in range(random.randint(1, 4)):
        data[random.randrange(len(data))] ^= 1 << random.randrange(8)


def overwritten(data: bytearray, random: Random) -> None:
    for _ in range(random.randint(1, 4)):
        data[random.randrange(len(data))] = random.choice((0, 1, 0x7F, 0x80, 0xFF, random.randrange(256)))


def cut(data: bytearray, random: Random) -> None:
    del data[random.randrange(len(data)) :]


def removed(data: bytearray, random: Random) -> None:
    start = random.randrange(len(data))
    del data[start : start + random.randint(1, 16)]


def inserted(data: bytearray, random: Random) -> None:
    place = random.randrange(len(data) + 1)
    data[place:place] = random.choice(TOKENS)


def repeated(data: bytearray, random: Random) -> None:
    start = random.randrange(len(data))
    piece = data[start : start + random.randint(1, 64)]
    data[start:start] = piece * random.randint(1, 8)


CHANGES: tuple[Callable[[bytearray, Random], None], ...] = (
    flipped,
    overwritten,
    cut,
    removed,
    inserted,
    repeated,
)


def mutated(sample: bytes, random: Random) -> bytes:
    data = bytearray(sample)
    for _ in range(random.choice((1, 1, 2, 3))):
        if data:
            random.choice(CHANGES)(data, random)
    return bytes(data[:LONGEST])


def hostile_inputs(samples: Sequence[bytes], seed: int) -> Iterator[bytes]:
    """Without end: three quarters mutated samples, the rest random bytes of about their lengths."""
    random = Random(seed)
    while True:
        sample = random.choice(samples)
        if random.random() < 0.75:
            yield mutated(sample, random)
        else:
            yield random.randbytes(random.choice((0, 1, random.randint(0, 64), len(sample))))
