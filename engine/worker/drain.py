"""Ending a worker in order, within ten seconds: SIGTERM, or `overnight serve` going down.

Nothing new is claimed or sent; what is in flight gets a few seconds; what is finished is committed; the rest is aborted
and given back, so that other workers go on at once; the engine is ended meanwhile.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable

from engine.backends.protocol import Backend
from engine.worker.shard import OpenShard
from engine.worker.worker import Worker

log = logging.getLogger(__name__)

#: Seconds for requests in flight, for the last commits, and for giving shards back.
LANDING_S, COMMIT_S, RETURN_S = 3.0, 1.5, 1.0


async def drain(worker: Worker, backend: Backend) -> None:
    """Brings everything to its end. Whatever cannot be done in time is left to the leases, which run out."""
    worker.draining = True
    worker.feed.stop()
    if worker.feed.in_flight:
        await until(worker.feed.emptied, LANDING_S)
    await worker.feed.close()
    await worker.triage.close()
    ending = asyncio.create_task(backend.close(), name="engine's end")
    try:
        await _settle(worker)
    finally:
        await ending  # invariant 15


async def _settle(worker: Worker) -> None:
    """Commits what is finished and gives the shards back."""
    shards = list(worker.shards.values())
    await until(lambda: _all(worker.committer.flush(shard) for shard in shards), COMMIT_S)
    await until(lambda: _all(_return(worker, shard) for shard in shards), RETURN_S)
    for shard in shards:
        if shard.committing is not None:
            shard.committing.cancel()


async def until(step: Callable[[], Awaitable[None]], seconds: float) -> None:
    """Does a step, or gives it up when the time has run out."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await step()


async def _return(worker: Worker, shard: OpenShard) -> None:
    """Gives the shard back, unless it has ended, or results of it wait to be committed still: then the lease runs out."""
    if worker.shards.get(shard.key) is shard and shard.committing is None:
        await worker.give_back(shard)


async def _all(steps: Iterable[Awaitable[None]]) -> None:
    for result in await asyncio.gather(*steps, return_exceptions=True):
        if isinstance(result, Exception):
            log.warning("a shard was not given back in order: %s", result)
