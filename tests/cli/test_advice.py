"""What a person is told beside the facts: why a batch waits, and what to do next."""

from collections.abc import Callable
from typing import Any

import pytest

from server.cli import watch
from server.cli.advice import about_faults, next_step, why_waiting
from tests.cli.conftest import Ran
from tests.cli.fake import Fake, batch

Overnight = Callable[..., Ran]
NO_ENGINE = {"error": {"message": "No engine can take work: vllm (managed) is starting", "code": "no_engine"}}
NOT_FOUND = {"code": "model_not_found", "message": "No.", "param": "body.model", "line": 1}


def serving(*names: str, state: str = "ready") -> dict[str, Any]:
    return {"status": "ready", "engines": [{"engine": "e", "state": state, "models": list(names)}]}


@pytest.mark.parametrize(
    ("model", "readiness", "told"),
    [
        ("m", NO_ENGINE, "waiting: No engine can take work: vllm (managed) is starting"),
        (None, NO_ENGINE, "waiting: No engine can take work: vllm (managed) is starting"),
        ("m", serving("b", "a"), "waiting: no engine serves 'm' now; there is a, b"),
        ("m", serving("a", "m"), None),
        ("m", serving("a", "*"), None),
        ("m", serving("a", state="starting"), None),
        (None, serving("a"), None),
        ("m", {"error": {"message": "Not found", "code": None}}, None),
        ("m", {"error": "Not found"}, None),
        ("m", {}, None),
    ],
)
def test_a_batch_waits_for_an_engine_or_for_its_model_or_for_nothing_we_know(
    model: str | None, readiness: dict[str, Any], told: str | None
) -> None:
    assert why_waiting({"model": model}, readiness) == told


def test_an_unknown_model_comes_with_the_known_ones_and_the_alias_that_takes_any() -> None:
    told = about_faults([{"code": "invalid_url"}, NOT_FOUND], ["demo", "smol"])
    assert told is not None
    assert "demo, smol" in told
    assert "--model-alias '*=demo'" in told
    assert about_faults([{"code": "invalid_url"}], ["demo"]) is None
    assert about_faults([NOT_FOUND], []) is None


def test_results_are_offered_where_there_are_any() -> None:
    assert next_step(batch("completed", output_file_id="file-1")) == (
        "fetch the results with: overnight download batch_1"
    )
    assert next_step(batch("cancelled", error_file_id="file-1")) is not None
    assert next_step(batch("failed")) is None


def test_watch_says_once_why_a_batch_stands_still(
    overnight: Overnight, fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "STILL_S", 0.0)
    still = (200, batch("in_progress", total=1, model="m"))
    end = (200, batch("completed", completed=1, total=1, output_file_id="file-1"))
    fake.answer("GET /batches/batch_1", still, still, still, still, end)
    fake.answer("GET /readyz/engine", (200, serving("other")))
    ran = overnight("watch", "batch_1")
    assert ran.code == 0
    assert ran.err.count("no engine serves 'm' now; there is other") == 1
    assert "overnight download batch_1" in ran.err
    assert "download" not in ran.out


def test_a_server_that_knows_no_readiness_is_watched_all_the_same(
    overnight: Overnight, fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "STILL_S", 0.0)
    still = (200, batch("in_progress", total=1, model="m"))
    fake.answer("GET /batches/batch_1", still, still, still, (200, batch("completed", completed=1, total=1)))
    fake.answer("GET /readyz/engine", (200, b"<html>"))
    ran = overnight("watch", "batch_1")
    assert ran.code == 0
    assert "waiting" not in ran.err


def test_watch_of_a_refused_model_says_which_there_are(overnight: Overnight, fake: Fake) -> None:
    fake.answer("GET /batches/batch_1", (200, batch("failed", errors={"data": [NOT_FOUND]})))
    fake.answer("GET /models", (200, {"data": [{"id": "demo"}]}))
    ran = overnight("watch", "batch_1")
    assert (ran.code, ran.out) == (6, "batch_1 failed: nothing was run\n")
    assert "this server has: demo." in ran.err


def test_a_server_that_lists_no_models_leaves_the_fault_alone(overnight: Overnight, fake: Fake) -> None:
    fake.answer("GET /batches/batch_1", (200, batch("failed", errors={"data": [NOT_FOUND]})))
    ran = overnight("watch", "batch_1")
    assert ran.code == 6
    assert "this server has" not in ran.err
