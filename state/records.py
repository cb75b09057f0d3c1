"""The records of the ledger, the moves they may make, and the errors of this layer.

Records are frozen: a change is a new row in the database, read again. Legal moves are pure functions, so they are
tested without a database; the SQL in `files`, `batches`, `shards` and `jobs` compares and sets accordingly.

The error tree::

    OvernightError                   anything this product raises on purpose
    ├── SettingsError                the configuration cannot work; says how to mend it
    ├── NotFound                     no such object in this project
    │   ├── FileNotFound · BatchNotFound · ModelNotFound
    ├── Conflict                     the object is in a state that forbids the move
    │   ├── BatchNotCancellable      carries the status
    │   └── FileInUse                carries the batch
    ├── LeaseLost                    the fence refused a write: another owner, a closed shard (invariant 4)
    ├── Unavailable                  the database or the store does not answer; try again
    │   ├── OutOfSpace               the disk is (nearly) full; carries needed and free bytes
    │   └── OutcomeUnknown           a commit's answer was lost; sending the same again is safe
    └── Corrupt                      stored bytes differ from their checksum, or cannot be read as what they should be
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class OvernightError(Exception):
    """Base of everything this product raises on purpose."""


class SettingsError(OvernightError):
    """The configuration cannot work. The message says how to mend it."""


class NotFound(OvernightError):
    """No such object in this project."""

    def __init__(self, object_id: str) -> None:
        super().__init__(f"no such object: {object_id}")
        self.object_id = object_id


class FileNotFound(NotFound):
    """No such file in this project."""


class BatchNotFound(NotFound):
    """No such batch in this project."""


class ModelNotFound(NotFound):
    """No such model."""


class Conflict(OvernightError):
    """The object is in a state that forbids the move."""


class BatchNotCancellable(Conflict):
    """The batch has ended otherwise than by cancellation."""

    def __init__(self, status: "BatchStatus") -> None:
        super().__init__(f"cannot cancel a batch with status '{status}'")
        self.status = status


class FileInUse(Conflict):
    """A batch that is still validating reads this file (invariant 11)."""

    def __init__(self, file_id: str, batch_id: str) -> None:
        super().__init__(f"{file_id} is the input of {batch_id}, which is still validating")
        self.file_id, self.batch_id = file_id, batch_id


class LeaseLost(OvernightError):
    """The fence refused a write: the shard or job has another owner by now, or is closed (invariant 4)."""


class Unavailable(OvernightError):
    """The database or the object store does not answer. Nothing was changed; try again."""


class OutOfSpace(Unavailable):
    """The disk is (nearly) full."""

    def __init__(self, message: str, *, needed: int, free: int) -> None:
        super().__init__(message)
        self.needed, self.free = needed, free


class OutcomeUnknown(Unavailable):
    """A commit was sent and its answer was lost: it may have happened or not (ledger rule 4).

    The one kind of Unavailable after which something may have changed. Whoever chose the identities of what was to be
    written can send the same again: a write that happened is recognised and not done twice.
    """


class Corrupt(OvernightError):
    """Stored bytes differ from their checksum, or cannot be read as what they should be."""


class FileStatus(StrEnum):
    """A file is invisible while PENDING; DELETED rows wait for the janitor to remove their bytes (ledger rule 5)."""

    PENDING = "pending"
    PROCESSED = "processed"
    DELETED = "deleted"


class BatchStatus(StrEnum):
    """OpenAI's eight statuses."""

    VALIDATING = "validating"
    FAILED = "failed"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"


TERMINAL = frozenset({BatchStatus.FAILED, BatchStatus.COMPLETED, BatchStatus.EXPIRED, BatchStatus.CANCELLED})

#: Invariant 6. `validating -> expired` happens when the window closes before the plan is made;
#: `in_progress -> finalizing` also when it closes on a running batch: finishing then ends in `expired`, because a client
#: that sees a terminal status must find the files.
MOVES: dict[BatchStatus, frozenset[BatchStatus]] = {
    BatchStatus.VALIDATING: frozenset(
        {BatchStatus.FAILED, BatchStatus.IN_PROGRESS, BatchStatus.CANCELLING, BatchStatus.EXPIRED}
    ),
    BatchStatus.IN_PROGRESS: frozenset({BatchStatus.FINALIZING, BatchStatus.CANCELLING}),
    BatchStatus.FINALIZING: frozenset({BatchStatus.COMPLETED, BatchStatus.EXPIRED, BatchStatus.CANCELLING}),
    BatchStatus.CANCELLING: frozenset({BatchStatus.CANCELLED}),
    BatchStatus.FAILED: frozenset(),
    BatchStatus.COMPLETED: frozenset(),
    BatchStatus.EXPIRED: frozenset(),
    BatchStatus.CANCELLED: frozenset(),
}


def may_move(old: BatchStatus, new: BatchStatus) -> bool:
    """Whether a batch may go from one status to the other (invariant 6)."""
    return new in MOVES[old]


class StopReason(StrEnum):
    """Why a batch that was planned is stopped before all its requests ran."""

    CANCELLED = "cancelled"
    EXPIRED = "expired"


def ending(status: BatchStatus, stop_reason: StopReason | None) -> BatchStatus:
    """The terminal status a finish job ends in, for a batch that is finalizing or cancelling."""
    if status is BatchStatus.CANCELLING:
        return BatchStatus.CANCELLED
    return BatchStatus.EXPIRED if stop_reason is StopReason.EXPIRED else BatchStatus.COMPLETED


class WorkState(StrEnum):
    """Where a shard or a job stands. An expired lease stays LEASED until somebody claims it (ledger rule 6)."""

    READY = "ready"
    LEASED = "leased"
    CLOSED = "closed"


class JobKind(StrEnum):
    """What an orchestrator does for a batch."""

    PLAN = "plan"
    FINISH = "finish"


@dataclass(frozen=True, slots=True)
class Usage:
    """Token sums, from the replies."""

    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        return self.input_tokens + self.output_tokens

    def __add__(self, other: "Usage") -> "Usage":
        return Usage(
            self.input_tokens + other.input_tokens,
            self.cached_tokens + other.cached_tokens,
            self.output_tokens + other.output_tokens,
            self.reasoning_tokens + other.reasoning_tokens,
        )


@dataclass(frozen=True, slots=True)
class Counts:
    """request_counts: requests in all, answered with success, and ended in failure (never-run lines are neither)."""

    total: int = 0
    completed: int = 0
    failed: int = 0


@dataclass(frozen=True, slots=True)
class File:
    """An uploaded or produced object, with its row. Times are seconds since the epoch."""

    id: str
    project_id: str
    purpose: str
    filename: str
    status: FileStatus
    object_key: str
    bytes: int
    sha256: str | None
    created_at: int
    expires_at: int | None


@dataclass(frozen=True, slots=True)
class Fault:
    """One entry of a batch's `errors`. `line` is the 1-based physical line of the input, None where none applies."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


@dataclass(frozen=True, slots=True)
class Batch:
    """One POST /v1/batches, as it stands now. `counts` and `usage` are sums over the shards until the batch ends."""

    id: str
    project_id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    status: BatchStatus
    stop_reason: StopReason | None
    model: str | None
    metadata: dict[str, str] | None
    faults: tuple[Fault, ...]
    output_file_id: str | None
    error_file_id: str | None
    output_expires_after: int | None
    deadline: float
    created_at: int
    expires_at: int
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    counts: Counts = field(default_factory=Counts)
    usage: Usage = field(default_factory=Usage)


@dataclass(frozen=True, slots=True)
class ShardLease:
    """A worker's right to one shard. `epoch` is the fencing token: no older one commits anything (invariant 4)."""

    batch_id: str
    number: int
    epoch: int
    worker_id: str
    project_id: str
    model: str
    endpoint: str
    object_key: str
    requests: int
    size: int
    next_seq: int
    deadline: float
    batch_created_at: int
    claims_since_progress: int
    suspect: int | None
    """The place (0-based, in the shard) a careful worker was trying when it died, if any."""


@dataclass(frozen=True, slots=True)
class Segment:
    """An immutable object holding results of one shard, written under one epoch.

    `places` is a bitmap over the shard's places (bit i of byte i // 8): which requests it answers.
    """

    batch_id: str
    shard_number: int
    seq: int
    epoch: int
    object_key: str
    sha256: str
    size: int
    lines: int
    places: bytes


@dataclass(frozen=True, slots=True)
class Tally:
    """What one segment adds to its shard's row."""

    completed: int = 0
    failed: int = 0
    usage: Usage = field(default_factory=Usage)
    model: str | None = None
    """The model named by the first successful reply, if any."""


@dataclass(frozen=True, slots=True)
class JobLease:
    """An orchestrator's right to one job. For a finish, the file ids were chosen when the job was made."""

    id: str
    kind: JobKind
    batch_id: str
    project_id: str
    epoch: int
    holder: str
    attempts: int
    output_file_id: str | None = None
    error_file_id: str | None = None


@dataclass(frozen=True, slots=True)
class NewShard:
    """A shard as the plan cut it; its object is already written."""

    number: int
    object_key: str
    requests: int
    size: int


@dataclass(frozen=True, slots=True)
class Model:
    """A model somebody may ask for. `root` is the name the engine knows; `name` may be an alias, or `*` for any name."""

    name: str
    root: str
    owned_by: str
    created_at: int
    last_seen: float
    endpoints: tuple[str, ...] | None = None
    """The batch endpoints its engine serves; None where the engine does not say."""


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    """One page of a list, newest or oldest first as asked."""

    items: tuple[T, ...]
    has_more: bool


JSONObject = dict[str, Any]
