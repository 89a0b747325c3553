"""kill -9 of a stage that is certain to have a text's next tokens under way.

Every stage process is behind a proxy, which reads what passes. The victim's answers are held back from when
it is named. So a text that it works on comes to a stand, and as soon as an answer is held back that this text
waits for before any other, the victim dies. The answer is lost with it: the text must ask again elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from blocktrain.model.generation import window_start
from blocktrain.wire.frame_metadata import Ask, decode_metadata
from blocktrain.wire.frames import HEADER_BYTES, Frame, FrameType, decode_body, decode_header, decode_ids
from tests.serving.conftest import TINY
from tests.serving.proxy import Proxy, Trouble
from tests.serving.stages import LIMITS, StageProcess

VOCABULARY, CONTEXT = 256, TINY.model.context
TraversalKey = tuple[int, int, int]


@dataclass(frozen=True)
class Sent:
    """What a TRAVERSE asks for: the rows of the last tokens of a window, drafts included."""

    ids: list[int]
    num_rows: int

    def goes_on(self, text: Sequence[int]) -> bool:
        window = text[window_start(len(text), CONTEXT) :]
        return self.ids[: len(window)] == window

    def asks_what_follows(self, text: Sequence[int]) -> bool:
        """Whether its first row is for the next token of `text`: then no other traversal is before it."""
        known = len(self.ids) - self.num_rows + 1
        return self.goes_on(text) and known == len(text) - window_start(len(text), CONTEXT)


@dataclass
class Watched:
    """A stage process and what it was sent and has not answered."""

    process: StageProcess
    proxy: Proxy
    ids: dict[int, list[int]] = field(default_factory=dict)
    """Of each session, as the stage has them."""
    sent: dict[TraversalKey, Sent] = field(default_factory=dict)
    held: list[Sent] = field(default_factory=list)
    """Computed, and the answers held back."""


class Killer:
    def __init__(self, least_held: int = 1) -> None:
        """The victim dies when it holds so many answers that a text waits for."""
        self.least_held = least_held
        self.stages: list[Watched] = []
        self.texts: dict[int, list[int]] = {}
        """Texts under way, as far as they are written: prompt and all; by any number."""
        self.victim: int | None = None
        self.killed: list[tuple[int, int]] = []
        """Stages, and the texts that waited for their answers."""

    async def watch(self, process: StageProcess) -> Proxy:
        proxy = await Proxy(process.address).start()
        stage, number = Watched(process, proxy), len(self.stages)
        self.stages.append(stage)
        proxy.to_stage, proxy.to_engine = self._sending(stage), self._answering(stage, number)
        return proxy

    def _sending(self, stage: Watched) -> Trouble:
        def sent(kind: FrameType, raw: bytes) -> list[bytes]:
            if kind == FrameType.TRAVERSE:
                frame = _frame(raw)
                header, like = frame.header, decode_metadata(frame, Ask).like
                # `base` speaks of the ids of the one before: a stage takes them in their order.
                before = stage.ids.get(header.session if like is None else like, [])
                ids = [*before[: header.base], *decode_ids(frame.payload, VOCABULARY)]
                stage.ids[header.session] = ids
                stage.sent[header.session, header.epoch, header.traversal] = Sent(ids, header.rows)
            return [raw]

        return sent

    def _answering(self, stage: Watched, number: int) -> Trouble:
        def answered(kind: FrameType, raw: bytes) -> list[bytes] | None:
            if kind == FrameType.LOG_PROBS:
                header = _frame(raw).header
                asked = stage.sent.pop((header.session, header.epoch, header.traversal), None)
                if number == self.victim and asked is not None:
                    stage.held.append(asked)
                    self.kill_if_awaited()
                    return []
            return [raw]

        return answered

    def kill_if_awaited(self) -> None:
        """To be called whenever a text was written on."""
        if self.victim is None:
            return
        stage = self.stages[self.victim]
        for number, text in self.texts.items():
            awaited = [sent for sent in stage.held if sent.goes_on(text)]
            first = any(sent.asks_what_follows(text) for sent in awaited)
            if first and len(awaited) >= self.least_held:
                stage.process.kill()
                self.killed.append((self.victim, number))
                self.victim = None
                return

    async def close(self) -> None:
        for stage in self.stages:
            await stage.proxy.close()


def _frame(raw: bytes) -> Frame:
    return decode_body(decode_header(raw[:HEADER_BYTES], LIMITS), raw[HEADER_BYTES:])
