"""The books of a batch: what went in against what came out."""

import sqlite3
from collections.abc import Sequence
from typing import Any

from tests.support.overnight import Overnight, request_line
from tests.support.stub_replies import answer_of, chat

NEVER_RAN = ("batch_cancelled", "batch_expired")


def lines_of(name: str, count: int, note: str = "", *, model: str = "stub-model") -> list[dict[str, Any]]:
    """Requests whose prompts are unlike any other's."""
    return [request_line(f"{name}-{n}", f"{name} asks {n} {note}", model=model) for n in range(count)]


def prompt_of(line: dict[str, Any]) -> str:
    return str(line["body"]["messages"][0]["content"])


def assert_all_answered(server: Overnight, batch: Any, lines: Sequence[dict[str, Any]]) -> None:
    """Invariants 1 and 2 for a batch that completed without a failure: each line once, in order, with its own answer."""
    assert batch.status == "completed", batch
    output, errors = server.results(batch)
    assert errors == []
    assert [line["custom_id"] for line in output] == [line["custom_id"] for line in lines]
    for line, answered in zip(lines, output, strict=True):
        said = answered["response"]["body"]["choices"][0]["message"]["content"]
        assert said == answer_of(chat(prompt_of(line)))
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (len(lines), len(lines), 0)


def assert_balanced(server: Overnight, batch: Any, lines: Sequence[dict[str, Any]]) -> None:
    """Invariants 1 and 5 for a batch that ended in any way without a failed request."""
    output, errors = server.results(batch)
    if batch.in_progress_at is None:
        assert (output, errors) == ([], [])
        return
    in_order = {line["custom_id"]: place for place, line in enumerate(lines)}
    places = [[in_order[line["custom_id"]] for line in part] for part in (output, errors)]
    assert places == [sorted(part) for part in places]
    assert sorted(places[0] + places[1]) == list(range(len(lines)))
    assert all(line["error"]["code"] in NEVER_RAN and line["response"] is None for line in errors)
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (len(lines), len(output), 0)


def committed(server: Overnight, batch_id: str) -> int:
    """Requests whose results are in committed segments at this moment."""
    connection = sqlite3.connect(server.data / "overnight.db")
    try:
        query = "SELECT coalesce(sum(lines), 0) FROM segments WHERE batch_id = ?"
        return int(connection.execute(query, (batch_id,)).fetchone()[0])
    finally:
        connection.close()
