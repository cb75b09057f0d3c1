"""A batch from upload to answers, by the openai SDK alone: the same script runs against OpenAI or against Overnight.

    OPENAI_BASE_URL=http://127.0.0.1:8000/v1 OPENAI_API_KEY=anything python examples/demo.py [OUTPUT_FOLDER]

It exits with 0 only if every line of requests.jsonl is answered exactly once, the capital of France is Paris, and the one
request that is wrong on purpose lies in the error file.
"""

import argparse
import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import openai
from openai.types import Batch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

HERE = Path(__file__).resolve().parent
REQUESTS = HERE / "requests.jsonl"
WRONG_ON_PURPOSE = "wrong-on-purpose"
SHOWN = ("capital-of-france", "geo-03", "cook-05", "support-01", "a-conversation")

#: Seconds between two looks at the batch, and until we no longer believe in it.
POLL_S, PATIENCE_S = 0.5, 600.0
OVER = ("completed", "failed", "expired", "cancelled")

Line = dict[str, Any]
console = Console(highlight=False)


class Wrong(Exception):
    """Something is not as it should be; the message says what."""


def main() -> int:
    """Runs the batch, shows what came back, checks it."""
    parser = argparse.ArgumentParser(description="Runs examples/requests.jsonl as a batch and checks the answers.")
    default = HERE.parent / ".demo" / "results"
    parser.add_argument(
        "output", nargs="?", type=Path, default=default, help=f"folder for the files (default: {default})"
    )
    folder: Path = parser.parse_args().output
    try:
        client = openai.OpenAI()
        batch = run(client)
        output, errors = download(client, batch, folder)
        show(output, errors)
        check(read(REQUESTS), output, errors)
    except (Wrong, openai.OpenAIError) as error:
        console.print(f"[red]wrong:[/] {error}", markup=True)
        return 1
    console.print("[green]all is well:[/] every request is answered exactly once")
    return 0


def run(client: openai.OpenAI) -> Batch:
    """Uploads, creates the batch, and watches it to its end."""
    uploaded = client.files.create(file=REQUESTS, purpose="batch")
    console.print(f"uploaded {REQUESTS.name}: {uploaded.id}, {uploaded.bytes} bytes")
    batch = client.batches.create(
        input_file_id=uploaded.id, endpoint="/v1/chat/completions", completion_window="24h", metadata={"demo": "yes"}
    )
    console.print(f"created {batch.id}")
    batch = watch(client, batch)
    if batch.status != "completed":
        reasons = "; ".join(e.message or "" for e in (batch.errors.data or [])) if batch.errors else "no errors given"
        raise Wrong(f"the batch ended as {batch.status}: {reasons}")
    return batch


def watch(client: openai.OpenAI, batch: Batch) -> Batch:
    """Shows the counts as a bar until the batch is over."""
    columns = (
        TextColumn("{task.description:<12}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[failed]} failed"),
        TimeElapsedColumn(),
    )
    deadline = time.monotonic() + PATIENCE_S
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task(batch.status, total=None, failed=0)
        while True:
            counts = batch.request_counts
            if counts is not None and counts.total:
                done = counts.completed + counts.failed
                progress.update(bar, total=counts.total, completed=done, failed=counts.failed)
            progress.update(bar, description=batch.status)
            if batch.status in OVER:
                return batch
            if time.monotonic() > deadline:
                raise Wrong(f"the batch is still {batch.status} after {PATIENCE_S:.0f} s")
            time.sleep(POLL_S)
            batch = client.batches.retrieve(batch.id)


def download(client: openai.OpenAI, batch: Batch, folder: Path) -> tuple[list[Line], list[Line]]:
    """Writes both files into the folder and returns their lines."""
    folder.mkdir(parents=True, exist_ok=True)
    found: list[list[Line]] = []
    for name, file_id in (("output", batch.output_file_id), ("errors", batch.error_file_id)):
        if file_id is None:
            raise Wrong(f"the batch has no file of {name}")
        path = folder / f"{name}.jsonl"
        path.write_bytes(client.files.content(file_id).content)
        console.print(f"{name}: {path}", soft_wrap=True)
        found.append(read(path))
    return found[0], found[1]


def read(path: Path) -> list[Line]:
    """The lines of a JSONL file."""
    return [json.loads(line) for line in path.read_bytes().split(b"\n") if line.strip()]


def show(output: list[Line], errors: list[Line]) -> None:
    """Some answers, and the one error."""
    asked = {line["custom_id"]: line["body"]["messages"][-1]["content"] for line in read(REQUESTS)}
    answers = {line["custom_id"]: answer(line) for line in output}
    for custom_id in SHOWN:
        console.print(f"\n[bold]{custom_id}[/]", markup=True)
        console.print(
            f"  Q: {asked[custom_id]}\n  A: {answers.get(custom_id, '(no answer)')}", markup=False, soft_wrap=True
        )
    for line in errors:
        console.print(f"\n[bold]{line['custom_id']}[/] (in the error file)", markup=True)
        console.print(f"  {json.dumps(line['error'] or line['response'])[:300]}", markup=False, soft_wrap=True)
    console.print()


def answer(line: Line) -> str:
    """The text of the first choice, in one line."""
    content: str = line["response"]["body"]["choices"][0]["message"]["content"] or ""
    return " ".join(content.split())


def check(requests: list[Line], output: list[Line], errors: list[Line]) -> None:
    """Raises Wrong if a line is missing, there twice, or in the wrong file, or if Paris is not the capital of France."""
    got = Counter(line["custom_id"] for line in (*output, *errors))
    if got != Counter(line["custom_id"] for line in requests):
        expected = Counter(line["custom_id"] for line in requests)
        raise Wrong(f"missing: {sorted(expected - got)}, too many: {sorted(got - expected)}")
    order = [line["custom_id"] for line in requests if line["custom_id"] != WRONG_ON_PURPOSE]
    if [line["custom_id"] for line in output] != order:
        raise Wrong("the output file holds other lines than the right ones, or in another order than the input")
    refused = [(line["custom_id"], (line["response"] or {}).get("status_code")) for line in errors]
    if refused != [(WRONG_ON_PURPOSE, 400)]:
        raise Wrong(f"the error file should hold {WRONG_ON_PURPOSE} with status 400, and holds {refused}")
    paris = next(answer(line) for line in output if line["custom_id"] == "capital-of-france")
    if "Paris" not in paris:
        raise Wrong(f"the capital of France is not {paris!r}")


if __name__ == "__main__":
    sys.exit(main())
