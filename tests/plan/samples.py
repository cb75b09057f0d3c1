"""Lines and files to check and plan."""

import json
from pathlib import Path
from typing import Any

from engine.bodies import Catalogue
from engine.lines import Limits, Rules
from engine.orchestrator.scan import Scan, scan
from state.records import Model
from state.settings import Settings

CHAT = "/v1/chat/completions"
LIMITS = Limits.of(Settings())
MODELS = {"m": Model("m", "m", "overnight", 0, 0.0), "alias": Model("alias", "m", "overnight", 0, 0.0)}


def rules(endpoint: str = CHAT, models: dict[str, Model] | None = None, **limits: int) -> Rules:
    values = {name: getattr(LIMITS, name) for name in Limits.__slots__}
    return Rules(endpoint, Catalogue(MODELS if models is None else models), Limits(**(values | limits)))


def body(**changes: Any) -> dict[str, Any]:
    """A chat body; a value of `...` takes a key away."""
    whole = {"model": "m", "messages": [{"role": "user", "content": "Hi."}]} | changes
    return {key: value for key, value in whole.items() if value is not ...}


def line(custom_id: Any = "a", **changes: Any) -> bytes:
    """A good line, but for the changes; a value of `...` takes a key away."""
    whole = {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body()} | changes
    return json.dumps({key: value for key, value in whole.items() if value is not ...}).encode()


def lines(*several: bytes) -> bytes:
    return b"".join(one + b"\n" for one in several)


def scanned(folder: Path, content: bytes, **limits: int) -> Scan:
    """What a scan of this content finds."""
    source = folder / "input.jsonl"
    source.write_bytes(content)
    with open(folder / "ids", "w+b") as ids, open(folder / "keys", "w+b") as keys:
        return scan(source, rules=rules(**limits), ids=ids, keys=keys)


def told(found: Scan) -> list[tuple[str, str | None, int | None]]:
    """The faults without their messages."""
    return [(fault.code, fault.param, fault.line) for fault in found.faults]
