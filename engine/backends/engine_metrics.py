"""Reads vLLM's /metrics (Prometheus text), and says by it whether an engine hangs. Pure.

Names are vLLM's own: gauges `vllm:num_requests_running` and `..._waiting`, counters ending in `_total`, each with a label
`engine` for every replica inside one server, so values are sums over `engine`. A restarted engine counts from zero again.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

#: What moves while an engine gets on: tokens written, prompts read, requests done (a pooling model writes no tokens), and
#: the cache that fills while a long prompt is read, which counts only once it is read to its end.
PROGRESS: Final = (
    "vllm:generation_tokens_total",
    "vllm:prompt_tokens_total",
    "vllm:request_success_total",
    "vllm:kv_cache_usage_perc",
)
RUNNING: Final = "vllm:num_requests_running"
WAITING: Final = "vllm:num_requests_waiting"

#: Seconds of requests at the engine without progress, or without an answer, after which it hangs. One step of a slow CPU,
#: which reads some thousand tokens of a prompt, may take minutes.
HUNG_AFTER_S: Final = 120.0
HUNG_AFTER_ON_CPU_S: Final = 600.0

#: A longer time between two readings, in seconds, means that we were stopped ourselves: it says nothing of the engine.
GAP_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class Sample:
    """One reading. None where the engine does not publish it (`--disable-log-stats`)."""

    running: float | None
    waiting: float | None
    progress: float | None


def read_sample(text: str) -> Sample:
    """A reading out of an answer to GET /metrics; lines it cannot understand are passed over."""
    sums: dict[str, float] = {}
    for name, value in _series(text):
        if name in (RUNNING, WAITING, *PROGRESS):
            sums[name] = sums.get(name, 0.0) + value
    counted = [sums[name] for name in PROGRESS if name in sums]
    return Sample(sums.get(RUNNING), sums.get(WAITING), sum(counted) if counted else None)


def _series(text: str) -> Iterator[tuple[str, float]]:
    """Name and value of every sample, in the order of the text."""
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        # Label values may hold spaces and braces, so the name ends at the first brace and the value follows the last.
        labelled = "{" in line
        name = line.partition("{")[0] if labelled else line.partition(" ")[0]
        rest = line.rpartition("}")[2] if labelled else line.partition(" ")[2]
        try:
            yield name, float(rest.split()[0])
        except (ValueError, IndexError):
            continue


def grown(before: float, after: float) -> float:
    """How much a counter grew; from zero if it was reset in between."""
    return after - before if after >= before else after


class HangWatch:
    """Decides, reading by reading, whether an engine hangs. Times are monotonic seconds."""

    def __init__(self, *, now: float, after: float = HUNG_AFTER_S) -> None:
        self._after = after
        self._progress: float | None = None
        self._since = self._looked = now

    def hangs(self, sample: Sample | None, *, now: float) -> bool:
        """`sample` is None if the engine did not answer, which for so long is hanging, whether it has requests or not.

        An engine that publishes no counters is never called hung while it answers.
        """
        if now - self._looked > GAP_S or (sample is not None and self._gets_on(sample)):
            self._since = now
        self._looked = now
        return now - self._since >= self._after

    def _gets_on(self, sample: Sample) -> bool:
        busy = bool((sample.running or 0) + (sample.waiting or 0))
        stands = sample.progress is not None and self._progress == sample.progress
        self._progress = sample.progress
        return not busy or not stands
