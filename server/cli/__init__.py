"""The command `overnight`. Every command is a function from the parsed arguments to an exit code.

Nothing but the parser is imported before it is known what to do, so that `overnight --help` and completion are quick.
Errors become one line on stderr; `OVERNIGHT_DEBUG=1` shows the traceback as well.
"""

import os
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module

from server.cli.exits import FAILED, INTERRUPTED, USAGE, Failure


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    from server.cli.parser import parse

    _open_what_is_closed()
    args = parse(list(sys.argv[1:] if argv is None else argv))
    module, _, name = args.run.partition(":")
    try:
        code: int = getattr(import_module(module), name)(args)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # `overnight ls | head`: the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except Exception as error:
        return _explain(error)
    return code


def _open_what_is_closed() -> None:
    """Gives a command that was started without stdout or stderr (`>&-`) one that leads nowhere."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115


def _explain(error: Exception) -> int:
    """The error in one line, and the exit code that goes with it."""
    from server.logs import one_line
    from state.records import OvernightError, SettingsError

    if os.environ.get("OVERNIGHT_DEBUG"):
        traceback.print_exception(error)
    text = str(error)
    if not isinstance(error, OvernightError):
        text = f"{type(error).__name__}: {text} (this should not happen; OVERNIGHT_DEBUG=1 shows more)"
    if isinstance(error, OSError):
        text = f"{error.filename or 'error'}: {error.strerror or error}"
    print(f"overnight: {one_line(text)}", file=sys.stderr)
    if isinstance(error, Failure):
        return error.code
    return USAGE if isinstance(error, SettingsError) else FAILED
