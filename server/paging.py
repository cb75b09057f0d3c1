"""Query parameters of the list routes. The two lists differ, on the original too: in limits, defaults and wording."""

import re
from dataclasses import dataclass
from typing import Literal

from starlette.datastructures import QueryParams

from server import errors
from server.errors import ApiError

Order = Literal["asc", "desc"]

MOST_FILES = 10_000
MOST_BATCHES = 100
USUAL_BATCHES = 20

_INTEGER = re.compile(r"[+-]?[0-9]{1,18}")
_ID = re.compile(r"[A-Za-z0-9_-]{1,128}")


@dataclass(frozen=True, slots=True)
class FilesQuery:
    """GET /v1/files."""

    limit: int
    after: str | None
    order: Order
    purpose: str | None


@dataclass(frozen=True, slots=True)
class BatchesQuery:
    """GET /v1/batches. A limit of 0 asks for an empty page."""

    limit: int
    after: str | None


def is_id(text: str) -> bool:
    """Whether a text could be an id of ours. Whatever else is asked for does not exist, and no database need see it."""
    return _ID.fullmatch(text) is not None


def files_query(params: QueryParams) -> FilesQuery:
    """Reads the query of GET /v1/files; an empty value is as good as none.

    Raises:
        ApiError: 400, in the wording of the Files routes.
    """
    return FilesQuery(
        limit=_files_limit(params.get("limit", "")),
        after=params.get("after") or None,
        order=_order(params.get("order") or "desc"),
        purpose=params.get("purpose") or None,
    )


def batches_query(params: QueryParams) -> BatchesQuery:
    """Reads the query of GET /v1/batches; an empty value is as good as none.

    Raises:
        ApiError: 400, in the platform's wording.
    """
    return BatchesQuery(limit=_batches_limit(params.get("limit", "")), after=params.get("after") or None)


def unknown_file_after() -> ApiError:
    """404 for a cursor that names no file."""
    return ApiError(404, "Resource not found.", param="after")


def _files_limit(text: str) -> int:
    if not text:
        return MOST_FILES
    if not _INTEGER.fullmatch(text):
        raise errors.not_an_integer("limit", text)
    limit = int(text)
    if limit < 1:
        raise errors.less_than_minimum("limit", 1, limit)
    if limit > MOST_FILES:
        raise errors.greater_than_maximum("limit", MOST_FILES, limit)
    return limit


def _batches_limit(text: str) -> int:
    if not text:
        return USUAL_BATCHES
    if not _INTEGER.fullmatch(text):
        raise errors.invalid_type("limit", "an integer", text)
    limit = int(text)
    if limit < 0:
        raise errors.below_minimum("limit", 0, limit)
    if limit > MOST_BATCHES:
        raise errors.above_maximum("limit", MOST_BATCHES, limit)
    return limit


def _order(text: str) -> Order:
    if text == "asc":
        return "asc"
    if text == "desc":
        return "desc"
    raise errors.not_one_of("order", text, ["asc", "desc"])
