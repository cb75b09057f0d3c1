import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.packs import ERROR, OUTPUT
from engine.replies import (
    MAX_DEPTH,
    NotConforming,
    is_openai_error,
    read_answer,
    read_refusal,
    refused,
    result_line,
    safe,
    succeeded,
    unanswered,
    usage_of,
)
from state.records import Usage

LINE_ID = "batch_req_" + "0123456789abcdef" * 2

_texts = st.text() | st.text(alphabet='a\u2028\u2029\u0085\r\n\v\f\x1c\x1d\x1e"\\é\U0001f600')
_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | _texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_texts, inner, max_size=4),
    max_leaves=20,
)
_objects = st.dictionaries(_texts, _values, max_size=5)


def _written(value: Any, *, ascii_only: bool, indent: int | None, end: str) -> bytes:
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent)
    return text.replace("\n", end).encode()


def _strict(line: bytes) -> Any:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(line.decode(), parse_constant=refuse)


@given(_objects, st.booleans(), st.sampled_from([None, 1]), st.sampled_from(["\n", "\r\n", "\r"]))
def test_a_reply_keeps_its_value_and_fits_on_one_line(
    value: dict[str, Any], ascii_only: bool, indent: int | None, end: str
) -> None:
    body = _written(value, ascii_only=ascii_only, indent=indent, end=end)
    answer = read_answer(body)
    assert _strict(answer.body) == value
    assert len(answer.body.decode().splitlines()) == 1


@given(_objects, _texts)
def test_a_result_line_is_strict_json_on_one_line_whose_parts_are_what_went_in(
    value: dict[str, Any], custom_id: str
) -> None:  # invariant 2
    raw_id = json.dumps(custom_id, ensure_ascii=False).encode()
    ending = succeeded(200, read_answer(_written(value, ascii_only=False, indent=1, end="\n")), "req_1")
    line = result_line(ending, line_id=LINE_ID, custom_id=raw_id)
    assert line.endswith(b"\n")
    assert len(line.decode().splitlines()) == 1
    response = {"status_code": 200, "request_id": "req_1", "body": value}
    assert _strict(line) == {"id": LINE_ID, "custom_id": custom_id, "response": response, "error": None}


def test_a_result_line_has_openais_spacing_and_the_body_byte_for_byte() -> None:
    body = b'{"id":"c-1","n":12345678901234567890123456789,"x":1.10,"a":{}}'
    line = result_line(succeeded(200, read_answer(body), None), line_id=LINE_ID, custom_id=b'"caf\\u00e9"')
    assert line == (
        b'{"id": "' + LINE_ID.encode() + b'", "custom_id": "caf\\u00e9", "response": '
        b'{"status_code": 200, "request_id": "c-1", "body": ' + body + b'}, "error": null}\n'
    )


def test_a_body_that_needs_nothing_is_not_copied() -> None:
    body = b'{"text": "plain"}'
    assert safe(body) is body


def test_without_any_id_from_the_engine_the_lines_own_one_is_the_request_id() -> None:
    line = result_line(succeeded(200, read_answer(b"{}"), None), line_id=LINE_ID, custom_id=b'"a"')
    assert json.loads(line)["response"]["request_id"] == "0123456789abcdef" * 2


def test_a_line_without_an_answer_says_why() -> None:
    line = result_line(unanswered("engine_crash", 'it "died"\u2028'), line_id=LINE_ID, custom_id=b'"a"')
    assert _strict(line) == {
        "id": LINE_ID,
        "custom_id": "a",
        "response": None,
        "error": {"code": "engine_crash", "message": 'it "died"\u2028'},
    }
    assert len(line.decode().splitlines()) == 1


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "not valid JSON"),
        (b"<html>", "not valid JSON"),
        (b"[1]", "not valid JSON|not a JSON object"),
        (b"null", "not a JSON object"),
        (b'{"a": NaN}', "not valid JSON"),
        (b'{"a": -Infinity}', "not valid JSON"),
        (b'{"a": 01}', "not valid JSON"),
        (b'{"a": 1,}', "not valid JSON"),
        (b'{"a": "x\ny"}', "not valid JSON"),
        (b'{"a": "\x00"}', "not valid JSON"),
        (b'{"a": "\\x"}', "not valid JSON"),
        (b'{"a": 1} {}', "not valid JSON"),
        (b'\xef\xbb\xbf{"a": 1}', "not valid JSON"),
        (b'{"a": "caf\xe9"}', "not UTF-8"),
        (b'{"a": "\xed\xa0\x80"}', "not UTF-8"),
        (b'{"a": ' + b"[" * MAX_DEPTH + b"]" * MAX_DEPTH + b"}", "nested"),
        (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "not valid JSON|nested"),
    ],
)
def test_a_body_that_is_no_json_object_does_not_conform(body: bytes, reason: str) -> None:
    with pytest.raises(NotConforming, match=reason):
        read_answer(body)


@pytest.mark.parametrize(
    "body",
    [
        b'{"a": "\\ud83d"}',
        b'{"a": 1e999}',
        b'{"a": ' + b"[" * (MAX_DEPTH - 1) + b"]" * (MAX_DEPTH - 1) + b"}",
        b'{"a": [' + b"{}," * 2000 + b"{}]}",
        b'{"a": "' + b"[" * 5000 + b'"}',
        b'{"usage": {"prompt_tokens": "many"}, "model": 7, "id": null}',
    ],
)
def test_unusual_but_valid_bodies_are_kept_as_they_are(body: bytes) -> None:
    assert read_answer(body).body == body


def test_model_and_id_are_read_from_the_reply() -> None:
    answer = read_answer(b'{"id": "chatcmpl-1", "model": "caf\\u00e9", "usage": null}')
    assert (answer.id, answer.model, answer.usage) == ("chatcmpl-1", "café", Usage())


def test_a_nested_model_is_not_the_replys_model() -> None:
    assert read_answer(b'{"choices": [{"model": "x", "usage": {"prompt_tokens": 5}}]}').model is None


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        (
            {
                "prompt_tokens": 10,
                "completion_tokens": 5,
                "total_tokens": 15,
                "prompt_tokens_details": {"cached_tokens": 8},
                "completion_tokens_details": {"reasoning_tokens": 3},
            },
            Usage(10, 8, 5, 3),
        ),
        (
            {
                "input_tokens": 10,
                "output_tokens": 5,
                "input_tokens_details": {"cached_tokens": 8},
                "output_tokens_details": {"reasoning_tokens": 3},
            },
            Usage(10, 8, 5, 3),
        ),
        ({"prompt_tokens": 7, "total_tokens": 7}, Usage(7)),
        ({"prompt_tokens": 7, "completion_tokens": None, "prompt_tokens_details": None}, Usage(7)),
        ({"prompt_tokens": -7, "completion_tokens": True}, Usage()),
        ({"prompt_tokens": 1 << 70, "completion_tokens": 1.5}, Usage()),
        (None, Usage()),
        ("lots", Usage()),
    ],
)
def test_token_counts_have_three_naming_schemes_and_are_zero_where_missing(usage: Any, expected: Usage) -> None:
    assert usage_of(usage) == expected
    assert read_answer(json.dumps({"usage": usage}).encode()).usage == expected


def test_an_openai_error_stays_as_it_is() -> None:
    body = b'{"error":{"message":"too long","type":"BadRequestError","param":null,"code":400}}'
    assert read_refusal(body, 400) == body
    assert is_openai_error(body)


@pytest.mark.parametrize(
    ("body", "status", "message", "kind"),
    [
        (b'{"detail":"Not Found"}', 404, "Not Found", "invalid_request_error"),
        (b'{"detail":[{"loc":["body"]}]}', 422, '[{"loc": ["body"]}]', "invalid_request_error"),
        (b'{"error":"overloaded"}', 500, "overloaded", "server_error"),
        (b'{"object":"error","message":"no","type":"NotFoundError","code":404}', 404, "no", "NotFoundError"),
        (b"<html>Bad Gateway</html>", 502, "<html>Bad Gateway</html>", "server_error"),
        (b"", 500, "the engine answered 500 without a body", "server_error"),
        (b"caf\xe9", 500, "caf\ufffd", "server_error"),
        (b"null", 500, "null", "server_error"),
        (b'{"error": null}', 500, '{"error": null}', "server_error"),
    ],
)
def test_any_other_refusal_is_put_into_an_openai_error(body: bytes, status: int, message: str, kind: str) -> None:
    error = json.loads(read_refusal(body, status))["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["message"], error["type"]) == (message, kind)
    assert not is_openai_error(body)


@given(st.binary(max_size=200) | _objects.map(lambda v: json.dumps(v, ensure_ascii=False).encode()))
def test_whatever_a_refusal_holds_its_line_is_strict_json_with_an_error_object(body: bytes) -> None:
    ending = refused(502, body, None)
    line = result_line(ending, line_id=LINE_ID, custom_id=b'"a"')
    assert ending.mark == ERROR
    assert isinstance(_strict(line)["response"]["body"]["error"], dict)
    assert len(line.decode().splitlines()) == 1


def test_answers_go_to_the_output_file_and_everything_else_to_the_error_file() -> None:
    marks = [succeeded(200, read_answer(b"{}"), None).mark, refused(400, b"", None).mark, unanswered("x", "y").mark]
    assert marks == [OUTPUT, ERROR, ERROR]


@pytest.mark.parametrize("value", ['"a\\ud83d"', '"a\\u0000"', f'"{"x" * 300}"', "7", "null", "[]"])
def test_a_name_that_no_database_keeps_is_as_good_as_none(value: str) -> None:
    body = f'{{"id": {value}, "model": {value}}}'.encode()
    answer = read_answer(body)
    assert (answer.id, answer.model, answer.body) == (None, None, body)
