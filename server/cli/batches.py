"""`overnight ls`, `get`, `cancel` and `models`."""

import argparse
from itertools import islice

from server.cli import screen
from server.cli.exits import OK
from server.cli.remote import Remote
from server.cli.watch import counts_of, show_faults, summary


def ls(args: argparse.Namespace) -> int:
    """Batches, newest first."""
    with Remote(args.base_url, None) as remote:
        wanted = (batch for batch in remote.batches() if args.status in (None, batch.get("status")))
        batches = list(islice(wanted, args.limit))
    if args.json:
        screen.out_json(batches)
        return OK
    rows = []
    for batch in batches:
        completed, failed, total = counts_of(batch)
        numbers = (str(completed), str(failed), str(total))
        rows.append([str(batch.get("id")), str(batch.get("status")), *numbers, screen.when(batch.get("created_at"))])
        rows[-1].append(str(batch.get("endpoint")))
    screen.table(("ID", "STATUS", "DONE", "FAILED", "TOTAL", "CREATED", "ENDPOINT"), rows)
    return OK


def get(args: argparse.Namespace) -> int:
    """A batch, or a file, in full."""
    with Remote(args.base_url, None) as remote:
        found = remote.file(args.id) if args.id.startswith("file-") else remote.batch(args.id)
    if args.json:
        screen.out_json(found)
        return OK
    width = max(map(len, found), default=0)
    for name, value in found.items():
        if value is None or name in ("object", "errors", "usage"):
            continue
        shown = f"{value}  ({screen.when(value)})" if name.endswith("_at") else value
        if isinstance(value, dict):
            shown = " ".join(f"{key}={item}" for key, item in value.items())
        screen.out(f"{name:{width}}  {shown}")
    show_faults(found)
    return OK


def cancel(args: argparse.Namespace) -> int:
    """Stops a batch; what is finished is kept."""
    with Remote(args.base_url, None) as remote:
        batch = remote.cancel(args.id)
    if args.json:
        screen.out_json(batch)
    else:
        screen.out(summary(batch))
    return OK


def models(args: argparse.Namespace) -> int:
    """The models one can ask for."""
    with Remote(args.base_url, None) as remote:
        known = remote.models()
    if args.json:
        screen.out_json(known)
    else:
        for model in known:
            screen.out(str(model.get("id")))
    return OK
