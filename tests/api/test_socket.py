"""The server as a peer on a socket sees it: limits in time and size, early refusals, ranges, stopping."""

import asyncio
import contextlib
import json
import socket
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest

from server.listen import bind, serve
from server.protocol import LARGEST_HEADER, GuardedProtocol
from state import files
from state.database import Database
from state.records import SettingsError
from state.settings import Settings
from tests.api.conftest import LINE, Listening
from tests.support.waiting import eventually

Listen = Callable[..., AbstractAsyncContextManager[Listening]]

FORM = (
    b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--x\r\nContent-Disposition: form-data; name="file"; filename="in.jsonl"\r\n\r\n'
)


def upload_head(length: int | None, *, port: int) -> bytes:
    size = b"Transfer-Encoding: chunked" if length is None else b"Content-Length: %d" % length
    return (
        b"POST /v1/files HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nContent-Type: multipart/form-data; boundary=x\r\n%s\r\n\r\n"
        % (port, size)
    )


async def reply_of(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], dict[str, Any]]:
    """One reply: status, headers, JSON body."""
    async with asyncio.timeout(10):
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:-2])}
        body = await reader.readexactly(int(headers["content-length"]))
    return int(head[0].split()[1]), headers, json.loads(body)


async def is_closed(reader: asyncio.StreamReader) -> bool:
    """Waits until the server has ended the connection."""
    async with asyncio.timeout(10):
        with contextlib.suppress(ConnectionError):
            while await reader.read(65536):
                pass
    return True


# ---- headers -------------------------------------------------------------------------------------------------


async def test_a_connection_that_says_nothing_is_closed(listening: Listen) -> None:
    async with listening(header_timeout=0.2) as server:
        reader, _ = await server.connect()
        assert await asyncio.wait_for(reader.read(), 10) == b""


async def test_half_a_header_is_answered_with_408_and_closed(listening: Listen) -> None:
    async with listening(header_timeout=0.2) as server:
        reader, writer = await server.connect()
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: 127")
        status, _, body = await reply_of(reader)
        assert (status, body["error"]["code"]) == (408, "request_timeout")
        assert await is_closed(reader)


async def test_a_header_that_trickles_is_no_excuse(listening: Listen) -> None:
    async with listening(header_timeout=0.3) as server:
        reader, writer = await server.connect()
        writer.write(b"GET /healthz HTTP/1.1\r\nX: ")
        answer = asyncio.create_task(reply_of(reader))
        while not (await asyncio.wait((answer,), timeout=0.02))[0]:
            writer.write(b"y")
        assert answer.result()[0] == 408
        assert await is_closed(reader)


async def test_a_second_header_has_its_own_time(listening: Listen) -> None:
    async with listening(header_timeout=0.3) as server:
        reader, writer = await server.connect()
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert (await reply_of(reader))[0] == 200
        writer.write(b"GET /healthz HTTP/1.1\r\n")
        assert (await reply_of(reader))[0] == 408
        assert await is_closed(reader)


async def test_an_idle_connection_is_kept_longer_than_a_header_may_take(listening: Listen) -> None:
    async with listening(header_timeout=0.1) as server:
        reader, writer = await server.connect()
        for _ in range(3):
            writer.write(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert (await reply_of(reader))[0] == 200
            silent, _ = await server.connect()
            assert await is_closed(silent)  # which takes as long as a header may


@pytest.mark.parametrize("complete", [False, True])
async def test_a_header_that_is_too_large_is_refused(listening: Listen, complete: bool) -> None:
    async with listening() as server:
        reader, writer = await server.connect()
        end = b"\r\n\r\n" if complete else b""
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX: " + b"y" * (LARGEST_HEADER + 1) + end)
        status, _, body = await reply_of(reader)
        assert (status, body["error"]["code"]) == (431, "header_too_large")
        await is_closed(reader)


@pytest.mark.parametrize("junk", [b"\x16\x03\x01\x02\x00\x01\x00", b"hello\r\n\r\n", b"GET /\xff HTTP/1.1\r\n\r\n"])
async def test_what_is_not_http_gets_an_envelope(listening: Listen, junk: bytes) -> None:
    async with listening() as server:
        reader, writer = await server.connect()
        writer.write(junk)
        status, _, body = await reply_of(reader)
        assert (status, body["error"]["type"]) == (400, "invalid_request_error")
        assert await is_closed(reader)


# ---- bodies --------------------------------------------------------------------------------------------------


async def test_a_body_that_stalls_is_answered_with_408_and_leaves_nothing(listening: Listen) -> None:
    async with listening(body_timeout=0.3) as server:
        reader, writer = await server.connect()
        writer.write(upload_head(10_000, port=server.port) + FORM + LINE)
        status, headers, body = await reply_of(reader)
        assert (status, body["error"]["code"], headers["connection"]) == (408, "request_timeout", "close")
        assert await is_closed(reader)
        assert list((server.data / "objects" / ".tmp").iterdir()) == []


async def test_a_client_that_goes_away_leaves_nothing(listening: Listen) -> None:
    async with listening() as server:
        temporary = server.data / "objects" / ".tmp"
        _, writer = await server.connect()
        writer.write(upload_head(10_000_000, port=server.port) + FORM + LINE * 10_000)
        await writer.drain()
        await eventually(lambda: list(temporary.iterdir()))
        writer.transport.abort()
        await eventually(lambda: not list(temporary.iterdir()))
        database = Database.open(Settings(data=server.data).database)
        try:
            await eventually(lambda: files.garbage(database))
            assert (await files.page(
                database, project_id="default", limit=10, after=None, order="asc", purpose=None
            )).items == ()  # fmt: skip
        finally:
            await database.close()


async def test_an_upload_that_is_too_large_is_refused_before_it_is_sent(listening: Listen) -> None:
    async with listening() as server:
        reader, writer = await server.connect()
        writer.write(upload_head(300 << 20, port=server.port))
        status, headers, body = await reply_of(reader)
        assert (status, body["error"]["message"], headers["connection"]) == (400, "File is too large.", "close")


async def test_an_upload_that_grows_too_large_is_refused_when_it_does(listening: Listen) -> None:
    async with listening(max_file_bytes=1 << 20) as server:
        reader, writer = await server.connect()
        data = FORM + LINE * ((2 << 20) // len(LINE))
        writer.write(upload_head(None, port=server.port) + b"%x\r\n%s\r\n" % (len(data), data))
        status, _, body = await reply_of(reader)
        assert (status, body["error"]["message"]) == (400, "File is too large.")


async def test_a_refused_body_is_read_so_that_its_sender_hears_the_answer(listening: Listen) -> None:
    """The client sends everything before it looks at the answer, as httpx and the SDK do."""
    body = FORM + LINE * (20_000_000 // len(LINE))
    async with listening(api_keys=("on-key",)) as server:
        reader, writer = await server.connect()
        writer.write(upload_head(len(body), port=server.port) + body)
        await writer.drain()
        status, headers, told = await reply_of(reader)
        assert (status, headers["connection"]) == (401, "close")
        assert told["error"]["message"] == "Missing bearer or basic authentication in header"
        assert await is_closed(reader)


async def test_a_small_unread_body_does_not_cost_the_connection(listening: Listen) -> None:
    async with listening(api_keys=("on-key",)) as server:
        reader, writer = await server.connect()
        head = b"POST /v1/batches HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\n"
        for _ in range(2):
            writer.write(head)
            status, headers, _ = await reply_of(reader)
            assert (status, "connection" in headers) == (401, False)
            writer.write(b"12345")


async def test_a_client_that_waits_to_be_asked_for_its_body_is_refused_at_once(listening: Listen) -> None:
    async with listening() as server:
        reader, writer = await server.connect()
        writer.write(upload_head(300 << 20, port=server.port)[:-2] + b"Expect: 100-continue\r\n\r\n")
        status, _, _ = await reply_of(reader)
        assert status == 400


# ---- downloads -----------------------------------------------------------------------------------------------


async def test_a_slow_reader_keeps_nobody_waiting(listening: Listen) -> None:
    async with listening() as server, httpx.AsyncClient(base_url=server.url) as client:
        content = LINE * 300_000
        reply = await client.post("/v1/files", data={"purpose": "batch"}, files={"file": ("in.jsonl", content)})
        path = f"/v1/files/{reply.json()['id']}/content"
        for _ in range(20):
            reader, writer = await server.connect()
            writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            await reader.readexactly(1)
        assert (await client.get(path)).content == content


async def test_a_reader_that_takes_nothing_is_cut_off(listening: Listen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GuardedProtocol, "unread_timeout", 0.3)
    async with listening() as server, httpx.AsyncClient(base_url=server.url) as client:
        content = LINE * 300_000
        reply = await client.post("/v1/files", data={"purpose": "batch"}, files={"file": ("in.jsonl", content)})
        reader, writer = await server.connect()
        writer.write(f"GET /v1/files/{reply.json()['id']}/content HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        await reader.readexactly(1)
        await eventually(lambda: requests_under_way() == 0)
        with pytest.raises(asyncio.IncompleteReadError):
            await reader.readexactly(len(content))


async def test_a_download_is_resumed_by_a_range(listening: Listen) -> None:
    async with listening() as server, httpx.AsyncClient(base_url=server.url) as client:
        content = LINE * 50_000
        reply = await client.post("/v1/files", data={"purpose": "batch"}, files={"file": ("in.jsonl", content)})
        path = f"/v1/files/{reply.json()['id']}/content"
        head = (await client.head(path)).headers
        rest = await client.get(path, headers={"range": "bytes=1000000-", "if-range": head["etag"]})
        assert (rest.status_code, rest.content) == (206, content[1_000_000:])


# ---- listening and stopping ----------------------------------------------------------------------------------


async def test_a_port_that_is_taken_is_said_in_one_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        settings = Settings(data=tmp_path, port=port)
        with pytest.raises(SettingsError, match=f"127.0.0.1:{port} is taken by another program: .* another --port"):
            await serve(settings, stop=asyncio.Event(), ready=lambda: None)


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_without_keys_only_loopback_is_listened_on(tmp_path: Path, host: str) -> None:
    with pytest.raises(SettingsError, match="set OVERNIGHT_API_KEYS, or listen on"):
        bind(Settings(data=tmp_path, host=host, port=0))


def test_with_keys_any_address_is_listened_on(tmp_path: Path) -> None:
    for one in bind(Settings(data=tmp_path, host="0.0.0.0", port=0, api_keys=("on-key",))):
        one.close()


def test_a_name_with_several_addresses_is_listened_on_at_one_port(tmp_path: Path) -> None:
    sockets = bind(Settings(data=tmp_path, host="localhost", port=0))
    assert len({one.getsockname()[1] for one in sockets}) == 1
    for one in sockets:
        one.close()


def test_a_host_that_does_not_exist_is_said_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="has no address on this machine"):
        bind(Settings(data=tmp_path, host="no such host", port=0))


async def test_stopping_lets_a_request_under_way_finish(listening: Listen) -> None:
    async with listening() as server:
        body = FORM + LINE + b"\r\n--x--\r\n"
        reader, writer = await server.connect()
        writer.write(upload_head(len(body), port=server.port) + body[:100])
        await eventually(lambda: requests_under_way() > 0)
        server.stop.set()
        writer.write(body[100:])
        status, _, told = await reply_of(reader)
        assert (status, told["status"]) == (200, "processed")


async def test_stopping_waits_no_longer_than_it_is_told(listening: Listen) -> None:
    async with listening(shutdown_timeout=0.5) as server:
        _, writer = await server.connect()
        writer.write(upload_head(10_000_000, port=server.port) + FORM + LINE * 10_000)
        await eventually(lambda: list((server.data / "objects" / ".tmp").iterdir()))
        server.stop.set()
        await asyncio.wait_for(server.done, 10)
        assert list((server.data / "objects" / ".tmp").iterdir()) == []


def requests_under_way() -> int:
    return sum("run_asgi" in str(task.get_coro()) for task in asyncio.all_tasks())
