"""What Overnight costs: requests/s beside a bare loop on the same model server, in the same run.

    python -m bench.overhead [--requests 10000] [--in-flight 64] [--latency 0.02] [--runs 3]

The model server is a stub that answers after a fixed time. The ceiling is an aiohttp loop that posts the same bodies and
drops the answers. "steady" compares first reply to last reply, as the stub saw them; "whole" compares the ceiling's time
with everything from the upload's first byte to both files on disk.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.inputs import chat_file
from tests.support.overnight import Overnight
from tests.support.stub_process import StubProcess

MODEL = "stub-model"


def ceiling(stub: StubProcess, path: Path, in_flight: int) -> float:
    """Seconds from first to last reply of the bare loop."""
    stub.reset()
    subprocess.run([sys.executable, "-m", "bench.bare", stub.url, str(path), str(in_flight)], check=True)
    return span(stub.stats())


def span(stats: dict[str, Any]) -> float:
    """Seconds from the first reply to the last."""
    return float(stats["last_reply_at"] - stats["first_reply_at"])


def overnight(stub: StubProcess, server: Overnight, path: Path, requests: int, results: Path) -> tuple[float, float]:
    """Seconds from first to last reply, and from the upload's start to both files on disk."""
    stub.reset()
    client = server.client
    began = time.monotonic()
    file = client.files.create(file=path, purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    while batch.status not in ("completed", "failed"):
        time.sleep(0.1)
        batch = client.batches.retrieve(batch.id)
    counts = batch.request_counts
    if batch.status != "completed" or counts is None or counts.completed != requests:
        sys.exit(f"the batch went wrong: {batch}")
    assert batch.output_file_id
    with client.files.with_streaming_response.content(batch.output_file_id) as reply:
        reply.stream_to_file(results)
    whole = time.monotonic() - began
    return span(stub.stats()), whole


def main() -> None:
    """Runs both, several times, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--in-flight", type=int, default=64)
    parser.add_argument("--latency", type=float, default=0.02)
    parser.add_argument("--prompt-bytes", type=int, default=400)
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as place, StubProcess(latency=options.latency) as stub:
        folder = Path(place)
        path = folder / "input.jsonl"
        chat_file(path, requests=options.requests, prompt_bytes=options.prompt_bytes, model=MODEL)
        with Overnight(folder, upstreams=[stub.url], max_in_flight=options.in_flight) as server:
            for run in range(options.runs):
                bare = ceiling(stub, path, options.in_flight)
                steady, whole = overnight(stub, server, path, options.requests, folder / "output.jsonl")
                rows.append((bare, steady, whole))
                print(f"run {run + 1} of {options.runs} done", file=sys.stderr)
    show(rows, options.requests)


def show(rows: list[tuple[float, float, float]], requests: int) -> None:
    """One line per run, and the medians."""
    print("| run | bare loop, req/s | Overnight, req/s | steady | whole, req/s | whole |")
    print("| --- | --- | --- | --- | --- | --- |")
    for number, (bare, steady, whole) in enumerate(rows, 1):
        rates = [requests / seconds for seconds in (bare, steady, whole)]
        print(
            f"| {number} | {rates[0]:,.0f} | {rates[1]:,.0f} | {bare / steady:.2f} "
            f"| {rates[2]:,.0f} | {bare / whole:.2f} |"
        )
    steady_ratio = statistics.median(bare / steady for bare, steady, _ in rows)
    whole_ratio = statistics.median(bare / whole for bare, _, whole in rows)
    print(f"| median | | | {steady_ratio:.2f} | | {whole_ratio:.2f} |")


if __name__ == "__main__":
    main()
