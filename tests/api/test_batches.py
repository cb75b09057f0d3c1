"""/v1/batches on the wire."""

import re
from typing import Any

import httpx
import pytest

from state import batches, jobs
from state.records import Fault
from tests.api.conftest import CREATE, Api, Opener

FIELDS = [
    "id", "object", "endpoint", "model", "errors", "input_file_id", "completion_window", "status", "output_file_id",
    "error_file_id", "created_at", "in_progress_at", "expires_at", "finalizing_at", "completed_at", "failed_at",
    "expired_at", "cancelling_at", "cancelled_at", "request_counts", "usage", "metadata",
]  # fmt: skip
NO_USAGE = {
    "input_tokens": 0,
    "input_tokens_details": {"cached_tokens": 0},
    "output_tokens": 0,
    "output_tokens_details": {"reasoning_tokens": 0},
    "total_tokens": 0,
}


def error(reply: httpx.Response) -> dict[str, Any]:
    body = reply.json()["error"]
    assert set(body) == {"message", "type", "param", "code"}
    return dict(body)


async def fail(api: Api) -> None:
    """Refuses the one batch there is, as validation does."""
    now = api.clock.wall()
    job = await jobs.claim(api.database, holder="h", now=now, ttl=30.0)
    assert job is not None
    fault = Fault("invalid_json_line", "This line is not parseable as valid JSON.", None, 3)
    assert await batches.refused(api.database, job=job, faults=[fault], now=now)


async def test_a_new_batch_shows_every_field(api: Api) -> None:
    file_id = await api.uploaded()
    reply = await api.create(file_id, metadata={"k": "v"})
    now = int(api.clock.wall())
    batch = reply.json()
    assert reply.status_code == 200
    assert list(batch) == FIELDS
    told = {
        "object": "batch",
        "endpoint": "/v1/chat/completions",
        "input_file_id": file_id,
        "completion_window": "24h",
        "status": "validating",
        "created_at": now,
        "expires_at": now + 86_400,
        "request_counts": {"total": 0, "completed": 0, "failed": 0},
        "usage": NO_USAGE,
        "metadata": {"k": "v"},
    }
    assert batch == {**dict.fromkeys(FIELDS), "id": batch["id"], **told}
    assert re.fullmatch(r"batch_[0-9a-f]{32}", batch["id"])
    assert (await api.client.get(f"/v1/batches/{batch['id']}")).json() == batch


async def test_a_window_is_echoed_as_it_was_given(api: Api) -> None:
    batch = (await api.create("file-x", completion_window="90m")).json()
    assert (batch["completion_window"], batch["expires_at"] - batch["created_at"]) == ("90m", 5400)


async def test_creating_wakes_the_orchestrator(api: Api) -> None:
    await api.created()
    assert await api.orchestrator.wait(5.0)


async def test_cancelling_wakes_the_orchestrator(api: Api) -> None:
    batch_id = await api.created()
    assert await api.orchestrator.wait(5.0)
    await api.client.post(f"/v1/batches/{batch_id}/cancel")
    assert await api.orchestrator.wait(5.0)


async def test_an_unknown_input_file_is_for_validation_to_report(api: Api) -> None:
    reply = await api.create("file-does-not-exist")
    assert (reply.status_code, reply.json()["status"]) == (200, "validating")


async def test_an_input_of_another_purpose_is_refused(api: Api) -> None:
    reply = await api.create(await api.uploaded(purpose="user_data"))
    assert reply.status_code == 400
    assert "purpose" in error(reply)["message"]
    assert (error(reply)["param"], error(reply)["code"]) == ("input_file_id", "invalid_value")


@pytest.mark.parametrize(
    ("change", "param", "code"),
    [
        ({"endpoint": "/v1/invalid"}, "endpoint", "invalid_value"),
        ({"completion_window": "soon"}, "completion_window", "invalid_value"),
        ({"metadata": {"tags": ["x", "y"]}}, "metadata.tags", "invalid_type"),
        ({"priority": 1}, "priority", "unknown_parameter"),
        ({"input_file_id": None}, "input_file_id", "invalid_type"),
    ],
)
async def test_a_wrong_parameter_is_refused_by_name(api: Api, change: dict[str, Any], param: str, code: str) -> None:
    reply = await api.client.post("/v1/batches", json={"input_file_id": "file-x", **CREATE, **change})
    assert (reply.status_code, error(reply)["param"], error(reply)["code"]) == (400, param, code)
    assert (await api.client.get("/v1/batches")).json()["data"] == []


async def test_strictly_only_24h_is_accepted(open_api: Opener) -> None:
    async with open_api(strict_window=True) as api:
        reply = await api.create("file-x", completion_window="1h")
        assert error(reply)["message"] == "Invalid value: '1h'. Supported values are: '24h'."
        assert (await api.create("file-x")).status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        b"{not json",
        b"",
        b"\xff\xfe",
        b'{"input_file_id": "file-\\ud83d"}',
        b'{"a": NaN}',
        b"[" * 200_000,
        '{"metadata": "ü"}'.encode("latin-1"),
    ],
)
async def test_a_body_that_is_not_json_is_400(api: Api, body: bytes) -> None:
    reply = await api.client.post("/v1/batches", content=body, headers={"content-type": "application/json"})
    assert reply.status_code == 400
    assert error(reply)["message"].startswith("We could not parse the JSON body of your request.")
    assert (error(reply)["param"], error(reply)["code"]) == (None, None)


@pytest.mark.parametrize(
    ("body", "got"), [(b"[]", "an array"), (b'"x"', "a string"), (b"null", "null"), (b"5", "an integer")]
)
async def test_a_body_that_is_no_object_is_400(api: Api, body: bytes, got: str) -> None:
    reply = await api.client.post("/v1/batches", content=body, headers={"content-type": "application/json"})
    assert (reply.status_code, error(reply)["code"]) == (400, "invalid_type")
    assert got in error(reply)["message"]


@pytest.mark.parametrize("kind", ["", "text/plain", "application/x-www-form-urlencoded"])
async def test_a_body_must_say_that_it_is_json(api: Api, kind: str) -> None:
    reply = await api.client.post("/v1/batches", content=b"{}", headers={"content-type": kind})
    assert (reply.status_code, error(reply)["type"]) == (415, "invalid_request_error")


async def test_a_json_body_may_name_its_charset(api: Api) -> None:
    kind = {"content-type": "Application/JSON; charset=utf-8"}
    reply = await api.client.post("/v1/batches", content=b"{}", headers=kind)
    assert error(reply)["code"] == "missing_required_parameter"


async def test_a_json_body_is_bounded(api: Api) -> None:
    reply = await api.create("file-x", metadata={"k": "v" * (1 << 20)})
    assert (reply.status_code, error(reply)["code"]) == (413, "request_too_large")


# ---- listing -------------------------------------------------------------------------------------------------


async def test_batches_are_listed_newest_first_page_by_page(api: Api) -> None:
    made = [await api.created() for _ in range(3)][::-1]
    first = (await api.client.get("/v1/batches?limit=2")).json()
    assert [batch["id"] for batch in first["data"]] == made[:2]
    assert (first["first_id"], first["last_id"], first["has_more"]) == (made[0], made[1], True)
    assert list(first["data"][0]) == FIELDS
    second = (await api.client.get(f"/v1/batches?limit=2&after={made[1]}")).json()
    assert ([batch["id"] for batch in second["data"]], second["has_more"]) == (made[2:], False)


async def test_a_full_last_page_has_no_more(api: Api) -> None:
    for _ in range(2):
        await api.created()
    assert (await api.client.get("/v1/batches?limit=2")).json()["has_more"] is False


async def test_a_limit_of_nothing_gives_nothing(api: Api) -> None:
    await api.created()
    empty = {"object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False}
    assert (await api.client.get("/v1/batches?limit=0")).json() == empty


@pytest.mark.parametrize(
    ("limit", "code"),
    [("-1", "integer_below_min_value"), ("101", "integer_above_max_value"), ("abc", "invalid_type")],
)
async def test_a_wrong_limit_is_400(api: Api, limit: str, code: str) -> None:
    reply = await api.client.get(f"/v1/batches?limit={limit}")
    assert (reply.status_code, error(reply)["param"], error(reply)["code"]) == (400, "limit", code)


@pytest.mark.parametrize("after", ["batch_none", "no id"])
async def test_an_unknown_cursor_is_404(api: Api, after: str) -> None:
    reply = await api.client.get("/v1/batches", params={"after": after})
    assert (reply.status_code, error(reply)["message"]) == (404, f"No batch found with id '{after}'.")


# ---- one batch -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_id", ["batch_nope", "batch-nonexistent-xyz", "batch%00", "batch_%F0%9F%98%80"])
async def test_an_unknown_batch_is_404(api: Api, batch_id: str) -> None:
    for method, path in (("GET", ""), ("POST", "/cancel")):
        reply = await api.client.request(method, f"/v1/batches/{batch_id}{path}")
        assert reply.status_code == 404
        assert re.fullmatch(r"No batch found with id 'batch.*'\.", error(reply)["message"], re.DOTALL)
        assert (error(reply)["type"], error(reply)["param"], error(reply)["code"]) == (
            "invalid_request_error",
            None,
            None,
        )


async def test_an_id_that_cannot_be_a_batchs_is_400(api: Api) -> None:
    for method, path in (("GET", ""), ("POST", "/cancel")):
        reply = await api.client.request(method, f"/v1/batches/invalid{path}")
        assert reply.status_code == 400
        assert error(reply) == {
            "message": "Invalid 'batch_id': 'invalid'. Expected an ID that begins with 'batch'.",
            "type": "invalid_request_error",
            "param": "batch_id",
            "code": "invalid_value",
        }


async def test_a_failed_batch_tells_what_was_wrong(api: Api) -> None:
    batch_id = await api.created()
    await fail(api)
    batch = (await api.client.get(f"/v1/batches/{batch_id}")).json()
    assert (batch["status"], batch["failed_at"], batch["in_progress_at"]) == ("failed", int(api.clock.wall()), None)
    fault = {
        "code": "invalid_json_line",
        "message": "This line is not parseable as valid JSON.",
        "param": None,
        "line": 3,
    }
    assert batch["errors"] == {"object": "list", "data": [fault]}


async def test_a_batch_is_cancelled_by_an_empty_post_and_again(api: Api) -> None:
    batch_id = await api.created()
    for _ in range(2):
        reply = await api.client.post(f"/v1/batches/{batch_id}/cancel", headers={"content-type": "application/json"})
        assert (reply.status_code, reply.json()["status"]) == (200, "cancelling")
        assert reply.json()["cancelling_at"] == int(api.clock.wall())


async def test_a_batch_that_has_ended_cannot_be_cancelled_and_clients_do_not_repeat(api: Api) -> None:
    batch_id = await api.created()
    await fail(api)
    reply = await api.client.post(f"/v1/batches/{batch_id}/cancel")
    assert reply.status_code == 409
    assert error(reply) == {
        "message": "Cannot cancel a batch with status 'failed'.",
        "type": "invalid_request_error",
        "param": None,
        "code": None,
    }
    assert reply.headers["x-should-retry"] == "false"


async def test_an_idempotency_key_is_ignored(api: Api) -> None:
    body = {"input_file_id": "file-x", **CREATE}
    made = {
        (await api.client.post("/v1/batches", json=body, headers={"idempotency-key": "k"})).json()["id"]
        for _ in range(2)
    }
    assert len(made) == 2
