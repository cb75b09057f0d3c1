"""Ranges, validators and names of downloads."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.ranges import Span, Unsatisfiable, attachment, is_unchanged, wanted_span

TAG = '"abc"'


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("bytes=0-0", Span(0, 1)),
        ("bytes=0-99", Span(0, 100)),
        ("bytes=10-", Span(10, 100)),
        ("bytes=90-1000", Span(90, 100)),
        ("bytes=-10", Span(90, 100)),
        ("bytes=-1000", Span(0, 100)),
        ("Bytes = 5-6", Span(5, 7)),
    ],
)
def test_a_single_range_is_served(header: str, expected: Span) -> None:
    assert wanted_span(header, None, size=100, tag=TAG) == expected


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "bytes=",
        "bytes=-",
        "bytes=5-4",
        "bytes=0-1,5-6",
        "items=0-1",
        "bytes=a-b",
        "bytes=" + "9" * 5000 + "-",
    ],
)
def test_what_is_no_single_range_means_the_whole_file(header: str | None) -> None:
    assert wanted_span(header, None, size=100, tag=TAG) is None


@pytest.mark.parametrize(("header", "size"), [("bytes=100-", 100), ("bytes=-0", 100), ("bytes=0-", 0), ("bytes=-5", 0)])
def test_a_range_outside_the_file_cannot_be_satisfied(header: str, size: int) -> None:
    with pytest.raises(Unsatisfiable):
        wanted_span(header, None, size=size, tag=TAG)


def test_if_range_holds_only_for_the_same_bytes() -> None:
    assert wanted_span("bytes=0-1", TAG, size=100, tag=TAG) == Span(0, 2)
    for other in ('"other"', "W/" + TAG, "Wed, 21 Oct 2026 07:28:00 GMT"):
        assert wanted_span("bytes=0-1", other, size=100, tag=TAG) is None


@given(st.integers(0, 300), st.integers(0, 300), st.integers(1, 200))
def test_a_span_is_never_empty_and_never_outside(start: int, last: int, size: int) -> None:
    try:
        span = wanted_span(f"bytes={start}-{last}", None, size=size, tag=None)
    except Unsatisfiable:
        assert start >= size
        return
    if span is None:
        assert last < start
    else:
        assert span == Span(start, min(last, size - 1) + 1)
        assert span.length > 0


@pytest.mark.parametrize(
    ("header", "expected"),
    [(TAG, True), (f'"x", W/{TAG}', True), ("*", True), ('"x"', False), (None, False)],
)
def test_if_none_match_compares_tags(header: str | None, expected: bool) -> None:
    assert is_unchanged(header, TAG) is expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("batch_1_output.jsonl", 'attachment; filename="batch_1_output.jsonl"'),
        ('a"b\\c.txt', "attachment; filename=\"a_b_c.txt\"; filename*=UTF-8''a%22b%5Cc.txt"),
        ("夜.jsonl", "attachment; filename=\"_.jsonl\"; filename*=UTF-8''%E5%A4%9C.jsonl"),
        ("a\r\nb", "attachment; filename=\"a__b\"; filename*=UTF-8''a%0D%0Ab"),
    ],
)
def test_a_filename_is_quoted_for_every_client(name: str, expected: str) -> None:
    assert attachment(name) == expected
