"""OpenAI's shapes: records as the JSON objects clients know, every key always there, null where nothing applies.

Key order, defaults and the two-space layout are those of the original's replies.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import orjson
from starlette.responses import Response

from state.records import Batch, Counts, Fault, File, JSONObject, Model, Usage

_LAYOUT = orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE


class JSON(Response):
    """A JSON reply."""

    media_type = "application/json"

    def __init__(self, content: Any, status_code: int = 200, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(content, status_code, headers)

    def render(self, content: Any) -> bytes:
        return orjson.dumps(content, option=_LAYOUT)


def file_object(file: File) -> JSONObject:
    """A File."""
    return {
        "object": "file",
        "id": file.id,
        "purpose": file.purpose,
        "filename": file.filename,
        "bytes": file.bytes,
        "created_at": file.created_at,
        "expires_at": file.expires_at,
        "status": str(file.status),
        "status_details": None,
    }


def file_deleted(file_id: str) -> JSONObject:
    """The reply to a deletion."""
    return {"id": file_id, "object": "file", "deleted": True}


def batch_object(batch: Batch) -> JSONObject:
    """A Batch. `expires_at` stands from creation on; counts and usage are zeros, not null, before anything ran."""
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "model": batch.model,
        "errors": _errors(batch.faults),
        "input_file_id": batch.input_file_id,
        "completion_window": batch.completion_window,
        "status": str(batch.status),
        "output_file_id": batch.output_file_id,
        "error_file_id": batch.error_file_id,
        "created_at": batch.created_at,
        "in_progress_at": batch.in_progress_at,
        "expires_at": batch.expires_at,
        "finalizing_at": batch.finalizing_at,
        "completed_at": batch.completed_at,
        "failed_at": batch.failed_at,
        "expired_at": batch.expired_at,
        "cancelling_at": batch.cancelling_at,
        "cancelled_at": batch.cancelled_at,
        "request_counts": _counts(batch.counts),
        "usage": _usage(batch.usage),
        "metadata": batch.metadata,
    }


def model_object(model: Model) -> JSONObject:
    """A Model."""
    return {"id": model.name, "object": "model", "created": model.created_at, "owned_by": model.owned_by}


def page_object(items: Sequence[JSONObject], *, has_more: bool) -> JSONObject:
    """One page of a list. Clients go on from the last id in `data`, so an empty page never has more."""
    return {
        "object": "list",
        "data": list(items),
        "first_id": items[0]["id"] if items else None,
        "last_id": items[-1]["id"] if items else None,
        "has_more": has_more and bool(items),
    }


def _errors(faults: Sequence[Fault]) -> JSONObject | None:
    if not faults:
        return None
    data = [{"code": f.code, "message": f.message, "param": f.param, "line": f.line} for f in faults]
    return {"object": "list", "data": data}


def _counts(counts: Counts) -> JSONObject:
    return {"total": counts.total, "completed": counts.completed, "failed": counts.failed}


def _usage(usage: Usage) -> JSONObject:
    return {
        "input_tokens": usage.input_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.output_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.total_tokens,
    }
