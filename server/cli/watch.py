"""`overnight watch`: follow a batch until it ends. The batch does not depend on it: Ctrl-C only detaches."""

import argparse
import sys
import time
from typing import Any

from server.cli import screen
from server.cli.exits import ENDED_OTHERWISE, INTERRUPTED, OK, Failure
from server.cli.remote import Remote, patiently

#: Statuses after which nothing changes.
ENDED = frozenset({"completed", "failed", "expired", "cancelled"})

#: A server that is away for so many seconds is given up.
PATIENCE_S = 120.0

#: Seconds between two looks: at first, and the longest.
FIRST_LOOK_S, LONGEST_LOOK_S = 0.25, 2.0


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
    return OK if batch.get("status") == "completed" else ENDED_OTHERWISE


def _until_ended(remote: Remote, batch_id: str) -> dict[str, Any]:
    pause = FIRST_LOOK_S
    batch = remote.batch(batch_id)  # what is wrong at once is said at once
    with screen.bar(label_of(batch), unit="requests") as bar:

        def noticed(trouble: Failure) -> None:
            bar.at(done, text=f"{batch_id}: {trouble}; trying again")

        while True:
            done, total = progress_of(batch)
            bar.at(done, total or None, label_of(batch))
            if batch.get("status") in ENDED:
                return batch
            time.sleep(pause)
            pause = min(pause * 1.2, LONGEST_LOOK_S)
            batch = patiently(lambda: remote.batch(batch_id), within=PATIENCE_S, noticed=noticed)


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
    text = f"{batch.get('id')} {batch.get('status')}: {completed} of {total} answered, {failed} failed"
    never = total - completed - failed
    return f"{text}, {never} never run" if batch.get("status") in ENDED and never else text


def show_faults(batch: dict[str, Any]) -> None:
    """The lines because of which a batch failed, as a table on stderr."""
    faults = (batch.get("errors") or {}).get("data") or []
    if faults:
        rows = [[str(_or_dash(fault.get(name))) for name in ("line", "code", "param", "message")] for fault in faults]
        screen.table(("LINE", "CODE", "PARAM", "MESSAGE"), rows, to=sys.stderr)


def _or_dash(value: Any) -> Any:
    return "-" if value is None else value
