"""One line of an input file: read, checked, and taken apart without changing a byte of what will be sent.

The codes and messages are OpenAI's where they are known. A line is refused for one reason, the first that applies, in this
order: its length, its JSON, custom_id, method, url, body, and within the body model, messages (or prompt, or input),
stream, and what else cannot be in a batch. Duplicates and mixed models are the whole file's concern: see
`engine.orchestrator.scan`. What is decided about odd input, and the test for each decision: docs/input-format.md.
"""

import re
from dataclasses import dataclass
from typing import NamedTuple, Self

import msgspec
from msgspec import Raw

from engine import bodies
from engine.bodies import Catalogue, Refusal
from engine.json_text import Reveal, decode, has_surrogates, kind, nested_deeper, shown, text
from state.settings import Settings

NOT_JSON = "This line is not parseable as valid JSON."
_ABSENT = Raw()
_NAN = re.compile(rb"[:\[,]\s*-?(?:NaN|Infinity)\b")


@dataclass(frozen=True, slots=True)
class Limits:
    """What is too much, as the settings say. Sizes are bytes."""

    max_requests: int
    max_line_bytes: int
    max_custom_id_bytes: int
    max_depth: int

    @classmethod
    def of(cls, settings: Settings) -> Self:
        """The limits among the settings."""
        return cls(settings.max_requests, settings.max_line_bytes, settings.max_custom_id_bytes, settings.max_depth)


@dataclass(frozen=True, slots=True)
class Rules:
    """What the lines of one batch are held against."""

    endpoint: str
    catalogue: Catalogue
    limits: Limits


class Request(NamedTuple):
    """A line that may run. `raw_id` and `body` are the bytes of the line; `prompt` is what orders it, empty if nothing."""

    custom_id: str
    raw_id: bytes
    model: str
    body: bytes
    prompt: bytes


class LineRefused(Refusal):
    """A line that may not run. `custom_id` (and its raw bytes) where it has a good one: duplicates of it are told too."""

    def __init__(self, reason: Refusal, custom_id: str | None = None, raw_id: bytes = b"") -> None:
        super().__init__(reason.code, reason.message, reason.param)
        self.custom_id, self.raw_id = custom_id, raw_id


class Envelope(msgspec.Struct):
    """The four keys of a line, each as it stands there; empty where it is absent. Other keys are passed over."""

    custom_id: Raw = _ABSENT
    method: Raw = _ABSENT
    url: Raw = _ABSENT
    body: Raw = _ABSENT


_ENVELOPE = msgspec.json.Decoder(Envelope)


def read_request(line: bytes, rules: Rules) -> Request:
    """Checks one line, line ending and all.

    Raises:
        LineRefused: with the first reason, in the order given above.
    """
    try:
        envelope, reveal = _decode_line(line, rules)
        raw_id = reveal(envelope.custom_id)
        custom_id = _check_custom_id(raw_id, rules.limits.max_custom_id_bytes)
    except Refusal as reason:
        raise LineRefused(reason) from None
    try:
        _check_address(reveal(envelope.method), reveal(envelope.url), rules.endpoint)
        fields = _decode_body(bytes(envelope.body))
        model = bodies.check_body(fields, rules.endpoint, rules.catalogue, reveal)
    except Refusal as reason:
        raise LineRefused(reason, custom_id, raw_id) from None
    prompt = bodies.prompt_key(fields, rules.endpoint, reveal)
    return Request(custom_id, raw_id, model, reveal(envelope.body), prompt)


def too_long(rules: Rules) -> LineRefused:
    """The refusal of a line that was not even read into memory."""
    return LineRefused(Refusal("invalid_request", f"This line is longer than {rules.limits.max_line_bytes:,} bytes."))


def duplicate(custom_id: str) -> Refusal:
    """The refusal of a line whose custom_id was there before."""
    message = (
        f"The custom_id '{shown(custom_id)}' for this request is a duplicate of another request. "
        "The custom_id parameter must be unique for each request in a batch."
    )
    return Refusal("duplicate_custom_id", message, "custom_id")


def mismatched(model: str) -> Refusal:
    """The refusal of a line that asks for another model than the lines before."""
    message = (
        f"The model '{shown(model)}' for this request does not match the rest of the batch. "
        "Each batch must contain requests for a single model."
    )
    return Refusal("mismatched_model", message, "body.model")


def _decode_line(line: bytes, rules: Rules) -> tuple[Envelope, Reveal]:
    try:
        line.decode()
    except UnicodeDecodeError as error:
        raise Refusal("invalid_json_line", f"{NOT_JSON} It is not UTF-8: see byte {error.start + 1}.") from None
    if nested_deeper(line, rules.limits.max_depth):
        raise Refusal("invalid_json_line", f"{NOT_JSON} It is nested deeper than {rules.limits.max_depth} levels.")
    try:
        return decode(line, _ENVELOPE)
    except (msgspec.DecodeError, RecursionError):
        raise Refusal("invalid_json_line", NOT_JSON + _hint(line.strip())) from None


def _decode_body(raw: bytes) -> bodies.Fields:
    if not raw:
        raise _missing("body")
    if not raw.startswith(b"{"):
        raise _wrong_type("body", "an object", raw)
    return bodies.DECODER.decode(raw)


def _check_custom_id(raw: bytes, limit: int) -> str:
    value = _string("custom_id", raw)
    if not value:
        raise Refusal("invalid_value", "Invalid 'custom_id': it must not be empty.", "custom_id")
    if has_surrogates(value):
        message = f"Invalid 'custom_id': '{shown(value)}' holds an unpaired surrogate, which UTF-8 cannot carry."
        raise Refusal("invalid_value", message, "custom_id")
    if len(size := value.encode()) > limit:
        message = (
            f"Invalid 'custom_id': string too long. Expected at most {limit:,} bytes of UTF-8, but got {len(size):,}."
        )
        raise Refusal("string_above_max_length", message, "custom_id")
    return value


def _check_address(method: bytes, url: bytes, endpoint: str) -> None:
    r"""Method and url. Any case of POST will do; escapes in the url are resolved (PHP writes `\/v1`)."""
    verb = _string("method", method)
    if verb.upper() != "POST":
        raise Refusal("invalid_value", f"Invalid value: '{shown(verb)}'. Supported values are: 'POST'.", "method")
    if _string("url", url) != endpoint:
        message = "The URL provided for this request does not match the batch endpoint."
        raise Refusal("invalid_url", message, "url")


def _string(name: str, raw: bytes) -> str:
    if not raw:
        raise _missing(name)
    if not raw.startswith(b'"'):
        raise _wrong_type(name, "a string", raw)
    return text(raw)


def _missing(name: str) -> Refusal:
    return Refusal("missing_required_parameter", f"Missing required parameter: '{name}'.", name)


def _wrong_type(name: str, wanted: str, raw: bytes) -> Refusal:
    message = f"Invalid type for '{name}': expected {wanted}, but got {kind(raw)} instead."
    return Refusal("invalid_type", message, name)


def _hint(line: bytes) -> str:
    """What probably went wrong, where it shows; most often nothing does."""
    if line in (b"{", b"["):
        return " The file looks pretty-printed: each request must stand on one line."
    if line.startswith(b'"{""'):
        return " It looks like CSV: a spreadsheet has put it in quotes and doubled its own."
    if line.startswith(b"["):
        return " It begins an array: each line must hold one request object, without brackets or commas around it."
    if line.endswith((b"},", b"}]")):
        return " No comma or bracket may follow a request."
    if _NAN.search(line):
        return " NaN and Infinity are not JSON."
    return "" if line.startswith(b"{") else " Each line must hold one request object."
