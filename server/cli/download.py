"""`overnight download`: both result files of a batch, whole or not at all under their names.

A file is written under a temporary name that holds its id, and renamed when it is complete. A later call goes on where
an interrupted one stopped; a broken connection is taken up again at once.
"""

import argparse
import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from server.cli import screen
from server.cli.exits import ENDED_OTHERWISE, FAILED, OK, USAGE, Failure
from server.cli.remote import Remote, patiently
from server.cli.watch import ENDED, show_faults, summary

#: A server that is away for so many seconds is given up.
PATIENCE_S = 60.0

_SAFE = re.compile(r"[A-Za-z0-9_-]{1,200}")
_SHA256 = re.compile(r'"?([0-9a-f]{64})"?')


def download(args: argparse.Namespace) -> int:
    """Fetches what the batch has, and prints the paths."""
    with Remote(args.base_url, None) as remote:
        batch = remote.batch(args.id)
        name = _safe(str(batch.get("id")))
        if batch.get("status") not in ENDED:
            raise Failure(f"{summary(batch)}: there are files when it has ended; see: overnight watch {name}")
        _make(args.output)
        found = {}
        for kind in ("output", "error"):
            if file_id := batch.get(f"{kind}_file_id"):
                path = args.output / f"{name}_{kind}.jsonl"
                fetch(remote, _safe(str(file_id)), path, quiet=args.json)
                found[kind] = str(path)
    if args.json:
        screen.out_json(found)
    for path in () if args.json else found.values():
        screen.out(path)
    if not found:
        screen.note(f"{summary(batch)}, and has no files")
        show_faults(batch)
        return ENDED_OTHERWISE if batch.get("status") != "completed" else FAILED
    return OK


def fetch(remote: Remote, file_id: str, path: Path, *, quiet: bool) -> None:
    """Brings one file to `path`.

    Raises:
        Failure: the server does not have it, stays away, or sent other bytes than it holds.
    """
    part = path.with_name(f".{path.name}.{file_id}.part")
    size = remote.file(file_id).get("bytes")
    with screen.bar(f"fetching {path.name}", unit="bytes", total=size, quiet=quiet) as bar:
        digest = patiently(
            lambda: _fetch_rest(remote, file_id, part, bar.at),
            within=PATIENCE_S,
            noticed=lambda trouble: bar.at(_size(part), text=f"{trouble}; trying again"),
        )
    if (isinstance(size, int) and _size(part) != size) or not _matches(part, digest):
        part.unlink(missing_ok=True)
        raise Failure(f"{path.name} came damaged, and was thrown away; try again")
    part.replace(path)


def _fetch_rest(remote: Remote, file_id: str, part: Path, at: Callable[[float], None]) -> str | None:
    """Appends what is missing, and returns the checksum the server names, if it does."""
    have = _size(part)
    with remote.content(file_id, have) as reply:
        if reply.status_code == 416:  # nothing after what we have: complete, or (checked later) another file's bytes
            return _checksum(reply)
        fresh = reply.status_code == 200
        done = 0 if fresh else have
        with part.open("wb" if fresh else "ab") as target:
            for piece in reply.iter_raw(1 << 18):
                target.write(piece)
                done += len(piece)
                at(done)
        return _checksum(reply)


def _checksum(reply: httpx.Response) -> str | None:
    found = _SHA256.fullmatch(reply.headers.get("ETag", ""))
    return found[1] if found else None


def _matches(part: Path, digest: str | None) -> bool:
    if digest is None:
        return True
    with part.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest() == digest


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Failure(f"cannot make the folder {folder}: {error.strerror}") from error


def _safe(name: Any) -> str:
    """An id that may be part of a file's name."""
    if not _SAFE.fullmatch(name):
        raise Failure(f"{name!r} is no id that can name a file", USAGE)
    return str(name)
