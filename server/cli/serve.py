"""`overnight serve`, and the roles alone: `api`, `orchestrator`, `worker`.

The same functions run a role for a person and for the supervisor; a child of the supervisor finds its orders in the
environment (server/roles/handover.py).
"""

import argparse
import asyncio
import os
from collections.abc import Awaitable, Callable
from typing import Any

from server.cli.exits import FAILED
from server.cli.misspelt import refuse_misspelt
from server.cli.parser import FLAGS, REPEATED
from server.roles.handover import Orders, orders_from
from state.records import SettingsError
from state.settings import Settings

#: How a role is called: the settings, the orders (or none), and the event that stops it.
Start = Callable[[Settings, Orders | None, asyncio.Event], Awaitable[None]]


def settings_from(args: argparse.Namespace) -> Settings:
    """The settings that the flags, the variables and the file make together."""
    refuse_misspelt(os.environ)
    flags: dict[str, Any] = {name: getattr(args, name) for names in FLAGS.values() for name in names}
    flags |= {name: tuple(flags[name]) for name in REPEATED if flags[name] is not None}
    flags["engine_args"] = args.engine_args
    return Settings.load(flags, config=args.config)


def serve(args: argparse.Namespace) -> int:
    """Everything on this machine."""
    settings = settings_from(args)
    _must_have_an_engine(settings)
    from server.roles import embedded
    from server.roles.supervise import roles_for

    return embedded.run(embedded.Plan(settings, roles_for(settings), sole=True))


def api(args: argparse.Namespace) -> int:
    """The HTTP api; beside it, unless told not to, an orchestrator."""
    orders = orders_from(os.environ)
    if orders is None and not args.no_orchestrator:
        from server.roles import embedded
        from server.roles.supervise import Role

        roles = (Role("api", "api"), Role("orchestrator", "orchestrator"))
        return embedded.run(embedded.Plan(settings_from(args), roles, sole=False))
    return _run("api", _api, args, orders)


def orchestrator(args: argparse.Namespace) -> int:
    """An orchestrator alone."""
    return _run("orchestrator", _orchestrator, args, orders_from(os.environ))


def worker(args: argparse.Namespace) -> int:
    """A worker alone, for one engine."""
    orders = orders_from(os.environ)
    if orders is None:
        settings = settings_from(args)
        _must_have_an_engine(settings)
        if len(settings.upstreams) > 1:
            raise SettingsError("a worker has one engine: start one worker for each --upstream")
    return _run("worker", _worker, args, orders)


def _must_have_an_engine(settings: Settings) -> None:
    if settings.engine_kind == "vllm" and not settings.model:
        raise SettingsError(
            "there is nothing to run: give --model NAME (`--model demo` is a small one for the CPU), "
            "or --upstream URL for a server that already runs"
        )
    if settings.model and settings.upstreams and not settings.engine:
        raise SettingsError(
            "--model is for a vLLM that Overnight starts, --upstream for a server that already runs: give one of them; "
            "an upstream's other names are a matter of --model-alias"
        )
    if settings.engine_kind == "remote" and not settings.upstreams:
        raise SettingsError("the engine `remote` needs an --upstream URL")


def _run(kind: str, start: Start, args: argparse.Namespace, orders: Orders | None) -> int:
    """Runs the role: for the supervisor under its orders, or for a person, who also wants the schema up to date."""
    from server.roles import child, embedded

    settings = orders.settings if orders else settings_from(args)
    name = orders.holder.rpartition("-")[0] if orders else kind

    async def role(stop: asyncio.Event) -> None:
        if orders is None:
            await embedded.migrate(settings)
        await start(settings, orders, stop)

    code = child.run(settings, name=name, role=role, orders=orders)
    if orders is None and code == child.MISCONFIGURED:
        return FAILED
    return code


async def _api(settings: Settings, orders: Orders | None, stop: asyncio.Event) -> None:
    from server.listen import serve as listen
    from server.roles.child import Lifeline
    from server.roles.embedded import tell, url_of

    ready = Lifeline(os.dup(orders.lifeline)).ready if orders else _nothing

    def listening(port: int) -> None:
        if orders is None:
            tell(f"the api listens on {url_of(settings.host, port)}")

    await listen(settings, stop=stop, ready=ready, listening=listening)


async def _orchestrator(settings: Settings, orders: Orders | None, stop: asyncio.Event) -> None:
    from engine.orchestrator.role import run

    _say_ready(orders)
    await run(settings, holder=_holder("orchestrator", orders), stop=stop)


async def _worker(settings: Settings, orders: Orders | None, stop: asyncio.Event) -> None:
    from engine.worker.role import run

    upstream = orders.upstream if orders else next(iter(settings.upstreams), None)
    _say_ready(orders)
    await run(settings, worker_id=_holder("worker", orders), upstream=upstream, stop=stop)


def _holder(kind: str, orders: Orders | None) -> str:
    """The id for leases: new at every start, so that no process inherits another's."""
    if orders is not None:
        return orders.holder
    from secrets import token_hex

    return f"{kind}-{token_hex(4)}"


def _say_ready(orders: Orders | None) -> None:
    """These roles have nothing to open before they work; the api speaks for itself once it listens."""
    if orders is not None:
        from server.roles.child import Lifeline

        Lifeline(os.dup(orders.lifeline)).ready()


def _nothing() -> None:
    return None
