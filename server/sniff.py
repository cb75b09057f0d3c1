"""A first look at a batch file while it is uploaded: is this JSON Lines at all?

Only the first characters count. What is wrong further down is found by validation, which names every line; here a wrong
file (a text, a spreadsheet, an archive, another encoding) is refused before a batch is made of it.
"""

from server import errors
from server.errors import ApiError

#: As much of the beginning as decides: the opening brace and what follows it.
_ENOUGH = 64
_BLANK = b" \t\r\n"
_BOM = b"\xef\xbb\xbf"

_UTF16 = "The file is encoded in UTF-16; save it as UTF-8"
_FOREIGN: tuple[tuple[bytes, str], ...] = (
    (b"\x1f\x8b", "The file is compressed with gzip; upload it unpacked"),
    (b"PK\x03\x04", "The file is a zip archive; upload what is in it"),
    (b"\x28\xb5\x2f\xfd", "The file is compressed with zstd; upload it unpacked"),
    (b"\xff\xfe", _UTF16),
    (b"\xfe\xff", _UTF16),
    (b"{\x00", _UTF16),
    (b"\x00{", _UTF16),
)


class Sniffer:
    """Collects the beginning of a file, a byte-order mark and blank lines skipped, however it is cut into chunks."""

    def __init__(self) -> None:
        self._head = b""
        self._past_bom = False

    def feed(self, data: bytes) -> None:
        """Takes the next bytes of the file."""
        if len(self._head) >= _ENOUGH:
            return
        self._head += data
        if len(self._head) >= len(_BOM) and not self._past_bom:
            self._past_bom = True
            self._head = self._head.removeprefix(_BOM)
        if self._past_bom:
            self._head = self._head.lstrip(_BLANK)[:_ENOUGH]

    def verdict(self, *, complete: bool) -> ApiError | None:
        """Why this is no batch file, or None while nothing speaks against it. `complete`: no more bytes will come."""
        for magic, reason in _FOREIGN:
            if self._head.startswith(magic):
                return errors.not_jsonl(reason)
        if len(self._head) < _ENOUGH and not complete:
            return None
        return None if _begins_object(self._head.lstrip(_BLANK)) else errors.not_jsonl()


def _begins_object(head: bytes) -> bool:
    """Whether the first line opens an object and goes on in it: pretty-printed JSON and arrays are no JSON Lines."""
    if not head.startswith(b"{"):
        return False
    inside = head[1:].lstrip(b" \t")
    return inside[:1] in (b'"', b"}") or (not inside and len(head) >= _ENOUGH)
