"""200 chat requests through a real vLLM, the worker killed with -9 three times on the way: each line once."""

import os
from pathlib import Path

import pytest

from tests.support.overnight import ENDED, Overnight

REQUESTS, KILLS = 200, 3


def chat_line(number: int) -> dict[str, object]:
    body = {
        "model": "demo",
        "messages": [{"role": "user", "content": f"Say one thing about the number {number}."}],
        "temperature": 0,
        "max_tokens": 24,
    }
    return {"custom_id": f"n-{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}


@pytest.mark.processes
def test_every_line_is_answered_once_though_the_worker_is_killed_three_times(tmp_path: Path, engine_home: Path) -> None:
    environ = {"OVERNIGHT_ENGINE_HOME": str(engine_home.absolute())}
    lines = [chat_line(n) for n in range(REQUESTS)]
    server = Overnight(tmp_path, model="demo", max_in_flight=16, segment_interval=0.5, environ=environ)
    try:
        server.start(within=240)
        batch = server.submit(lines)
        for kill in range(KILLS):
            done = (kill + 1) * REQUESTS // (KILLS + 2)
            seen = server.until(
                batch.id, lambda b, least=done: b.status in ENDED or b.request_counts.completed >= least, within=240
            )
            assert seen.status == "in_progress", "all kills hit a running batch"
            worker = server.pids()["worker"]
            server.kill("worker")
            server.replaced("worker", worker)
        batch = server.ended(batch.id, within=240)
        output, errors = server.results(batch)
        assert batch.status == "completed"
        assert errors == []
        assert [line["custom_id"] for line in output] == [line["custom_id"] for line in lines]  # invariant 1
        assert all(line["response"]["body"]["choices"][0]["message"]["content"] for line in output)
        assert batch.request_counts.completed == REQUESTS
        assert batch.usage.output_tokens > REQUESTS
        assert server.stop() == 0
        server.nothing_left()  # invariant 15: neither guards nor engines
    finally:
        if os.environ.get("CI"):
            print(server.text[-4000:])
        server.destroy()
