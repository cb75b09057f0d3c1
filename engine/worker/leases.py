"""The leases a worker holds, shared between the loop that runs shards and the thread that renews them.

A worker relies on a lease for a time of its own reckoning, on its own monotonic clock: from the moment the claim or the
renewal **started**, for the lease's length less a margin (rule 6). Past that it neither sends nor commits until a renewal
has answered. The fence in the database is what makes this safe (invariant 4); the trust window only saves useless work.
"""

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

Key = tuple[str, int]
"""A shard: its batch's id and its number."""

#: The part of a lease's length that is not relied on: room for the renewal's way there and back.
MARGIN = 0.2


@dataclass(slots=True)
class Holding:
    """One lease. `trusted_until` is a monotonic time; one float is replaced whole, so no lock is needed to read it."""

    epoch: int
    trusted_until: float


class Leases:
    """All leases of one worker. Every method may be called from any thread."""

    def __init__(self, *, ttl: float) -> None:
        self._span = ttl * (1 - MARGIN)
        self._lock = threading.Lock()
        self._held: dict[Key, Holding] = {}

    def hold(self, key: Key, epoch: int, *, started: float) -> Holding:
        """A claim that began at `started` has succeeded."""
        holding = Holding(epoch, started + self._span)
        with self._lock:
            self._held[key] = holding
        return holding

    def holding(self, key: Key) -> Holding | None:
        """The lease of this shard, if it is still held."""
        with self._lock:
            return self._held.get(key)

    def drop(self, key: Key, epoch: int) -> None:
        """The lease is not to be renewed any more; a later one of the same shard stays."""
        with self._lock:
            holding = self._held.get(key)
            if holding is not None and holding.epoch == epoch:
                del self._held[key]

    def held(self) -> dict[Key, int]:
        """The epoch of each lease, as of now."""
        with self._lock:
            return {key: holding.epoch for key, holding in self._held.items()}

    def renewed(self, asked: Mapping[Key, int], answered: Iterable[Key], *, started: float) -> None:
        """A renewal of `asked` that began at `started` was granted for `answered`."""
        with self._lock:
            for key in answered:
                holding = self._held.get(key)
                if holding is not None and holding.epoch == asked.get(key):
                    holding.trusted_until = max(holding.trusted_until, started + self._span)
