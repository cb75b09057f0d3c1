"""A managed vLLM, played by a fake one: its life from the first start to its end, and each way it can fail."""

import asyncio
import json
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest

from engine.backends import vllm
from engine.backends.protocol import EngineError, EngineMisconfigured, NotSent
from engine.backends.vllm import ManagedVLLM
from engine.worker import drain, role
from server.roles import supervise
from state.records import SettingsError
from state.settings import Settings
from tests.engine_process.conftest import Traces
from tests.support.waiting import eventually

CHAT = "/v1/chat/completions"
Make = Callable[..., Settings]


@asynccontextmanager
async def running(settings: Settings, **more: Any) -> AsyncIterator[ManagedVLLM]:
    backend = ManagedVLLM(settings, stop_s=2.0, **more)
    try:
        await backend.start()
        yield backend
    finally:
        await backend.close()


def body(model: str) -> bytes:
    return orjson.dumps({"model": model, "messages": []})


async def reason_of_death(backend: ManagedVLLM) -> str:
    return await asyncio.wait_for(backend.died(), 20)


async def test_it_answers_on_a_private_socket_and_leaves_nothing(
    settings: Make, traces: Traces, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OVERNIGHT_UPSTREAM_API_KEY", "secret")
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    async with running(settings()) as backend:
        assert orjson.loads((await backend.send(CHAT, body("org/model"))).body)["model"] == "org/model"
        command = json.loads((traces.folder / "command").read_text())
        socket = Path(command[command.index("--uds") + 1])
        assert (socket.parent.stat().st_mode & 0o777, len(os.fsencode(socket)) < 107) == (0o700, True)
        assert "secret" not in (traces.folder / "environ").read_text()
        await eventually(lambda: traces.pid("core"))
        assert traces.pid("engine")
    assert traces.alive() == []
    assert not socket.parent.exists()
    with pytest.raises(NotSent):
        await backend.send(CHAT, body("org/model"))


async def test_every_endpoint_it_serves_gets_a_first_request(settings: Make, traces: Traces) -> None:
    async with running(settings()) as backend:
        (model,) = await backend.models()
    assert model.endpoints == ("/v1/chat/completions", "/v1/completions", "/v1/responses")
    assert (traces.folder / "asked").read_text().split() == ["/v1/chat/completions", "/v1/completions"]


async def test_a_pooling_model_has_no_chat(settings: Make, traces: Traces, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_VLLM", "pools")
    async with running(settings()) as backend:
        (model,) = await backend.models()
    assert model.endpoints == ("/v1/embeddings", "/v1/score")
    assert (traces.folder / "asked").read_text().split() == ["/v1/embeddings", "/v1/score"]


async def test_aliases_are_names_of_the_engines_own_and_the_star_is_put_in_place(settings: Make) -> None:
    async with running(settings(model_aliases=("gpt-4o-mini=org/model", "*=org/model"))) as backend:
        asked = [orjson.loads((await backend.send(CHAT, body(name))).body)["model"] for name in ("gpt-4o-mini", "any")]
        (model,) = await backend.models()
    assert asked == ["gpt-4o-mini", "org/model"]
    assert (model.root, model.names) == ("org/model", ("org/model", "gpt-4o-mini", "*"))


async def test_its_names_are_known_before_it_is_up(settings: Make) -> None:
    (model,) = await ManagedVLLM(settings(model_aliases=("a=org/model",))).models()
    assert (model.root, model.names, model.endpoints) == ("org/model", ("org/model", "a"), None)


async def test_an_engine_that_ends_before_it_was_healthy_is_misconfigured(
    settings: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_VLLM", "exits")
    with pytest.raises(EngineMisconfigured, match="vLLM ended with exit code 1 before it was ready") as caught:
        async with running(settings()):
            raise AssertionError("it started")
    assert len(caught.value.tail) == 50
    assert caught.value.tail[-2:] == ("line 69", "ValueError: this model does not fit")


async def test_an_engine_that_was_healthy_once_may_fail_to_start_for_a_while(
    settings: Make, traces: Traces, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(settings()) as backend:
        os.kill(traces.pid("engine"), signal.SIGKILL)
        await reason_of_death(backend)
        monkeypatch.setenv("FAKE_VLLM", "exits")
        with pytest.raises(EngineError, match="before it was ready"):
            await backend.start()
        monkeypatch.setenv("FAKE_VLLM", "")
        await backend.start()
        assert (await backend.send(CHAT, body("org/model"))).status == 200


async def test_also_when_its_worker_is_a_new_one_of_the_same_parent(
    settings: Make, traces: Traces, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that is killed after hours may find the GPU's memory not free yet; that must not end everything."""
    async with running(settings()):
        assert traces.pid("engine")
    monkeypatch.setenv("FAKE_VLLM", "exits")
    with pytest.raises(
        EngineError, match=r"vLLM ended with exit code 1 before it was ready; .*this model does not fit"
    ):
        await ManagedVLLM(settings()).start()
    with pytest.raises(EngineMisconfigured):
        await ManagedVLLM(settings(engine_args=("--seed", "1"))).start()
    monkeypatch.setattr(os, "getppid", lambda: 1)
    with pytest.raises(EngineMisconfigured):
        await ManagedVLLM(settings()).start()


async def test_what_it_needs_may_be_missing_for_a_while(settings: Make, fake_python: Path) -> None:
    async with running(settings()) as backend:
        fake_python.rename(fake_python.with_name("gone"))
        with pytest.raises(EngineError, match="which is no program that can be run"):
            await backend.start()
        fake_python.with_name("gone").rename(fake_python)
        await backend.start()
        assert (await backend.send(CHAT, body("org/model"))).status == 200


async def test_an_engine_that_dies_of_its_first_request_is_misconfigured(
    settings: Make, traces: Traces, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Starting it again would go on for ever."""
    monkeypatch.setenv("FAKE_VLLM", "dies-of-work")
    with pytest.raises(EngineMisconfigured, match=f"did not live through a first request to {CHAT}") as caught:
        await ManagedVLLM(settings(), stop_s=2.0).start()
    assert caught.value.tail[-1] == "RuntimeError: no kernel image is available"
    assert traces.alive() == []


async def test_an_engine_that_fails_at_one_endpoint_only_works(settings: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_VLLM", "fails-at-completions")
    async with running(settings()) as backend:
        assert (await backend.send(CHAT, body("org/model"))).status == 200


async def test_a_killed_engine_is_reported_and_its_successor_has_a_socket_of_its_own(
    settings: Make, traces: Traces
) -> None:
    async with running(settings()) as backend:
        first = json.loads((traces.folder / "command").read_text())
        await eventually(lambda: traces.pid("core"))
        os.kill(traces.pid("engine"), signal.SIGKILL)
        assert (await reason_of_death(backend)).startswith("vLLM was ended by SIGKILL")
        assert traces.alive() == []
        with pytest.raises(NotSent):
            await backend.send(CHAT, body("org/model"))
        await backend.start()
        assert (await backend.send(CHAT, body("org/model"))).status == 200
        second = json.loads((traces.folder / "command").read_text())
    assert first[first.index("--uds") + 1] != second[second.index("--uds") + 1]


async def test_an_engine_that_hangs_is_ended(settings: Make, traces: Traces, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_VLLM", "hangs")
    async with running(settings(engine_hung_after=1.5)) as backend:
        assert traces.pid("engine")
        assert await reason_of_death(backend) == "vLLM hung: requests at it, and no progress for 1.5 s"
        assert traces.alive() == []


async def test_an_engine_that_cannot_be_reached_any_more_is_ended(settings: Make, traces: Traces) -> None:
    """Without requests as well: it gets none, because it cannot be reached."""
    async with running(settings(engine_hung_after=1.5)) as backend:
        command = json.loads((traces.folder / "command").read_text())
        Path(command[command.index("--uds") + 1]).unlink()
        assert await reason_of_death(backend) == "vLLM hung: no answer from it for 1.5 s"
        assert traces.alive() == []


async def test_a_slow_cpu_may_take_longer_for_a_step_than_a_gpu(
    settings: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_VLLM", "hangs")
    async with running(settings()) as backend:
        assert backend._run is not None
        assert backend._run.hung_after == 600


async def test_a_killed_guard_leaves_nothing(settings: Make, traces: Traces) -> None:
    """Invariant 15: the worker ends what its guard cannot any more, before it starts the next engine."""
    data = settings().data
    async with running(settings()) as backend:
        await eventually(lambda: traces.pid("core") and traces.pid("engine"))
        (record,) = (data / "engines").glob("*.json")
        facts = json.loads(record.read_text())
        os.kill(facts["guard"], signal.SIGKILL)
        assert (await reason_of_death(backend)).startswith("vLLM lost its guard, which was ended by SIGKILL")
        assert traces.alive() == []
        assert not record.exists()
        assert not Path(facts["folder"]).exists()
        await backend.start()
        assert (await backend.send(CHAT, body("org/model"))).status == 200


async def test_its_socket_is_not_where_a_logout_removes_it(
    settings: Make, traces: Traces, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as runtime:
        monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
        async with running(settings()):
            command = json.loads((traces.folder / "command").read_text())
        assert not command[command.index("--uds") + 1].startswith(runtime)


async def test_a_server_that_outlives_its_core_is_ended(settings: Make, traces: Traces) -> None:
    async with running(settings()) as backend:
        assert traces.pid("engine")
        (traces.folder / "dead").touch()
        assert await reason_of_death(backend) == "vLLM's engine core died"
        assert traces.alive() == []
        (traces.folder / "dead").unlink()


async def test_a_start_that_is_cancelled_leaves_nothing(
    settings: Make, traces: Traces, monkeypatch: pytest.MonkeyPatch
) -> None:
    (traces.folder / "dead").touch()  # it never gets healthy
    backend = ManagedVLLM(settings(), stop_s=2.0)
    start = asyncio.create_task(backend.start())
    await eventually(lambda: traces.pid("engine"))
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    assert traces.alive() == []


async def test_flags_that_are_ours_are_refused_before_anything_starts(settings: Make) -> None:
    with pytest.raises(SettingsError, match="--port cannot be given to the engine: the engine listens on a private"):
        ManagedVLLM(settings(engine_args=("--port", "9000")))


async def test_an_alias_of_another_model_is_refused(settings: Make) -> None:
    with pytest.raises(SettingsError, match="model alias a=b: the engine does not serve 'b'"):
        ManagedVLLM(settings(model_aliases=("a=b",)))


async def test_without_an_environment_it_says_how_to_install_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.delenv("OVERNIGHT_ENGINE_HOME", raising=False)
    with pytest.raises(SettingsError, match="run `overnight engine install --cpu`"):
        await ManagedVLLM(Settings(data=tmp_path / "data", model="demo")).start()


WORKER = """
import asyncio, sys
from pathlib import Path
from engine.backends.vllm import ManagedVLLM
from state.settings import Settings

async def main():
    backend = ManagedVLLM(Settings(data=Path(sys.argv[1]), engine_python=sys.argv[2], model="org/model"))
    await backend.start()
    print("up", flush=True)
    await backend.died()

asyncio.run(main())
"""


async def test_a_killed_worker_leaves_nothing(tmp_path: Path, fake_python: Path, traces: Traces) -> None:
    worker = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", WORKER, str(tmp_path / "data"), str(fake_python)), stdout=asyncio.subprocess.PIPE
    )
    assert worker.stdout is not None
    assert await worker.stdout.readline() == b"up\n"
    await eventually(lambda: traces.pid("core") and traces.pid("engine"))
    (record,) = (tmp_path / "data" / "engines").glob("*.json")
    command = json.loads((traces.folder / "command").read_text())
    worker.kill()
    await worker.wait()
    await eventually(lambda: not traces.alive())
    await eventually(lambda: not record.exists())
    await eventually(lambda: not Path(command[command.index("--uds") + 1]).parent.exists())


def test_a_workers_whole_end_takes_less_than_its_supervisor_allows() -> None:
    """Else a worker is killed while it ends (invariant 15). The engine ends while the last commits are made."""
    steps = role.LAST_CLAIM_S + drain.LANDING_S + vllm.STOP_S + 3 * role.FAREWELL_S
    assert steps <= supervise.DRAIN_S
