"""`overnight watch`: follow a batch until it ends. The batch does not depend on it: Ctrl-C only detaches."""

import argparse
import sys
import time
from typing import Any

from server.cli import advice, screen
from server.cli.exits import ENDED_OTHERWISE, INTERRUPTED, OK, Failure
from server.cli.remote import Remote, patiently

#: Statuses after which nothing changes.
ENDED = frozenset({"completed", "failed", "expired", "cancelled"})

#: A server that is away for so many seconds is given up.
PATIENCE_S = 120.0

#: Seconds between two looks: at first, and the longest.
FIRST_LOOK_S, LONGEST_LOOK_S = 0.25, 2.0

#: A batch that has not moved for so many seconds is asked about: why?
STILL_S = 5.0


def watch(args: argparse.Namespace) -> int:
    """Follows the batch and returns 0 if it completes."""
    with Remote(args.base_url, None) as remote:
        return follow(remote, args.id, as_json=args.json)


def follow(remote: Remote, batch_id: str, *, as_json: bool) -> int:
    """Draws the progress, then prints how the batch ended."""
    try:
        batch = _until_ended(remote, batch_id)
    except KeyboardInterrupt:
        screen.note(f"detached; {batch_id} goes on. Come back with: overnight watch {batch_id}")
        return INTERRUPTED
    if as_json:
        screen.out_json(batch)
    else:
        screen.out(summary(batch))
        show_faults(batch)
        if told := _advice(remote, batch):
            screen.note(told)
    return OK if batch.get("status") == "completed" else ENDED_OTHERWISE


def _until_ended(remote: Remote, batch_id: str) -> dict[str, Any]:
    pause = FIRST_LOOK_S
    batch = remote.batch(batch_id)  # what is wrong at once is said at once
    with screen.bar(label_of(batch), unit="requests") as bar:

        def noticed(trouble: Failure) -> None:
            bar.at(done, text=f"{batch_id}: {trouble}; trying again")

        stillness = _Stillness(remote)
        while True:
            done, total = progress_of(batch)
            bar.at(done, total or None, label_of(batch))
            if batch.get("status") in ENDED:
                return batch
            stillness.look(batch)
            time.sleep(pause)
            pause = min(pause * 1.2, LONGEST_LOOK_S)
            batch = patiently(lambda: remote.batch(batch_id), within=PATIENCE_S, noticed=noticed)


class _Stillness:
    """Tells the person why a batch does not move, each reason once."""

    def __init__(self, remote: Remote) -> None:
        self._remote = remote
        self._stood: tuple[Any, ...] = ()
        self._since = time.monotonic()
        self._told: str | None = None

    def look(self, batch: dict[str, Any]) -> None:
        """Asks the server when it has stood still for a while."""
        stands = (batch.get("status"), *progress_of(batch))
        now = time.monotonic()
        if stands != self._stood:
            self._stood, self._since = stands, now
        elif now - self._since >= STILL_S and batch.get("status") in ("validating", "in_progress"):
            self._since = now
            reason = advice.why_waiting(batch, self._remote.readiness())
            if reason and reason != self._told:
                screen.note(reason)
                self._told = reason


def _advice(remote: Remote, batch: dict[str, Any]) -> str | None:
    """What to do now that the batch has ended. The models are asked for only where they help."""
    faults = faults_of(batch)
    if not any(fault.get("code") == "model_not_found" for fault in faults):
        return advice.next_step(batch)
    try:
        return advice.about_faults(faults, [str(model.get("id")) for model in remote.models()])
    except Failure:
        return None


def counts_of(batch: dict[str, Any]) -> tuple[int, int, int]:
    """completed, failed, total; zeros where a server does not say."""
    counts = batch.get("request_counts") or {}
    return int(counts.get("completed") or 0), int(counts.get("failed") or 0), int(counts.get("total") or 0)


def progress_of(batch: dict[str, Any]) -> tuple[int, int]:
    """Requests that are answered, and requests in all."""
    completed, failed, total = counts_of(batch)
    return completed + failed, total


def label_of(batch: dict[str, Any]) -> str:
    """What stands beside the bar: `in_progress (3 failed)`.

    Without a terminal, where each change is a line of its own: the id and the status alone.
    """
    if not sys.stderr.isatty():
        return f"{batch.get('id')} {batch.get('status')}"
    failed = counts_of(batch)[1]
    return f"{batch.get('status')} ({failed} failed)" if failed else str(batch.get("status"))


def summary(batch: dict[str, Any]) -> str:
    """One line: how the batch stands, and what became of its requests."""
    completed, failed, total = counts_of(batch)
    if batch.get("status") == "failed" and not total:
        return f"{batch.get('id')} failed: nothing was run"
    text = f"{batch.get('id')} {batch.get('status')}: {completed} of {total} answered, {failed} failed"
    never = total - completed - failed
    return f"{text}, {never} never run" if batch.get("status") in ENDED and never else text


def faults_of(batch: dict[str, Any]) -> list[dict[str, Any]]:
    """The entries of a batch's `errors`."""
    return (batch.get("errors") or {}).get("data") or []


def show_faults(batch: dict[str, Any]) -> None:
    """The lines because of which a batch failed, as a table on stderr."""
    if faults := faults_of(batch):
        rows = [[str(_or_dash(fault.get(name))) for name in ("line", "code", "param", "message")] for fault in faults]
        screen.table(("LINE", "CODE", "PARAM", "MESSAGE"), rows, to=sys.stderr)


def _or_dash(value: Any) -> Any:
    return "-" if value is None else value
