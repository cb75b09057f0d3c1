"""Peers that keep to HTTP's letter, or nearly, to harm: what one connection can take from others is bounded."""

import asyncio
import contextlib
import json
import logging

import httpx
import pytest

from server import listen
from server.protocol import MOST_AHEAD
from tests.api.conftest import CREATE, LINE, Listening
from tests.api.test_socket import Listen, is_closed, reply_of, requests_under_way, upload_head
from tests.support.waiting import eventually

BODY = json.dumps({"input_file_id": "file-none", **CREATE}).encode()
PROBE = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"


def create_head(rest: bytes, *, host: bytes = b"localhost") -> bytes:
    return b"POST /v1/batches HTTP/1.1\r\nHost: %s\r\nContent-Type: application/json\r\n%s\r\n\r\n" % (host, rest)


async def large_file(server: Listening) -> str:
    """The path of a download that fits into no buffer."""
    async with httpx.AsyncClient(base_url=server.url) as client:
        form = {"data": {"purpose": "batch"}, "files": {"file": ("in.jsonl", LINE * 300_000)}}
        reply = await client.post("/v1/files", **form)  # type: ignore[arg-type]
        return f"/v1/files/{reply.json()['id']}/content"


# ---- trailers ------------------------------------------------------------------------------------------------


async def test_a_trailer_is_no_header(listening: Listen) -> None:
    async with listening() as server:
        reader, writer = await server.connect()
        chunks = b"%x\r\n%s\r\n0\r\nHost: evil.example\r\n\r\n" % (len(BODY), BODY)
        writer.write(create_head(b"Transfer-Encoding: chunked") + chunks)
        status, _, body = await reply_of(reader)
        assert (status, body["object"]) == (200, "batch")


async def test_a_key_in_a_trailer_opens_nothing(listening: Listen) -> None:
    async with listening(api_keys=("on-key",)) as server:
        reader, writer = await server.connect()
        chunks = b"%x\r\n%s\r\n0\r\nAuthorization: Bearer on-key\r\n\r\n" % (len(BODY), BODY)
        writer.write(create_head(b"Transfer-Encoding: chunked") + chunks)
        assert (await reply_of(reader))[0] == 401


@pytest.mark.parametrize(
    "coding", [b"gzip, chunked", b"chunked, gzip", b"xchunked", b"identity\r\nTransfer-Encoding: chunked", b"identity"]
)
async def test_a_body_that_a_proxy_may_read_in_another_way_is_refused(listening: Listen, coding: bytes) -> None:
    async with listening() as server:
        reader, writer = await server.connect()
        writer.write(create_head(b"Transfer-Encoding: " + coding) + b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY))
        assert (await reply_of(reader))[0] == 400
        assert await is_closed(reader)


# ---- requests sent ahead ---------------------------------------------------------------------------------------


async def test_a_few_requests_sent_ahead_are_answered_in_order(listening: Listen) -> None:
    async with listening() as server:
        reader, writer = await server.connect()
        writer.write(b"".join(b"GET /%d HTTP/1.1\r\nHost: localhost\r\n\r\n" % n for n in range(MOST_AHEAD)))
        for n in range(MOST_AHEAD):
            assert (await reply_of(reader))[2]["error"]["message"] == f"Invalid URL (GET /{n})"


async def test_requests_sent_ahead_without_end_cost_the_connection(listening: Listen) -> None:
    async with listening() as server:
        reader, writer = await server.connect()
        writer.write(PROBE * 5_000)
        answered = 0
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while (await reply_of(reader))[0] == 200:
                answered += 1
        assert answered < 5_000
        assert await is_closed(reader)


async def test_nothing_is_written_into_a_reply_under_way(listening: Listen) -> None:
    async with listening() as server:
        path = await large_file(server)
        reader, writer = await server.connect()
        writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"\x00 this is not HTTP\r\n\r\n")
        received = b""
        async with asyncio.timeout(10):
            while piece := await reader.read(1 << 20):
                received += piece
        assert received == (LINE * 300_000)[: len(received)]


async def test_a_reply_ends_with_its_connection_though_another_request_was_sent_ahead(
    listening: Listen, caplog: pytest.LogCaptureFixture
) -> None:
    """Else the file is read to its end for nobody, and asyncio warns of each piece."""
    async with listening() as server:
        path = await large_file(server)
        with caplog.at_level(logging.WARNING, "asyncio"):
            reader, writer = await server.connect()
            writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode() + PROBE)
            await reader.readexactly(1)
            writer.transport.abort()
            await eventually(lambda: requests_under_way() == 0)
        assert [record.message for record in caplog.records if record.name == "asyncio"] == []


# ---- connections -----------------------------------------------------------------------------------------------


async def test_connections_beyond_the_bound_are_told_so(listening: Listen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listen, "_open_files", lambda: 6)
    async with listening() as server:
        kept = [await server.connect() for _ in range(3)]
        reader, writer = kept[0]
        writer.write(PROBE)
        assert (await reply_of(reader))[0] == 200
        refused, _ = await server.connect()
        status, headers, body = await reply_of(refused)
        assert (status, body["error"]["code"], headers["retry-after"]) == (503, "overloaded", "1")
        assert await is_closed(refused)
        writer.close()

        async def is_served() -> bool:
            again, asking = await server.connect()
            asking.write(PROBE)
            return (await reply_of(again))[0] == 200

        await eventually(is_served)


# ---- bodies ----------------------------------------------------------------------------------------------------


async def test_a_body_that_trickles_is_no_excuse(listening: Listen) -> None:
    async with listening(body_timeout=0.3, min_body_rate=1e6) as server:
        reader, writer = await server.connect()
        writer.write(upload_head(10_000, port=server.port) + b"--x\r\n")
        answer = asyncio.create_task(reply_of(reader))
        while not (await asyncio.wait((answer,), timeout=0.02))[0]:
            writer.write(b"y")
        status, headers, body = answer.result()
        assert (status, headers["connection"]) == (408, "close")
        assert body["error"]["message"] == "The request's body arrives too slowly: fewer than 1e+06 bytes per second."
        assert await is_closed(reader)


async def test_a_body_may_take_its_time_at_the_least_rate(listening: Listen) -> None:
    async with listening(body_timeout=0.2, min_body_rate=1.0) as server:
        reader, writer = await server.connect()
        writer.write(create_head(b"Transfer-Encoding: chunked"))
        begun = asyncio.get_running_loop().time()
        answer = asyncio.create_task(reply_of(reader))
        while asyncio.get_running_loop().time() < begun + 0.5:
            writer.write(b"1\r\n \r\n")
            await asyncio.wait((answer,), timeout=0.02)
        writer.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY))
        assert (await answer)[0] == 200


@pytest.mark.parametrize("length", [2**20 + 1, 2**63 - 1, 2**64 - 1])
async def test_a_body_that_will_be_too_large_is_refused_before_it_comes(listening: Listen, length: int) -> None:
    async with listening() as server:
        reader, writer = await server.connect()
        writer.write(create_head(b"Content-Length: %d" % length))
        status, _, body = await reply_of(reader)
        assert (status, body["error"]["code"]) == (413, "request_too_large")
