"""Memory stays bounded whatever the file's size (invariant 12), measured as the server process's peak."""

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

MIB = 1 << 20

SERVER = """
import asyncio, signal, sys
from pathlib import Path
from server.listen import serve
from state.settings import Settings

async def main():
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    settings = Settings(data=Path(sys.argv[1]), port=0)
    await serve(settings, stop=stop, ready=lambda: None, listening=lambda port: print(port, flush=True))

asyncio.run(main())
"""


def peak(pid: int) -> int:
    """The most memory the process has had resident, in bytes."""
    status = Path(f"/proc/{pid}/status").read_text()
    [line] = [line for line in status.splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1]) * 1024


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[int, str]]:
    """A server process: its pid and URL."""
    with subprocess.Popen([sys.executable, "-c", SERVER, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process.pid, f"http://127.0.0.1:{process.stdout.readline().strip()}"
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            assert process.wait(15) == 0
        process.kill()


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_a_200_mb_file_goes_up_and_down_in_less_than_64_mb(served: tuple[int, str], tmp_path: Path) -> None:
    pid, url = served
    line = b'{"custom_id": "%08d", "method": "POST", "url": "/v1/chat/completions", "body": {"pad": "' + b"x" * 4000
    block = (line + b'"}}\n') * 250

    def form(blocks: int) -> Iterator[bytes]:
        yield b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        yield b'--x\r\nContent-Disposition: form-data; name="file"; filename="in.jsonl"\r\n\r\n'
        for _ in range(blocks):
            yield block
        yield b"\r\n--x--\r\n"

    kind = {"content-type": "multipart/form-data; boundary=x"}
    with httpx.Client(base_url=url, timeout=60) as client:
        assert client.post("/v1/files", content=form(1), headers=kind).status_code == 200
        before = peak(pid)
        blocks = 200 * MIB // len(block)
        reply = client.post("/v1/files", content=form(blocks), headers=kind)
        assert reply.status_code == 200
        assert reply.json()["bytes"] == blocks * len(block)
        after_upload = peak(pid)
        with client.stream("GET", f"/v1/files/{reply.json()['id']}/content") as download:
            assert sum(len(piece) for piece in download.iter_raw()) == blocks * len(block)
        after_download = peak(pid)
    assert after_upload - before < 64 * MIB
    assert after_download - before < 64 * MIB
    print(f"upload +{(after_upload - before) / MIB:.1f} MiB, download +{(after_download - before) / MIB:.1f} MiB")
