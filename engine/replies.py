r"""What an engine answered, checked and made into the line of a result file. Pure: bytes in, bytes out.

A result file is read by people's scripts, line by line, with whatever JSON library they have. So a body is kept as the
engine sent it, key order, `1.10` and 30-digit integers included, and only these bytes are replaced, none of which
changes a value:

- raw CR and LF, which in valid JSON stand between tokens only, become spaces;
- U+2028, U+2029 and U+0085, which `str.splitlines` takes for line ends and which in valid JSON stand in strings only,
  become `\u` escapes.

A lone-surrogate escape (`\ud83d` alone) is valid JSON by RFC 8259 section 7 and is kept.
"""

import json
from typing import Any, Final, NamedTuple, NoReturn

import msgspec
import orjson

from engine.packs import ERROR, OUTPUT
from state.records import OvernightError, Usage

#: Deepest nesting of a reply that is kept: Python's own `json` gives up near 1,000.
MAX_DEPTH: Final = 512
#: How much of an answer that is no JSON is quoted in the error made of it, in characters.
QUOTED: Final = 1000

#: Longest model name and id of a reply that are kept, in characters.
LONGEST_NAME: Final = 256

#: No tokens, or none that were told.
NO_USAGE: Final = Usage()

_SEPARATORS: Final = ((b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"), (b"\xc2\x85", b"\\u0085"))


class NotConforming(OvernightError):
    """A reply body is not what an OpenAI-compatible server sends; the message says in which way."""


class Answer(NamedTuple):
    """A checked reply body, safe for JSON Lines, and what was read from it."""

    body: bytes
    usage: Usage = NO_USAGE
    model: str | None = None
    id: str | None = None


class Ending(NamedTuple):
    """How a request ended: the parts of its result line. `mark` says which file the line belongs to.

    Either `body` is there (the engine answered with `status`), or `code` and `message` are (no answer worth keeping).
    """

    mark: int
    status: int = 0
    body: bytes | None = None
    request_id: str | None = None
    code: str = ""
    message: str = ""
    usage: Usage = NO_USAGE
    model: str | None = None


class _Top(msgspec.Struct):
    """The few top-level fields that are read; msgspec checks the rest without building it."""

    usage: Any = None
    model: Any = None
    id: Any = None
    error: Any = None


_decode_top = msgspec.json.Decoder(_Top).decode


def read_answer(body: bytes) -> Answer:
    """Checks the body of a 2xx reply: strict JSON in UTF-8, an object, nested at most `MAX_DEPTH` deep.

    Raises:
        NotConforming: it is not; such a reply is the engine's failure, not the request's.
    """
    top = _parse(body)
    return Answer(
        body=safe(body),
        usage=usage_of(top.usage),
        model=_name(top.model),
        id=_name(top.id),
    )


def read_refusal(body: bytes, status: int) -> bytes:
    """The body of a non-2xx reply as it goes into the error file.

    An OpenAI error, `{"error": {...}}`, stays as it is; anything else is put into one.
    """
    try:
        if isinstance(_parse(body).error, dict):
            return safe(body)
        return _wrapped_object(_load(body), status)
    except NotConforming:
        return _wrapped(_quote(body), status)


def is_openai_error(body: bytes) -> bool:
    """Whether a body is an OpenAI error: an object whose `error` is an object."""
    try:
        return isinstance(_parse(body).error, dict)
    except NotConforming:
        return False


def safe(body: bytes) -> bytes:
    """The same JSON value on one line, whoever splits the lines. The body must be valid JSON."""
    if b"\n" in body or b"\r" in body:
        body = body.replace(b"\r", b" ").replace(b"\n", b" ")
    if not body.isascii():
        for raw, escaped in _SEPARATORS:
            if raw in body:
                body = body.replace(raw, escaped)
    return body


def result_line(ending: Ending, *, line_id: str, custom_id: bytes) -> bytes:
    """The finished line of a result file. `custom_id` is the raw JSON string of the input (invariant 2)."""
    head = b'{"id": "%s", "custom_id": %s, "response": ' % (line_id.encode(), safe(custom_id))
    if ending.body is None:
        error = json.dumps({"code": ending.code, "message": ending.message}).encode()
        return head + b'null, "error": ' + error + b"}\n"
    request_id = ending.request_id or line_id.removeprefix("batch_req_")
    response = b'{"status_code": %d, "request_id": %s, "body": ' % (ending.status, json.dumps(request_id).encode())
    return b"".join((head, response, ending.body, b'}, "error": null}\n'))


def succeeded(status: int, answer: Answer, request_id: str | None) -> Ending:
    """A line of the output file."""
    return Ending(OUTPUT, status, answer.body, request_id or answer.id, usage=answer.usage, model=answer.model)


def refused(status: int, body: bytes, request_id: str | None) -> Ending:
    """A line of the error file for a request the engine answered otherwise than with 2xx."""
    return Ending(ERROR, status, read_refusal(body, status), request_id)


def unanswered(code: str, message: str) -> Ending:
    """A line of the error file for a request without an answer worth keeping."""
    return Ending(ERROR, code=code, message=message)


def usage_of(value: Any) -> Usage:
    """Token counts, by the names of chat, completions and embeddings or by those of responses; 0 where missing."""
    if not isinstance(value, dict):
        return NO_USAGE
    read = _details(value, "prompt_tokens_details", "input_tokens_details")
    written = _details(value, "completion_tokens_details", "output_tokens_details")
    return Usage(
        input_tokens=_count(value, "prompt_tokens", "input_tokens"),
        cached_tokens=_count(read, "cached_tokens"),
        output_tokens=_count(value, "completion_tokens", "output_tokens"),
        reasoning_tokens=_count(written, "reasoning_tokens"),
    )


def _name(value: Any) -> str | None:
    """A name that the database can keep: no text with NUL, or with half a character (a lone surrogate)."""
    return value if isinstance(value, str) and len(value) <= LONGEST_NAME and value.isprintable() else None


def _details(usage: dict[str, Any], *names: str) -> dict[str, Any]:
    for name in names:
        if isinstance(found := usage.get(name), dict):
            return found
    return {}


def _count(numbers: dict[str, Any], *names: str) -> int:
    """The first of these fields that is a count the database can keep, else 0."""
    for name in names:
        value = numbers.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 48:
            return value
    return 0


def _parse(body: bytes) -> _Top:
    try:
        if not body.isascii():
            body.decode()  # msgspec does not check the UTF-8 of what it skips
        top = _decode_top(body)
    except UnicodeDecodeError as error:
        raise NotConforming(f"the reply is not UTF-8 (byte {error.start})") from None
    except (msgspec.DecodeError, RecursionError) as error:
        top = _parse_slowly(body, error)
    if _may_be_deep(body) and _deeper_than(_load(body), MAX_DEPTH):
        raise NotConforming(f"the reply is nested more than {MAX_DEPTH} deep")
    return top


def _parse_slowly(body: bytes, first: Exception) -> _Top:
    """A second opinion: msgspec refuses lone-surrogate escapes, which are valid JSON; the standard library takes them."""
    try:
        value = json.loads(body.decode(), parse_constant=_no_constant)
    except (ValueError, RecursionError):
        raise NotConforming(f"the reply is not valid JSON: {first}") from None
    if not isinstance(value, dict):
        raise NotConforming("the reply is not a JSON object")
    return _Top(**{name: value.get(name) for name in _Top.__struct_fields__})


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _load(body: bytes) -> Any:
    """The value of a body that has been checked; the slower parser where the fast one is too strict."""
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        try:
            return json.loads(body)
        except (ValueError, RecursionError) as error:  # an integer of 5,000 digits, say
            raise NotConforming(f"the reply cannot be read: {error}") from None


def _may_be_deep(body: bytes) -> bool:
    return body.count(b"[") + body.count(b"{") > MAX_DEPTH


def _deeper_than(value: Any, limit: int) -> bool:
    """Goes down level by level, so that no recursion limit is met."""
    level = [value]
    for _ in range(limit):
        children = (c for node in level for c in (node.values() if isinstance(node, dict) else node))
        level = [c for c in children if isinstance(c, dict | list)]
        if not level:
            return False
    return True


def _wrapped_object(value: Any, status: int) -> bytes:
    """An error that is JSON but not OpenAI's: `{"detail": ...}`, `{"error": "text"}`, or the fields without `error`."""
    told = next((value[k] for k in ("message", "detail", "error") if value.get(k)), None)
    message = told if isinstance(told, str) else _quote(json.dumps(value if told is None else told).encode())
    kind, param, code = value.get("type"), value.get("param"), value.get("code")
    return _wrapped(
        message,
        status,
        kind=kind if isinstance(kind, str) else None,
        param=param if isinstance(param, str) else None,
        code=code if isinstance(code, str | int) else None,
    )


def _wrapped(
    message: str, status: int, *, kind: str | None = None, param: str | None = None, code: str | int | None = None
) -> bytes:
    kind = kind or ("invalid_request_error" if status < 500 else "server_error")
    message = message or f"the engine answered {status} without a body"
    error = {"message": message, "type": kind, "param": param, "code": code}
    return json.dumps({"error": error}).encode()


def _quote(body: bytes) -> str:
    return body[: 4 * QUOTED].decode(errors="replace")[:QUOTED].strip()
