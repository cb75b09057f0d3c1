"""Forms as events: cut anywhere, bounded everywhere."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.errors import ApiError
from server.multipart import LONGEST_TEXT, MOST_PARTS, Event, FileBegin, FileData, FileEnd, FormReader, Text

KIND = 'multipart/form-data; boundary="xyz"'


def part(name: str, content: bytes, filename: str | None = None) -> bytes:
    head = f'--xyz\r\nContent-Disposition: form-data; name="{name}"'
    if filename is not None:
        head += f'; filename="{filename}"\r\nContent-Type: application/jsonl'
    return head.encode() + b"\r\n\r\n" + content + b"\r\n"


def form(*parts: bytes) -> bytes:
    return b"".join(parts) + b"--xyz--\r\n"


def read(body: bytes, *, chunk: int = 1 << 20) -> list[Event]:
    reader = FormReader(KIND)
    events: list[Event] = []
    for start in range(0, len(body), chunk):
        events += reader.feed(body[start : start + chunk])
    reader.finish()
    return merged(events)


def merged(events: list[Event]) -> list[Event]:
    """Neighbouring pieces of the file as one."""
    out: list[Event] = []
    for event in events:
        if isinstance(event, FileData) and out and isinstance(out[-1], FileData):
            out[-1] = FileData(out[-1].data + event.data)
        else:
            out.append(event)
    return out


def refusal(body: bytes) -> str:
    with pytest.raises(ApiError) as caught:
        read(body)
    assert caught.value.status == 400
    return caught.value.message


def test_fields_and_file_come_as_events_in_their_order() -> None:
    body = form(part("purpose", b"batch"), part("file", b'{"a": 1}\n', "in.jsonl"), part("late", "ü".encode()))
    assert read(body) == [
        Text("purpose", "batch"),
        FileBegin("in.jsonl"),
        FileData(b'{"a": 1}\n'),
        FileEnd(),
        Text("late", "ü"),
    ]


def test_a_file_part_without_a_name_is_a_file_too() -> None:
    assert read(form(part("file", b"x"))) == [FileBegin(None), FileData(b"x"), FileEnd()]


def test_an_empty_file_has_no_data() -> None:
    assert read(form(part("file", b"", "in.jsonl"))) == [FileBegin("in.jsonl"), FileEnd()]


def test_a_filename_is_utf8() -> None:
    assert read(form(part("file", b"", "nächtlich 夜.jsonl")))[0] == FileBegin("nächtlich 夜.jsonl")


@given(
    content=st.lists(st.sampled_from([b"\r\n", b"--", b"xyz", b"--xyz", b"\r", b"a"])).map(b"".join),
    chunk=st.integers(1, 9),
)
def test_the_file_comes_out_byte_for_byte_however_it_is_cut(content: bytes, chunk: int) -> None:
    if b"\r\n--xyz" in b"\r\n" + content:
        return  # a form whose boundary stands in its content is another form
    events = read(form(part("file", content, "f"), part("purpose", b"batch")), chunk=chunk)
    data = [event.data for event in events if isinstance(event, FileData)]
    assert (b"".join(data), events[-1]) == (content, Text("purpose", "batch"))


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"no form at all", "Could not parse multipart form"),
        (form(*[part(f"p{n}", b"") for n in range(MOST_PARTS + 1)]), "more than 16 parts"),
        (form(part("purpose", b"x" * (LONGEST_TEXT + 1))), "a text field is longer than"),
        (form(part("purpose", b"\xff")), "a text field is not UTF-8"),
        (b"--xyz\r\nContent-Type: text/plain\r\n\r\nx\r\n--xyz--\r\n", "a part has no name"),
        (b"--xyz\r\n" + b"A: b\r\n" * 20 + b"\r\nx\r\n--xyz--\r\n", "header count"),
        (b"--xyz\r\nA: " + b"b" * 10_000 + b"\r\n\r\nx\r\n--xyz--\r\n", "header size"),
        (part("file", b"cut short", "f"), "ends before its closing boundary"),
        (part("file", b"cut short", "f") + b"--xy", "ends before its closing boundary"),
        (b"", "ends before its closing boundary"),
    ],
)
def test_a_form_that_is_malformed_or_beyond_a_limit_is_refused(body: bytes, reason: str) -> None:
    assert reason.lower() in refusal(body).lower()


def test_a_body_that_is_no_form_is_415() -> None:
    for kind in ("", "application/json", "application/x-www-form-urlencoded"):
        with pytest.raises(ApiError) as caught:
            FormReader(kind)
        assert caught.value.status == 415


@pytest.mark.parametrize("kind", ["multipart/form-data", "multipart/form-data; boundary=" + "x" * 1000])
def test_a_form_without_a_usable_boundary_is_400(kind: str) -> None:
    with pytest.raises(ApiError) as caught:
        FormReader(kind)
    assert caught.value.status == 400
