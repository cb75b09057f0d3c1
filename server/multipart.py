"""Reading a multipart form while it arrives: bytes in, events out, nothing kept but what is in hand.

The parser is python-multipart's; this module turns its callbacks into a list of events per chunk and holds the limits.
It does no I/O and knows nothing of files or purposes. Starlette's own `request.form()` would spool the whole upload first.
"""

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from server.errors import ApiError

if TYPE_CHECKING:  # the library defines this type for checkers only
    from python_multipart.multipart import MultipartCallbacks

MOST_PARTS = 16
LONGEST_TEXT = 8 * 1024
MOST_HEADERS = 8
LONGEST_HEADER = 8 * 1024

# The parser warns about each malformed form, quoting it. The client is told; a log line a stranger can write is no use.
logging.getLogger("python_multipart").setLevel(logging.ERROR)


@dataclass(frozen=True, slots=True)
class Text:
    """A whole text field."""

    name: str
    value: str


@dataclass(frozen=True, slots=True)
class FileBegin:
    """The file part begins; `filename` is what the client called it, None where it gave no name."""

    filename: str | None


@dataclass(frozen=True, slots=True)
class FileData:
    """Some of the file part's bytes."""

    data: bytes


@dataclass(frozen=True, slots=True)
class FileEnd:
    """The file part is complete."""


Event = Text | FileBegin | FileData | FileEnd


class FormReader:
    """One form. The part named `file` becomes File events, with or without a filename; every other part is a text field."""

    def __init__(self, content_type: str) -> None:
        """Reads the boundary.

        Raises:
            ApiError: 415 when the body is no multipart form, 400 when it has no usable boundary.
        """
        kind, options = parse_options_header(content_type)
        if kind != b"multipart/form-data":
            raise ApiError(415, "Files are uploaded as multipart/form-data, with the fields 'file' and 'purpose'.")
        boundary = options.get(b"boundary", b"")
        if not boundary:
            raise _malformed("its Content-Type names no boundary")
        callbacks: MultipartCallbacks = {
            "on_part_begin": self._part_begins,
            "on_header_field": self._header_name,
            "on_header_value": self._header_value,
            "on_header_end": self._header_ends,
            "on_headers_finished": self._headers_end,
            "on_part_data": self._part_data,
            "on_part_end": self._part_ends,
            "on_end": self._form_ends,
        }
        try:
            self._parser = MultipartParser(
                boundary, callbacks, max_header_count=MOST_HEADERS, max_header_size=LONGEST_HEADER
            )
        except FormParserError as error:
            raise _malformed("its boundary is too long") from error
        self._events: list[Event] = []
        self._parts = 0
        self._complete = False
        self._start_part()

    def feed(self, data: bytes) -> list[Event]:
        """Takes the next bytes of the body; the events they complete, in order.

        Raises:
            ApiError: 400, the form is malformed or beyond a limit.
        """
        self._events = []
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise _malformed(str(error)) from error
        return self._events

    def finish(self) -> None:
        """Says that the body has ended.

        Raises:
            ApiError: 400, the form's closing boundary never came, so the file may be cut short.
        """
        if not self._complete:
            raise _malformed("it ends before its closing boundary")

    def _start_part(self) -> None:
        self._header = bytearray()
        self._content = bytearray()
        self._headers: dict[bytes, bytes] = {}
        self._value = bytearray()
        self._name = ""
        self._is_file = False

    def _part_begins(self) -> None:
        self._parts += 1
        if self._parts > MOST_PARTS:
            raise _malformed(f"it has more than {MOST_PARTS} parts")
        self._start_part()

    def _header_name(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._content += data[start:end]

    def _header_ends(self) -> None:
        self._headers[bytes(self._header).lower()] = bytes(self._content)
        self._header, self._content = bytearray(), bytearray()

    def _headers_end(self) -> None:
        disposition = self._headers.get(b"content-disposition", b"").decode("latin-1")
        _, options = parse_options_header(disposition)
        if b"name" not in options:
            raise _malformed("a part has no name")
        self._name = options[b"name"].decode("utf-8", "replace")
        self._is_file = self._name == "file"
        if self._is_file:
            filename = options.get(b"filename")
            self._events.append(FileBegin(None if filename is None else filename.decode("utf-8", "replace")))

    def _part_data(self, data: bytes, start: int, end: int) -> None:
        if self._is_file:
            self._events.append(FileData(data[start:end]))
            return
        self._value += data[start:end]
        if len(self._value) > LONGEST_TEXT:
            raise _malformed(f"a text field is longer than {LONGEST_TEXT} bytes")

    def _part_ends(self) -> None:
        if self._is_file:
            self._events.append(FileEnd())
            return
        try:
            self._events.append(Text(self._name, self._value.decode("utf-8")))
        except UnicodeDecodeError as error:
            raise _malformed("a text field is not UTF-8") from error

    def _form_ends(self) -> None:
        self._complete = True


def _malformed(reason: str) -> ApiError:
    return ApiError(400, f"Could not parse multipart form: {reason}.")
