"""Resident memory of every role while a full batch goes through, and how long a tiny batch takes on an idle server.

    python -m bench.memory [--requests 50000] [--prompt-bytes 3900]

Prints the highest resident size each role reached (with its children: the orchestrator's planning process counts as the
orchestrator), and the seconds from the upload to `completed` of a batch of three requests.
"""

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path

from bench.inputs import chat_file
from tests.support.overnight import Overnight, request_line
from tests.support.stub_process import StubProcess


class Sampler(threading.Thread):
    """Reads the processes' sizes from /proc, ten times a second."""

    def __init__(self, server: Overnight) -> None:
        super().__init__(daemon=True)
        self.server = server
        self.peaks: dict[str, int] = defaultdict(int)
        self.done = threading.Event()

    def run(self) -> None:
        """Until told to stop."""
        while not self.done.wait(0.1):
            try:
                for role, pid in self.server.pids().items():
                    family = [pid] if role == "supervisor" else descendants(pid)
                    self.peaks[role] = max(self.peaks[role], sum(map(resident, family)))
            except (OSError, ValueError, json.JSONDecodeError):
                continue  # a process ended between two reads


def descendants(pid: int) -> list[int]:
    """The process and all below it."""
    found = [pid]
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in path.read_text().split():
            found += descendants(int(child))
    return found


def resident(pid: int) -> int:
    """Resident bytes of one process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * 4096


def small_batch(server: Overnight) -> float:
    """Seconds from the upload to `completed` for three requests, polled every 20 ms."""
    began = time.monotonic()
    batch = server.submit([request_line(f"s-{n}", f"small {n} {began}") for n in range(3)])
    server.ended(batch.id)
    return time.monotonic() - began


def main() -> None:
    """Runs the batch and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=50_000)
    parser.add_argument("--prompt-bytes", type=int, default=3_900)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place, StubProcess(latency=0.02) as stub:
        folder = Path(place)
        path = folder / "input.jsonl"
        size = chat_file(path, requests=options.requests, prompt_bytes=options.prompt_bytes, model="stub-model")
        with Overnight(folder, upstreams=[stub.url]) as server:
            small = [small_batch(server) for _ in range(5)]
            sampler = Sampler(server)
            sampler.start()
            began = time.monotonic()
            file = server.client.files.create(file=path, purpose="batch")
            batch = server.client.batches.create(
                input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
            )
            batch = server.ended(batch.id, within=900)
            seconds = time.monotonic() - began
            sampler.done.set()
            if batch.status != "completed":
                sys.exit(f"the batch went wrong: {batch}")
    print(f"{options.requests} requests, {size / 1e6:.0f} MB, done in {seconds:.0f} s\n")
    print("| role | highest resident size, MB |")
    print("| --- | --- |")
    for role, peak in sorted(sampler.peaks.items()):
        print(f"| {role} | {peak / 1e6:.0f} |")
    print(f"\nthree requests on an idle server: median {statistics.median(small):.2f} s, worst {max(small):.2f} s")


if __name__ == "__main__":
    main()
