"""The object store: immutable bytes under keys, behind one protocol.

An object is written once, whole, before the row that names it is committed, and never changed (invariants 4 and 11).
The protocol asks for no more than an S3 multipart upload, a ranged GET, a listing and a delete can give: nothing relies
on renames, appends, conditional writes or ETags.
"""

from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self


@dataclass(frozen=True, slots=True)
class Stored:
    """What was written: the length in bytes and the SHA-256, in hex, computed on the way in."""

    size: int
    sha256: str


class ObjectWriter(Protocol):
    """An upload under way. Leaving the context without `commit` aborts it and leaves nothing visible."""

    async def write(self, data: bytes) -> None:
        """Takes the next bytes, of any size.

        Raises:
            OutOfSpace: the disk is full.
            Unavailable: the store does not answer.
        """
        ...

    async def commit(self) -> Stored:
        """Makes the object visible and durable under its key, all at once."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class ObjectStore(Protocol):
    """Where objects live. Keys are ours, made of ids, never of anything a client chose."""

    def writer(self, key: str) -> ObjectWriter:
        """Starts an upload."""
        ...

    async def put(self, key: str, data: bytes) -> Stored:
        """Writes a small object in one go."""
        ...

    async def get(self, key: str) -> bytes:
        """The whole of a small object (a shard, a segment: some MB).

        Raises:
            NotFound: there is no such object.
            Unavailable: the store does not answer.
        """
        ...

    def read(self, key: str, start: int = 0, end: int | None = None) -> AsyncIterator[bytes]:
        """The bytes from `start` up to, not including, `end`, in pieces of at most 1 MiB. Errors as for `get`."""
        ...

    async def fetch(self, key: str, path: Path) -> None:
        """Places the object at `path`, which must not exist, as a file to read at random."""
        ...

    async def delete(self, keys: Iterable[str]) -> None:
        """Removes objects; those that are not there are no error."""
        ...

    def list(self, prefix: str) -> AsyncIterator[str]:
        """The keys that begin with `prefix`, in no particular order."""
        ...

    async def check(self) -> None:
        """A cheap sign of life for readiness.

        Raises:
            Unavailable: with the reason.
        """
        ...

    def free_bytes(self) -> int | None:
        """Room left, where that is a meaningful question (a local disk); None for S3."""
        ...

    async def close(self) -> None:
        """Ends connections and threads."""
        ...
