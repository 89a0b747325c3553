"""Numbers as people say them, the same in every terminal, log and verdict."""

from __future__ import annotations


def duration(seconds: float) -> str:
    """The two largest units: 45 s, 12 min 5 s, 3 h 20 min, 2 d 4 h."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def size(num_bytes: float) -> str:
    """27 B, 25 kB, 2.5 MB, 1.2 GB."""
    for unit, scale, digits in (("GB", 1e9, 1), ("MB", 1e6, 1), ("kB", 1e3, 0)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.{digits}f} {unit}"
    return f"{num_bytes:.0f} B"


def counted(count: int, noun: str) -> str:
    """1 round, 2 rounds."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
