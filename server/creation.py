"""Checking the body of POST /v1/batches: plain values in, a `Creation` or the first fault out, no I/O."""

import re
from dataclasses import dataclass
from typing import Any

from server import errors
from server.errors import ApiError
from state.records import JSONObject

#: What a batch may be made of. The last two are extensions: vLLM serves them, OpenAI does not.
ENDPOINTS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/responses",
    "/v1/score",
    "/v1/rerank",
)

LEAST_WINDOW_S = 10
MOST_WINDOW_S = 30 * 86_400
LEAST_TTL_S = 3_600
MOST_TTL_S = 30 * 86_400

_UNITS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}
_WINDOW = re.compile(r"([1-9][0-9]{0,8})([smhd])")
_FILE_ID = re.compile(r"[A-Za-z0-9_.:-]{1,256}")
_REQUIRED = ("input_file_id", "endpoint", "completion_window")
_OPTIONAL = ("metadata", "output_expires_after")


@dataclass(frozen=True, slots=True)
class Creation:
    """What a client asks for. `window_s` is the window in seconds, `completion_window` the client's own words for it."""

    input_file_id: str
    endpoint: str
    completion_window: str
    window_s: float
    metadata: dict[str, str] | None
    output_expires_after: int | None


def parse_creation(body: JSONObject, *, strict_window: bool) -> Creation:
    """Reads the body of a create.

    Raises:
        ApiError: 400, in the platform's wording, for the first fault found.
    """
    for name in body:
        if name not in _REQUIRED and name not in _OPTIONAL:
            raise errors.unknown_parameter(name)
    for name in _REQUIRED:
        if name not in body:
            raise errors.missing_parameter(name)
    window, window_s = _completion_window(body["completion_window"], strict=strict_window)
    return Creation(
        input_file_id=_input_file_id(body["input_file_id"]),
        endpoint=_endpoint(body["endpoint"]),
        completion_window=window,
        window_s=window_s,
        metadata=_metadata(body.get("metadata")),
        output_expires_after=_output_expires_after(body.get("output_expires_after")),
    )


def _string(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise errors.invalid_type(name, "a string", value)
    return value


def _input_file_id(value: Any) -> str:
    """Any id a file could have: whether there is such a file is for validation to find (`errors.data` of the batch)."""
    text = _string("input_file_id", value)
    if not _FILE_ID.fullmatch(text):
        message = f"Invalid 'input_file_id': '{errors.echo(text)}'. Expected an ID that begins with 'file'."
        raise ApiError(400, message, param="input_file_id", code="invalid_value")
    return text


def _endpoint(value: Any) -> str:
    text = _string("endpoint", value)
    if text not in ENDPOINTS:
        raise errors.invalid_value("endpoint", text, errors.listed(ENDPOINTS))
    return text


def _completion_window(value: Any, *, strict: bool) -> tuple[str, float]:
    text = _string("completion_window", value)
    found = _WINDOW.fullmatch(text)
    seconds = int(found[1]) * _UNITS[found[2]] if found else 0
    if text == "24h" or (not strict and LEAST_WINDOW_S <= seconds <= MOST_WINDOW_S):
        return text, float(seconds)
    supported = "'24h'" if strict else "'24h', and as an extension any <integer>(s|m|h|d) from '10s' to '30d'"
    raise errors.invalid_value("completion_window", text, supported)


def _metadata(value: Any) -> dict[str, str] | None:
    """At most 16 pairs of strings, keys up to 64 characters, values up to 512."""
    if value is None:
        return None
    if not isinstance(value, dict):
        raise errors.invalid_type("metadata", "an object", value)
    if len(value) > 16:
        message = (
            "Invalid 'metadata': object too large. Expected an object with at most 16 properties, "
            f"but got an object with {len(value)} properties instead."
        )
        raise ApiError(400, message, param="metadata", code="object_above_max_properties")
    for key, text in value.items():
        _metadata_pair(key, text)
    return value


def _metadata_pair(key: str, value: Any) -> None:
    name = f"metadata.{key}"
    if len(key) > 64:
        message = (
            "Invalid property name in 'metadata': string too long. Expected a property name with maximum length 64, "
            f"but got one with length {len(key)} instead."
        )
        raise ApiError(400, message, param="metadata", code="string_above_max_length")
    text = _string(name, value)
    if len(text) > 512:
        raise errors.string_too_long(name, 512, len(text))
    if "\x00" in key + text:
        raise errors.unreadable_text("metadata")


def _output_expires_after(value: Any) -> int | None:
    """`{"anchor": "created_at", "seconds": 3600..2592000}`: counted from the creation of the result files."""
    name = "output_expires_after"
    if value is None:
        return None
    if not isinstance(value, dict):
        raise errors.invalid_type(name, "an object", value)
    for key in value:
        if key not in ("anchor", "seconds"):
            raise errors.unknown_parameter(f"{name}.{key}")
    for key in ("anchor", "seconds"):
        if key not in value:
            raise errors.missing_parameter(f"{name}.{key}")
    if (anchor := _string(f"{name}.anchor", value["anchor"])) != "created_at":
        raise errors.invalid_value(f"{name}.anchor", anchor, "'created_at'")
    return _seconds(f"{name}.seconds", value["seconds"])


def _seconds(name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise errors.invalid_type(name, "an integer", value)
    if value < LEAST_TTL_S:
        raise errors.below_minimum(name, LEAST_TTL_S, value)
    if value > MOST_TTL_S:
        raise errors.above_maximum(name, MOST_TTL_S, value)
    return value
