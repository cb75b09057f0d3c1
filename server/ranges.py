"""Conditional and partial downloads (RFC 9110, sections 13 and 14), as decisions about headers."""

import re
from dataclasses import dataclass
from urllib.parse import quote

_RANGE = re.compile(r"bytes[ \t]*=[ \t]*(\d{0,18})-(\d{0,18})[ \t]*", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes from `start` up to, not including, `end`."""

    start: int
    end: int

    @property
    def length(self) -> int:
        return self.end - self.start

    def content_range(self, size: int) -> str:
        """The Content-Range header of a 206."""
        return f"bytes {self.start}-{self.end - 1}/{size}"


class Unsatisfiable(Exception):
    """The range lies outside the file: 416."""


def etag(sha256: str) -> str:
    """A strong validator: the digest of the very bytes."""
    return f'"{sha256}"'


def is_unchanged(if_none_match: str | None, tag: str | None) -> bool:
    """Whether the client has these bytes already (304). Weak comparison, as section 13.1.2 asks."""
    if if_none_match is None or tag is None:
        return False
    return if_none_match.strip() == "*" or tag in (t.strip().removeprefix("W/") for t in if_none_match.split(","))


def wanted_span(range_header: str | None, if_range: str | None, *, size: int, tag: str | None) -> Span | None:
    """The part of the file that is asked for; None for the whole.

    A header that is malformed, in another unit, or names several ranges is ignored, as a server may. `If-Range` must be
    the strong tag; a date or anything else means the whole file.

    Raises:
        Unsatisfiable: the range begins behind the end of the file.
    """
    if range_header is None or (if_range is not None and if_range.strip() != tag):
        return None
    found = _RANGE.fullmatch(range_header.strip())
    if found is None or not (found[1] or found[2]):
        return None
    if not found[1]:
        return _last(int(found[2]), size)
    start, last = int(found[1]), int(found[2]) if found[2] else size - 1
    if found[2] and last < start:
        return None
    if start >= size:
        raise Unsatisfiable
    return Span(start, min(last + 1, size))


def _last(count: int, size: int) -> Span:
    if count == 0 or size == 0:
        raise Unsatisfiable
    return Span(max(0, size - count), size)


def attachment(filename: str) -> str:
    """A Content-Disposition header (RFC 6266): the name in ASCII for old clients, and as it is in `filename*`."""
    plain = "".join(c if " " <= c <= "~" and c not in '"\\%' else "_" for c in filename)
    if plain == filename:
        return f'attachment; filename="{plain}"'
    return f"attachment; filename=\"{plain}\"; filename*=UTF-8''{quote(filename, safe='')}"
