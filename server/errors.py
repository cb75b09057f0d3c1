"""Every refusal and failure as OpenAI's error envelope. This is the only module that maps exceptions to HTTP.

Two wordings live side by side on the original, and clients read both: the Files routes speak like a JSON-schema validator
(`param` and `code` mostly null), all others like OpenAI's platform (`param` and `code` filled). The texts are OpenAI's
wherever one is known, because scripts branch on them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from starlette.exceptions import HTTPException

from state.records import (
    BatchNotCancellable,
    BatchNotFound,
    FileInUse,
    FileNotFound,
    ModelNotFound,
    OutcomeUnknown,
    OutOfSpace,
    Unavailable,
)

INVALID = "invalid_request_error"
SERVER = "server_error"

#: Tells the SDKs not to send the same request again; without it they repeat every 409.
DO_NOT_RETRY = {"x-should-retry": "false"}

_LONGEST_ECHO = 200


class ApiError(Exception):
    """An answer that is an error: status, envelope, headers. `beside` goes next to `error` in the body."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        beside: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.kind, self.param, self.code = status, message, kind, param, code
        self.headers = {name.lower(): value for name, value in (headers or {}).items()}
        self.beside = dict(beside or {})

    def body(self) -> dict[str, Any]:
        """The envelope: always all four keys."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error, **self.beside}


def from_exception(error: BaseException, *, method: str, path: str, request_id: str) -> ApiError:
    """What a client is told about an exception. Only what it can act upon: the rest is in the log."""
    match error:
        case ApiError():
            return error
        case FileNotFound():
            return ApiError(404, f"No such File object: {echo(error.object_id)}", param="id")
        case BatchNotFound():
            return ApiError(404, f"No batch found with id '{echo(error.object_id)}'.")
        case ModelNotFound():
            message = f"The model '{echo(error.object_id)}' does not exist"
            return ApiError(404, message, param="model", code="model_not_found")
        case BatchNotCancellable():
            return ApiError(409, f"Cannot cancel a batch with status '{error.status}'.", headers=DO_NOT_RETRY)
        case FileInUse():
            message = f"File {error.file_id} is the input of batch {error.batch_id}, which is still validating."
            return ApiError(409, message, param="id", code="file_in_use", headers=DO_NOT_RETRY)
        case OutOfSpace():
            message = "The server's disk is full. Nothing was stored; try again when there is room."
            return ApiError(507, message, kind=SERVER, code="insufficient_storage", headers={"retry-after": "30"})
        case OutcomeUnknown():
            message = "The server's database stopped answering in the middle. Look whether it was done, then try again."
            return ApiError(503, message, kind=SERVER, code="outcome_unknown", headers={"retry-after": "1"})
        case Unavailable():
            message = "The server's database or object store does not answer. Nothing was changed; try again."
            return ApiError(503, message, kind=SERVER, code="unavailable", headers={"retry-after": "1"})
        case HTTPException():
            return _from_routing(error, method, path)
        case _:
            message = f"The server had an error while processing your request. Its log tells more about {request_id}."
            return ApiError(500, message, kind=SERVER, code="internal_error")


def _from_routing(error: HTTPException, method: str, path: str) -> ApiError:
    if error.status_code == 404:
        return ApiError(404, f"Invalid URL ({method} {echo(path)})")
    if error.status_code == 405:
        message = f"Not allowed to {method} on {echo(path)}. (HINT: Perhaps you meant to use a different HTTP method?)"
        return ApiError(405, message, headers=error.headers, code="method_not_supported")
    return ApiError(error.status_code, str(error.detail), headers=error.headers)


def echo(text: str) -> str:
    """A client's text as it may stand in a message: bounded, and without what no JSON can hold."""
    safe = text.encode("utf-8", "backslashreplace").decode("utf-8")
    return safe if len(safe) <= _LONGEST_ECHO else safe[:_LONGEST_ECHO] + "…"


# ---- the platform's wording -----------------------------------------------------------------------------


def kind_of(value: Any) -> str:
    """A JSON value's type as OpenAI names it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    names = {int: "an integer", float: "a decimal number", str: "a string", list: "an array", dict: "an object"}
    return names.get(type(value), "an unknown type")


def missing_parameter(name: str) -> ApiError:
    """400 for a required parameter that is not there."""
    message = f"Missing required parameter: '{name}'."
    return ApiError(400, message, param=name, code="missing_required_parameter")


def unknown_parameter(name: str) -> ApiError:
    """400 for a parameter that does not exist."""
    return ApiError(400, f"Unknown parameter: '{echo(name)}'.", param=echo(name), code="unknown_parameter")


def invalid_type(name: str, expected: str, value: Any) -> ApiError:
    """400 for a parameter of another type; `expected` carries its article ("a string")."""
    message = f"Invalid type for '{echo(name)}': expected {expected}, but got {kind_of(value)} instead."
    return ApiError(400, message, param=echo(name), code="invalid_type")


def invalid_value(name: str, value: str, supported: str) -> ApiError:
    """400 for a value outside the supported ones; `supported` is their list, as prose."""
    message = f"Invalid value: '{echo(value)}'. Supported values are: {supported}."
    return ApiError(400, message, param=name, code="invalid_value")


def listed(values: Sequence[str]) -> str:
    """`'a', 'b', and 'c'`."""
    quoted = [f"'{value}'" for value in values]
    return " and ".join(quoted) if len(quoted) < 3 else ", ".join(quoted[:-1]) + f", and {quoted[-1]}"


def below_minimum(name: str, least: int, value: int) -> ApiError:
    """400 for an integer that is too small."""
    message = f"Invalid '{name}': integer below minimum value. Expected a value >= {least}, but got {value} instead."
    return ApiError(400, message, param=name, code="integer_below_min_value")


def above_maximum(name: str, most: int, value: int) -> ApiError:
    """400 for an integer that is too large."""
    message = f"Invalid '{name}': integer above maximum value. Expected a value <= {most}, but got {value} instead."
    return ApiError(400, message, param=name, code="integer_above_max_value")


def string_too_long(name: str, most: int, length: int) -> ApiError:
    """400 for a string that is too long, in characters."""
    message = (
        f"Invalid '{echo(name)}': string too long. Expected a string with maximum length {most}, "
        f"but got a string with length {length} instead."
    )
    return ApiError(400, message, param=echo(name), code="string_above_max_length")


def unreadable_text(name: str) -> ApiError:
    """400 for a string that no database can be trusted to keep."""
    message = f"Invalid '{echo(name)}': NUL characters and unpaired surrogates are not allowed."
    return ApiError(400, message, param=echo(name), code="invalid_value")


def unparsable_json() -> ApiError:
    """400 for a body that is not JSON."""
    message = (
        "We could not parse the JSON body of your request. (HINT: This likely means you aren't using your HTTP library "
        "correctly. This route expects a JSON object in UTF-8, but what was sent was not valid JSON.)"
    )
    return ApiError(400, message)


# ---- the wording of the Files routes ----------------------------------------------------------------------


def property_required(name: str, *, param: str | None = None) -> ApiError:
    """400 for a form field that is not there."""
    return ApiError(400, f"'{name}' is a required property", param=param)


def property_unexpected(name: str) -> ApiError:
    """400 for a form field that does not exist."""
    return ApiError(400, f"Additional properties are not allowed ('{echo(name)}' was unexpected)")


def not_one_of(name: str, value: str, allowed: Sequence[str], *, param: str | None = None) -> ApiError:
    """400 for a form field or query parameter outside its enumeration."""
    return ApiError(400, f"'{echo(value)}' is not one of {list(allowed)} - '{name}'", param=param)


def not_an_integer(name: str, value: str) -> ApiError:
    """400 for a form field or query parameter that should be an integer."""
    return ApiError(400, f"'{echo(value)}' is not of type 'integer' - '{name}'")


def less_than_minimum(name: str, least: int, value: int) -> ApiError:
    """400 for a form field or query parameter that is too small."""
    return ApiError(400, f"{value} is less than the minimum of {least} - '{name}'")


def greater_than_maximum(name: str, most: int, value: int) -> ApiError:
    """400 for a form field or query parameter that is too large."""
    return ApiError(400, f"{value} is greater than the maximum of {most} - '{name}'")


def not_jsonl(reason: str = "") -> ApiError:
    """400 for a batch file that does not begin like JSON Lines. `detail` is what the original says beside it."""
    message = "Invalid file format for Batch API. Must be .jsonl" + (f". {reason}" if reason else "")
    return ApiError(400, message, beside={"detail": {"message": message, "code": None}})


def file_too_large() -> ApiError:
    """400, as the original says it (not 413)."""
    return ApiError(400, "File is too large.")
