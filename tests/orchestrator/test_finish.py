"""Result files: every line once, in input order, byte for byte; or the holes are named and nothing is written."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.orchestrator.finish import FinishRequest, Written, write_results
from engine.orchestrator.results import ResultObject
from state.losses import Loss
from state.objects import ObjectStore
from state.records import Corrupt, OutOfSpace, Segment, Unavailable
from tests.orchestrator.made import BATCH, put_index, put_segment, result_line


@pytest.fixture
def spool(tmp_path: Path) -> Path:
    folder = tmp_path / "spool"
    folder.mkdir()
    return folder


def request(*segments: Segment, total: int, index_key: str = "", **rest: Any) -> FinishRequest:
    whole = {"batch_id": BATCH, "epoch": 3, "spool_limit": 1 << 30} | rest
    return FinishRequest(total=total, index_key=index_key, segments=segments, **whole)


async def content(store: ObjectStore, written: ResultObject | None) -> bytes:
    """The object's bytes, held against what was said about them."""
    assert written is not None
    data = await store.get(written.object_key)
    described = (written.size, written.sha256, written.lines)
    assert described == (len(data), hashlib.sha256(data).hexdigest(), data.count(b"\n"))
    return data


def in_order(*lines: int) -> bytes:
    return b"".join(result_line(n) for n in lines)


async def everything_under(store: ObjectStore, prefix: str) -> list[str]:
    return sorted([key async for key in store.list(prefix)])


async def test_answers_in_execution_order_come_out_in_input_order(store, spool):
    first = await put_segment(store, {n: result_line(n) for n in (4, 0, 2)}, failed=[0])
    second = await put_segment(store, {n: result_line(n) for n in (5, 3, 1)}, failed=[3], shard=1)

    written = await write_results(store, request=request(second, first, total=6), spool=spool)

    assert await content(store, written.output) == in_order(1, 2, 4, 5)
    assert await content(store, written.error) == in_order(0, 3)
    assert written.output is not None
    assert written.output.object_key == f"results/{BATCH}/e3/output"


async def test_a_file_that_would_be_empty_is_not_written(store, spool):
    good = await put_segment(store, {0: result_line(0)})
    written = await write_results(store, request=request(good, total=1), spool=spool)
    assert written.error is None

    bad = await put_segment(store, {0: result_line(0)}, failed=[0], seq=1)
    written = await write_results(store, request=request(bad, total=1, epoch=4), spool=spool)
    assert written.output is None
    assert await everything_under(store, "results/") == [f"results/{BATCH}/e3/output", f"results/{BATCH}/e4/error"]


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("batch_expired", "This request could not be executed before the completion window expired."),
        ("batch_cancelled", "This request was not executed because the batch was cancelled."),
    ],
)
async def test_lines_that_never_ran_are_named_in_the_error_file_in_their_place(store, spool, code, message):
    index = await put_index(store, [0, 0, 0, 0], custom_ids={1: b'"a\\u00e9 \\/b"'})
    done = await put_segment(store, {2: result_line(2), 0: result_line(0)}, failed=[2])

    written = await write_results(store, request=request(done, total=4, index_key=index, stop_code=code), spool=spool)

    lines = (await content(store, written.error)).splitlines(keepends=True)
    id_of_1 = "batch_req_" + hashlib.sha256(f"{BATCH}:1".encode()).hexdigest()[:32]
    assert (
        lines[0]
        == (
            f'{{"id": "{id_of_1}", "custom_id": "a\\u00e9 \\/b", "response": null, '
            f'"error": {{"code": "{code}", "message": "{message}"}}}}\n'
        ).encode()
    )
    assert lines[1] == result_line(2)
    assert json.loads(lines[2])["custom_id"] == "3"
    assert await content(store, written.output) == in_order(0)


async def test_a_stopped_batch_of_which_nothing_ran_has_an_error_file_only(store, spool):
    index = await put_index(store, [0, 0])
    written = await write_results(
        store, request=request(total=2, index_key=index, stop_code="batch_expired"), spool=spool
    )
    assert written.output is None
    assert [json.loads(line)["custom_id"] for line in (await content(store, written.error)).splitlines()] == ["0", "1"]


async def test_characters_that_end_a_line_for_some_readers_are_escaped_in_custom_ids(store, spool):
    index = await put_index(store, [0], custom_ids={0: '"a\u2028b\u2029c\u0085d"'.encode()})
    written = await write_results(
        store, request=request(total=1, index_key=index, stop_code="batch_expired"), spool=spool
    )
    lines = (await content(store, written.error)).decode().splitlines()
    assert [json.loads(line)["custom_id"] for line in lines] == ["a\u2028b\u2029c\u0085d"]


async def test_a_missing_line_of_a_batch_that_was_not_stopped_is_a_hole_in_its_shard(store, spool):
    index = await put_index(store, [0, 1, 2, 1])
    done = await put_segment(store, {0: result_line(0), 1: result_line(1)})

    written = await write_results(store, request=request(done, total=4, index_key=index), spool=spool)

    assert written == Written(holes=(1, 2))
    assert await everything_under(store, "results/") == []


@pytest.mark.parametrize("spool_limit", [1 << 30, 0])
async def test_a_damaged_segment_makes_its_shard_a_hole(store, spool, spool_limit):
    index = await put_index(store, [0, 0, 1, 1])
    whole = await put_segment(store, {0: result_line(0), 1: result_line(1)})
    rotten = await put_segment(store, {2: result_line(2), 3: result_line(3)}, shard=1, seq=5)
    data = bytearray(await store.get(rotten.object_key))
    data[-3] ^= 1
    await store.put(rotten.object_key, bytes(data))

    asked = request(whole, rotten, total=4, index_key=index, spool_limit=spool_limit)
    written = await write_results(store, request=asked, spool=spool)

    assert written == Written(holes=(1,), lost=(Loss(1, (5,), completed=0, failed=0),))
    assert await everything_under(store, "results/") == []


async def test_a_lost_segment_makes_its_shard_a_hole(store, spool):
    index = await put_index(store, [0])
    lost = await put_segment(store, {0: result_line(0)})
    await store.delete([lost.object_key])
    written = await write_results(store, request=request(lost, total=1, index_key=index), spool=spool)
    assert written == Written(holes=(0,), lost=(Loss(0, (0,), completed=0, failed=0),))


async def test_a_store_that_lost_the_index_too_is_waited_for(store, spool):
    lost = await put_segment(store, {0: result_line(0)})
    await store.delete([lost.object_key])
    with pytest.raises(Unavailable):
        await write_results(store, request=request(lost, total=1, index_key="batches/x/index"), spool=spool)


@pytest.mark.parametrize("spool_limit", [1 << 30, 0])
async def test_a_line_answered_twice_stops_everything(store, spool, spool_limit):
    one = await put_segment(store, {0: result_line(0)})
    again = await put_segment(store, {0: result_line(0)}, shard=1)
    with pytest.raises(Corrupt, match="a second time"):
        await write_results(store, request=request(one, again, total=1, spool_limit=spool_limit), spool=spool)
    assert await everything_under(store, "results/") == []


async def test_a_line_that_the_batch_does_not_have_stops_everything(store, spool):
    strange = await put_segment(store, {7: result_line(7)})
    with pytest.raises(Corrupt, match="answers line 7 of a batch of 1"):
        await write_results(store, request=request(strange, total=1), spool=spool)


async def test_results_above_the_spool_limit_are_written_in_plan_order(store, spool):
    index = await put_index(store, [0] * 5)
    late = await put_segment(store, {n: result_line(n) for n in (1, 0)}, shard=1)
    early = await put_segment(store, {n: result_line(n) for n in (4, 2)}, failed=[2])

    asked = request(late, early, total=5, index_key=index, spool_limit=1, stop_code="batch_cancelled")
    written = await write_results(store, request=asked, spool=spool)

    assert await content(store, written.output) == in_order(4, 1, 0)
    error = await content(store, written.error)
    assert error.startswith(in_order(2))
    assert json.loads(error.splitlines()[1])["custom_id"] == "3"


async def test_a_disk_without_room_is_told_before_anything_is_done(store, spool):
    done = await put_segment(store, {0: result_line(0)})
    with pytest.raises(OutOfSpace) as told:
        await write_results(store, request=request(done, total=1, min_free_bytes=1 << 60), spool=spool)
    assert told.value.needed >= 1 << 60
    assert await everything_under(store, "results/") == []


async def test_nothing_is_left_in_the_spool(store, spool):
    done = await put_segment(store, {0: result_line(0)})
    await write_results(store, request=request(done, total=1), spool=spool)
    assert list(spool.iterdir()) == []


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
async def test_any_batch_comes_out_with_every_line_once_in_order(store, spool, data):
    total = data.draw(st.integers(1, 12), label="total")
    order = data.draw(st.permutations(range(total)), label="execution order")
    ran = data.draw(st.integers(0, total), label="lines that ran")
    failed = data.draw(st.sets(st.sampled_from(order)), label="failed")
    cuts = sorted(data.draw(st.sets(st.integers(1, total)), label="ends of segments") | {ran})
    segments, start = [], 0
    for seq, end in enumerate(cut for cut in cuts if cut <= ran):
        lines = {n: result_line(n) for n in order[start:end]}
        segments.append(await put_segment(store, lines, failed=failed, seq=seq))
        start = end
    index = await put_index(store, [0] * total)

    asked = request(*segments, total=total, index_key=index, stop_code="batch_cancelled")
    written = await write_results(store, request=asked, spool=spool)

    done = set(order[:ran])
    output = b"" if written.output is None else await content(store, written.output)
    assert output == in_order(*sorted(done - failed))
    error = [] if written.error is None else (await content(store, written.error)).splitlines()
    names = [json.loads(line).get("line", json.loads(line).get("custom_id")) for line in error]
    assert [int(name) for name in names] == sorted(set(range(total)) - (done - failed))  # invariant 1
