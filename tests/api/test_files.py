"""/v1/files on the wire."""

import hashlib
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from state import files
from state.objects.local import LocalStore
from state.records import FileNotFound
from tests.api.conftest import LINE, Api, Opener


def error(reply: httpx.Response) -> dict[str, Any]:
    body = reply.json()["error"]
    assert set(body) == {"message", "type", "param", "code"}
    return dict(body)


async def test_an_uploaded_file_is_processed_at_once(api: Api) -> None:
    reply = await api.upload(LINE, filename="nächtlich.jsonl")
    now = int(api.clock.wall())
    assert reply.status_code == 200
    assert reply.json() == {
        "object": "file",
        "id": reply.json()["id"],
        "purpose": "batch",
        "filename": "nächtlich.jsonl",
        "bytes": len(LINE),
        "created_at": now,
        "expires_at": now + 30 * 86_400,
        "status": "processed",
        "status_details": None,
    }
    assert list(reply.json()) == list(json.loads(reply.text))
    assert reply.text.startswith('{\n  "object": "file",\n')
    assert reply.json()["id"].startswith("file-")
    assert (await api.client.get(f"/v1/files/{reply.json()['id']}")).json() == reply.json()


async def test_a_file_of_another_purpose_may_be_anything_and_does_not_expire(api: Api) -> None:
    reply = await api.upload(b"\x00\xff", purpose="evals")
    assert (reply.status_code, reply.json()["expires_at"], reply.json()["purpose"]) == (200, None, "evals")


async def test_expires_after_is_honoured(api: Api) -> None:
    after = {"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}
    assert (await api.upload(**after)).json()["expires_at"] == int(api.clock.wall()) + 3600


async def test_fields_may_follow_the_file(api: Api) -> None:
    head = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n'
    field = '\r\n--x\r\nContent-Disposition: form-data; name="{}"\r\n\r\n{}'
    after = field.format("purpose", "batch") + field.format("expires_after[anchor]", "created_at")
    after += field.format("expires_after[seconds]", "7200") + "\r\n--x--\r\n"
    reply = await api.client.post(
        "/v1/files",
        content=head + LINE + after.encode(),
        headers={"content-type": "multipart/form-data; boundary=x"},
    )
    assert reply.status_code == 200
    listed = await api.client.get(f"/v1/files/{reply.json()['id']}")
    assert (listed.json()["purpose"], listed.json()["expires_at"]) == ("batch", int(api.clock.wall()) + 7200)


@pytest.mark.parametrize("kind", ["application/jsonl", "application/json", "text/plain", "application/x-ndjson"])
async def test_the_parts_content_type_does_not_matter(api: Api, kind: str) -> None:
    reply = await api.client.post("/v1/files", data={"purpose": "batch"}, files={"file": ("in.txt", LINE, kind)})
    assert (reply.status_code, reply.json()["bytes"]) == (200, len(LINE))


async def test_the_same_bytes_twice_are_two_files(api: Api) -> None:
    assert await api.uploaded() != await api.uploaded()


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("content", [b"", b"Hello World", b"{malformed json", b"Dear reader, " * 50_000])
async def test_a_batch_file_that_is_no_jsonl_is_refused(api: Api, content: bytes, late: bool) -> None:
    fields: list[tuple[str, Any]] = [("purpose", (None, "batch")), ("file", ("notes.txt", content))]
    reply = await api.client.post("/v1/files", files=fields[::-1] if late else fields)
    message = "Invalid file format for Batch API. Must be .jsonl"
    assert reply.status_code == 400
    assert reply.json() == {
        "error": {"message": message, "type": "invalid_request_error", "param": None, "code": None},
        "detail": {"message": message, "code": None},
    }


async def test_a_refused_upload_leaves_nothing_but_garbage(api: Api) -> None:
    await api.upload(b"Hello World")
    assert (await api.client.get("/v1/files")).json()["data"] == []
    [(file_id, key)] = await files.garbage(api.database)
    assert [name async for name in api.store.list("files/")] == []
    assert key == f"files/{file_id}"


@pytest.mark.parametrize(
    ("fields", "message", "param"),
    [
        ({"purpose": "batch"}, "'file' is a required property", None),
        ({}, "'purpose' is a required property", "purpose"),
        (
            {"purpose": "batches"},
            "'batches' is not one of ['fine-tune', 'assistants', 'batch', 'user_data', 'vision', 'evals'] - 'purpose'",
            "purpose",
        ),
        (
            {"purpose": "batch", "color": "red"},
            "Additional properties are not allowed ('color' was unexpected)",
            None,
        ),
    ],
)
async def test_a_form_that_lacks_something_is_refused(
    api: Api, fields: dict[str, str], message: str, param: str | None
) -> None:
    parts: dict[str, Any] = {name: (None, value) for name, value in fields.items()}
    if message.startswith("'purpose'"):
        parts["file"] = ("in.jsonl", LINE)
    reply = await api.client.post("/v1/files", files=parts)
    assert reply.status_code == 400
    assert error(reply) == {"message": message, "type": "invalid_request_error", "param": param, "code": None}


async def test_two_files_in_one_form_are_refused(api: Api) -> None:
    parts: list[tuple[str, Any]] = [("purpose", (None, "batch")), ("file", ("a", LINE)), ("file", ("b", LINE))]
    reply = await api.client.post("/v1/files", files=parts)
    assert (reply.status_code, error(reply)["message"]) == (400, "The field 'file' is given twice")
    assert (await api.client.get("/v1/files")).json()["data"] == []


async def test_a_json_body_is_no_upload(api: Api) -> None:
    reply = await api.client.post("/v1/files", json={"purpose": "batch"})
    assert (reply.status_code, error(reply)["type"]) == (415, "invalid_request_error")


async def test_a_compressed_body_is_not_inflated(api: Api) -> None:
    for path in ("/v1/files", "/v1/batches"):
        reply = await api.client.post(path, content=b"\x1f\x8b", headers={"content-encoding": "gzip"})
        assert (reply.status_code, error(reply)["code"]) == (415, "unsupported_content_encoding")


async def test_a_file_that_is_too_large_is_refused(open_api: Opener) -> None:
    async with open_api(max_file_bytes=len(LINE) * 2) as api:
        assert (await api.upload(LINE * 2)).status_code == 200
        reply = await api.upload(LINE * 2 + b"\n")
        assert reply.status_code == 400
        assert error(reply) == {
            "message": "File is too large.",
            "type": "invalid_request_error",
            "param": None,
            "code": None,
        }


async def test_a_form_that_declares_too_much_is_refused_unread(open_api: Opener) -> None:
    async with open_api(max_file_bytes=1000) as api:
        request = api.client.build_request(
            "POST",
            "/v1/files",
            headers={"content-type": "multipart/form-data; boundary=x", "content-length": str(3 << 20)},
        )
        request.stream = httpx.ByteStream(b"")
        reply = await api.client.send(request)
        assert (reply.status_code, error(reply)["message"]) == (400, "File is too large.")


async def test_a_full_disk_is_said_and_keeps_nothing(open_api: Opener) -> None:
    async with open_api(min_free_bytes=1 << 60) as api:
        reply = await api.upload()
        assert reply.status_code == 507
        assert (error(reply)["code"], error(reply)["type"]) == ("insufficient_storage", "server_error")
        assert reply.headers["retry-after"] == "30"
        assert (await api.client.get("/v1/files")).json()["data"] == []


async def test_an_upload_that_fits_is_not_counted_twice(open_api: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    """What has arrived of it already takes room on the disk."""
    content = LINE * (3_000_000 // len(LINE))
    async with open_api() as api:
        temporary = api.store.folder / ".tmp"

        def free(store: LocalStore) -> int:
            return api.settings.min_free_bytes + 4_000_000 - sum(path.stat().st_size for path in temporary.iterdir())

        monkeypatch.setattr(LocalStore, "free_bytes", free)
        assert (await api.upload(content)).status_code == 200
        assert (await api.upload(content * 2)).status_code == 507


# ---- listing -------------------------------------------------------------------------------------------------


async def test_no_files_are_an_empty_list(api: Api) -> None:
    empty = {"object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False}
    assert (await api.client.get("/v1/files")).json() == empty


async def test_files_are_listed_page_by_page_in_both_orders(api: Api) -> None:
    made = [await api.uploaded() for _ in range(3)]
    for order, expected in (("desc", made[::-1]), ("asc", made)):
        first = (await api.client.get("/v1/files", params={"limit": 2, "order": order})).json()
        assert [file["id"] for file in first["data"]] == expected[:2]
        assert (first["first_id"], first["last_id"], first["has_more"]) == (expected[0], expected[1], True)
        params = {"limit": 2, "order": order, "after": first["last_id"]}
        second = (await api.client.get("/v1/files", params=params)).json()
        assert ([file["id"] for file in second["data"]], second["has_more"]) == (expected[2:], False)


async def test_files_are_filtered_by_purpose(api: Api) -> None:
    batch, other = await api.uploaded(), await api.uploaded(purpose="evals")
    for purpose, expected in (("batch", [batch]), ("evals", [other]), ("batch_output", []), ("\x00 '", [])):
        reply = await api.client.get("/v1/files", params={"purpose": purpose})
        assert [file["id"] for file in reply.json()["data"]] == expected


@pytest.mark.parametrize("after", ["file-none", "no id", "\x00"])
async def test_an_unknown_cursor_is_404(api: Api, after: str) -> None:
    reply = await api.client.get("/v1/files", params={"after": after})
    assert (reply.status_code, error(reply)["message"], error(reply)["param"]) == (404, "Resource not found.", "after")


async def test_a_wrong_limit_is_400(api: Api) -> None:
    reply = await api.client.get("/v1/files?limit=0")
    assert (reply.status_code, error(reply)["message"]) == (400, "0 is less than the minimum of 1 - 'limit'")


# ---- one file ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file_id", ["file-nope", "%00", "a%20b", "file-%ff", "x" * 3000])
async def test_an_unknown_file_is_404_everywhere(api: Api, file_id: str) -> None:
    for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/content")):
        reply = await api.client.request(method, f"/v1/files/{file_id}{path}")
        assert reply.status_code == 404
        assert error(reply)["message"].startswith("No such File object: ")
        assert (error(reply)["type"], error(reply)["param"], error(reply)["code"]) == (
            "invalid_request_error",
            "id",
            None,
        )


async def test_a_path_cannot_climb_out(api: Api) -> None:
    for path in ("/v1/files/..%2f..%2fetc%2fpasswd/content", "/v1/batches/..%2f..%2fetc%2fpasswd"):
        reply = await api.client.get(path)
        assert (reply.status_code, error(reply)["type"]) == (404, "invalid_request_error")


async def test_a_deleted_file_is_gone(api: Api) -> None:
    file_id = await api.uploaded()
    reply = await api.client.delete(f"/v1/files/{file_id}", headers={"content-type": "application/json"})
    assert (reply.status_code, reply.json()) == (200, {"id": file_id, "object": "file", "deleted": True})
    for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/content")):
        assert (await api.client.request(method, f"/v1/files/{file_id}{path}")).status_code == 404


async def test_an_input_is_kept_while_its_batch_is_validating(api: Api) -> None:  # invariant 11
    file_id = await api.uploaded()
    batch_id = await api.created(file_id)
    reply = await api.client.delete(f"/v1/files/{file_id}")
    assert (reply.status_code, error(reply)["code"]) == (409, "file_in_use")
    assert batch_id in error(reply)["message"]
    assert reply.headers["x-should-retry"] == "false"


# ---- content -------------------------------------------------------------------------------------------------


async def test_the_content_is_the_uploaded_bytes(api: Api) -> None:
    content = LINE * 30_000
    file_id = await api.uploaded(content, filename="in.jsonl")
    reply = await api.client.get(f"/v1/files/{file_id}/content", headers={"accept-encoding": "gzip"})
    assert reply.status_code == 200
    assert reply.content == content
    expected = {
        "content-type": "application/octet-stream",
        "content-disposition": 'attachment; filename="in.jsonl"',
        "content-length": str(len(content)),
        "accept-ranges": "bytes",
        "etag": f'"{hashlib.sha256(content).hexdigest()}"',
    }
    assert {name: reply.headers[name] for name in expected} == expected
    assert "content-encoding" not in reply.headers


async def test_a_range_of_the_content(api: Api) -> None:
    file_id = await api.uploaded(LINE * 10)
    reply = await api.client.get(f"/v1/files/{file_id}/content", headers={"range": "bytes=100-199"})
    assert (reply.status_code, reply.content) == (206, (LINE * 10)[100:200])
    assert reply.headers["content-range"] == f"bytes 100-199/{len(LINE) * 10}"
    assert reply.headers["content-length"] == "100"


async def test_several_ranges_are_answered_with_everything(api: Api) -> None:
    file_id = await api.uploaded()
    reply = await api.client.get(f"/v1/files/{file_id}/content", headers={"range": "bytes=0-1,3-4"})
    assert (reply.status_code, reply.content) == (200, LINE)


async def test_a_range_behind_the_end_is_416(api: Api) -> None:
    file_id = await api.uploaded()
    reply = await api.client.get(f"/v1/files/{file_id}/content", headers={"range": "bytes=5000-"})
    assert (reply.status_code, reply.headers["content-range"]) == (416, f"bytes */{len(LINE)}")
    assert error(reply)["type"] == "invalid_request_error"


async def test_a_range_holds_only_for_the_same_bytes(api: Api) -> None:
    path = f"/v1/files/{await api.uploaded()}/content"
    tag = (await api.client.head(path)).headers["etag"]
    same = await api.client.get(path, headers={"range": "bytes=0-1", "if-range": tag})
    other = await api.client.get(path, headers={"range": "bytes=0-1", "if-range": '"other"'})
    assert (same.status_code, other.status_code) == (206, 200)


async def test_bytes_the_client_has_are_not_sent_again(api: Api) -> None:
    path = f"/v1/files/{await api.uploaded()}/content"
    tag = (await api.client.get(path)).headers["etag"]
    reply = await api.client.get(path, headers={"if-none-match": tag})
    assert (reply.status_code, reply.content, reply.headers["etag"]) == (304, b"", tag)


async def test_head_tells_all_but_the_bytes(api: Api) -> None:
    path = f"/v1/files/{await api.uploaded()}/content"
    got, head = await api.client.get(path), await api.client.head(path)
    for name in ("content-length", "etag", "content-type", "content-disposition", "accept-ranges"):
        assert head.headers[name] == got.headers[name]
    assert head.content == b""


async def test_an_empty_file_is_empty(api: Api) -> None:
    path = f"/v1/files/{await api.uploaded(b'', purpose='evals')}/content"
    reply = await api.client.get(path)
    assert (reply.status_code, reply.content, reply.headers["content-length"]) == (200, b"", "0")
    assert (await api.client.get(path, headers={"range": "bytes=0-"})).status_code == 416


@pytest.mark.parametrize("purpose", ["user_data", "assistants", "vision"])
async def test_some_purposes_are_not_handed_out(api: Api, purpose: str) -> None:
    reply = await api.client.get(f"/v1/files/{await api.uploaded(purpose=purpose)}/content")
    message = f"Not allowed to download files of purpose: {purpose}"
    assert (reply.status_code, error(reply)["message"]) == (400, message)


async def test_bytes_that_are_missing_are_a_fault_of_the_server(api: Api, tmp_path: Path) -> None:
    file_id = await api.uploaded()
    (tmp_path / "objects" / "files" / file_id).unlink()
    reply = await api.client.get(f"/v1/files/{file_id}/content")
    assert (reply.status_code, error(reply)["type"]) == (500, "server_error")
    assert reply.headers["x-request-id"] in error(reply)["message"]


async def test_a_file_of_another_project_does_not_exist(api: Api) -> None:
    await files.reserve(
        api.database, file_id="file-theirs", project_id="other", purpose="batch", filename="f",
        object_key="files/file-theirs", now=1.0, expires_at=None,
    )  # fmt: skip
    with pytest.raises(FileNotFound):
        await files.get(api.database, project_id="other", file_id="file-theirs")  # pending
    await files.publish(api.database, file_id="file-theirs", size=0, sha256="0" * 64)
    assert (await api.client.get("/v1/files/file-theirs")).status_code == 404
    assert (await api.client.delete("/v1/files/file-theirs")).status_code == 404
    assert (await api.client.get("/v1/files/file-theirs/content")).status_code == 404
    assert (await api.client.get("/v1/files")).json()["data"] == []
    assert (await api.client.get("/v1/files?after=file-theirs")).status_code == 404
