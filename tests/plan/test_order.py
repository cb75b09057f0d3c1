"""The order of work and where it is cut, as pure functions."""

import random
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from engine.orchestrator.order import block_size, cut, prefix_order


def ordered(keys: Sequence[bytes], block: int | None = None) -> tuple[list[int], list[int]]:
    order, shared = prefix_order(len(keys), lambda i, start, size: keys[i][start : start + size], block=block)
    return list(order), list(shared)


def common(a: bytes, b: bytes) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


#: Keys that share much: few letters, pieces repeated, some longer than a block and than a stride.
pieces = st.sampled_from(
    [b"", b"a", b"ab", b"\x00", b"\xff", b"a" * 31, b"b" * 32, b"c" * 300, b"d" * 4096, b"e" * 5000]
)
shared_keys = st.lists(st.lists(pieces, max_size=5).map(b"".join), max_size=30)


@given(shared_keys | st.lists(st.binary(max_size=12), max_size=60), st.sampled_from([None, 1, 2, 32]))
@example([b"x" * 32, b"x" * 32, b"x" * 64, b"x" * 33], 32)
def test_the_order_is_the_lexicographic_one_and_stable(keys: list[bytes], block: int | None) -> None:
    order, shared = ordered(keys, block)
    assert order == sorted(range(len(keys)), key=keys.__getitem__)
    in_order = [keys[i] for i in order]
    assert shared == [0] * bool(keys) + [common(a, b) for a, b in pairwise(in_order)]


def switches(keys: Sequence[bytes], documents: Sequence[int]) -> int:
    order, _ = ordered(keys)
    return sum(documents[a] != documents[b] for a, b in pairwise(order))


@pytest.mark.parametrize(("system", "document"), [(2_100, 1_500), (0, 4_000), (1_000, 900), (4_096, 256), (31, 1)])
def test_requests_on_one_document_are_neighbours(system: int, document: int) -> None:
    """A hundred documents under four questions each, question by question: the order that never reuses a document."""
    rng = random.Random(7)
    texts = [rng.randbytes(document) + bytes([i]) for i in range(100)]
    documents = [i % 100 for i in range(400)]
    keys = [b"s" * system + texts[i % 100] + b"question %d" % (i // 100) for i in range(400)]
    assert switches(keys, documents) == 99  # in the order of the file: 399


def test_a_conversations_turns_are_neighbours_shortest_first() -> None:
    talks = [b"talk %d " % n + b"turn " * 200 for n in range(5)]
    keys = [talk[: 100 * turns] for turns in (1, 2, 3) for talk in talks]
    order, shared = ordered(keys)
    assert [i % 5 for i in order] == sorted([i % 5 for i in range(15)])
    assert shared[:3] == [0, 100, 200]


def test_a_large_plan_holds_smaller_blocks() -> None:
    assert block_size(50_000) == 256
    assert block_size(1_000_000) * 1_000_000 < 64 * 1024 * 1024
    assert block_size(10**9) == 32


def test_what_all_share_is_passed_over_in_long_strides() -> None:
    """Keys that share 100 kB are neither read over and over nor in a thousand small pieces."""
    keys = [b"s" * 100_000 + b"%d" % i for i in range(50)]
    reads: list[int] = []

    def read_block(i: int, start: int, size: int) -> bytes:
        piece = keys[i][start : start + size]
        reads.append(len(piece))
        return piece

    order, _ = prefix_order(50, read_block)
    assert list(order) == sorted(range(50), key=keys.__getitem__)
    assert sum(reads) < 1.2 * 50 * 100_000
    assert len(reads) < 50 * 30


sizes_and_shared = st.lists(st.tuples(st.integers(1, 3_000), st.integers(0, 50)), min_size=1, max_size=400)


@given(sizes_and_shared, st.integers(1, 60), st.integers(1, 20_000))
def test_shards_cover_everything_once_within_their_limits(
    requests: list[tuple[int, int]], target: int, most_bytes: int
) -> None:  # invariant 1
    sizes, shared = [size for size, _ in requests], [count for _, count in requests]
    shards = cut(sizes, shared, target=target, most_bytes=most_bytes)
    assert [i for start, end in shards for i in range(start, end)] == list(range(len(requests)))
    for start, end in shards:
        assert 0 < end - start <= target
        assert end - start == 1 or sum(sizes[start:end]) <= most_bytes


def test_shards_are_about_equal() -> None:
    assert [end - start for start, end in cut([1] * 33, [0] * 33, target=16, most_bytes=100)] == [11, 11, 11]
    assert cut([1] * 3, [0] * 3, target=16, most_bytes=100) == [(0, 3)]
    assert cut([], [], target=16, most_bytes=100) == []


def test_a_cut_falls_between_documents_where_one_is_near() -> None:
    documents = [2000] * 400
    for first in range(0, 400, 4):
        documents[first] = 30
    shards = cut([1] * 400, documents, target=50, most_bytes=10_000)
    assert all(start % 4 == 0 for start, _ in shards)


def test_a_request_larger_than_a_shard_gets_one_to_itself() -> None:
    assert cut([5, 500, 5], [0, 0, 0], target=16, most_bytes=100) == [(0, 1), (1, 2), (2, 3)]
