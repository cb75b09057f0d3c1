"""The order of work: the exact lexicographic order of the prompts' bytes, so that what shares a prefix runs side by side.

An engine reuses the computation of a prefix while it still has it in its cache. In the order of a file that is luck; in
lexicographic order each prefix is run once from beginning to end, whatever the sharing looks like: a system prompt over
all requests, a document over some, a few turns of talk over fewer.

The keys may be far larger than memory, so they are read block by block: all first blocks are sorted, then only among
requests that are equal so far the next ones. What a whole group shares is skipped first, without keeping it.
"""

from array import array
from collections.abc import Callable, Sequence

#: Reads `size` bytes of a request's key from `start` on; fewer at the key's end, none beyond it.
ReadBlock = Callable[[int, int, int], bytes]

#: Bytes of blocks that are held at once, roughly.
_BUDGET = 48 * 1024 * 1024
_SMALLEST, _LARGEST = 32, 256
#: Bytes compared at once while skipping what a group shares.
_STRIDE = 4096


def block_size(count: int) -> int:
    """Bytes of each key held while `count` of them are sorted."""
    return max(_SMALLEST, min(_LARGEST, _BUDGET // max(count, 1)))


def prefix_order(count: int, read_block: ReadBlock, *, block: int | None = None) -> "tuple[array[int], array[int]]":
    """The requests' indices in the order of their keys, and for each the bytes it shares with the one before it.

    Stable: equal keys keep their order. The first shares nothing.
    """
    order = array("I", range(count))
    shared = array("I", bytes(4 * count))
    groups = [(0, count, 0)] if count > 1 else []
    while groups:
        low, high, depth = groups.pop()
        members = order[low:high]
        size = block or block_size(high - low)
        start = depth + _shared_by_all(members, depth, read_block)
        blocks = [read_block(i, start, size) for i in members]
        places = sorted(range(len(members)), key=blocks.__getitem__)
        order[low:high] = array("I", (members[place] for place in places))
        ordered = [blocks[place] for place in places]
        del blocks, places
        groups += _mark(ordered, low, start, size, shared)
    return order, shared


def _mark(blocks: Sequence[bytes], low: int, start: int, size: int, shared: "array[int]") -> list[tuple[int, int, int]]:
    """Notes what neighbours share; returns the groups that are equal so far and go on, as (low, high, depth)."""
    groups, first = [], 0
    for i in range(1, len(blocks) + 1):
        if i < len(blocks) and blocks[i] == blocks[i - 1]:
            shared[low + i] = start + len(blocks[i])
            continue
        if i - first > 1 and len(blocks[first]) == size:
            groups.append((low + first, low + i, start + size))
        if i < len(blocks):
            shared[low + i] = start + _common(blocks[i - 1], blocks[i])
            first = i
    return groups


def _shared_by_all(members: Sequence[int], depth: int, read_block: ReadBlock) -> int:
    """How many bytes from `depth` on all members share; at least that many may be skipped."""
    skipped = 0
    while True:
        model = read_block(members[0], depth + skipped, _STRIDE)
        for i in members:
            if not model:
                return skipped
            other = read_block(i, depth + skipped, len(model))
            if other != model:
                model = model[: _common(model, other)]
        skipped += len(model)
        if len(model) < _STRIDE:
            return skipped


def _common(a: bytes, b: bytes) -> int:
    """The length of the common prefix."""
    size = min(len(a), len(b))
    if a[:size] == b[:size]:
        return size
    difference = int.from_bytes(a[:size], "big") ^ int.from_bytes(b[:size], "big")
    return size - (difference.bit_length() + 7) // 8


def cut(sizes: Sequence[int], shared: Sequence[int], *, target: int, most_bytes: int) -> list[tuple[int, int]]:
    """Cuts a plan into shards: (start, end) of each, over requests in execution order.

    No shard has more than `target` requests, or more than `most_bytes` unless it is one request. The shards are about
    equal; within an eighth of an even cut, the place is taken where neighbours share least, so that a document's
    questions are rarely parted.
    """
    cuts, start, total = [], 0, len(sizes)
    while start < total:
        remaining = total - start
        even = -(-remaining // -(-remaining // target))
        end = start + _fitting(sizes, start, even, most_bytes)
        if end < total:
            earliest = max(start + 1, end - even // 8)
            end = min(range(earliest, end + 1), key=lambda i: (shared[i], -i))
        cuts.append((start, end))
        start = end
    return cuts


def _fitting(sizes: Sequence[int], start: int, most: int, most_bytes: int) -> int:
    """How many requests from `start` on fit; at least one."""
    used = 0
    for i in range(start, start + most):
        used += sizes[i]
        if used > most_bytes:
            return max(1, i - start)
    return most
