"""Putting another model's name into a body changes nothing but that name."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.splice import splice_model
from tests.plan.test_lines import json_values


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b'{"model":"m"}', b'{"model":"new"}'),
        (b' { "a" : 1 , "model"\t:\n "m" , "b" : [ ] } ', b' { "a" : 1 , "model"\t:\n "new" , "b" : [ ] } '),
        (b'{"mod\\u0065l":"m","n":1.10}', b'{"mod\\u0065l":"new","n":1.10}'),
        (b'{"model":"a","x":{"model":"b"},"model":"c"}', b'{"model":"new","x":{"model":"b"},"model":"new"}'),
        (b'{"x":"\\"model\\":\\"m\\"","y":[{"model":"]}"}]}', b'{"x":"\\"model\\":\\"m\\"","y":[{"model":"]}"}]}'),
        (b'{"model":{"model":[1,"}"]},"z":0}', b'{"model":"new","z":0}'),
        (b'{"model":null}', b'{"model":"new"}'),
        (b'{"model":1e5,"seed":12345678901234567890}', b'{"model":"new","seed":12345678901234567890}'),
        (b'{"m":"\\\\","model":"m\\\\\\""}', b'{"m":"\\\\","model":"new"}'),
        (b'{"m":"\\ud83d","model":"m"}', b'{"m":"\\ud83d","model":"new"}'),
        (b"{}", b"{}"),
    ],
)
def test_the_value_alone_is_replaced(before: bytes, after: bytes) -> None:
    assert splice_model(before, "new") == after


def test_a_name_with_quotes_is_escaped() -> None:
    assert splice_model(b'{"model":"m"}', 'a"b\\ü') == '{"model":"a\\"b\\\\ü"}'.encode()


@pytest.mark.parametrize("body", [b"", b"[]", b'"model"', b"{", b'{"model"', b'{"model":', b'{"model":"m', b'{"a":[1}'])
def test_what_is_no_object_is_refused(body: bytes) -> None:
    with pytest.raises(ValueError):
        splice_model(body, "new")


@given(
    st.dictionaries(st.text(max_size=8) | st.just("model"), json_values, max_size=6),
    st.text(max_size=20),
    st.booleans(),
    st.sampled_from([None, 2]),
)
def test_any_body_keeps_all_but_its_model(
    body: dict[str, Any], model: str, ascii_only: bool, indent: int | None
) -> None:
    raw = json.dumps(body, ensure_ascii=ascii_only, indent=indent).encode()
    spliced = splice_model(raw, model)
    assert json.loads(spliced) == (body | {"model": model} if "model" in body else body)
    if "model" not in body:
        assert spliced == raw


@given(st.lists(st.tuples(st.sampled_from(["model", "mode", "models", "x"]), json_values), max_size=6))
def test_putting_the_old_name_back_gives_the_old_bytes(members: list[tuple[str, Any]]) -> None:
    def raw(values: list[tuple[str, Any]]) -> bytes:
        return ("{" + " ,".join(f"{json.dumps(k)} : {json.dumps(v)}" for k, v in values) + "}").encode()

    same = [(key, "old" if key == "model" else value) for key, value in members]
    assert splice_model(raw(members), "old") == raw(same)
