"""Planning a batch against a real store: what is written, what is refused, what is left behind."""

import json
import pickle
import random
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from engine.orchestrator import plan as plan_module
from engine.orchestrator.plan import Planned, PlanRequest, PlanResult, Refused, make_plan, shard_target
from engine.packs import Pack, Record, pack
from state.objects import ObjectStore, Stored
from state.objects.local import LocalStore
from state.records import Corrupt, Fault, Model, OutOfSpace, Unavailable
from tests.plan.samples import CHAT, LIMITS, MODELS, body, line, lines


class Planner:
    """Plans files put into a store, and reads back what was written."""

    def __init__(self, store: LocalStore, spool: Path) -> None:
        self.store, self.spool = store, spool

    async def request(self, content: bytes, **changes: Any) -> PlanRequest:
        stored = await self.store.put("files/file-1", content)
        given = {
            "batch_id": "batch_1",
            "epoch": 3,
            "endpoint": CHAT,
            "file_id": "file-1",
            "object_key": "files/file-1",
            "size": stored.size,
            "sha256": stored.sha256,
            "models": MODELS,
            "workers": 1,
            "limits": LIMITS,
        }
        return PlanRequest(**(given | changes))

    async def plan(self, content: bytes, **changes: Any) -> PlanResult:
        return await self.run(await self.request(content, **changes))

    async def run(self, request: PlanRequest) -> PlanResult:
        try:
            return await make_plan(self.store, request=request, spool=self.spool)
        finally:
            assert list(self.spool.iterdir()) == []

    async def planned(self, content: bytes, **changes: Any) -> Planned:
        result = await self.plan(content, **changes)
        assert isinstance(result, Planned)
        return result

    async def records(self, planned: Planned) -> list[list[Record]]:
        return [list(Pack(await self.store.get(shard.object_key))) for shard in planned.shards]


@pytest.fixture
async def planner(tmp_path: Path) -> AsyncIterator[Planner]:
    (tmp_path / "spool").mkdir()
    store = LocalStore(tmp_path / "objects")
    yield Planner(store, tmp_path / "spool")
    await store.close()


def documents(count: int, each: int) -> bytes:
    """`each` questions on every document, question by question."""
    rng = random.Random(3)
    texts = [f"{n:03d} {rng.getrandbits(4000):x}" for n in range(count)]
    return lines(
        *(
            line(f"{n}-{question}", body=body(messages=[{"role": "user", "content": f"{texts[n]} {question}?"}]))
            for question in range(each)
            for n in range(count)
        )
    )


async def test_a_small_batch_is_one_shard_and_an_index(planner: Planner) -> None:
    planned = await planner.planned(lines(line("b"), line("a")))
    assert planned.model_root == planned.requested_model == "m"
    assert planned.total == 2
    assert planned.index_key == "batches/batch_1/e3/index"
    [shard] = planned.shards
    data = await planner.store.get("batches/batch_1/e3/shard-0")
    assert (shard.number, shard.object_key, shard.requests) == (0, "batches/batch_1/e3/shard-0", 2)
    assert shard.size == len(data)
    sent = b'{"model": "m", "messages": [{"role": "user", "content": "Hi."}]}'
    prompt = len(b'\x00\x00\x00\x00\x00[{"role": "user", "content": "Hi."}]')
    assert list(Pack(data)) == [Record(0, 0, b'"b"', sent), Record(1, prompt, b'"a"', sent)]


async def test_every_request_is_in_one_shard_and_the_index_knows_which(planner: Planner) -> None:  # invariants 1 and 2
    content = documents(40, 5)
    planned = await planner.planned(content, workers=2)
    shards = await planner.records(planned)
    parsed = [json.loads(raw) for raw in content.splitlines()]
    index = Pack(await planner.store.get(planned.index_key))
    assert list(index.lines) == list(range(200))
    for number, records in enumerate(shards):
        for record in records:
            assert index.marks[record.line] == number
            assert index.head(record.line) == record.head == json.dumps(parsed[record.line]["custom_id"]).encode()
            assert record.body == json.dumps(parsed[record.line]["body"]).encode()
    assert sorted(record.line for records in shards for record in records) == list(range(200))
    assert [len(records) for records in shards] == [shard.requests for shard in planned.shards]
    assert max(len(records) for records in shards) <= shard_target(200, 2) == 16


async def test_questions_on_one_document_run_side_by_side(planner: Planner) -> None:
    planned = await planner.planned(documents(40, 5))
    order = [record for records in await planner.records(planned) for record in records]
    names = [json.loads(record.head).split("-")[0] for record in order]
    assert sum(a != b for a, b in pairwise(names)) == 39
    # `mark`: what a request shares with the one before it; nothing at the beginning of a shard
    for records in await planner.records(planned):
        assert records[0].mark == 0
        for before, after in pairwise(records):
            same = json.loads(before.head).split("-")[0] == json.loads(after.head).split("-")[0]
            assert (after.mark > 1000) is same


@pytest.mark.parametrize(
    ("endpoint", "sent"),
    [
        ("/v1/embeddings", {"input": "x"}),
        ("/v1/score", {"text_1": "x", "text_2": "y"}),
        ("/v1/rerank", {"query": "x", "documents": []}),
    ],
)
async def test_what_has_no_reusable_prefix_keeps_input_order(
    planner: Planner, endpoint: str, sent: dict[str, Any]
) -> None:
    several = [line(str(n), url=endpoint, body={"model": "m", **sent, "n": 9 - n}) for n in range(10)]
    [records] = await planner.records(await planner.planned(lines(*several), endpoint=endpoint))
    assert [(record.line, record.mark) for record in records] == [(n, 0) for n in range(10)]


async def test_an_alias_is_planned_for_the_model_behind_it(planner: Planner) -> None:
    models = {"*": Model("*", "m", "overnight", 0, 0.0)}
    planned = await planner.planned(lines(line(body=body(model="gpt-4o-mini"))), models=models)
    assert (planned.requested_model, planned.model_root) == ("gpt-4o-mini", "m")
    [[record]] = await planner.records(planned)
    assert b'"gpt-4o-mini"' in record.body  # the file stays as it is; the worker asks by the engine's name


async def test_an_engine_that_takes_any_name_is_asked_by_it(planner: Planner) -> None:
    models = {"*": Model("*", "*", "overnight", 0, 0.0)}
    planned = await planner.planned(lines(line(body=body(model="whatever"))), models=models)
    assert planned.model_root == "whatever"


@pytest.mark.parametrize(
    ("total", "workers", "target"), [(3, 1, 16), (200, 1, 25), (50_000, 1, 500), (1000, 10, 16), (1000, 0, 125)]
)
def test_shards_are_sized_for_the_workers(total: int, workers: int, target: int) -> None:
    assert shard_target(total, workers) == target


async def test_shards_hold_at_most_8_mb_unless_one_request_is_larger(planner: Planner) -> None:
    sizes = [3_000_000] * 4 + [9_000_000]
    several = [line(str(n), body=body(x="y" * size)) for n, size in enumerate(sizes)]
    planned = await planner.planned(lines(*several))
    assert sorted(shard.requests for shard in planned.shards) == [1, 2, 2]


async def test_a_bad_file_is_refused_and_nothing_is_written(planner: Planner) -> None:
    result = await planner.plan(lines(line("a"), line("a"), b"nonsense"))
    assert isinstance(result, Refused)
    assert [(fault.code, fault.line) for fault in result.faults] == [
        ("duplicate_custom_id", 2),
        ("invalid_json_line", 3),
    ]
    assert [key async for key in planner.store.list("batches/")] == []


@pytest.mark.parametrize("key", [None, "files/file-gone"])
async def test_a_file_that_is_gone_is_refused_by_name(planner: Planner, key: str | None) -> None:
    result = await planner.plan(lines(line()), object_key=key, file_id="file-gone")
    message = "Cannot find file file-gone, or organization default does not have access to it."
    assert result == Refused((Fault("invalid_request", message, "file_id", None),))


@pytest.mark.parametrize(
    "change",
    [{"size": 1}, {"sha256": "0" * 64}, {"size": None, "sha256": "0" * 64}],
    ids=["length", "sum", "sum alone"],
)
async def test_an_input_that_differs_from_its_row_is_never_run(planner: Planner, change: dict[str, Any]) -> None:
    with pytest.raises(Corrupt, match="file-1"):
        await planner.plan(lines(line()), **change)
    with pytest.raises(Corrupt, match="file-1"):  # not even its faults are believed
        await planner.plan(b"nonsense\n", **change)


async def test_too_little_room_is_told_before_anything_is_done(planner: Planner) -> None:
    with pytest.raises(OutOfSpace) as caught:
        await planner.plan(lines(line()), min_free_bytes=1 << 62)
    assert caught.value.needed > 1 << 62 > caught.value.free > 0


async def test_a_store_that_fails_says_so_itself(planner: Planner, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(key: str, data: bytes) -> Stored:
        raise Unavailable("no answer")

    request = await planner.request(documents(20, 5))
    monkeypatch.setattr(planner.store, "put", fail)
    with pytest.raises(Unavailable, match="no answer"):
        await planner.run(request)


async def test_a_plan_and_what_it_needs_cross_a_pipe(planner: Planner) -> None:
    request = await planner.request(lines(line()))
    assert pickle.loads(pickle.dumps(request)) == request
    result = await planner.run(request)
    assert pickle.loads(pickle.dumps(result)) == result


async def test_deleting_the_input_while_it_is_planned_changes_nothing(
    planner: Planner, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = plan_module.scan

    def scan_late(source: Path, **more: Any) -> Any:
        (planner.store.folder / "files" / "file-1").unlink()
        return real(source, **more)

    monkeypatch.setattr(plan_module, "scan", scan_late)
    assert (await planner.planned(lines(line()))).total == 1


async def test_the_index_is_a_pack_like_any_other(planner: Planner) -> None:
    store: ObjectStore = planner.store
    planned = await planner.planned(documents(10, 4))
    data = await store.get(planned.index_key)
    assert pack(Pack(data)) == data
