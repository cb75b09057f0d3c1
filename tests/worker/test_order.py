"""In which order requests reach the engine."""

from itertools import groupby

import pytest

from tests.support.stub import Stub
from tests.support.waiting import eventually
from tests.worker.farm import Farm

pytestmark = pytest.mark.asyncio


async def test_a_small_batch_behind_a_large_one_is_served_at_once(farm: Farm, stub: Stub) -> None:
    """Invariant 9, and no batch waits behind thousands of another's requests."""
    stub.latency = 0.05
    large = await farm.plan([f"large {i}" for i in range(2000)], per_shard=100)
    async with farm.worker(upstream=stub.url):
        await eventually(lambda: stub.calls > 30)
        before = stub.calls
        small = await farm.plan(["small 1", "small 2", "small 3"])
        await eventually(lambda: farm.ended(small))
        assert not await farm.ended(large)
        ahead = stub.log.index("small 3") - before
    assert ahead <= 64, "two turns' worth of the large batch at most"


async def test_a_project_does_not_wait_for_the_many_batches_of_another(farm: Farm, stub: Stub) -> None:
    stub.latency = 0.1
    for i in range(20):
        await farm.plan([f"crowd {i} {j}" for j in range(40)], project="crowd")
    single = await farm.plan([f"single {j}" for j in range(10)], project="default")
    async with farm.worker(upstream=stub.url):
        await eventually(lambda: farm.ended(single))
    assert stub.log.index("single 9") < 150


async def test_requests_that_share_a_prefix_reach_the_engine_together(farm: Farm, stub: Stub) -> None:
    farm.tell(max_in_flight=2)
    stub.latency = 0.001
    documents = [f"document {d} " * 20 for d in range(4)]
    texts = [f"{document}question {q}" for document in documents for q in range(40)]
    marks = [0 if i % 40 == 0 else len(documents[0]) for i in range(len(texts))]
    grouped = await farm.plan(texts, marks=marks)
    other = await farm.plan([f"other {i}" for i in range(160)])
    async with farm.worker(upstream=stub.url):
        await eventually(lambda: farm.ended(grouped))
        await eventually(lambda: farm.ended(other))
    runs = [list(run) for _, run in groupby(stub.log, key=lambda text: text.split(" question")[0].split(" ")[:2])]
    lengths = [len(run) for run in runs if run[0].startswith("document")]
    assert lengths == [40, 40, 40, 40]
