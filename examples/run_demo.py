"""`make demo`: a server of its own, the demo against it, and the server's end, whatever happened.

Everything lies under `.demo/` in the checkout: the engine's environment, the server's data and its log.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / ".demo"
OVERNIGHT = (sys.executable, "-P", "-m", "server.cli")

#: Seconds until the engine must be able to take work: a slow disk reads the model and its libraries for a while.
STARTS_WITHIN_S = 240.0
#: Seconds a stopping server gets; it needs ten at most.
STOPS_WITHIN_S = 15.0


def main() -> int:
    """Runs the demo and returns its exit code."""
    signal.signal(signal.SIGTERM, _interrupt)
    port = _free_port()
    FOLDER.mkdir(exist_ok=True)
    log = FOLDER / "serve.log"
    command = [*OVERNIGHT, "serve", "--model=demo", f"--data={FOLDER}", f"--port={port}"]
    print(f"starting: overnight serve --model demo --port {port}   (its log: {log.relative_to(ROOT)})", flush=True)
    with _server(command, log) as server:
        if not _is_ready(server, port, log):
            return 1
        environ = {**os.environ, "OPENAI_BASE_URL": f"http://127.0.0.1:{port}/v1", "OPENAI_API_KEY": "demo"}
        return subprocess.run([sys.executable, ROOT / "examples" / "demo.py"], env=environ, check=False).returncode


@contextlib.contextmanager
def _server(command: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The server, for as long as the context lasts. In a session of its own: Ctrl-C is ours to hear."""
    with log.open("wb") as sink:
        server = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, cwd=ROOT, start_new_session=True
        )
    try:
        yield server
    finally:
        print("stopping the server", flush=True)
        server.terminate()
        try:
            server.wait(STOPS_WITHIN_S)
        except subprocess.TimeoutExpired:
            server.kill()  # its roles and its engine end by themselves
            server.wait()


def _is_ready(server: subprocess.Popen[bytes], port: int, log: Path) -> bool:
    """Waits, visibly, until the engine can take work; says why not if it cannot."""
    started, told = time.monotonic(), 0.0
    while (waited := time.monotonic() - started) < STARTS_WITHIN_S:
        if server.poll() is not None:
            break
        if _answers(f"http://127.0.0.1:{port}/readyz/engine"):
            _tell(f"ready after {waited:.0f} s", last=True)
            return True
        if waited - told >= (0.5 if sys.stderr.isatty() else 10.0):
            _tell(f"vLLM is starting: {waited:.0f} s (30 to 60 s on two cores)")
            told = waited
        time.sleep(0.1)
    print(f"\nthe server did not become ready; the end of {log}:", file=sys.stderr)
    print("\n".join(log.read_text(errors="replace").splitlines()[-30:]), file=sys.stderr)
    return False


def _tell(text: str, *, last: bool = False) -> None:
    """A line that is written over on a terminal, and one after another elsewhere."""
    terminal = sys.stderr.isatty()
    sys.stderr.write(f"\r\x1b[K{text}" if terminal else text)
    sys.stderr.write("" if terminal and not last else "\n")
    sys.stderr.flush()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as reply:  # noqa: S310  # our own, on loopback
            return bool(reply.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
