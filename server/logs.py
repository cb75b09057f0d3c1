"""Logging, for all roles: one line a record on stderr, as text or as JSON by the settings.

What came from outside (names of files and models, an engine's words) stands in a record's fields, never in its message
as it is: in JSON it is quoted, in text its control characters are escaped, so nobody can forge a line. Configured keys
are blotted out wherever they turn up.
"""

import json
import logging
import re
import sys
import time
from typing import Any

from state.settings import Settings

#: Controls, the C1 set, line and paragraph separators, and what reorders text on a screen.
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}


def one_line(text: str) -> str:
    """The text with everything that could move a cursor, or begin a line, written as an escape."""
    return _UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


def fields_of(record: logging.LogRecord) -> dict[str, Any]:
    """What was handed in as `extra`."""
    return {name: value for name, value in vars(record).items() if name not in _STANDARD}


class TextFormatter(logging.Formatter):
    """`12:00:01.250 warning worker-1 message key=value`."""

    def __init__(self, role: str, secrets: tuple[str, ...] = ()) -> None:
        super().__init__()
        self._role, self._secrets = role, secrets

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        pairs = "".join(f" {name}={_word(value)}" for name, value in fields_of(record).items())
        line = (
            f"{clock}.{int(record.msecs):03} {record.levelname.lower():7} {self._role:12} {record.getMessage()}{pairs}"
        )
        text = one_line(line)
        if record.exc_info:
            trace = self.formatException(record.exc_info)
            text += "".join(f"\n    {one_line(part)}" for part in trace.splitlines())
        return _without(text, self._secrets)


class JSONFormatter(logging.Formatter):
    """One JSON object a line: time (UTC), level, role, logger, message, and the record's fields."""

    def __init__(self, role: str, secrets: tuple[str, ...] = ()) -> None:
        super().__init__()
        self._role, self._secrets = role, secrets

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03}Z"
        line = {
            "time": stamp,
            "level": record.levelname.lower(),
            "role": self._role,
            "logger": record.name,
            "message": record.getMessage(),
            **fields_of(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return _without(json.dumps(line, default=str), self._secrets)


def set_up(settings: Settings, *, role: str) -> None:
    """Sends this process's log to stderr. Libraries are heard from warnings on."""
    plain = [secret for secret in (*settings.api_keys, settings.upstream_api_key) if len(secret) > 3]
    secrets = (*plain, *(json.dumps(secret)[1:-1] for secret in plain))  # as they are, and as JSON writes them
    formatter = JSONFormatter if settings.log_format == "json" else TextFormatter
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter(role, secrets))
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    for ours in ("server", "engine", "state", "overnight"):
        logging.getLogger(ours).setLevel(settings.log_level.upper())
    logging.captureWarnings(True)


def _word(value: Any) -> str:
    text = str(value)
    return text if text and re.fullmatch(r"[\w./:@+-]+", text, re.ASCII) else json.dumps(text)


def _without(text: str, secrets: tuple[str, ...]) -> str:
    for secret in secrets:
        text = text.replace(secret, "***")
    return text
