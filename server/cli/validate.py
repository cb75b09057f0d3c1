"""`overnight validate`: the checks of the plan, on a file, without a server.

All but one: which models there are is the server's to know, so any name will do here.
"""

import argparse
import tempfile
from pathlib import Path

from engine.bodies import Catalogue
from engine.lines import Limits, Rules
from engine.orchestrator.scan import MAX_FAULTS, Scan, scan
from server.cli import screen
from server.cli.exits import FAILED, OK, Failure
from server.cli.submit import first_url
from state.records import Fault
from state.settings import Settings

#: Assumed where neither the flag nor the first line says it.
DEFAULT_ENDPOINT = "/v1/chat/completions"


def validate(args: argparse.Namespace) -> int:
    """Prints every fault, or that there is none."""
    settings = Settings.load()
    endpoint = args.endpoint or first_url(args.file) or DEFAULT_ENDPOINT
    found = _scan(args.file, Rules(endpoint, Catalogue(), Limits.of(settings)))
    faults = (*_size_faults(found, settings), *found.faults)
    if args.json:
        entries = [{name: getattr(fault, name) for name in ("line", "code", "param", "message")} for fault in faults]
        screen.out_json({"valid": not faults, "endpoint": endpoint, "requests": found.total, "errors": entries})
    elif faults:
        rows = [(str(fault.line or "-"), fault.code, fault.param or "-", fault.message) for fault in faults]
        screen.table(("LINE", "CODE", "PARAM", "MESSAGE"), rows)
        more = " or more (the first are listed)" if len(faults) >= MAX_FAULTS else ""
        count = "1 fault" if len(faults) == 1 else f"{len(faults)} faults"
        screen.note(f"{args.file}: {count}{more}: a batch of it would fail, and nothing would run")
    else:
        screen.out(f"{args.file}: {found.total} requests for {endpoint}, no faults")
    return FAILED if faults else OK


def _scan(path: Path, rules: Rules) -> Scan:
    try:
        with tempfile.TemporaryFile() as ids, tempfile.TemporaryFile() as keys:
            return scan(path, rules=rules, ids=ids, keys=keys)
    except OSError as error:
        raise Failure(f"cannot read {path}: {error.strerror}") from error


def _size_faults(found: Scan, settings: Settings) -> tuple[Fault, ...]:
    """What the upload would be refused for."""
    if found.size <= settings.max_file_bytes:
        return ()
    return (Fault("file_too_large", f"{found.size} bytes are more than the {settings.max_file_bytes} of an upload."),)
