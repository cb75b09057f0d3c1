"""Made input for the orchestrator's tests: result lines, segments and indexes as a plan and its workers would leave them."""

from collections.abc import Iterable, Mapping

from engine.packs import ERROR, OUTPUT, Record, pack
from state.objects import ObjectStore
from state.records import Segment

BATCH = "batch_" + "0" * 32


def result_line(line: int, *, text: str = "") -> bytes:
    """A line as a worker would write it; what it says is no concern of a finish."""
    return b'{"line": %d, "text": "%s"}\n' % (line, text.encode())


async def put_segment(
    store: ObjectStore,
    lines: Mapping[int, bytes],
    *,
    failed: Iterable[int] = (),
    shard: int = 0,
    seq: int = 0,
    batch_id: str = BATCH,
    epoch: int = 1,
    places: bytes = b"",
) -> Segment:
    """Writes a segment that answers `lines` in this order, and describes it."""
    bad = set(failed)
    data = pack(Record(n, ERROR if n in bad else OUTPUT, b"", body) for n, body in lines.items())
    key = f"batches/{batch_id}/s{shard}/e{epoch}/seg-{seq}"
    stored = await store.put(key, data)
    return Segment(batch_id, shard, seq, epoch, key, stored.sha256, stored.size, len(lines), places)


async def put_index(store: ObjectStore, shards: Iterable[int], *, custom_ids: Mapping[int, bytes] | None = None) -> str:
    """Writes an index of the lines' shards, in line order; the custom_ids are "0", "1" and so on unless given."""
    ids = custom_ids or {}
    key = f"batches/{BATCH}/e1/index"
    await store.put(key, pack(Record(n, s, ids.get(n, b'"%d"' % n), b"") for n, s in enumerate(shards)))
    return key
