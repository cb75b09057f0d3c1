"""The models that have a name here: those of the workers, live or not, and their aliases.

A model that was ever registered stays known: batches for it wait until somebody serves it again. An alias is a setting, and
goes when it is known to be set no more.
"""

from collections.abc import Iterable
from typing import Any

import orjson
from sqlalchemy import Row, delete, func, select

from state import tables
from state.database import Database, upsert
from state.records import Model, ModelNotFound

#: The alias that stands for any name.
ANY = "*"

_TABLE = tables.models


async def register(db: Database, *, models: Iterable[Model], now: float) -> None:
    """Makes names known, or seen again at `now`. The time a name was first created at stays."""
    rows = [_row(model, now) for model in models]
    async with db.write() as conn:
        for row in sorted(rows, key=lambda row: str(row["name"])):
            await upsert(conn, _TABLE, "name", row, keep=("created_at",))


async def listed(db: Database) -> list[Model]:
    """Every name that may be asked for, in order of the alphabet; `*` is none."""
    async with db.read() as conn:
        rows = await conn.execute(select(_TABLE).where(_TABLE.c.name != ANY).order_by(_TABLE.c.name))
        return [_model(row) for row in rows]


async def get(db: Database, *, name: str) -> Model:
    """The model of that name, as it is listed.

    Raises:
        ModelNotFound: no such name; `*` does not count here.
    """
    async with db.read() as conn:
        row = (await conn.execute(select(_TABLE).where(_TABLE.c.name == name, _TABLE.c.name != ANY))).one_or_none()
    if row is None:
        raise ModelNotFound(name)
    return _model(row)


async def resolve(db: Database, *, name: str) -> Model | None:
    """The model that a request naming this one goes to: its own row, or that of `*`; None if there is neither."""
    async with db.read() as conn:
        rows = (await conn.execute(select(_TABLE).where(_TABLE.c.name.in_((name, ANY))))).all()
    found = {row.name: _model(row) for row in rows}
    return found.get(name) or found.get(ANY)


async def forget_aliases(db: Database, *, before: float) -> None:
    """Forgets the aliases, `*` included, that no worker has registered since `before` (wall time)."""
    async with db.write() as conn:
        await conn.execute(delete(_TABLE).where(_TABLE.c.name != _TABLE.c.root, _TABLE.c.last_seen < before))


async def any_known(db: Database) -> bool:
    """Whether any worker has ever registered a model."""
    async with db.read() as conn:
        return bool(await conn.scalar(select(func.count()).select_from(_TABLE)))


def _row(model: Model, now: float) -> dict[str, Any]:
    return {
        "name": model.name,
        "root": model.root,
        "owned_by": model.owned_by,
        "endpoints": None if model.endpoints is None else orjson.dumps(model.endpoints).decode(),
        "created_at": model.created_at,
        "last_seen": now,
    }


def _model(row: "Row[Any]") -> Model:
    endpoints = None if row.endpoints is None else tuple(orjson.loads(row.endpoints))
    return Model(row.name, row.root, row.owned_by, row.created_at, row.last_seen, endpoints)
