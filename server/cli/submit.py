"""`overnight submit`: upload a file and start a batch of its requests."""

import argparse
import json
from pathlib import Path
from typing import Any

from server.cli import screen
from server.cli.exits import OK, USAGE, Failure
from server.cli.remote import Remote, opened

#: The first request is looked for in so many bytes; a longer first line needs --endpoint.
LOOK = 1024 * 1024


def submit(args: argparse.Namespace) -> int:
    """Uploads, creates, prints the batch's id (or the batch), and follows it if asked to."""
    metadata = _pairs(args.metadata)
    with opened(args.file) as stream:
        if not stream.read(1):
            raise Failure(f"{args.file} is empty: there is nothing to run")
    endpoint = args.endpoint or first_url(args.file)
    if endpoint is None:
        raise Failure(f"{args.file}: the first line names no `url`, so say --endpoint /v1/chat/completions", USAGE)
    with Remote(args.base_url, None) as remote:
        uploaded = _upload(remote, args.file, quiet=args.json)
        wanted: dict[str, Any] = {
            "input_file_id": uploaded["id"],
            "endpoint": endpoint,
            "completion_window": args.window,
        }
        batch = remote.create({**wanted, **({"metadata": metadata} if metadata else {})})
        if args.watch:
            from server.cli.watch import follow

            screen.note(f"started {batch['id']}")
            return follow(remote, str(batch["id"]), as_json=args.json)
    if args.json:
        screen.out_json(batch)
    else:
        screen.out(str(batch["id"]))
        screen.note(f"follow it with: overnight watch {batch['id']}")
    return OK


def first_url(path: Path) -> str | None:
    """The `url` of the first request in the file, if it can be read; what is wrong with the file is the server's to say.

    Raises:
        Failure: the file cannot be read.
    """
    with opened(path) as stream:
        start = stream.read(LOOK)
    for line in start.removeprefix(b"\xef\xbb\xbf").splitlines():
        if line.strip():
            try:
                url = json.loads(line).get("url")
            except (ValueError, AttributeError, RecursionError):
                return None
            return url if isinstance(url, str) else None
    return None


def _upload(remote: Remote, path: Path, *, quiet: bool) -> dict[str, Any]:
    size, done = path.stat().st_size, 0
    with screen.bar(f"uploading {path.name}", unit="bytes", total=size, quiet=quiet) as bar:

        def moved(count: int) -> None:
            nonlocal done
            done += count
            bar.at(done)

        return remote.upload(path, moved)


def _pairs(given: list[str]) -> dict[str, str]:
    pairs = {}
    for pair in given:
        name, mark, value = pair.partition("=")
        if not mark or not name:
            raise Failure(f"--metadata wants NAME=VALUE, not {pair!r}", USAGE)
        pairs[name] = value
    return pairs
