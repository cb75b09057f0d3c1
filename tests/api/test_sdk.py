"""The official SDK against the listening server."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import openai
import pytest

from tests.api.conftest import LINE, Listening

Listen = Callable[..., AbstractAsyncContextManager[Listening]]


@pytest.fixture
async def sdk(listening: Listen) -> AsyncIterator[openai.AsyncOpenAI]:
    async with listening() as server:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
            yield client


async def test_a_file_lives_its_life(sdk: openai.AsyncOpenAI, tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(LINE * 3)
    made = await sdk.files.create(file=path, purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600})
    assert (made.filename, made.bytes, made.status) == ("in.jsonl", 3 * len(LINE), "processed")
    assert made.expires_at == made.created_at + 3600
    assert await sdk.files.retrieve(made.id) == made
    assert await sdk.files.wait_for_processing(made.id) == made
    content = await sdk.files.content(made.id)
    assert (content.content, content.text) == (LINE * 3, (LINE * 3).decode())
    deleted = await sdk.files.delete(made.id)
    assert (deleted.id, deleted.deleted) == (made.id, True)
    with pytest.raises(openai.NotFoundError) as caught:
        await sdk.files.retrieve(made.id)
    assert caught.value.message == f"Error code: 404 - No such File object: {made.id}"
    assert (caught.value.param, caught.value.code, caught.value.type) == ("id", None, "invalid_request_error")
    assert (caught.value.request_id or "").startswith("req_")


async def test_bytes_without_a_name_are_called_upload(sdk: openai.AsyncOpenAI) -> None:
    assert (await sdk.files.create(file=LINE, purpose="batch")).filename == "upload"


async def test_a_batch_is_created_read_listed_and_cancelled(sdk: openai.AsyncOpenAI) -> None:
    file = await sdk.files.create(file=("in.jsonl", LINE), purpose="batch")
    made = await sdk.batches.create(
        input_file_id=file.id,
        endpoint="/v1/chat/completions",
        completion_window="24h",
        metadata={"job": "night"},
        output_expires_after={"anchor": "created_at", "seconds": 3600},
    )
    assert (made.status, made.metadata, made.errors) == ("validating", {"job": "night"}, None)
    assert made.request_counts is not None
    assert (made.request_counts.total, made.request_counts.failed) == (0, 0)
    assert await sdk.batches.retrieve(made.id) == made
    assert [batch.id async for batch in sdk.batches.list(limit=1)] == [made.id]
    with pytest.raises(openai.ConflictError):
        await sdk.files.delete(file.id)
    assert (await sdk.batches.cancel(made.id)).status == "cancelling"


async def test_lists_are_followed_to_their_end(sdk: openai.AsyncOpenAI) -> None:
    files = [(await sdk.files.create(file=LINE, purpose="batch")).id for _ in range(3)]
    assert [file.id async for file in sdk.files.list(limit=2)] == files[::-1]
    assert [model.id async for model in sdk.models.list()] == []


async def test_errors_have_the_sdks_types(sdk: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await sdk.files.create(file=b"Hello World", purpose="batch")
    assert caught.value.message == "Error code: 400 - Invalid file format for Batch API. Must be .jsonl"
    with pytest.raises(openai.BadRequestError) as caught:
        await sdk.batches.create(input_file_id="file-x", endpoint="/v1/moderations", completion_window="24h")
    assert (caught.value.param, caught.value.code) == ("endpoint", "invalid_value")
    with pytest.raises(openai.NotFoundError):
        await sdk.batches.retrieve("batch_none")


async def test_a_wrong_key_is_an_authentication_error(listening: Listen) -> None:
    async with listening(api_keys=("on-right-key",)) as server:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="on-wrong", max_retries=0) as client:
            with pytest.raises(openai.AuthenticationError) as caught:
                await client.files.create(file=LINE * 200_000, purpose="batch")
            assert caught.value.code == "invalid_api_key"


async def test_an_oversized_upload_is_a_bad_request(listening: Listen) -> None:
    """The SDK sends the whole file before it reads an answer, and must find one all the same."""
    content = LINE * (48_000_000 // len(LINE))
    async with listening(max_file_bytes=1 << 20) as server:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
            with pytest.raises(openai.BadRequestError) as caught:
                await client.files.create(file=content, purpose="batch")
        assert caught.value.message == "Error code: 400 - File is too large."


async def test_an_oversized_upload_is_a_bad_request_to_the_synchronous_client_too(listening: Listen) -> None:
    content = LINE * (48_000_000 // len(LINE))
    async with listening(max_file_bytes=1 << 20) as server:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
            with pytest.raises(openai.BadRequestError) as caught:
                await asyncio.to_thread(client.files.create, file=content, purpose="batch")
        assert caught.value.message == "Error code: 400 - File is too large."
