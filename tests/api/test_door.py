"""Who may come in."""

from typing import Any

import httpx
import pytest

from server.auth import masked
from tests.api.conftest import Opener

KEY = "on-0123456789abcdefghijklmnop"


def error(reply: httpx.Response) -> dict[str, Any]:
    body = reply.json()["error"]
    assert set(body) == {"message", "type", "param", "code"}
    return dict(body)


# ---- without keys --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer whatever"}, {"authorization": "Basic eDp5"}])
async def test_without_keys_local_programs_need_none(open_api: Opener, headers: dict[str, str]) -> None:
    async with open_api() as api:
        assert (await api.client.get("/v1/files", headers=headers)).status_code == 200


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.0.0.1:8000", "localhost:8000", "[::1]:8000", "LOCALHOST", "app.localhost"]
)
async def test_without_keys_loopback_names_are_served(open_api: Opener, host: str) -> None:
    async with open_api() as api:
        assert (await api.client.get("/v1/files", headers={"host": host})).status_code == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "127.0.0.1.evil.example",
        "localhost.evil.example:8000",
        "localhost:80@evil.example",
        "[::1].evil.example",
        "10.0.0.5",
        "",
        "[::1",
        "[::2]",
    ],
)
async def test_without_keys_any_other_name_is_refused(open_api: Opener, host: str) -> None:
    async with open_api() as api:
        for path in ("/v1/files", "/healthz", "/readyz", "/nowhere"):
            reply = await api.client.get(path, headers={"host": host})
            assert (reply.status_code, error(reply)["code"]) == (403, "host_not_allowed")


async def test_without_keys_a_listed_name_is_served(open_api: Opener) -> None:
    async with open_api(allowed_hosts=("gpu-box.internal",)) as api:
        assert (await api.client.get("/v1/files", headers={"host": "GPU-box.internal:8000"})).status_code == 200
        assert (await api.client.get("/v1/files", headers={"host": "other.internal"})).status_code == 403


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"origin": "http://127.0.0.1:8000"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ],
)
async def test_without_keys_web_pages_are_refused(open_api: Opener, headers: dict[str, str]) -> None:
    async with open_api() as api:
        for method in ("GET", "OPTIONS"):
            reply = await api.client.request(method, "/v1/files", headers=headers)
            assert (reply.status_code, error(reply)["code"]) == (403, "origin_not_allowed")
            assert not [name for name in reply.headers if name.startswith("access-control")]


async def test_a_person_may_open_an_address(open_api: Opener) -> None:
    async with open_api() as api:
        assert (await api.client.get("/v1/models", headers={"sec-fetch-site": "none"})).status_code == 200


# ---- with keys -----------------------------------------------------------------------------------------------


async def test_with_keys_one_of_them_opens(open_api: Opener) -> None:
    async with open_api(api_keys=("on-other", KEY)) as api:
        for header in (f"Bearer {KEY}", f"bearer  {KEY}", "Bearer on-other"):
            assert (await api.client.get("/v1/files", headers={"authorization": header})).status_code == 200


@pytest.mark.parametrize(
    "headers", [{}, {"authorization": ""}, {"authorization": "Bearer "}, {"authorization": "Basic eDp5"}]
)
async def test_with_keys_none_is_401(open_api: Opener, headers: dict[str, str]) -> None:
    async with open_api(api_keys=(KEY,)) as api:
        for path in ("/v1/files", "/v1/models", "/readyz/engine", "/nowhere"):
            reply = await api.client.get(path, headers=headers)
            assert reply.status_code == 401
            assert error(reply) == {
                "message": "Missing bearer or basic authentication in header",
                "type": "invalid_request_error",
                "param": None,
                "code": None,
            }
            assert reply.headers["www-authenticate"] == "Bearer"


async def test_with_keys_a_wrong_one_is_401_and_is_not_repeated_in_full(open_api: Opener) -> None:
    wrong = "sk-proj-abcdefghijklmnopqrstuvwxyz"
    async with open_api(api_keys=(KEY,)) as api:
        reply = await api.client.get("/v1/files", headers={"authorization": f"Bearer {wrong}"})
        assert (reply.status_code, error(reply)["code"]) == (401, "invalid_api_key")
        assert error(reply)["message"].startswith("Incorrect API key provided: sk-****wxyz. ")
        assert wrong not in reply.text


async def test_with_keys_names_and_pages_do_not_matter(open_api: Opener) -> None:
    async with open_api(api_keys=(KEY,)) as api:
        headers = {"authorization": f"Bearer {KEY}", "host": "api.example", "origin": "https://app.example"}
        assert (await api.client.get("/v1/files", headers=headers)).status_code == 200


async def test_with_keys_probes_need_none(open_api: Opener) -> None:
    async with open_api(api_keys=(KEY,)) as api:
        for path in ("/healthz", "/readyz"):
            assert (await api.client.get(path)).status_code == 200


@pytest.mark.parametrize(
    ("key", "shown"), [("short", "****"), ("sk-0123456789abcdef", "sk-****cdef"), ("x" * 15, "****")]
)
def test_a_key_is_masked(key: str, shown: str) -> None:
    assert masked(key) == shown
