"""The JSON messages between workers and the coordinator: every field typed, every size bounded.

A request with an unknown key, a wrong type or an oversized value is refused before anything looks at it;
an answer may gain keys without breaking a client of the same protocol version. Knows nothing of HTTP
(docs/protocol.md lists the routes), signatures or what a coordinator decides.

Covered: lengths, ranges, finite numbers, printable ASCII in every string a peer chooses, so that none can
inject a path, a log line or HTML. Not covered: whether a claim is true (a loss, a device, free memory).
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, StringConstraints, model_validator
from pydantic.config import JsonDict

PROTOCOL_VERSION: Final = 1
"""Raised when an old peer would misunderstand a message; both sides refuse another number."""

MAX_BODY_BYTES = 64 * 1024
"""Largest JSON request; payloads have their own exact length."""
MAX_BLOCKS = 4096
MAX_COUNT = 2**53 - 1
"""Largest integer that every JSON reader keeps exact."""
MAX_SECONDS = 1e10
MAX_LEDGER_PAGE = 500
MAX_MERGE_PAGE = 100

# Patterns and not only lengths: these texts end up in file names, log lines and pages.
Hash = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
"""Hex of 32 bytes: a blake3 of a payload or snapshot, or the sha-256 of a corpus."""
WorkerIdText = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]
AssignmentIdText = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]
SignatureText = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{128}$")]
Label = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9 ._:()/@+-]{0,64}$")]
"""A short name a peer chooses: device, version of a library."""
Count = Annotated[int, Field(ge=0, le=MAX_COUNT)]
BlockIndex = Annotated[int, Field(ge=0, lt=MAX_BLOCKS)]
Seconds = Annotated[FiniteFloat, Field(ge=0, le=MAX_SECONDS)]
BlockKey = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,4}$")]
NO_OTHER_KEYS: Final[JsonDict] = {"additionalProperties": False}
"""Pydantic refuses keys that break the pattern, and leaves that out of the schema."""
Protocol = Literal[1]


class Request(BaseModel):
    """What a worker sends; unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    protocol: Protocol = PROTOCOL_VERSION


class Answer(BaseModel):
    """What the coordinator answers; a client skips keys it does not know."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    protocol: Protocol = PROTOCOL_VERSION


# --- errors ------------------------------------------------------------------------------------------


class ErrorReason(StrEnum):
    """Why a request was not carried out. Signature refusals use `signing.Reason` in the same field."""

    NOT_FOUND = "not_found"
    """No such route, block, snapshot, update or assignment."""
    METHOD_NOT_ALLOWED = "method_not_allowed"
    INVALID_MESSAGE = "invalid_message"
    """The body or a parameter does not fit its schema."""
    TOO_LARGE = "too_large"
    """More bytes than this route takes."""
    LENGTH_REQUIRED = "length_required"
    WRONG_LENGTH = "wrong_length"
    """A payload whose length is not the one the block's schema demands."""
    HASH_MISMATCH = "hash_mismatch"
    """The bytes are not those that were committed."""
    TOO_SLOW = "too_slow"
    """The body came slower than the minimum transfer rate."""
    NOT_JOINED = "not_joined"
    """This key has not joined the run: POST /v1/join first."""
    CORPUS_MISMATCH = "corpus_mismatch"
    """The worker's text is not the run's text."""
    NOT_YOURS = "not_yours"
    """The assignment or update belongs to another worker."""
    ALREADY_COMMITTED = "already_committed"
    """(worker, block, round) has a commit with another payload."""
    LEASE_RETURNED = "lease_returned"
    """The assignment was handed back."""
    UNKNOWN_BASE = "unknown_base"
    """The base hash is no snapshot of this block."""
    ROUND_NOT_OPEN = "round_not_open"
    """The base is older than the assignment's round: rebase on the snapshot that opens it, then commit. Or
    the run cannot be finished now: a block has had no round yet, or all have had theirs."""
    NOT_COMMITTED = "not_committed"
    """A payload without a commit before it."""
    NOT_UPLOADED = "not_uploaded"
    """`uploaded` was called before the object was there."""
    RANGE_NOT_SATISFIABLE = "range_not_satisfiable"
    STAMP_REQUIRED = "stamp_required"
    """Joining needs a proof-of-work stamp on a fresh challenge: GET /v1/challenge/{worker_id}."""
    INVITE_REQUIRED = "invite_required"
    """Joining needs an invitation that is valid and unused."""
    NOT_LISTED = "not_listed"
    """The operator has not listed this worker id."""
    ADDRESS_FULL = "address_full"
    """Too many workers joined from this network address."""
    BANNED = "banned"
    """This worker is banned, for a reason and until a time that the message names."""
    NOT_OPERATOR = "not_operator"
    """Only the operator's key (coordinator.key) may do this."""
    NOT_JUDGE = "not_judge"
    """Only the operator's key, or one listed in judges.txt, may judge."""
    LEASE_LOST = "lease_lost"
    """The update is judged already, or another judge has it now."""
    UNAVAILABLE = "unavailable"
    """The coordinator is draining or its storage does not answer: try again."""


class ErrorBody(BaseModel):
    reason: str
    """A member of ErrorReason or of signing.Reason; for programs."""
    message: str
    """Expected, found; for people."""
    remedy: str | None = None
    """What to do about it."""
    server_time: float | None = None
    """Seconds since the epoch, where the reason is about a clock."""


class ErrorAnswer(BaseModel):
    """The one shape of every answer with a status of 400 or more."""

    error: ErrorBody


# --- the run -----------------------------------------------------------------------------------------


class TensorShape(BaseModel):
    name: Annotated[str, StringConstraints(max_length=256)]
    shape: tuple[Count, ...]


class BlockLayout(BaseModel):
    """How a block's payloads and snapshots are laid out; `tensors` in the order a frame holds them."""

    block: BlockIndex
    tensors: tuple[TensorShape, ...]
    schema_hash: Hash
    codec: str
    payload_bytes: Count
    initial_hash: Hash
    """Hash of version 0, which every worker can regenerate from the recipe's seed."""


class RunAnswer(Answer):
    """GET /v1/run"""

    run_id: Hash
    """Goes into every signature as its audience, so that no request can be replayed to another run."""
    recipe: dict[str, Any]
    corpus_sha256: Hash
    coordinator_key: Hash
    """Ed25519 public key that signs receipts and the ledger, hex."""
    server_time: float
    blocks: tuple[BlockLayout, ...]
    dataset: Hash | None = None
    """SHA-256 of the manifest (docs/data.md) of the text that GET /v1/data serves; None: bring the text."""
    vocabulary: Count = 256


class Receipt(BaseModel):
    """A ledger entry the coordinator signed: proof of what it acknowledged."""

    sequence: Count
    entry_hash: Hash
    signature: SignatureText


class JoinRequest(Request):
    """POST /v1/join"""

    corpus_sha256: Hash
    versions: Annotated[dict[Label, Label], Field(max_length=16, json_schema_extra=NO_OTHER_KEYS)] = Field(
        default_factory=dict
    )
    """Library versions, for the operator's eyes."""
    device: Label = "cpu"
    label: Label = ""
    """A name for people, shown beside the worker's id; nothing depends on it."""
    memory_bytes: Count | None = None
    """Memory of the training device; None when unknown, then any block fits."""
    challenge: Hash | None = None
    stamp: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{16}$")] | None = None
    """Proof of work on `challenge`, for a run with open admission."""
    invite: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._-]{1,512}$")] | None = None
    """Token from `blocktrain invite`, for a run that asks for one."""


class ChallengeAnswer(Answer):
    """GET /v1/challenge/{worker_id}: what to stamp before joining."""

    admission: Literal["open", "invite", "allowlist"]
    challenge: Hash
    bits: Annotated[int, Field(ge=0, le=64)]
    """Leading zero bits that blake3(challenge || stamp) must have; 0 for no stamp."""
    valid_seconds: Seconds


class JoinAnswer(Answer):
    worker_id: WorkerIdText
    receipt: Receipt


# --- assignments -------------------------------------------------------------------------------------


class AssignmentRequest(Request):
    """POST /v1/assignments

    Without `after` the answer is the worker's open assignment again, if it has one: asking twice after a
    lost answer, or after a restart, is safe. With `after` (an assignment in hand that will still be
    delivered) the answer is the next one, so training goes on while the payload travels.
    """

    holding: Annotated[dict[BlockKey, Count], Field(max_length=256, json_schema_extra=NO_OTHER_KEYS)] = Field(
        default_factory=dict
    )
    """Block (as text, a JSON key) to the snapshot version in the worker's cache."""
    prefer_block: BlockIndex | None = None
    after: AssignmentIdText | None = None


class FrozenSnapshot(BaseModel):
    """A snapshot of another block, which takes part in training and judging a block and is not trained."""

    model_config = ConfigDict(frozen=True)

    block: BlockIndex
    version: Count
    hash: Hash


Frozen = Annotated[tuple[FrozenSnapshot, ...], Field(max_length=MAX_BLOCKS)]


class StandIn(BaseModel):
    """Extra steps that a worker runs for an absent replica."""

    model_config = ConfigDict(frozen=True)

    shard: Count
    steps: Annotated[int, Field(ge=1, le=MAX_COUNT)]


class Assignment(Answer):
    """A block, a data shard and a span of steps, lent to a worker."""

    kind: Literal["assignment"] = "assignment"
    assignment_id: AssignmentIdText
    block: BlockIndex
    round: Count
    """The snapshot version the update must be based on. One above `base_version` where the worker runs
    ahead: it trains on from its own weights and rebases when version `round` appears, before it commits."""
    base_version: Count
    """The block's head when the assignment was made."""
    base_hash: Hash
    shard: Count
    first_step: Count
    """Position of the first batch and of the learning-rate schedule: round * steps."""
    steps: Count
    """In all, those of `stand_in` included."""
    total_steps: Count
    """End of the learning-rate schedule; takes the place of training.steps."""
    deadline: float | None
    """Server time at which the round may close without this update; None before the round has begun."""
    deadline_reason: str
    lease_seconds: Seconds
    """The lease ends this long after the last heartbeat; the work is then no longer waited for."""
    heartbeat_seconds: Seconds
    server_time: float
    reason: str
    """Why this block."""
    frozen: Frozen = ()
    """The other blocks that the objective needs for these steps, in the order they run, each at the version
    that was its head when the assignment was made. Empty where blocks train independently."""
    stand_in: StandIn | None = None
    """The last steps of the assignment are on another shard, from `first_step` on, where the worker is alone
    on its block and the round leaves it time: one update of more steps, at the same place of the schedule."""
    run_seconds_left: float | None = None
    """Until the whole run is finished, at the pace of its last rounds; None while that is not known."""


class Wait(Answer):
    kind: Literal["wait"] = "wait"
    seconds: Seconds
    reason: str


class Finished(Answer):
    kind: Literal["finished"] = "finished"
    reason: str


# A discriminator, so that a client finds the kind without trying each in turn, and errors name the right one.
AssignmentAnswer = Annotated[Assignment | Wait | Finished, Field(discriminator="kind")]


# Requests refuse unknown keys, so what older workers still send has to be named.
OLD_HEARTBEAT_FIELDS: Final = ("steps_per_second", "bytes_per_second")


class HeartbeatRequest(Request):
    """POST /v1/assignments/{id}/heartbeat"""

    step: Count
    """Steps of this assignment done so far."""
    loss: FiniteFloat | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_old_fields(cls, data: Any) -> Any:
        """Older workers also send rates, which nobody reads; they are still understood."""
        if not isinstance(data, dict):
            return data
        return {key: value for key, value in data.items() if key not in OLD_HEARTBEAT_FIELDS}


class HeartbeatAnswer(Answer):
    cancel: bool
    """The update can no longer count: ask for another assignment (the delta goes to error feedback)."""
    reason: str
    run_seconds_left: float | None = None
    head_version: Count
    head_hash: Hash
    deadline: float | None
    deadline_reason: str
    server_time: float


class ReturnAnswer(Answer):
    """DELETE /v1/assignments/{id}: the lease is back; doing it twice is fine."""

    returned: bool


# --- commit and reveal -------------------------------------------------------------------------------


class ByteCounts(BaseModel):
    """Bytes on the worker's sockets by kind."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    payload: Count = 0
    snapshot: Count = 0
    control: Count = 0


class Account(BaseModel):
    """What one assignment cost the worker; for reports only."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    seconds_computing: Seconds = 0.0
    seconds_transferring: Seconds = 0.0
    seconds_waiting: Seconds = 0.0
    up: ByteCounts = ByteCounts()
    down: ByteCounts = ByteCounts()


class CommitRequest(Request):
    """POST /v1/assignments/{id}/commit: the promise of a payload, before anybody has seen it."""

    payload_hash: Hash
    payload_bytes: Count
    base_hash: Hash
    """Snapshot the delta is measured from: the assignment's, or a newer one the worker has rebased to."""
    loss: FiniteFloat | None = None
    """Mean training loss of the assignment."""
    account: Account | None = None


Address = Annotated[str, StringConstraints(max_length=4096)]
MAX_UPLOAD_PARTS = 256


class Upload(BaseModel):
    """Where the payload goes. `presigned`: a plain PUT without signature headers, then POST `uploaded`."""

    url: Address
    """Absolute, or a path on the coordinator."""
    presigned: bool
    expires_seconds: Seconds
    part_bytes: Count = 0
    parts: Annotated[list[Address], Field(max_length=MAX_UPLOAD_PARTS)] = []
    """Of a large payload on shared storage: where each `part_bytes` of it go, in order, empty for those that
    lie there already. A commit that is repeated has new addresses for the rest."""


class Outcome(StrEnum):
    ACCEPTED = "accepted"
    """Counts fully in the next merge."""
    LATE = "late"
    """Counts in the next merge at `weight` below 1."""
    PENDING = "pending"
    """Arrived and waiting for a judge: ask again, GET /v1/updates/{payload_hash}/verdict."""
    REFUSED = "refused"
    """Does not count. What came too late returns to the worker's error feedback; the rest is discarded."""


class VerdictReason(StrEnum):
    """Why an update counts or does not; each comes with a sentence."""

    ON_TIME = "on_time"
    CARRIED = "carried"
    """Late, within max_age rounds: merged at a decayed weight."""
    DROPPED = "dropped"
    """Late under the policy `drop`."""
    TOO_OLD = "too_old"
    """Late by more than max_age rounds."""
    RUN_FINISHED = "run_finished"
    """The block has all its rounds."""
    MALFORMED = "malformed"
    """The frame breaks the codec's layout."""
    NOT_FINITE = "not_finite"
    """NaN or infinity, or a norm that is."""
    JUDGING = "judging"
    """In the judges' queue."""
    NORM = "norm"
    """The norm is far from that of this block's merged updates."""
    DUPLICATE = "duplicate"
    """Another update, or one of earlier rounds, with too little of its own."""
    NO_GAIN = "no_gain"
    """Held-out loss does not fall; within noise, so it says nothing about the worker."""
    HARMFUL = "harmful"
    """Held-out loss rises, beyond noise."""
    PROBATION = "probation"
    """A good update of a newcomer: counted towards its admission, not merged."""
    GUARD = "guard"
    """The merge made held-out loss rise, and this was its worst contributor."""
    REMOVED = "removed"
    """Its worker was banned or removed before it was merged, or its payload is lost."""


def verdict_word(outcome: str, held_against: bool) -> str:
    """How an outcome or state is told and counted everywhere: `unused` is what does not count although its
    worker did nothing wrong (within noise, too late, the run is over)."""
    return "unused" if outcome == Outcome.REFUSED and not held_against else str(outcome)


class Verdict(Answer):
    """Answer to a payload: PUT /v1/updates/{payload_hash}, or POST …/uploaded."""

    update_id: Hash
    outcome: Outcome
    weight: Annotated[FiniteFloat, Field(ge=0, le=1)]
    reason: VerdictReason
    sentence: str
    held_against: bool = False
    """True where a refusal speaks against the worker; older coordinators do not say."""
    norm: FiniteFloat | None
    """L2 norm of the decoded update; None where it was not decoded."""
    head_version: Count
    head_hash: Hash
    receipt: Receipt


class CommitAnswer(Answer):
    """Committing the same payload again is safe, and tells what became of it."""

    update_id: Hash
    receipt: Receipt
    upload: Upload
    deadline: float | None
    verdict: Verdict | None = None
    """Set where the payload has already arrived: a retry need not send it again."""


# --- what anybody may read ---------------------------------------------------------------------------


class RoundState(BaseModel):
    round: Count
    begun: float | None
    """Server time of the first assignment on this snapshot."""
    deadline: float | None
    deadline_reason: str
    accepted: Count
    late: Count
    wanted: Count
    """Updates that close the round before its deadline."""
    workers: Count
    """Live workers on this block."""
    merging: bool = False
    """The round is over and its merge under way; `accepted` and `late` are those for the next one."""


class BlockAnswer(Answer):
    """GET /v1/blocks/{b}"""

    block: BlockIndex
    head_version: Count
    head_hash: Hash
    head_made: float
    """Server time at which the head was published."""
    finished: bool
    round: RoundState
    server_time: float


class MergeInputRecord(BaseModel):
    """One update in a merge. A merge adds its inputs in the order listed: sorted update ids."""

    update_id: Hash
    payload_hash: Hash
    worker_id: WorkerIdText
    base_version: Count
    base_hash: Hash
    weight: FiniteFloat
    """Age weight: 1 for an update on the merge's own base."""
    scale: FiniteFloat
    """Factor at most 1 that clips its norm."""


class MergeRecord(BaseModel):
    """Everything that turns snapshot version-1 into snapshot `version`; inputs in the order they add up."""

    block: BlockIndex
    version: Count
    base_hash: Hash
    result_hash: Hash
    codec: str
    alpha: FiniteFloat
    inputs: tuple[MergeInputRecord, ...]


class MergesAnswer(Answer):
    """GET /v1/blocks/{b}/merges?since=v: merges v+1 and on, at most MAX_MERGE_PAGE of them."""

    block: BlockIndex
    head_version: Count
    head_hash: Hash
    merges: tuple[MergeRecord, ...]


class LedgerEntry(BaseModel):
    """`entry_hash` = blake3(previous_hash || canonical JSON of {sequence, time, kind, body})."""

    sequence: Count
    time: float
    kind: Literal[
        "run", "join", "assign", "return", "commit", "reveal", "verdict", "merge", "snapshot", "ban", "remove"
    ]
    body: dict[str, Any]
    entry_hash: Hash
    signature: SignatureText


class LedgerAnswer(Answer):
    """GET /v1/ledger?since=n: entries n and on, at most MAX_LEDGER_PAGE of them."""

    length: Count
    entries: tuple[LedgerEntry, ...]


class WorkerState(BaseModel):
    worker_id: WorkerIdText
    label: str
    device: str
    memory_bytes: Count | None = None
    block: BlockIndex | None
    live: bool
    last_seen: float
    step: Count | None
    loss: float | None
    accepted: Count
    late: Count
    refused: Count
    """Only what speaks against the worker."""
    unused: Count = 0
    """What does not count and says nothing about the worker."""
    seconds_computing: float
    seconds_transferring: float
    seconds_waiting: float
    tokens_per_second: float | None = None
    """Training tokens of its updates over the time it says it computed."""
    up: ByteCounts
    down: ByteCounts


class WorkCounts(BaseModel):
    """What became of the work that was lent, over the whole run; each piece is counted once."""

    accepted: Count = 0
    """On time, and counts fully."""
    late: Count = 0
    unused: Count = 0
    """Arrived, does not count, and says nothing about its worker."""
    refused: Count = 0
    """Arrived, does not count, and speaks against its worker."""
    missing: Count = 0
    """Never arrived, and its round is over."""

    @property
    def participation(self) -> float | None:
        """Share that counted on time; None before there is anything."""
        due = self.accepted + self.late + self.unused + self.refused + self.missing
        return self.accepted / due if due else None


class EvaluationState(BaseModel):
    """Held-out cross entropy of the assembled model, in nats per token (per byte for a byte model)."""

    time: float
    versions: tuple[Count, ...]
    scored_bytes: Count
    bytes_per_token: Annotated[FiniteFloat, Field(gt=0)] = 1.0
    """Divides the losses, where runs of different tokenizers are compared."""
    consensus_ce: float
    euler_ce: float | None
    block_ce: tuple[float, ...]
    weights: tuple[float, ...]
    decays: tuple[float, ...] = ()
    """Where the blocks are specialised: how fast older text fades, and how much the weights follow it."""
    taus: tuple[float, ...] = ()


class ReferenceState(BaseModel):
    """Something to hold the run's cross entropy against, in the same unit."""

    name: Literal["end to end", "bigram counts"]
    ce: FiniteFloat
    source: str
    """Who measured it, and on what."""


class SpokenPiece(BaseModel):
    """Text that one block has the most say in, and its mean weight there."""

    block: BlockIndex
    weight: Annotated[FiniteFloat, Field(ge=0, le=1)]
    text: str


class RoundReport(BaseModel):
    """One closed round, for reports."""

    block: BlockIndex
    version: Count
    seconds: float
    on_time: Count
    late: Count
    refused: Count
    unused: Count = 0
    assigned: Count
    mean_loss: float | None
    """Mean training loss of the merged updates, as their workers reported it."""
    closed: float | None = None
    """Time of its merge."""


class StatusAnswer(Answer):
    """GET /v1/status"""

    run_id: Hash
    name: str
    created: float
    server_time: float
    finished: bool
    rounds: Count
    blocks: tuple[BlockAnswer, ...]
    workers: tuple[WorkerState, ...]
    ended: float | None = None
    """Time of the last merge of a finished run."""
    seconds_left: float | None = None
    """Until all blocks have had their rounds, at the pace of the last ones; None while nobody works, or while
    that pace is not known."""
    tokens_per_second: float | None = None
    """Training tokens of the updates that arrived, in the last rounds."""
    work: WorkCounts = WorkCounts()
    participation: float | None
    """`work.accepted` as a share of all of `work`."""
    ages: dict[str, Count]
    """Merged updates by age in rounds."""
    up: ByteCounts
    """Bytes received by this coordinator process, headers included."""
    down: ByteCounts
    """Bytes sent by this coordinator process, headers included."""
    full_checkpoint_bytes: Count
    """What the updates that arrived would have moved as full fp32 checkpoints: for each, its whole block once
    down to the worker and once up. `up` and `down` of `workers` are what was moved instead."""
    evaluations: tuple[EvaluationState, ...]
    """The latest, oldest first."""
    references: tuple[ReferenceState, ...]
    """What is known to compare them with."""
    speaking: tuple[SpokenPiece, ...] = ()
    """Where blocks are specialised: which of them has the most say where, on a sample of training text."""
    reports: tuple[RoundReport, ...]
    """The rounds closed last, oldest first."""
    ledger_length: Count
    ledger_head: Hash
    """`entry_hash` of the last ledger entry."""
    gateway: Annotated[str, StringConstraints(max_length=2048)] | None
    """Address of a gateway that serves this run's model, where the operator named one."""
    pin: Hash | None = None
    """SHA-256 of the coordinator's certificate where it signed itself: a link to this run must carry it."""


# --- judges and the operator -------------------------------------------------------------------------


class GainReport(BaseModel):
    """Fall of the loss in nats per token, its standard error, and the windows it was measured on."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    mean: FiniteFloat | None
    """None where the loss was no longer finite."""
    error: FiniteFloat | None
    windows: Count


class JudgeTask(Answer):
    """An update lent to a judge: score moving `block` from `head_hash` by it."""

    kind: Literal["task"] = "task"
    update_id: Hash
    block: BlockIndex
    payload_hash: Hash
    head_hash: Hash
    """Snapshot to score it on."""
    base_hash: Hash
    """Snapshot its delta is measured from; differs from the head where it is late."""
    step: FiniteFloat
    """Outer learning rate times the factor that clips its norm."""
    shard: Count
    first_step: Count
    steps: Count
    seed: Count
    """Draws text, sigma and noise; unknown to anybody before the commit."""
    lease_seconds: Seconds
    frozen: Frozen = ()
    """The snapshots of other blocks that the assignment named, for the loss before and after alike."""


class JudgeWait(Answer):
    kind: Literal["wait"] = "wait"
    seconds: Seconds


JudgeAnswer = Annotated[JudgeTask | JudgeWait, Field(discriminator="kind")]


class EvidenceReport(Request):
    """POST /v1/judge/tasks/{update_id}: what a judge found."""

    held_out: GainReport
    assigned: GainReport
    other: GainReport
    tokens: Count
    """Tokens of forward passes that judging took."""
    own: GainReport | None = None
    """Where blocks are specialised: the held-out windows of the block's own cluster, and the others."""
    rest: GainReport | None = None


class BanRequest(Request):
    """POST /v1/workers/{worker_id}/ban, by the operator."""

    reason: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9 ._:()/@+,;-]{1,200}$")]
    seconds: Annotated[FiniteFloat, Field(ge=0, le=MAX_SECONDS)]
    """0 lifts a ban."""


class BanState(BaseModel):
    reason: str
    until: float


class WorkerSummary(BaseModel):
    """A worker's standing and contribution."""

    worker_id: WorkerIdText
    label: str
    joined: float
    last_seen: float
    live: bool
    probation: bool
    ban: BanState | None
    reputation: float
    """rating x max(0, assigned_versus_other) x uptime, in [0, 1]."""
    rating: float
    assigned_versus_other: float
    uptime: float
    good_verdicts: Count
    verdicts: Count
    accepted: Count = 0
    late: Count = 0
    unused: Count = 0
    refused: Count = 0
    merged: Count
    merged_weight: float
    gain: float
    """Sum of the gains that the judge found of its merged updates."""
    tokens: Count
    """Training tokens behind its merged updates."""


class WorkersAnswer(Answer):
    """GET /v1/workers"""

    workers: tuple[WorkerSummary, ...]
    judged: bool = True
    """False where nothing is judged: then reputations stay where they began."""
    newcomer_reputation: float = 0.125
    """What a worker begins with: where on the scale from 0 to 1 nothing is known yet."""


class VerdictRecord(BaseModel):
    worker_id: WorkerIdText
    update_id: Hash
    block: BlockIndex
    round: Count
    state: str
    weight: float
    reason: str | None
    sentence: str | None
    held_against: bool = False
    norm: float | None
    evidence: dict[str, Any] | None
    revealed: float | None
    verdict_sequence: Count | None


class WorkerAnswer(Answer):
    """GET /v1/workers/{worker_id}: its standing, and its latest verdicts with their reasons."""

    worker: WorkerSummary
    verdicts: tuple[VerdictRecord, ...]


class VerdictsAnswer(Answer):
    """GET /v1/verdicts: the latest of all workers, newest first."""

    verdicts: tuple[VerdictRecord, ...]


class ContributionsAnswer(Answer):
    """GET /v1/contributions: signed by the coordinator over the canonical JSON of `statement`."""

    statement: dict[str, Any]
    signature: SignatureText


CONTRIBUTIONS_CONTEXT: Final = b"blocktrain contributions 1\n"
"""Goes before the statement's bytes into the signature."""


class OperatorAnswer(Answer):
    """What the operator asked for is done, and in the ledger."""

    receipt: Receipt


class HealthAnswer(Answer):
    """GET /healthz"""

    status: Literal["ok", "draining"]
