"""The binary layout of the objects that a batch's work is kept in: shards, segments and the index.

A pack is a table and a heap: fixed columns for every record first, then the variable bytes one after another, so that a
reader knows where everything is after reading the table, and never parses what it does not need::

    magic "OVNPACK1" | u32 records | records x (u32 line, u32 mark, u32 head bytes, u32 body bytes) | heap

All integers are little-endian. `line` is the request's place in the input (0-based, counting requests, not blank lines).
What `mark`, head and body mean depends on the kind of pack:

========  ===========================  ================================  =====================================
kind      mark                         head                              body
========  ===========================  ================================  =====================================
shard     bytes of prompt shared with  the custom_id, as its raw JSON    the request body, byte for byte
          the request before
segment   0 output line, 1 error line  empty                             the finished line, newline included
index     number of the shard          the custom_id, as its raw JSON    empty
========  ===========================  ================================  =====================================
"""

import struct
import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from state.records import Corrupt

MAGIC = b"OVNPACK1"
_COUNT = struct.Struct("<8sI")
_COLUMNS = 4

#: `mark` of a segment's record: which file its line belongs to.
OUTPUT, ERROR = 0, 1


class Record(NamedTuple):
    """One record of a pack; what the fields mean is the table above."""

    line: int
    mark: int
    head: bytes
    body: bytes


def pack(records: Iterable[Record]) -> bytes:
    """Lays records out as one object."""
    table = array("I")
    heap: list[bytes] = []
    count = 0
    for line, mark, head, body in records:
        table.extend((line, mark, len(head), len(body)))
        heap.append(head)
        heap.append(body)
        count += 1
    _to_little(table)
    return b"".join((_COUNT.pack(MAGIC, count), table.tobytes(), *heap))


def pack_table(lines: Iterable[int], marks: Iterable[int], heads: Sequence[int], bodies: Iterable[int]) -> bytes:
    """Everything before the heap, from the columns (sizes for heads and bodies): for a heap too large to hold at once."""
    count = len(heads)
    table = array("I", bytes(4 * _COLUMNS * count))
    for column, values in enumerate((lines, marks, heads, bodies)):
        table[column::_COLUMNS] = array("I", iter(values))  # bytes would be taken for raw content
    _to_little(table)
    return _COUNT.pack(MAGIC, count) + table.tobytes()


def table_size(records: int) -> int:
    """Bytes before the heap of a pack with this many records."""
    return _COUNT.size + records * _COLUMNS * 4


class Pack:
    """A pack read into memory."""

    def __init__(self, data: bytes) -> None:
        """Reads the table.

        Raises:
            Corrupt: the data is no pack, or is cut short.
        """
        if len(data) < _COUNT.size or data[:8] != MAGIC:
            raise Corrupt("not a pack: the magic number is missing")
        _, self.count = _COUNT.unpack_from(data)
        start = table_size(self.count)
        if len(data) < start:
            raise Corrupt("a pack is cut short within its table")
        table = array("I")
        table.frombytes(data[_COUNT.size : start])
        _to_little(table)
        self.lines, self.marks = table[0::_COLUMNS], table[1::_COLUMNS]
        self._heads, self._bodies = table[2::_COLUMNS], table[3::_COLUMNS]
        self._starts = array("Q", [0]) * (self.count + 1)
        at = start
        for i in range(self.count):
            self._starts[i] = at
            at += self._heads[i] + self._bodies[i]
        self._starts[self.count] = at
        if at != len(data):
            raise Corrupt("a pack's length differs from its table")
        self._data = data

    def __len__(self) -> int:
        return int(self.count)

    def head(self, i: int) -> bytes:
        """The head of record `i`."""
        start = self._starts[i]
        return self._data[start : start + self._heads[i]]

    def body(self, i: int) -> bytes:
        """The body of record `i`."""
        start = self._starts[i] + self._heads[i]
        return self._data[start : start + self._bodies[i]]

    def body_size(self, i: int) -> int:
        """The length of record `i`'s body in bytes."""
        return int(self._bodies[i])

    def body_span(self, i: int) -> tuple[int, int]:
        """Where record `i`'s body lies in the object: offset and length."""
        return self._starts[i] + self._heads[i], self._bodies[i]

    def __iter__(self) -> Iterator[Record]:
        for i in range(self.count):
            yield Record(self.lines[i], self.marks[i], self.head(i), self.body(i))


def _to_little(table: "array[int]") -> None:
    if sys.byteorder == "big":
        table.byteswap()
