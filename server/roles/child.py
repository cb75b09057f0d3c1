"""A role's process from the inside: logging, signals, the lifeline to the supervisor, and how it ends.

A child ends by itself when its supervisor is gone, however that died (invariant 15): the other end of the lifeline
closes, the role is asked to stop, and if it does not the process exits hard after `LAST_S`.
"""

import asyncio
import logging
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from server import logs
from server.roles.handover import Orders
from state.records import SettingsError
from state.settings import Settings

#: The role cannot work as configured; starting it again would change nothing. (`EX_CONFIG` of sysexits.h)
MISCONFIGURED = 78
#: The role ended by an error that trying again may mend. (`EX_SOFTWARE`)
FAILED = 70

#: The role was told twice to stop, and ended at once.
INTERRUPTED = 130

#: A role that was asked to stop and has not after so many seconds is ended.
LAST_S = 12.0

#: How often a child tells its supervisor that it lives, in seconds.
SIGN_OF_LIFE_S = 1.0

log = logging.getLogger(__name__)

Role = Callable[[asyncio.Event], Awaitable[None]]


class Lifeline:
    """The child's end of the socket pair between it and its supervisor."""

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)

    def ready(self) -> None:
        """Tells the supervisor that this role does its work."""
        try:
            self._socket.sendall(b"ready\n")
        except OSError:
            log.debug("the supervisor is gone")  # the watch says the rest

    def watch(self, ended: Callable[[], None]) -> None:
        """Gives signs of life, and calls `ended` when the supervisor is gone, both from a thread of its own."""
        threading.Thread(target=self._watch, args=(ended,), name="lifeline", daemon=True).start()

    def _watch(self, ended: Callable[[], None]) -> None:
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        try:
            while not poll.poll(SIGN_OF_LIFE_S * 1000) or self._socket.recv(16):
                with suppress(BlockingIOError):  # a supervisor that is stopped does not read
                    self._socket.send(b".", socket.MSG_DONTWAIT)
        except OSError:
            pass
        ended()


def run(settings: Settings, *, name: str, role: Role, orders: Orders | None = None) -> int:
    """Runs a role until it is told to stop, and returns the exit code. Errors become one line, or a logged traceback."""
    logs.set_up(settings, role=name)
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(_until_stopped(role, orders))
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:
        return _ended_by(error)
    return 0


async def _until_stopped(role: Role, orders: Orders | None) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _told_to_stop, stop, orders is None)
    if orders is not None:
        Lifeline(orders.lifeline).watch(lambda: _orphaned(loop, stop))
    await role(stop)


def _told_to_stop(stop: asyncio.Event, by_a_person: bool) -> None:
    """The first time in order; the second at once, as with `serve`.

    A child of a supervisor may well hear it twice, from the supervisor and from an init that signals everybody.
    """
    if stop.is_set() and by_a_person:
        os._exit(INTERRUPTED)
    stop.set()


def _orphaned(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    """Runs in the lifeline's thread: the supervisor is gone."""
    try:
        loop.call_soon_threadsafe(stop.set)
    except RuntimeError:
        return  # the loop has ended already, and the process with it
    time.sleep(LAST_S)
    os._exit(FAILED)


def _ended_by(error: Exception) -> int:
    if misconfigured(error):
        for line in getattr(error, "tail", ()):
            print(logs.one_line(line), file=sys.stderr)
        print(f"overnight: {logs.one_line(str(error))}", file=sys.stderr, flush=True)
        return MISCONFIGURED
    log.error("ended by an error", exc_info=error)
    return FAILED


def misconfigured(error: Exception) -> bool:
    """Whether starting again would end the same way."""
    if isinstance(error, SettingsError):
        return True
    from engine.backends.protocol import EngineMisconfigured

    return isinstance(error, EngineMisconfigured)


def _loop_factory() -> Callable[[], Any] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
