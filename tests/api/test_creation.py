"""The body of POST /v1/batches, fault by fault."""

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.creation import Creation, parse_creation
from server.errors import ApiError

BODY: dict[str, Any] = {
    "input_file_id": "file-abc",
    "endpoint": "/v1/chat/completions",
    "completion_window": "24h",
}
SUPPORTED = (
    "'/v1/chat/completions', '/v1/completions', '/v1/embeddings', '/v1/responses', '/v1/score', and '/v1/rerank'"
)


def refusal(body: dict[str, Any], *, strict: bool = False) -> tuple[str, str | None, str | None]:
    with pytest.raises(ApiError) as caught:
        parse_creation(body, strict_window=strict)
    assert (caught.value.status, caught.value.kind) == (400, "invalid_request_error")
    return caught.value.message, caught.value.param, caught.value.code


def without(name: str) -> dict[str, Any]:
    return {key: value for key, value in BODY.items() if key != name}


def test_the_three_required_fields_make_a_batch() -> None:
    assert parse_creation(BODY, strict_window=True) == Creation(
        input_file_id="file-abc",
        endpoint="/v1/chat/completions",
        completion_window="24h",
        window_s=86_400.0,
        metadata=None,
        output_expires_after=None,
    )


@pytest.mark.parametrize("name", ["input_file_id", "endpoint", "completion_window"])
def test_each_required_field_is_missed(name: str) -> None:
    assert refusal(without(name)) == (f"Missing required parameter: '{name}'.", name, "missing_required_parameter")


def test_an_empty_body_misses_the_first_field() -> None:
    assert refusal({})[1] == "input_file_id"


def test_a_field_that_does_not_exist_is_refused() -> None:
    assert refusal({**BODY, "priority": 1}) == ("Unknown parameter: 'priority'.", "priority", "unknown_parameter")


@pytest.mark.parametrize("endpoint", ["/v1/invalid", "/chat/completions", "", "/v1/moderations"])
def test_an_endpoint_that_is_not_served_is_refused(endpoint: str) -> None:
    message = f"Invalid value: '{endpoint}'. Supported values are: {SUPPORTED}."
    assert refusal({**BODY, "endpoint": endpoint}) == (message, "endpoint", "invalid_value")


@pytest.mark.parametrize(
    ("value", "got"),
    [(5, "an integer"), (None, "null"), (True, "a boolean"), ([], "an array"), (1.5, "a decimal number")],
)
def test_a_field_of_the_wrong_type_is_refused(value: Any, got: str) -> None:
    for name in BODY:
        message = f"Invalid type for '{name}': expected a string, but got {got} instead."
        assert refusal({**BODY, name: value}) == (message, name, "invalid_type")


@pytest.mark.parametrize(
    ("window", "seconds"), [("24h", 86_400), ("10s", 10), ("90m", 5_400), ("7d", 604_800), ("30d", 2_592_000)]
)
def test_a_window_is_an_integer_and_a_unit(window: str, seconds: int) -> None:
    parsed = parse_creation({**BODY, "completion_window": window}, strict_window=False)
    assert (parsed.completion_window, parsed.window_s) == (window, float(seconds))


@pytest.mark.parametrize(
    "window", ["", "soon", "-1h", "0h", "9s", "31d", "721h", "1.5h", "24H", "24 h", " 24h", "1h\n", "１h", "h"]
)
def test_any_other_window_is_refused(window: str) -> None:
    message, param, code = refusal({**BODY, "completion_window": window})
    assert message.startswith(f"Invalid value: '{window}'. Supported values are: '24h'")
    assert (param, code) == ("completion_window", "invalid_value")


def test_strictly_only_24h_is_a_window() -> None:
    message = "Invalid value: '1h'. Supported values are: '24h'."
    assert refusal({**BODY, "completion_window": "1h"}, strict=True) == (message, "completion_window", "invalid_value")


@pytest.mark.parametrize("file_id", ["", "a b", "../x", "file\x00", "f" * 300, "ü"])
def test_what_cannot_be_a_file_id_is_refused(file_id: str) -> None:
    assert refusal({**BODY, "input_file_id": file_id})[1:] == ("input_file_id", "invalid_value")


def test_metadata_of_16_pairs_of_64_and_512_characters_is_kept() -> None:
    metadata = {f"{n:064}": "ü" * 512 for n in range(16)}
    assert parse_creation({**BODY, "metadata": metadata}, strict_window=False).metadata == metadata
    assert parse_creation({**BODY, "metadata": {}}, strict_window=False).metadata == {}


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        (
            {"tags": ["x"]},
            (
                "Invalid type for 'metadata.tags': expected a string, but got an array instead.",
                "metadata.tags",
                "invalid_type",
            ),
        ),
        (
            {"n": None},
            ("Invalid type for 'metadata.n': expected a string, but got null instead.", "metadata.n", "invalid_type"),
        ),
        (
            [],
            ("Invalid type for 'metadata': expected an object, but got an array instead.", "metadata", "invalid_type"),
        ),
        (
            {str(n): "v" for n in range(17)},
            (
                "Invalid 'metadata': object too large. Expected an object with at most 16 properties, "
                "but got an object with 17 properties instead.",
                "metadata",
                "object_above_max_properties",
            ),
        ),
        (
            {"k": "v" * 513},
            (
                "Invalid 'metadata.k': string too long. Expected a string with maximum length 512, "
                "but got a string with length 513 instead.",
                "metadata.k",
                "string_above_max_length",
            ),
        ),
        (
            {"k" * 65: "v"},
            (
                "Invalid property name in 'metadata': string too long. Expected a property name with maximum length 64, "
                "but got one with length 65 instead.",
                "metadata",
                "string_above_max_length",
            ),
        ),
        (
            {"k": "a\x00b"},
            (
                "Invalid 'metadata': NUL characters and unpaired surrogates are not allowed.",
                "metadata",
                "invalid_value",
            ),
        ),
    ],
)
def test_metadata_beyond_its_limits_is_refused(metadata: Any, expected: tuple[str, str, str]) -> None:
    assert refusal({**BODY, "metadata": metadata}) == expected


@pytest.mark.parametrize(
    ("value", "param", "code"),
    [
        ({"anchor": "created_at", "seconds": 1}, "output_expires_after.seconds", "integer_below_min_value"),
        ({"anchor": "created_at", "seconds": 2_592_001}, "output_expires_after.seconds", "integer_above_max_value"),
        ({"anchor": "created_at", "seconds": "3600"}, "output_expires_after.seconds", "invalid_type"),
        ({"anchor": "created_at", "seconds": True}, "output_expires_after.seconds", "invalid_type"),
        ({"anchor": "now", "seconds": 3600}, "output_expires_after.anchor", "invalid_value"),
        ({"seconds": 3600}, "output_expires_after.anchor", "missing_required_parameter"),
        ({"anchor": "created_at"}, "output_expires_after.seconds", "missing_required_parameter"),
        ({"anchor": "created_at", "seconds": 3600, "x": 1}, "output_expires_after.x", "unknown_parameter"),
        (3600, "output_expires_after", "invalid_type"),
    ],
)
def test_output_expires_after_beyond_its_limits_is_refused(value: Any, param: str, code: str) -> None:
    assert refusal({**BODY, "output_expires_after": value})[1:] == (param, code)


def test_output_expires_after_is_kept_in_seconds() -> None:
    body = {**BODY, "output_expires_after": {"anchor": "created_at", "seconds": 3600}, "metadata": None}
    assert parse_creation(body, strict_window=False).output_expires_after == 3600


JSON = (
    st.sampled_from([None, True, 5, -1, 1.5, "", "24h", "created_at", [], ["x"], {}, {"seconds": 3600}, {"": 1}])
    | st.text()
)


@given(st.fixed_dictionaries({}, optional=dict.fromkeys((*BODY, "metadata", "output_expires_after", "other"), JSON)))
def test_no_body_makes_it_fail_otherwise_than_by_a_400(body: dict[str, Any]) -> None:
    with contextlib.suppress(ApiError):
        parse_creation(body, strict_window=False)
