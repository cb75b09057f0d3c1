"""How a supervisor tells a child what it is: by the environment, never on the command line, where others can read it.

One variable holds the whole of the settings as JSON, so that no list has to survive being joined with commas. The
variables of the settings themselves are taken out, and a child takes this one out as it reads it: so an engine never
inherits a key. The orders also name the descriptor of the lifeline, by which a child notices its parent's end (invariant 15).
"""

import json
import os
from collections.abc import Mapping, MutableMapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from state.records import SettingsError
from state.settings import PREFIX, Settings

VARIABLE = "OVERNIGHT_CHILD"


@dataclass(frozen=True, slots=True)
class Orders:
    """What a child is told. `holder` is the id it takes leases under; `upstream` is for workers."""

    settings: Settings
    holder: str
    lifeline: int
    """The descriptor of the child's end of the socket pair; it ends when the parent does."""
    kept: tuple[int, ...] = ()
    """Descriptors the child keeps open and never uses: the lock of the data folder."""
    upstream: str | None = None


def environment(orders: Orders, environ: Mapping[str, str]) -> dict[str, str]:
    """The child's environment: the parent's without the settings' variables, and the orders."""
    packed = asdict(orders)
    packed["settings"] = {
        name: str(value) if isinstance(value, Path) else value for name, value in packed["settings"].items()
    }
    told = {f"{PREFIX}{item.name.upper()}" for item in fields(Settings)} | {f"{PREFIX}CONFIG"}
    kept = {name: value for name, value in environ.items() if name not in told}
    return {**kept, VARIABLE: json.dumps(packed)}


def orders_from(environ: MutableMapping[str, str]) -> Orders | None:
    """The orders this process was started with, taken out of the environment; None for a process started by a person.

    Raises:
        SettingsError: the variable holds something else.
    """
    raw = environ.pop(VARIABLE, None)
    if raw is None:
        return None
    try:
        packed: dict[str, Any] = json.loads(raw)
        told = packed.pop("settings")
        packed["kept"] = tuple(packed["kept"])
        orders = Orders(settings=_settings(told), **packed)
        for descriptor in (orders.lifeline, *orders.kept):
            os.set_inheritable(descriptor, False)  # an engine must not hold the lock, nor the lifeline
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise SettingsError(f"{VARIABLE} is set by `overnight serve` alone, and holds something else") from error
    return orders


def _settings(told: dict[str, Any]) -> Settings:
    paths = {name: Path(told[name]) for name in ("data", "spool") if told[name]}
    lists = {name: tuple(value) for name, value in told.items() if isinstance(value, list)}
    return Settings(**{**told, **lists, **paths})
