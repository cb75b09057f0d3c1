"""The text fields of an upload: which exist, what they may say, in any order, before or after the file."""

import re
import unicodedata
from dataclasses import dataclass, field

from server import errors
from server.errors import ApiError
from server.multipart import Text

PURPOSES = ("fine-tune", "assistants", "batch", "user_data", "vision", "evals")
BATCH = "batch"

LEAST_TTL_S = 3_600
MOST_TTL_S = 30 * 86_400
LONGEST_FILENAME = 1_000

_ANCHOR = "expires_after[anchor]"
_SECONDS = "expires_after[seconds]"
_INTEGER = re.compile(r"[+-]?[0-9]{1,18}")


@dataclass(slots=True)
class UploadForm:
    """What the text fields have said so far. Each is checked as it comes, so that a bad upload is refused early."""

    purpose: str | None = None
    seconds: int | None = None
    _anchored: bool = False
    _seen: set[str] = field(default_factory=set)

    def accept(self, text: Text) -> None:
        """Takes one field.

        Raises:
            ApiError: 400, the field is unknown, repeated, or its value is not allowed.
        """
        if text.name in self._seen:
            raise ApiError(400, f"The field '{errors.echo(text.name)}' is given twice")
        self._seen.add(text.name)
        if text.name == "purpose":
            if text.value not in PURPOSES:
                raise errors.not_one_of("purpose", text.value, PURPOSES, param="purpose")
            self.purpose = text.value
        elif text.name == _ANCHOR:
            if text.value != "created_at":
                raise errors.not_one_of("expires_after.anchor", text.value, ["created_at"])
            self._anchored = True
        elif text.name == _SECONDS:
            self.seconds = _ttl(text.value)
        else:
            raise errors.property_unexpected(text.name)

    def check_complete(self) -> None:
        """Says that no further field will come.

        Raises:
            ApiError: 400, a required field is missing.
        """
        if self.purpose is None:
            # The original leaves `param` null here; naming the field costs nobody anything.
            raise errors.property_required("purpose", param="purpose")
        if self._anchored != (self.seconds is not None):
            raise errors.property_required("seconds" if self._anchored else "anchor", param="expires_after")

    def expires_at(self, created_at: int, *, batch_ttl: int) -> int | None:
        """When the file expires: as asked, else batch files after `batch_ttl` seconds and others never."""
        if self.seconds is not None:
            return created_at + self.seconds
        return created_at + batch_ttl if self.purpose == BATCH else None


def _ttl(value: str) -> int:
    name = "expires_after.seconds"
    if not _INTEGER.fullmatch(value):
        raise errors.not_an_integer(name, value)
    seconds = int(value)
    if seconds < LEAST_TTL_S:
        raise errors.less_than_minimum(name, LEAST_TTL_S, seconds)
    if seconds > MOST_TTL_S:
        raise errors.greater_than_maximum(name, MOST_TTL_S, seconds)
    return seconds


def label(filename: str | None) -> str:
    """A client's file name as the label it is here: no folders, no control characters, `upload` where nothing is left.

    Raises:
        ApiError: 400, the name is longer than any file system allows.
    """
    if filename is not None and len(filename) > LONGEST_FILENAME:
        raise ApiError(400, f"The file's name is longer than {LONGEST_FILENAME} characters")
    name = re.split(r"[/\\]", filename or "")[-1]
    name = "".join(c for c in name if unicodedata.category(c) not in ("Cc", "Cs", "Zl", "Zp")).strip()
    return name if name not in ("", ".", "..") else "upload"
