r"""JSON as bytes: what a line of an input file must be checked for that msgspec does not check, or checks too hard.

msgspec skips over a value it is asked to hand back raw. Then it does not look at UTF-8, recurses on the C stack for every
level of nesting, and refuses an escape such as `\ud83d` that has no partner. The last is valid JSON (RFC 8259, section
8.2), so such a line is decoded with the escape concealed, and what is kept of it is revealed again, byte for byte.
"""

import json
import re
import secrets
from collections.abc import Callable
from itertools import accumulate
from typing import TypeVar

import msgspec

S = TypeVar("S")
Reveal = Callable[[msgspec.Raw], bytes]

#: A string, or what is left of one that does not end: so that no search begins anew at each quote of a broken line.
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_ESCAPE = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"  # a pair: one character
    rb"|\\u([dD][89a-fA-F][0-9a-fA-F]{2})"  # no pair
    rb"|\\.",
    re.DOTALL,
)


def nested_deeper(data: bytes, limit: int) -> bool:
    """Whether brackets outside strings nest deeper than `limit` levels. Never recurses, never builds objects."""
    if data.count(b"[") + data.count(b"{") <= limit:
        return False
    steps = _STRING.sub(b"", data).translate(_STEPS, _NO_BRACKETS)
    return max(accumulate(memoryview(steps).cast("b")), default=0) > limit


def decode(data: bytes, decoder: "msgspec.json.Decoder[S]") -> tuple[S, Reveal]:
    """The value, and what turns a raw part of it into the bytes of `data` that it stands for.

    Raises:
        msgspec.DecodeError: `data` is not JSON, or not what the decoder expects.
    """
    try:
        return decoder.decode(data), bytes
    except msgspec.DecodeError:
        if not _SURROGATE.search(data):
            raise
    concealed, reveal = _conceal(data)
    return decoder.decode(concealed), reveal


def _conceal(data: bytes) -> tuple[bytes, Reveal]:
    r"""Puts a name that stands nowhere in `data` for the `\u` of each unpaired surrogate; its digits stay.

    The name begins with a letter that no JSON value begins with, so what is no JSON does not become JSON. It is random,
    so that nobody can write a line that holds every name tried.
    """
    name = b"s" + secrets.token_hex(12).encode()
    while name in data:
        name = b"s" + secrets.token_hex(12).encode()
    concealed = _ESCAPE.sub(lambda found: name + found[1] if found[1] else found[0], data)
    return concealed, lambda part: bytes(part).replace(name, b"\\u")


def text(raw: bytes) -> str:
    """A JSON string's value. Unpaired surrogates are kept: see `has_surrogates`."""
    if b"\\" not in raw:
        return raw[1:-1].decode()
    value = json.loads(raw)
    assert isinstance(value, str)
    return value


def has_surrogates(value: str) -> bool:
    """Whether a string holds a code unit that no UTF-8 text can carry."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return True
    return False


def shown(value: str, limit: int = 200) -> str:
    """A client's text as it may stand in a message: shortened, and without surrogates."""
    whole = value.encode("utf-8", "backslashreplace").decode()
    return whole if len(whole) <= limit else whole[:limit] + "…"


def kind(raw: bytes) -> str:
    """What a JSON value is, with its article, as OpenAI's messages name it."""
    names = {b'"': "a string", b"{": "an object", b"[": "an array", b"t": "a boolean", b"f": "a boolean", b"n": "null"}
    name = names.get(raw[:1])
    if name is None:
        name = "a number" if any(c in raw for c in b".eE") else "an integer"
    return name
