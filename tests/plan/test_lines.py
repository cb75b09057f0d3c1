"""What one line of an input file may be, and how a bad one is refused: codes, messages and params as clients know them."""

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.json_text import nested_deeper
from engine.lines import LineRefused, read_request
from state.records import Model
from tests.plan.samples import CHAT, body, line, rules

NOT_JSON = "This line is not parseable as valid JSON."


def refused(raw: bytes, endpoint: str = CHAT, models: dict[str, Model] | None = None, **limits: int) -> LineRefused:
    with pytest.raises(LineRefused) as caught:
        read_request(raw, rules(endpoint, models, **limits))
    return caught.value


def told(raw: bytes, endpoint: str = CHAT) -> tuple[str, str, str | None]:
    refusal = refused(raw, endpoint)
    return refusal.code, refusal.message, refusal.param


def test_a_good_line_is_taken_apart_byte_for_byte() -> None:
    raw_body = b'{ "model":"m", "seed": 12345678901234567890123, "temperature":1.10,\t"messages":[ {"x":1,"x":2} ] }'
    raw = (
        b'{"custom_id":"a\\u0062", "method":"POST","url":"\\/v1/chat/completions","body":'
        + raw_body
        + b',"extra":[1]}\r\n'
    )
    request = read_request(raw, rules())
    assert request.custom_id == "ab"
    assert request.raw_id == b'"a\\u0062"'
    assert request.model == "m"
    assert request.body == raw_body


@pytest.mark.parametrize("name", ["custom_id", "method", "url", "body"])
def test_each_missing_key_is_named(name: str) -> None:
    assert told(line(**{name: ...})) == (
        "missing_required_parameter",
        f"Missing required parameter: '{name}'.",
        name,
    )


def test_of_several_reasons_the_first_is_told() -> None:
    assert told(b"{}")[2] == "custom_id"
    assert told(line(method=..., url=..., body=...))[2] == "method"
    assert told(line(url="/v1/embeddings", body="hello"))[2] == "url"
    assert told(line(body=body(model=..., messages=..., stream=True)))[2] == "body.model"
    assert told(line(body=body(messages=..., stream=True)))[2] == "body.messages"


@pytest.mark.parametrize(
    ("value", "got"),
    [(7, "an integer"), (7.5, "a number"), (None, "null"), (True, "a boolean"), (["a"], "an array"), ({}, "an object")],
)
def test_a_custom_id_must_be_a_string(value: Any, got: str) -> None:
    assert told(line(value)) == (
        "invalid_type",
        f"Invalid type for 'custom_id': expected a string, but got {got} instead.",
        "custom_id",
    )


def test_a_custom_id_must_not_be_empty_but_may_be_blank() -> None:
    assert told(line(""))[::2] == ("invalid_value", "custom_id")
    assert read_request(line("  "), rules()).custom_id == "  "


def test_a_custom_id_may_take_1024_bytes_and_the_message_names_the_limit() -> None:
    assert read_request(line("é" * 512), rules()).custom_id == "é" * 512
    code, message, param = told(line("é" * 512 + "x"))
    assert (code, param) == ("string_above_max_length", "custom_id")
    assert "1,024 bytes" in message


def test_a_lone_surrogate_in_a_custom_id_is_refused() -> None:
    code, message, param = told(line("id-\ud83d"))
    assert (code, param) == ("invalid_value", "custom_id")
    assert "surrogate" in message
    message.encode()


@pytest.mark.parametrize("method", ["POST", "post", "Post"])
def test_post_is_accepted_in_any_case(method: str) -> None:
    read_request(line(method=method), rules())


def test_another_method_is_refused() -> None:
    assert told(line(method="GET")) == (
        "invalid_value",
        "Invalid value: 'GET'. Supported values are: 'POST'.",
        "method",
    )
    assert told(line(method=1))[::2] == ("invalid_type", "method")


@pytest.mark.parametrize("url", ["/v1/embeddings", "/v1/chat/completions/", "chat/completions", ""])
def test_another_url_is_refused(url: str) -> None:
    assert told(line(url=url)) == (
        "invalid_url",
        "The URL provided for this request does not match the batch endpoint.",
        "url",
    )


@pytest.mark.parametrize(
    ("value", "got"), [("hello", "a string"), ([1], "an array"), (None, "null"), (1, "an integer")]
)
def test_a_body_must_be_an_object(value: Any, got: str) -> None:
    assert told(line(body=value)) == (
        "invalid_type",
        f"Invalid type for 'body': expected an object, but got {got} instead.",
        "body",
    )


@pytest.mark.parametrize("model", [..., None, ""])
def test_a_model_is_required(model: Any) -> None:
    assert told(line(body=body(model=model))) == ("invalid_request", "Model parameter is required.", "body.model")


def test_a_model_must_be_a_string() -> None:
    assert told(line(body=body(model=4)))[::2] == ("invalid_type", "body.model")


def test_an_unknown_model_is_named() -> None:
    assert told(line(body=body(model="nonexistent-model-xyz"))) == (
        "model_not_found",
        "The provided model 'nonexistent-model-xyz' is not supported by the Batch API.",
        "body.model",
    )


def test_any_model_will_do_where_an_alias_says_so() -> None:
    star = {"*": Model("*", "m", "overnight", 0, 0.0)}
    assert read_request(line(body=body(model="gpt-4o-mini")), rules(models=star)).model == "gpt-4o-mini"


def test_a_model_that_does_not_serve_the_endpoint_is_refused() -> None:
    models = {"m": Model("m", "m", "overnight", 0, 0.0, endpoints=("/v1/embeddings",))}
    refusal = refused(line(), models=models)
    assert (refusal.code, refusal.param) == ("invalid_request", "body.model")
    assert refusal.message == "The provided model 'm' does not serve the endpoint '/v1/chat/completions'."


def test_a_model_with_a_lone_surrogate_is_unknown_and_shown_as_an_escape() -> None:
    assert told(line(body=body(model="m\ud83d"))) == (
        "model_not_found",
        "The provided model 'm\\ud83d' is not supported by the Batch API.",
        "body.model",
    )


@pytest.mark.parametrize(
    ("endpoint", "word", "param"),
    [
        ("/v1/chat/completions", "Messages", "body.messages"),
        ("/v1/completions", "Prompt", "body.prompt"),
        ("/v1/embeddings", "Input", "body.input"),
        ("/v1/responses", "Input", "body.input"),
        ("/v1/moderations", "Input", "body.input"),
    ],
)
def test_what_to_answer_is_required(endpoint: str, word: str, param: str) -> None:
    raw = line(url=endpoint, body={"model": "m"})
    assert told(raw, endpoint) == ("invalid_request", f"{word} parameter is required.", param)


@pytest.mark.parametrize("endpoint", ["/v1/score", "/v1/rerank"])
def test_other_endpoints_of_the_engine_need_a_model_only(endpoint: str) -> None:
    request = read_request(line(url=endpoint, body={"model": "m", "query": "q"}), rules(endpoint))
    assert request.prompt == b""


@pytest.mark.parametrize("messages", ["text", [], 7, {}])
def test_what_messages_hold_is_the_engines_to_judge(messages: Any) -> None:
    read_request(line(body=body(messages=messages)), rules())


@pytest.mark.parametrize("stream", [True, 1, "true"])
def test_streaming_is_refused(stream: Any) -> None:
    assert told(line(body=body(stream=stream))) == (
        "streaming_unsupported",
        "Chat Completions: Streaming is not supported in the Batch API.",
        "body.stream",
    )


@pytest.mark.parametrize("stream", [False, None])
def test_saying_that_nothing_streams_is_harmless(stream: Any) -> None:
    read_request(line(body=body(stream=stream)), rules())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("background", True),
        ("previous_response_id", "resp_1"),
        ("conversation", "conv_1"),
        ("conversation", {"id": "c"}),
    ],
)
def test_responses_that_need_a_server_with_a_memory_are_refused(name: str, value: Any) -> None:
    raw = line(url="/v1/responses", body={"model": "m", "input": "Hi.", name: value})
    assert told(raw, "/v1/responses") == (
        "invalid_request",
        f"Responses: '{name}' is not supported in the Batch API.",
        f"body.{name}",
    )


@pytest.mark.parametrize("value", [None, False])
def test_responses_may_say_that_they_need_none(value: Any) -> None:
    raw = line(url="/v1/responses", body={"model": "m", "input": "Hi.", "background": value, "conversation": None})
    read_request(raw, rules("/v1/responses"))


@pytest.mark.parametrize(
    "raw",
    [
        b'{"custom_id": "a", ',
        b'{"custom_id": "a" "method": "POST"}',
        b"{'custom_id': 'a'}",
        b'{"custom_id": "a"} {"custom_id": "b"}',
        b'{"custom_id": "a\x00b"}',
        b'{"custom_id": "a\tb"}',
        b'{"n": 01}',
        b'{"n": "\\x"}',
        b'{"n": \\ud83d}',
        b'{"n": "\\ud83d}',
    ],
)
def test_broken_json_is_told_in_openais_words(raw: bytes) -> None:
    assert told(raw) == ("invalid_json_line", NOT_JSON, None)


@pytest.mark.parametrize(
    ("raw", "hint"),
    [
        (b"{", "pretty-printed"),
        (b"[", "pretty-printed"),
        (b'[{"custom_id": "a"}]', "array"),
        (line() + b",", "comma"),
        (b'"text"', "one request object"),
        (b'"{""custom_id"": ""a""}"', "CSV"),
        (b"null", "one request object"),
        (b'{"custom_id": "a", "body": {"temperature": NaN}}', "NaN"),
        (b'{"custom_id": "a", "body": {"x": [-Infinity]}}', "NaN and Infinity"),
    ],
)
def test_a_common_mistake_gets_a_hint(raw: bytes, hint: str) -> None:
    code, message, param = told(raw)
    assert (code, param) == ("invalid_json_line", None)
    assert message.startswith(NOT_JSON)
    assert hint in message


def test_bytes_that_are_not_utf8_are_refused_and_never_replaced() -> None:
    code, message, _ = told(line("caf\xe9").replace(b"\\u00e9", b"\xe9"))
    assert code == "invalid_json_line"
    assert message == NOT_JSON + " It is not UTF-8: see byte 19."
    told(b'{"custom_id": "\xed\xa0\x80"}')  # a surrogate, encoded


@pytest.mark.parametrize("text", ["\u2028\u2029\u0085", "\\u0000", "\\ud83d\\ude00", "\x7f", "😀"])
def test_unusual_characters_are_sent_as_they_stand(text: str) -> None:
    content = f'[{{"role":"user","content":"{text}"}}]'.encode()
    raw = b'{"custom_id":"a","method":"POST","url":"%s","body":{"model":"m","messages":%s}}' % (CHAT.encode(), content)
    assert read_request(raw, rules()).body == b'{"model":"m","messages":%s}' % content


@pytest.mark.parametrize("escape", [r"\ud83d", r"\uDE00\ud83D", r"x\\\udfff", r"\ud83d\ud83d\ude00", r"\\ud83d\ud83d"])
def test_a_lone_surrogate_in_a_body_is_valid_json_and_sent_on(escape: str) -> None:
    raw_body = f'{{"model":"m","messages":[{{"content":"{escape}"}}],"{escape}":1}}'.encode()
    raw = b'{"x":"\\ud800","custom_id":"a","method":"POST","url":"%s","body":%s}' % (CHAT.encode(), raw_body)
    request = read_request(raw, rules())
    assert request.body == raw_body
    assert request.prompt.endswith(f'[{{"content":"{escape}"}}]'.encode())


def test_nesting_may_go_512_levels_deep() -> None:
    def nested(levels: int) -> bytes:
        return line(body=body(x="NEST")).replace(b'"NEST"', b"[" * levels + b"]" * levels)

    read_request(nested(510), rules())  # the line and its body are two levels
    code, message, _ = told(nested(511))
    assert (code, message) == ("invalid_json_line", NOT_JSON + " It is nested deeper than 512 levels.")
    assert told(nested(1_000_000))[0] == "invalid_json_line"


def test_brackets_that_do_not_nest_are_no_depth() -> None:
    read_request(line(body=body(x=[[]] * 2000, y="[" * 2000 + '"' + "{" * 2000)), rules())


def test_nesting_beyond_the_parsers_own_limit_is_refused_too() -> None:
    raw = line(body=body(x="NEST")).replace(b'"NEST"', b"[" * 50_000 + b"]" * 50_000)
    assert refused(raw, max_depth=100_000).code == "invalid_json_line"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=20,
)


def depth(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + max(map(depth, value.values()), default=0)
    return 1 + max(map(depth, value), default=0) if isinstance(value, list) else 0


@given(json_values, st.integers(0, 8))
def test_depth_is_measured_exactly(value: Any, limit: int) -> None:
    assert nested_deeper(json.dumps(value).encode(), limit) == (depth(value) > limit)


@given(
    custom_id=st.text(min_size=1, max_size=50),
    extra=st.dictionaries(st.text(st.characters(exclude_categories=()), max_size=8), json_values, max_size=4),
    ascii_only=st.booleans(),
    spaces=st.sampled_from([(", ", ": "), (",", ":")]),
)
def test_any_body_comes_through_byte_for_byte(
    custom_id: str, extra: dict[str, Any], ascii_only: bool, spaces: tuple[str, str]
) -> None:  # invariant 2
    sent = body(**{f"x-{key}": value for key, value in extra.items()})
    has_surrogate = any(re.search("[\ud800-\udfff]", key) for key in extra)
    raw_body = json.dumps(sent, ensure_ascii=ascii_only or has_surrogate, separators=spaces).encode()
    raw_id = json.dumps(custom_id, ensure_ascii=ascii_only).encode()
    raw = b'{"custom_id":%s,"method":"POST","url":"%s","body":%s}' % (raw_id, CHAT.encode(), raw_body)
    request = read_request(raw, rules())
    assert (request.body, request.raw_id, request.custom_id) == (raw_body, raw_id, custom_id)
