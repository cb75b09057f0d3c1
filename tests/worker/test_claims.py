"""Which shard a worker claims next, and what an engine's names come to."""

from hypothesis import given
from hypothesis import strategies as st

from engine.backends.protocol import ServedModel
from engine.worker.claims import BREADTH, MOST_BYTES, MOST_SHARDS, AtHand, choose_claim, count_at_hand
from engine.worker.engine_watch import names_of, rows_of
from state.shards import Candidate
from tests.worker.making import a_shard

NOTHING = AtHand(0, 0, {}, {})


def a_candidate(batch: str, project: str = "p", *, deadline: float = 1e6, created: int = 0) -> Candidate:
    return Candidate(batch, project, deadline, created, 1)


def at_hand(shards: int = 1, size: int = 0, **batches: int) -> AtHand:
    return AtHand(shards, size, batches, {"p": sum(batches.values())})


def chosen(candidates: list[Candidate], hand: AtHand, enough: int = 100) -> str | None:
    choice = choose_claim(candidates, hand, enough=enough)
    return choice.batch_id if choice else None


def test_a_worker_with_nothing_claims_anything() -> None:
    assert chosen([a_candidate("a")], NOTHING) == "a"


def test_nothing_to_claim_is_no_claim() -> None:
    assert chosen([], NOTHING) is None


def test_a_worker_with_enough_claims_no_more_of_the_same_batch() -> None:
    assert chosen([a_candidate("big")], at_hand(big=100)) is None
    assert chosen([a_candidate("big")], at_hand(big=99)) == "big"


def test_another_batch_is_opened_however_much_is_at_hand() -> None:
    assert chosen([a_candidate("big"), a_candidate("small")], at_hand(big=5000)) == "small"


def test_batches_are_opened_beyond_need_only_to_a_certain_breadth() -> None:
    hand = AtHand(BREADTH, 0, {f"b{i}": 50 for i in range(BREADTH)}, {"p": 800})
    assert chosen([a_candidate("one more")], hand) is None


def test_a_project_with_nothing_at_hand_is_never_kept_waiting() -> None:
    hand = AtHand(MOST_SHARDS, MOST_BYTES, {f"b{i}": 50 for i in range(BREADTH)}, {"p": 50 * BREADTH})
    assert chosen([a_candidate("crowded", "p"), a_candidate("lonely", "q")], hand) == "lonely"


def test_a_project_with_little_at_hand_comes_first() -> None:
    candidates = [a_candidate("crowded", "p", deadline=1.0), a_candidate("lonely", "q", deadline=2.0)]
    assert chosen(candidates, at_hand(x=10)) == "lonely"


def test_the_earlier_deadline_comes_first_then_the_older_batch() -> None:
    assert chosen([a_candidate("late", deadline=9.0), a_candidate("soon", deadline=8.0)], NOTHING) == "soon"
    assert chosen([a_candidate("young", created=2), a_candidate("old", created=1)], NOTHING) == "old"


@given(
    st.lists(st.sampled_from("abcdef"), unique=True),
    st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 900)),
    st.integers(0, 2 * MOST_SHARDS),
    st.integers(0, 2 * MOST_BYTES),
)
def test_memory_stays_bounded_and_a_hungry_worker_is_never_left_hungry(
    batches: list[str], waiting: dict[str, int], shards: int, size: int
) -> None:
    """Invariants 9 and 12."""
    hand = AtHand(shards, size, waiting, {"p": sum(waiting.values())})
    choice = chosen([a_candidate(b) for b in batches], hand, enough=500)
    room = 1 if waiting else 2
    if shards >= room * MOST_SHARDS or size >= room * MOST_BYTES:
        assert choice is None
    elif batches and sum(waiting.values()) < 500:
        assert choice is not None


def test_what_is_at_hand_is_counted_from_the_open_shards() -> None:
    sent = a_shard("c", requests=1)
    sent.take(1)
    hand = count_at_hand([a_shard("a", requests=3), a_shard("a", number=1), a_shard("b", project="q"), sent])
    assert hand == AtHand(4, 120, {"a": 7, "b": 4}, {"default": 7, "q": 4})
    assert hand.requests == 11


def test_every_name_of_a_model_gets_a_row_that_leads_to_its_root() -> None:
    served = [
        ServedModel("smol", ("smol", "gpt-4o-mini", "*"), "me", ("/v1/completions",)),
        ServedModel("big", ("big",)),
    ]
    rows = {row.name: (row.root, row.owned_by, row.endpoints) for row in rows_of(served, now=5.5)}
    assert rows == {
        "smol": ("smol", "me", ("/v1/completions",)),
        "gpt-4o-mini": ("smol", "me", ("/v1/completions",)),
        "*": ("smol", "me", ("/v1/completions",)),
        "big": ("big", "overnight", None),
    }
    assert names_of(served) == ("*", "big", "gpt-4o-mini", "smol")
