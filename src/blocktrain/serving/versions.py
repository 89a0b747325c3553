"""A folder of checkpoints, of which one is served: how new weights reach stages and a gateway that run.

    FOLDER/000007/       a checkpoint, with `versions.json`: how many merges are in each block
    FOLDER/current       the name of the one to serve

Whoever writes a new checkpoint names it in `current`; stages and gateway look there, load it beside the one
they serve, and give it to new requests. A plain checkpoint folder is served as it is.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from blocktrain.errors import BlocktrainError, CheckpointError, UserError
from blocktrain.files import write_whole

log = logging.getLogger(__name__)

T = TypeVar("T")
CURRENT = "current"
VERSIONS = "versions.json"
LOOK_SECONDS = 0.5


def current_checkpoint(folder: Path) -> Path:
    """The checkpoint to serve: the folder itself, or the one that its `current` names."""
    if not (folder / CURRENT).is_file():
        return folder
    name = (folder / CURRENT).read_text(encoding="utf-8").strip()
    if re.fullmatch(r"[0-9]{1,12}", name) is None:
        raise CheckpointError(f"{folder / CURRENT} is damaged: expected the name of a folder beside it")
    return folder / name


def kept_checkpoints(folder: Path) -> list[Path]:
    """All checkpoints in the folder, oldest first."""
    named = [path for path in folder.glob("*") if re.fullmatch(r"[0-9]{1,12}", path.name)]
    return sorted((path for path in named if (path / VERSIONS).exists()), key=lambda path: int(path.name))


def publish(checkpoint: Path) -> None:
    """Have this checkpoint of a folder served from now on."""
    write_whole(checkpoint.parent / CURRENT, checkpoint.name.encode())


def roll_back(folder: Path, steps: int) -> Path:
    """Have an earlier checkpoint served: the one that came so many before the newest."""
    kept = kept_checkpoints(folder)
    if not 0 <= steps < len(kept):
        raise UserError(
            f"{folder} keeps {len(kept)} checkpoints; roll back by fewer than that, found {steps}"
        )
    publish(kept[-1 - steps])
    return kept[-1 - steps]


def versions_of(checkpoint: Path) -> tuple[int, ...]:
    """Merges in each block, where the checkpoint was taken from a run; empty otherwise."""
    if not (checkpoint / VERSIONS).is_file():
        return ()
    try:
        return tuple(map(int, json.loads((checkpoint / VERSIONS).read_text(encoding="utf-8"))))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{checkpoint / VERSIONS} is damaged: {error}") from None


async def watch(look: Callable[[], T], served: T, take_over: Callable[[T], Awaitable[None]]) -> None:
    """Without end: hand what `look` finds to `take_over` where it is not what is served, until it is."""
    complaint = ""
    while True:
        await asyncio.sleep(LOOK_SECONDS)
        try:
            wanted = look()
            if wanted != served:
                await take_over(wanted)
                log.info("took over wanted=%s before=%s", wanted, served)
                served = wanted
            complaint = ""
        except (BlocktrainError, OSError) as error:
            # What is served goes on, and the next look tries again: stages may not have the new one yet.
            if str(error) != complaint:
                complaint = str(error)
                log.warning("keeping served=%s reason=%s", served, error)
        except Exception as error:
            # What nobody foresaw is a fault of that folder or of ours. What is served is sound, and another
            # folder may be named next; before, the look ended here without a word.
            if repr(error) != complaint:
                complaint = repr(error)
                log.exception("keeping served=%s", served)
