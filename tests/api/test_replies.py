"""What every reply carries, and that every failure is an envelope."""

import asyncio
import logging
import re
from typing import Any

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from server.crowd import Crowd
from server.errors import ApiError, from_exception
from state import files, models, workers
from state.records import (
    BatchNotCancellable,
    BatchStatus,
    Corrupt,
    FileInUse,
    LeaseLost,
    Model,
    OutcomeUnknown,
    OutOfSpace,
    Unavailable,
)
from tests.api.conftest import Api


def error(reply: httpx.Response) -> dict[str, Any]:
    body = reply.json()["error"]
    assert set(body) == {"message", "type", "param", "code"}
    return dict(body)


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> BaseException:
    """Makes reading a file raise what no code expects."""
    fault = RuntimeError("a secret detail")

    async def get(*_: Any, **__: Any) -> None:
        raise fault

    monkeypatch.setattr(files, "get", get)
    return fault


@pytest.mark.parametrize("path", ["/v1/files", "/v1/batches/batch_none", "/nowhere", "/healthz"])
async def test_every_reply_has_openais_headers(api: Api, path: str) -> None:
    reply = await api.client.get(path)
    assert re.fullmatch(r"req_[0-9a-f]{32}", reply.headers["x-request-id"])
    assert reply.headers["openai-version"] == "2020-10-01"
    assert int(reply.headers["openai-processing-ms"]) >= 0
    assert reply.headers["x-content-type-options"] == "nosniff"
    assert reply.headers["content-type"] == "application/json"


async def test_two_requests_have_two_ids(api: Api) -> None:
    ids = {(await api.client.get("/healthz")).headers["x-request-id"] for _ in range(2)}
    assert len(ids) == 2


async def test_an_unknown_address_is_404(api: Api) -> None:
    for path in ("/v1/uploads", "/", "/v1/files/", "/v1/batches/batch_x/", "/v2/files"):
        reply = await api.client.get(path)
        assert reply.status_code == 404
        assert error(reply) == {
            "message": f"Invalid URL (GET {path})",
            "type": "invalid_request_error",
            "param": None,
            "code": None,
        }


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("PUT", "/v1/files", "GET, HEAD, POST"),
        ("PATCH", "/v1/files/file-x", "DELETE, GET, HEAD"),
        ("GET", "/v1/batches/batch_x/cancel", "POST"),
        ("POST", "/v1/models", "GET, HEAD"),
    ],
)
async def test_a_method_that_is_not_there_is_405(api: Api, method: str, path: str, allowed: str) -> None:
    reply = await api.client.request(method, path)
    assert (reply.status_code, reply.headers["allow"]) == (405, allowed)
    assert error(reply)["message"].startswith(f"Not allowed to {method} on {path}.")


async def test_the_unexpected_is_500_with_the_id_and_nothing_else(
    api: Api, broken: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    reply = await api.client.get("/v1/files/file-x")
    assert (reply.status_code, error(reply)["type"], error(reply)["code"]) == (500, "server_error", "internal_error")
    assert reply.headers["x-request-id"] in error(reply)["message"]
    assert "secret" not in reply.text
    [record] = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert vars(record)["request_id"] == reply.headers["x-request-id"]
    assert record.exc_info is not None
    assert record.exc_info[1] is broken


async def test_a_request_leaves_one_line_without_the_clients_words(api: Api, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="server")
    reply = await api.client.get("/v1/files/file-secret-word?after=secret")
    [record] = [record for record in caplog.records if record.name == "server.stamp"]
    fields = {name: vars(record)[name] for name in ("request_id", "method", "route", "status")}
    assert fields == {
        "request_id": reply.headers["x-request-id"],
        "method": "GET",
        "route": "/v1/files/{file_id}",
        "status": 404,
    }
    assert "secret" not in str(vars(record))


async def test_probes_are_quiet(api: Api, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="server")
    await api.client.get("/healthz")
    assert [record for record in caplog.records if record.name == "server.stamp"] == []


@pytest.mark.parametrize(
    ("raised", "status", "code", "headers"),
    [
        (Unavailable("db"), 503, "unavailable", {"retry-after": "1"}),
        (OutcomeUnknown("db"), 503, "outcome_unknown", {"retry-after": "1"}),
        (OutOfSpace("disk", needed=1, free=0), 507, "insufficient_storage", {"retry-after": "30"}),
        (FileInUse("file-a", "batch_a"), 409, "file_in_use", {"x-should-retry": "false"}),
        (BatchNotCancellable(BatchStatus.EXPIRED), 409, None, {"x-should-retry": "false"}),
        (Corrupt("file-a"), 500, "internal_error", {}),
        (LeaseLost("s"), 500, "internal_error", {}),
        (ValueError("x"), 500, "internal_error", {}),
    ],
)
def test_each_exception_has_its_answer(
    raised: Exception, status: int, code: str | None, headers: dict[str, str]
) -> None:
    told = from_exception(raised, method="GET", path="/", request_id="req_1")
    assert (told.status, told.code, told.headers) == (status, code, headers)
    assert told.kind == ("server_error" if status >= 500 else "invalid_request_error")


async def test_a_database_that_is_gone_is_503_and_comes_back(
    api: Api, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def gone(*_: Any, **__: Any) -> None:
        raise Unavailable("the database does not answer")

    with monkeypatch.context() as patched:
        patched.setattr(files, "page", gone)
        patched.setattr(type(api.database), "check", gone)
        reply = await api.client.get("/v1/files")
        assert (reply.status_code, error(reply)["code"], reply.headers["retry-after"]) == (503, "unavailable", "1")
        [record] = [record for record in caplog.records if record.levelno == logging.WARNING]
        assert vars(record)["cause"] == "the database does not answer"
        ready = await api.client.get("/readyz")
        assert (ready.status_code, ready.json()["checks"]) == (503, {"database": False, "store": True})
        assert error(ready)["message"] == "Not ready: database not answering."
        assert (await api.client.get("/healthz")).status_code == 200
    assert (await api.client.get("/v1/files")).status_code == 200


# ---- models and probes ---------------------------------------------------------------------------------------


async def test_models_are_what_the_ledger_knows(api: Api) -> None:
    names = ["org/model:latest", "gpt-4o-mini", "*"]
    known = [Model(name, "org/model", "overnight", 1_700_000_000, 0.0) for name in names]
    await models.register(api.database, models=known, now=api.clock.wall())
    first = {"id": "gpt-4o-mini", "object": "model", "created": 1_700_000_000, "owned_by": "overnight"}
    second = {**first, "id": "org/model:latest"}
    assert (await api.client.get("/v1/models")).json() == {"object": "list", "data": [first, second]}
    for path in ("/v1/models/org/model:latest", "/v1/models/org%2Fmodel%3Alatest"):
        assert (await api.client.get(path)).json() == second


@pytest.mark.parametrize("name", ["unknown", "*", "a/b/c", "%00"])
async def test_an_unknown_model_is_404(api: Api, name: str) -> None:
    reply = await api.client.get(f"/v1/models/{name}")
    assert (reply.status_code, error(reply)["code"], error(reply)["param"]) == (404, "model_not_found", "model")


async def test_a_server_with_its_stores_is_ready(api: Api) -> None:
    assert (await api.client.get("/healthz")).json() == {"status": "ok"}
    reply = await api.client.get("/readyz")
    assert (reply.status_code, reply.json()["checks"]) == (200, {"database": True, "store": True})


async def test_engine_readiness_tells_the_cause(api: Api) -> None:
    async def told() -> tuple[int, str]:
        reply = await api.client.get("/readyz/engine")
        return reply.status_code, reply.json()["status"] if reply.status_code == 200 else error(reply)["message"]

    async def seen(state: str, cause: str | None) -> None:
        await workers.seen(
            api.database, worker_id="w1", engine="vllm", state=state, cause=cause, models=["m"], now=api.clock.wall()
        )

    assert await told() == (503, "No engine can take work: no worker is running.")
    await seen("failing", "connection refused")
    assert await told() == (503, "No engine can take work: vllm is failing (connection refused)")
    await seen("ready", None)
    assert await told() == (200, "ready")
    api.clock.advance(120)
    assert await told() == (503, "No engine can take work: no worker is running.")


async def test_a_flood_is_refused_and_probes_still_pass() -> None:
    inside, leave = asyncio.Event(), asyncio.Event()

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        inside.set()
        await leave.wait()

    async def unused(*_: Any) -> Any:
        raise AssertionError

    crowd = Crowd(slow, most=1)
    first = asyncio.create_task(crowd({"type": "http", "path": "/v1/files"}, unused, unused))
    await inside.wait()
    with pytest.raises(ApiError) as caught:
        await crowd({"type": "http", "path": "/v1/files"}, unused, unused)
    assert (caught.value.status, caught.value.code, caught.value.headers) == (503, "overloaded", {"retry-after": "1"})
    probe = asyncio.create_task(crowd({"type": "http", "path": "/healthz"}, unused, unused))
    leave.set()
    await asyncio.gather(first, probe)
    await crowd({"type": "http", "path": "/v1/files"}, unused, unused)
