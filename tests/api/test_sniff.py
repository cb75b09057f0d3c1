"""What passes for a batch file at upload, from its first characters."""

import gzip

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.sniff import Sniffer

LINE = b'{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {}}\n'
REFUSAL = "Invalid file format for Batch API. Must be .jsonl"


def verdict(content: bytes, *, chunk: int = 1 << 20) -> str | None:
    sniffer = Sniffer()
    for start in range(0, len(content), chunk):
        sniffer.feed(content[start : start + chunk])
    refusal = sniffer.verdict(complete=True)
    return None if refusal is None else refusal.message


@pytest.mark.parametrize(
    "content",
    [
        LINE,
        b"{}",
        b"\xef\xbb\xbf" + LINE,
        b"\n \r\n\t\n" + LINE,
        b"\xef\xbb\xbf\n" + LINE,
        b'{ "custom_id": "a"}\n',
        LINE[:-1],
        b'{"custom_id": "broken\nfurther lines are for validation, which names them',
        b'{"n": NaN}\n',
        b'{"s": "\\ud83d"}\n',
        b'{"s": "\xe9"}\n',
    ],
)
def test_what_begins_like_an_object_on_one_line_passes(content: bytes) -> None:
    assert verdict(content) is None


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\n \n",
        b"\xef\xbb\xbf",
        b"Hello World",
        b"{malformed json",
        b"custom_id,method,url\n",
        b'[{"custom_id": "a"}]',
        b'{\n  "custom_id": "a"\n}\n',
        b'"text"',
        b"{",
        b"\x00\x00",
    ],
)
def test_anything_else_is_not_jsonl(content: bytes) -> None:
    assert verdict(content) == REFUSAL


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (gzip.compress(LINE), "gzip"),
        (b"PK\x03\x04rest of an archive", "zip"),
        ("﻿".encode("utf-16-le") + LINE.decode().encode("utf-16-le"), "UTF-16"),
        (LINE.decode().encode("utf-16"), "UTF-16"),
        (LINE.decode().encode("utf-16-le"), "UTF-16"),
        (LINE.decode().encode("utf-16-be"), "UTF-16"),
    ],
)
def test_a_known_foreign_format_is_named(content: bytes, word: str) -> None:
    said = verdict(content)
    assert said is not None
    assert said.startswith(REFUSAL)
    assert word in said


def test_a_refusal_says_the_same_in_detail_beside_the_error() -> None:
    refusal = Sniffer().verdict(complete=True)
    assert refusal is not None
    assert refusal.body() == {
        "error": {"message": REFUSAL, "type": "invalid_request_error", "param": None, "code": None},
        "detail": {"message": REFUSAL, "code": None},
    }


def test_a_text_is_refused_before_its_end() -> None:
    sniffer = Sniffer()
    sniffer.feed(b"Dear reader, " * 10)
    assert sniffer.verdict(complete=False) is not None


def test_little_is_kept_of_a_large_file() -> None:
    sniffer = Sniffer()
    for _ in range(100):
        sniffer.feed(b" " * 10_000)
    sniffer.feed(LINE * 1000)
    assert len(sniffer._head) <= 64
    assert sniffer.verdict(complete=False) is None


@given(
    content=st.lists(st.sampled_from([b"\xef\xbb\xbf", b"\n", b" ", b"{", b'"', b"}", b"a", b"\x00", LINE])).map(
        b"".join
    ),
    chunk=st.integers(1, 7),
)
def test_how_the_file_is_cut_makes_no_difference(content: bytes, chunk: int) -> None:
    assert verdict(content, chunk=chunk) == verdict(content)
