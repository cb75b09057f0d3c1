"""Another model's name in a request body, and not a byte else changed.

A server that knows its model by one name is asked for it under an alias. Decoding and encoding the body again would lose
what the client wrote (integers beyond 2^53, `1.10`, the order of keys, invariant 2 in spirit), so the value alone is cut
out of the bytes and replaced.
"""

import json
import re
from typing import Never

import msgspec

_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_SPACE = re.compile(rb"[ \t\n\r]*+")
_SCALAR = re.compile(rb"[^,}\] \t\n\r]++")
_NEXT = re.compile(rb'[^"\[\]{}]*+(?:"[^"\\]*+(?:\\.[^"\\]*+)*+"|([\[{])|([\]}]))', re.DOTALL)


def splice_model(body: bytes, model: str) -> bytes:
    """The body with `model` for the value of its top-level key "model", at each place where that key stands.

    JSON's readers mostly take the last of duplicate keys, some the first: all of them are replaced. A body without the
    key comes back as it is. Escaped spellings of the key count.

    Raises:
        ValueError: `body` is not a JSON object.
    """
    name = msgspec.json.encode(model)
    parts, kept = [], 0
    for start, end in _values_of_model(body):
        parts += [body[kept:start], name]
        kept = end
    return b"".join((*parts, body[kept:]))


def _values_of_model(body: bytes) -> list[tuple[int, int]]:
    """Where the values of the key stand: start and end."""
    found = []
    at = _expect(body, _skip(body, 0), b"{")
    at = _skip(body, at)
    while body[at : at + 1] != b"}":
        key_end = _string_end(body, at)
        is_model = _is_model(body[at:key_end])
        start = _skip(body, _expect(body, _skip(body, key_end), b":"))
        end = _value_end(body, start)
        if is_model:
            found.append((start, end))
        at = _skip(body, end)
        if body[at : at + 1] == b",":
            at = _skip(body, at + 1)
    return found


def _is_model(key: bytes) -> bool:
    return key == b'"model"' or (b"\\" in key and json.loads(key) == "model")


def _value_end(body: bytes, start: int) -> int:
    first = body[start : start + 1]
    if first == b'"':
        return _string_end(body, start)
    if first not in (b"{", b"["):
        match = _SCALAR.match(body, start)
        return match.end() if match else _refuse(start)
    depth, at = 0, start
    while True:
        match = _NEXT.match(body, at) or _refuse(at)
        at = match.end()
        depth += 1 if match[1] else -1 if match[2] else 0
        if depth == 0:
            return at


def _string_end(body: bytes, start: int) -> int:
    match = _STRING.match(body, start)
    return match.end() if match else _refuse(start)


def _skip(body: bytes, at: int) -> int:
    match = _SPACE.match(body, at)
    return match.end() if match else at


def _expect(body: bytes, at: int, char: bytes) -> int:
    return at + 1 if body[at : at + 1] == char else _refuse(at)


def _refuse(at: int) -> Never:
    raise ValueError(f"not a JSON object: unexpected byte at {at}")
