"""The clock, as a thing that is handed in, so that faults of time can be tested.

Three readings, never mixed: wall time is what clients see and what leases are written in; monotonic time is what a
process trusts for its own timeouts; the boot id says whether two monotonic readings may be compared (invariant 8).
"""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


class Clock(Protocol):
    """Where a component reads the time."""

    def wall(self) -> float:
        """Seconds since the epoch, UTC; may jump."""
        ...

    def monotonic(self) -> float:
        """Seconds on a clock that only grows and counts the time asleep where the system offers it."""
        ...

    def boot_id(self) -> str:
        """Changes when monotonic readings stop being comparable: at a reboot, on another machine."""
        ...


class SystemClock:
    """The machine's clocks. CLOCK_BOOTTIME counts suspended time on Linux; elsewhere the plain monotonic clock serves."""

    def __init__(self) -> None:
        self._source = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
        self._boot = _read_boot_id()

    def wall(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.clock_gettime(self._source)

    def boot_id(self) -> str:
        return self._boot


@dataclass(slots=True)
class ManualClock:
    """A clock that moves only when told to; for tests."""

    now: float = 1_800_000_000.0
    ticks: float = 1_000.0
    boot: str = "boot-1"

    def wall(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.ticks

    def boot_id(self) -> str:
        return self.boot

    def advance(self, seconds: float) -> None:
        """Both clocks move, as in real life."""
        self.now += seconds
        self.ticks += seconds

    def jump(self, seconds: float) -> None:
        """Only the wall clock moves, as when someone sets it."""
        self.now += seconds


def _read_boot_id() -> str:
    path = Path("/proc/sys/kernel/random/boot_id")
    try:
        return path.read_text("ascii").strip()
    except OSError:  # macOS: the boot time stands in for an id
        return f"booted-{round(time.time() - time.monotonic())}"
