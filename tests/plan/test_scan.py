"""What a whole input file may be: its encoding, its line ends, its duplicates, and the list of its faults."""

import gzip
import hashlib
import os
from pathlib import Path

import pytest

from engine.orchestrator import scan as scan_module
from tests.plan.samples import body, line, lines, scanned, told

GOOD = lines(line("a"), line("b"), line("c"))


def bodies(folder: Path, content: bytes) -> list[bytes]:
    table = scanned(folder, content).requests
    return [content[start : start + size] for start, size in zip(table.body_offsets, table.body_sizes, strict=True)]


def ids(folder: Path, content: bytes) -> bytes:
    scanned(folder, content)
    return (folder / "ids").read_bytes()


def test_a_good_file_has_no_faults_and_every_body_in_its_place(tmp_path: Path) -> None:
    found = scanned(tmp_path, GOOD)
    assert (found.faults, found.total, found.model) == ((), 3, "m")
    assert (found.size, found.sha256) == (len(GOOD), hashlib.sha256(GOOD).hexdigest())
    whole = b'{"model": "m", "messages": [{"role": "user", "content": "Hi."}]}'
    assert bodies(tmp_path, GOOD) == [whole] * 3
    assert ids(tmp_path, GOOD) == b'"a""b""c"'
    assert (tmp_path / "keys").read_bytes().count(b"Hi.") == 3


def test_a_body_is_found_wherever_it_stands_in_its_line(tmp_path: Path) -> None:
    first = b'{"body":{"model":"m","messages":[]},"url":"/v1/chat/completions","method":"POST","custom_id":"a"}\n'
    second = b' {"x":{"model":"m","messages":[]} , "custom_id":"b","body":{"model":"m","messages":[]}\t,'
    second += b'"url":"/v1/chat/completions","method":"POST"  }  \r\n'
    third = b'{"x":{"y":"}"},"custom_id":"c","body":{"model":"m","messages":[]},"z":{"y":1},'
    third += b'"url":"/v1/chat/completions","method":"POST"}'
    assert bodies(tmp_path, first + second + third) == [b'{"model":"m","messages":[]}'] * 3


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"\xef\xbb\xbf" + GOOD, id="BOM"),
        pytest.param(GOOD.replace(b"\n", b"\r\n"), id="CRLF"),
        pytest.param(b"\xef\xbb\xbf" + GOOD.replace(b"\n", b"\r\n"), id="BOM and CRLF"),
        pytest.param(GOOD[:-1], id="no final newline"),
        pytest.param(GOOD + b"\n\n\n", id="blank lines at the end"),
        pytest.param(b"\n \t\r\n" + GOOD.replace(b"\n", b"\n\n  \n"), id="blank lines between"),
    ],
)
def test_harmless_differences_between_files_do_not_matter(tmp_path: Path, content: bytes) -> None:
    found = scanned(tmp_path, content)
    assert (found.faults, found.total) == ((), 3)
    assert bodies(tmp_path, content) == bodies(tmp_path, GOOD)
    assert ids(tmp_path, content) == b'"a""b""c"'


def test_a_bom_within_the_file_is_no_bom(tmp_path: Path) -> None:
    content = lines(line("a"), b"\xef\xbb\xbf" + line("b"))
    assert told(scanned(tmp_path, content)) == [("invalid_json_line", None, 2)]


def test_only_lf_ends_a_line(tmp_path: Path) -> None:
    odd = line("a", body=body(x="LS")).replace(b"LS", "\u2028\u2029\u0085".encode())
    found = scanned(tmp_path, lines(odd, line("b")))
    assert (found.faults, found.total) == ((), 2)
    assert scanned(tmp_path, line("a") + b"\r" + line("b")).total == 1


def test_faults_count_physical_lines_blank_ones_included(tmp_path: Path) -> None:
    found = scanned(tmp_path, b"\n" + line("a") + b"\n \n{\n\nnonsense\n" + line("a"))
    assert told(found) == [
        ("invalid_json_line", None, 4),
        ("invalid_json_line", None, 6),
        ("duplicate_custom_id", "custom_id", 7),
    ]


@pytest.mark.parametrize("content", [b"", b"\n", b" \r\n\t\n", b"\xef\xbb\xbf", b"\xef\xbb\xbf\r\n"])
def test_an_empty_file_is_told_as_such(tmp_path: Path, content: bytes) -> None:
    found = scanned(tmp_path, content)
    assert told(found) == [("empty_file", None, None)]
    assert found.faults[0].message.startswith("The input file is empty. ")


@pytest.mark.parametrize(
    ("content", "name"),
    [
        (gzip.compress(GOOD), "gzip"),
        (GOOD.decode().encode("utf-16"), "UTF-16"),
        (GOOD.decode().encode("utf-16-le"), "UTF-16"),
        (GOOD.decode().encode("utf-16-be"), "UTF-16"),
        (GOOD.decode().encode("utf-32"), "UTF-32"),
        (b"PK\x03\x04" + os.urandom(10_000), "zip"),
    ],
)
def test_a_file_of_another_kind_is_one_fault_at_line_1(tmp_path: Path, content: bytes, name: str) -> None:
    found = scanned(tmp_path, content)
    assert told(found) == [("invalid_json_line", None, 1)]
    assert name in found.faults[0].message
    assert "UTF-8" in found.faults[0].message
    assert found.size == len(content)


def test_a_pretty_printed_file_gets_a_hint_at_line_1(tmp_path: Path) -> None:
    found = scanned(tmp_path, b'{\n  "custom_id": "a",\n  "method": "POST"\n}\n')
    assert told(found) == [("invalid_json_line", None, n) for n in (1, 2, 3, 4)]
    assert "pretty-printed" in found.faults[0].message


def test_a_line_at_the_limit_is_read_and_one_beyond_it_is_not(tmp_path: Path) -> None:
    long = line("long", body=body(x="y" * 5000))
    for ending in (b"\n", b"\r\n"):
        content = long + ending + line("b") + ending
        assert told(scanned(tmp_path, content, max_line_bytes=len(long))) == []
        found = scanned(tmp_path, content, max_line_bytes=len(long) - 1)
        assert told(found) == [("invalid_request", None, 1)]
        assert f"{len(long) - 1:,} bytes" in found.faults[0].message
    assert told(scanned(tmp_path, long, max_line_bytes=1024)) == [("invalid_request", None, 1)]
    assert scanned(tmp_path, long, max_line_bytes=1024).size == len(long)


def test_more_requests_than_allowed_are_counted_for_the_message(tmp_path: Path) -> None:
    assert told(scanned(tmp_path, GOOD, max_requests=3)) == []
    found = scanned(tmp_path, GOOD + b"not even JSON\n", max_requests=2)
    assert told(found) == [("too_many_tasks", None, None)]
    assert found.faults[0].message == "The input file holds 4 requests; a batch may hold at most 2."


def test_the_second_of_two_equal_custom_ids_is_the_fault(tmp_path: Path) -> None:
    found = scanned(tmp_path, lines(line("same"), line("other"), line("same"), line("x"), line("same")))
    assert told(found) == [("duplicate_custom_id", "custom_id", 3), ("duplicate_custom_id", "custom_id", 5)]
    assert found.faults[0].message == (
        "The custom_id 'same' for this request is a duplicate of another request. "
        "The custom_id parameter must be unique for each request in a batch."
    )


def test_custom_ids_are_compared_by_value_not_by_spelling(tmp_path: Path) -> None:
    content = lines(line("Ab"), line("ab"), line("\u00e9"), line("Ab").replace(b'"Ab"', b'"\\u0041b"'))
    assert told(scanned(tmp_path, content)) == [("duplicate_custom_id", "custom_id", 4)]


def test_custom_ids_of_equal_hash_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan_module, "hash", lambda value: 7, raising=False)
    assert told(scanned(tmp_path, GOOD)) == []
    assert told(scanned(tmp_path, GOOD + lines(line("b")))) == [("duplicate_custom_id", "custom_id", 4)]


def test_a_duplicate_of_a_bad_line_is_told_at_once(tmp_path: Path) -> None:
    content = lines(line("a", method="GET"), line("a"), line("a", url="/v1/embeddings"))
    assert told(scanned(tmp_path, content)) == [
        ("invalid_value", "method", 1),
        ("duplicate_custom_id", "custom_id", 2),
        ("invalid_url", "url", 3),
    ]


def test_a_batch_asks_for_one_model(tmp_path: Path) -> None:
    found = scanned(tmp_path, lines(line("a"), line("b", body=body(model="alias")), line("c")))
    assert told(found) == [("mismatched_model", "body.model", 2)]
    assert found.faults[0].message == (
        "The model 'alias' for this request does not match the rest of the batch. "
        "Each batch must contain requests for a single model."
    )


def test_an_unknown_model_is_told_for_every_line(tmp_path: Path) -> None:
    content = lines(*(line(str(n), body=body(model="no-such-model")) for n in range(3)))
    assert told(scanned(tmp_path, content)) == [("model_not_found", "body.model", n) for n in (1, 2, 3)]


def test_the_faults_of_the_first_hundred_bad_lines_are_kept_in_order(tmp_path: Path) -> None:
    content = lines(*([line("same")] * 5), *([b"nonsense"] * 300))
    found = scanned(tmp_path, content)
    assert [fault.line for fault in found.faults] == list(range(2, 102))
    assert {fault.code for fault in found.faults[:4]} == {"duplicate_custom_id"}
    assert {fault.code for fault in found.faults[4:]} == {"invalid_json_line"}


def test_prompts_are_keyed_by_what_is_rendered_first(tmp_path: Path) -> None:
    sent = body(
        messages=[{"role": "user", "content": "Hi."}],
        response_format={"type": "json_object"},
        temperature=0.5,
        metadata={"k": "v"},
        tools=[{"type": "function"}],
        chat_template_kwargs={"enable_thinking": False},
        cache_salt="salt",
    )
    scanned(tmp_path, line("a", body=sent))
    assert (tmp_path / "keys").read_bytes().split(b"\x00") == [
        b'"salt"',
        b"",
        b'[{"type": "function"}]',
        b'{"enable_thinking": false}',
        b"",
        b'[{"role": "user", "content": "Hi."}]',
    ]
