"""One pass over an input file: every line checked, every request's place kept in arrays, no object per request.

The pass takes memory for one line and about 40 bytes per request (invariant 12). What is larger goes to two spool files: the
custom_ids, one after another as they stand in the input, and the prompt keys that `engine.orchestrator.order` reads.
"""

import hashlib
import os
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path
from typing import BinaryIO, Protocol

from engine.bodies import Refusal
from engine.json_text import text
from engine.lines import NOT_JSON, LineRefused, Request, Rules, duplicate, mismatched, read_request, too_long
from state.records import Fault

#: So many entries of `errors` are kept: those of the first bad lines.
MAX_FAULTS = 100
_PIECE = 1024 * 1024
_BOM = b"\xef\xbb\xbf"
_FOREIGN = {
    b"\x1f\x8b": "gzip data",
    b"PK\x03\x04": "a zip archive (or a spreadsheet)",
    b"\x28\xb5\x2f\xfd": "zstd data",
    b"BZh": "bzip2 data",
    b"\xfd7zXZ": "xz data",
    b"\xff\xfe": "UTF-16 or UTF-32 text",
    b"\xfe\xff": "UTF-16 or UTF-32 text",
}


class Faults:
    """The entries of a batch's `errors`: one a line, the lowest lines first, at most `MAX_FAULTS`."""

    def __init__(self) -> None:
        self._by_line: dict[int, Fault] = {}

    def add(self, reason: Refusal, line: int | None = None) -> None:
        """Notes a line's fault; the first one of a line stays. None: the file as a whole."""
        place = line or 0
        if place in self._by_line:
            return
        if self.full_at(place):
            return
        if len(self._by_line) == MAX_FAULTS:
            del self._by_line[max(self._by_line)]
        self._by_line[place] = Fault(reason.code, reason.message, reason.param, line)

    def full_at(self, line: int) -> bool:
        """Whether no fault of this or a later line will be kept."""
        return len(self._by_line) == MAX_FAULTS and line > max(self._by_line)

    def __bool__(self) -> bool:
        return bool(self._by_line)

    def listed(self) -> tuple[Fault, ...]:
        """All of them, in line order."""
        return tuple(self._by_line[line] for line in sorted(self._by_line))


class Spooled(Protocol):
    """What the scan needs of a file: bytes appended, read again at random."""

    def write(self, data: bytes, /) -> int: ...
    def flush(self) -> None: ...
    def fileno(self) -> int: ...


@dataclass(slots=True)
class Requests:
    """The good requests of a file, in input order. Offsets of bodies are in the input, of ids and keys in their spools."""

    body_offsets: "array[int]" = field(default_factory=lambda: array("Q"))
    body_sizes: "array[int]" = field(default_factory=lambda: array("I"))
    id_sizes: "array[int]" = field(default_factory=lambda: array("I"))
    key_sizes: "array[int]" = field(default_factory=lambda: array("I"))

    def __len__(self) -> int:
        return len(self.body_sizes)


@dataclass(frozen=True, slots=True)
class Scan:
    """What a pass found. `requests` and `model` are of use only where there are no faults."""

    faults: tuple[Fault, ...]
    requests: Requests
    model: str
    total: int
    size: int
    sha256: str


def scan(path: Path, *, rules: Rules, ids: Spooled, keys: Spooled) -> Scan:
    """Checks the file at `path` whole. `ids` and `keys` are empty files, to be written.

    Raises:
        OSError: the disk's own errors, a full one among them.
    """
    scanner = _Scanner(rules, ids, keys)
    with open(path, "rb") as file:
        reader = _Reader(file, rules.limits.max_line_bytes)
        for number, offset, line in reader.lines():
            scanner.take(number, offset, line)
    return scanner.result(reader.size, reader.digest.hexdigest())


class _Reader:
    """The physical lines of a file, ended by LF alone (so U+2028 and CR end nothing), hashed as they are read."""

    def __init__(self, file: BinaryIO, limit: int) -> None:
        self._file, self._limit = file, limit
        self.digest = hashlib.sha256()
        self.size = 0

    def lines(self) -> Iterator[tuple[int, int, bytes | None]]:
        """Number (from 1), offset and bytes of each line; None for one that is longer than the limit."""
        number = 0
        while line := self._read(self._limit + 2):
            number += 1
            offset = self.size - len(line)
            if number == 1 and line.startswith(_BOM):
                line, offset = line[len(_BOM) :], offset + len(_BOM)
            if len(line) > self._limit and len(line.rstrip(b"\r\n")) > self._limit:
                while line and not line.endswith(b"\n"):
                    line = self._read(_PIECE)
                yield number, offset, None
            else:
                yield number, offset, line

    def _read(self, most: int) -> bytes:
        line = self._file.readline(most)
        self.digest.update(line)
        self.size += len(line)
        return line


class _Scanner:
    """Takes lines one by one and keeps what the plan needs of them."""

    def __init__(self, rules: Rules, ids: Spooled, keys: Spooled) -> None:
        self._rules, self._ids, self._keys = rules, ids, keys
        self._requests = Requests()
        self._faults = Faults()
        self._model: str | None = None
        self._count = 0
        self._foreign = False
        # One entry per custom_id, those of bad lines included, so that every duplicate is told at once.
        self._hashes, self._lines, self._id_sizes = array("q"), array("I"), array("I")

    def take(self, number: int, offset: int, line: bytes | None) -> None:
        """Checks one physical line; None: it was too long to be read."""
        if self._foreign or (line is not None and (not line or line.isspace())):
            return
        if number == 1 and line is not None and (name := _foreign(line)):
            self._foreign = True
            message = f"{NOT_JSON} The file is {name}; it must be uncompressed UTF-8 text."
            return self._faults.add(Refusal("invalid_json_line", message), 1)
        self._count += 1
        if self._count > self._rules.limits.max_requests:
            return  # counted on, for the message
        try:
            if line is None:
                raise too_long(self._rules)
            request = read_request(line, self._rules)
        except LineRefused as refusal:
            self._faults.add(refusal, number)
            if refusal.custom_id is not None:
                self._keep_id(refusal.custom_id, refusal.raw_id, number)
        else:
            self._keep(request, number, offset, line)

    def result(self, size: int, sha256: str) -> Scan:
        """What was found, duplicates included."""
        most = self._rules.limits.max_requests
        if self._count > most:
            message = f"The input file holds {self._count:,} requests; a batch may hold at most {most:,}."
            self._faults.add(Refusal("too_many_tasks", message))
        if not self._count and not self._faults:
            message = "The input file is empty. Please ensure that the batch contains at least one request."
            self._faults.add(Refusal("empty_file", message))
        self._ids.flush()
        self._keys.flush()
        self._find_duplicates()
        faults = self._faults.listed()
        return Scan(faults, self._requests, self._model or "", self._count, size, sha256)

    def _keep(self, request: Request, number: int, offset: int, line: bytes) -> None:
        self._keep_id(request.custom_id, request.raw_id, number)
        self._model = self._model or request.model
        if request.model != self._model:
            self._faults.add(mismatched(request.model), number)
        if self._faults:
            return  # nothing of this file will run
        table = self._requests
        table.body_offsets.append(offset + _place(line, request.body))
        table.body_sizes.append(len(request.body))
        table.id_sizes.append(len(request.raw_id))
        table.key_sizes.append(len(request.prompt))
        self._keys.write(request.prompt)

    def _keep_id(self, custom_id: str, raw: bytes, number: int) -> None:
        self._hashes.append(hash(custom_id))
        self._lines.append(number)
        self._id_sizes.append(len(raw))
        self._ids.write(raw)

    def _find_duplicates(self) -> None:
        """Exact: equal hashes are only where to look, and the ids themselves are read again and compared."""
        repeated = {a for a, b in pairwise(sorted(self._hashes)) if a == b}
        if not repeated:
            return
        offsets = array("Q", accumulate(self._id_sizes, initial=0))
        seen: dict[int, tuple[int, ...]] = {}
        for i, value in enumerate(self._hashes):
            if value not in repeated:
                continue
            if self._faults.full_at(self._lines[i]):
                return
            custom_id = self._read_id(i, offsets)
            if any(self._read_id(other, offsets) == custom_id for other in seen.get(value, ())):
                self._faults.add(duplicate(custom_id), self._lines[i])
            else:
                seen[value] = (*seen.get(value, ()), i)

    def _read_id(self, i: int, offsets: "array[int]") -> str:
        return text(os.pread(self._ids.fileno(), self._id_sizes[i], offsets[i]))


def _place(line: bytes, body: bytes) -> int:
    """Where the body lies in its line. Should the same bytes lie elsewhere too, they are the same bytes."""
    at = len(line.rstrip()) - 1 - len(body)
    return at if at > 0 and line.startswith(body, at) else line.index(body)


def _foreign(line: bytes) -> str | None:
    """What else than UTF-8 text a file is, by its first bytes."""
    if b"\x00" in line[:2]:
        return "UTF-16 or UTF-32 text"
    return next((name for magic, name in _FOREIGN.items() if line.startswith(magic)), None)
