"""The layout of shards, segments and indexes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.packs import Pack, Record, pack, table_size
from state.records import Corrupt

records = st.lists(
    st.builds(
        Record,
        line=st.integers(0, 2**32 - 1),
        mark=st.integers(0, 2**32 - 1),
        head=st.binary(max_size=40),
        body=st.binary(max_size=200),
    ),
    max_size=30,
)


@given(records)
def test_what_is_packed_comes_back_byte_for_byte(written: list[Record]) -> None:
    assert list(Pack(pack(written))) == written


@given(records)
def test_a_span_points_at_the_body_within_the_object(written: list[Record]) -> None:
    data = pack(written)
    read = Pack(data)
    for i, record in enumerate(written):
        start, size = read.body_span(i)
        assert data[start : start + size] == record.body
        assert read.body_size(i) == size


@given(records, st.data())
def test_a_pack_cut_short_anywhere_is_refused(written: list[Record], data: st.DataObject) -> None:
    whole = pack(written)
    cut = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(Corrupt):
        Pack(whole[:cut])


def test_a_pack_with_bytes_too_many_is_refused() -> None:
    with pytest.raises(Corrupt, match="length"):
        Pack(pack([Record(0, 0, b"", b"x")]) + b"y")


def test_other_bytes_are_refused() -> None:
    with pytest.raises(Corrupt, match="magic"):
        Pack(b"{" * 64)


def test_the_layout_is_the_documented_one() -> None:
    data = pack([Record(7, 9, b"ab", b"c")])
    assert data[:8] == b"OVNPACK1"
    assert data[8:12] == (1).to_bytes(4, "little")
    assert [int.from_bytes(data[i : i + 4], "little") for i in range(12, 28, 4)] == [7, 9, 2, 1]
    assert data[table_size(1) :] == b"abc"
