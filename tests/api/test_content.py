"""Downloads: what a HEAD says, and what may happen to a file or a client meanwhile."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from starlette.types import Message

from server.content import _Download
from server.intake import BodyStalled
from state import files
from state.objects.local import LocalStore
from tests.api.conftest import LINE, Api


@pytest.mark.parametrize("wanted", ["bytes=0-0", "bytes=999999-"])
async def test_a_range_means_nothing_to_a_head(api: Api, wanted: str) -> None:
    reply = await api.client.head(f"/v1/files/{await api.uploaded()}/content", headers={"range": wanted})
    assert (reply.status_code, reply.headers["content-length"]) == (200, str(len(LINE)))
    assert "content-range" not in reply.headers


@pytest.mark.parametrize(("deleted", "status"), [(True, 404), (False, 500)])
async def test_a_file_may_be_deleted_between_its_row_and_its_bytes(
    api: Api, monkeypatch: pytest.MonkeyPatch, deleted: bool, status: int
) -> None:
    file_id = await api.uploaded()
    read = LocalStore.read

    async def late(store: LocalStore, key: str, *span: Any) -> AsyncIterator[bytes]:
        if deleted:
            await files.delete(api.database, project_id="default", file_id=file_id, now=0.0)
        await store.delete([key])
        async for piece in read(store, key, *span):
            yield piece

    monkeypatch.setattr(LocalStore, "read", late)
    assert (await api.client.get(f"/v1/files/{file_id}/content")).status_code == status


async def test_a_download_goes_on_when_a_body_that_nobody_wants_stalls() -> None:
    stalled, sent = asyncio.Event(), list[Message]()

    async def receive() -> Message:
        if not stalled.is_set():
            stalled.set()
            raise BodyStalled("no byte for a while")
        await asyncio.Event().wait()
        raise AssertionError

    async def rest() -> AsyncIterator[bytes]:
        await stalled.wait()
        for piece in (b"b", b"c"):
            await asyncio.sleep(0)
            yield piece

    async def send(message: Message) -> None:
        sent.append(message)

    await _Download(b"a", rest(), 200, {})({"type": "http"}, receive, send)
    assert b"".join(message.get("body", b"") for message in sent) == b"abc"
    assert not sent[-1].get("more_body", False)
