"""What a person sees. Data goes to stdout; notes, tables of faults and progress go to stderr.

Text from a server or a file is never taken for markup, and never reaches the terminal with control characters in it.
"""

import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from server.logs import one_line


def note(text: str) -> None:
    """A line for the person, on stderr."""
    print(one_line(text), file=sys.stderr, flush=True)


def out(text: str) -> None:
    """A line of data, on stdout."""
    print(one_line(text))


def out_json(value: Any) -> None:
    """JSON on stdout; everything beyond ASCII as escapes, so that a terminal is safe and any pipe is right."""
    print(json.dumps(value, indent=2))


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, to: Any = None) -> None:
    """Aligned columns, to stdout unless told otherwise. An empty table is its head alone."""
    lines = [[one_line(cell) for cell in row] for row in (head, *rows)]
    widths = [max(len(line[n]) for line in lines) for n in range(len(head))]
    for line in lines:
        cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        print("  ".join(cells).rstrip(), file=to or sys.stdout)


def when(seconds: Any) -> str:
    """A time of an object, for this person's clock; `-` for none."""
    if not isinstance(seconds, int | float):
        return "-"
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


#: In fewer columns than this there is no room for a bar beside the numbers.
NARROW = 60


class Bar(Protocol):
    """Progress towards a total."""

    def at(self, done: float, total: float | None = None, text: str | None = None) -> None:
        """Sets how far it is; `total` and `text` stay as they were where None."""
        ...


class _Silent:
    """No terminal: text goes out as a line when it changes, numbers do not."""

    def __init__(self) -> None:
        self._text: str | None = None

    def at(self, done: float, total: float | None = None, text: str | None = None) -> None:
        if text is not None and text != self._text:
            self._text = text
            note(text)


class _Drawn:
    """A bar drawn with rich."""

    def __init__(self, progress: Any, task: Any) -> None:
        self._progress, self._task = progress, task

    def at(self, done: float, total: float | None = None, text: str | None = None) -> None:
        told = {} if text is None else {"description": one_line(text)}
        if total is not None:
            told["total"] = total  # type: ignore[assignment]
        self._progress.update(self._task, completed=done, **told)


@contextmanager
def bar(text: str, *, unit: str, total: float | None = None, quiet: bool = False) -> Iterator[Bar]:
    """A progress bar on stderr while the context lasts, where stderr is a terminal. `unit` is `bytes` or `requests`."""
    if quiet or not sys.stderr.isatty():
        silent = _Silent()
        if not quiet:
            silent.at(0, text=text)
        yield silent
        return
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)  # rich obeys NO_COLOR and TERM=dumb
    columns = _byte_columns() if unit == "bytes" else _request_columns(narrow=console.width < NARROW)
    with Progress(*columns, console=console, transient=True) as progress:
        yield _Drawn(progress, progress.add_task(one_line(text), total=total))


def _byte_columns() -> tuple[Any, ...]:
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    text = TextColumn("{task.description}", markup=False)
    return (text, BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())


def _request_columns(*, narrow: bool) -> tuple[Any, ...]:
    """Where there is little room the bar gives way, and the numbers stay whole."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        ProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.table import Column
    from rich.text import Text

    class Rate(ProgressColumn):
        """Requests per second, lately."""

        def render(self, task: Any) -> Text:
            return Text(f"{task.speed:.1f}/s" if task.speed else "-/s")

    def whole() -> Column:
        return Column(no_wrap=True)

    text = TextColumn("{task.description}", markup=False)
    count = MofNCompleteColumn(table_column=whole())
    if narrow:
        return (count, text)
    times = (TimeElapsedColumn(whole()), TextColumn("ETA"), TimeRemainingColumn(compact=True, table_column=whole()))
    return (text, BarColumn(), count, Rate(whole()), *times)
