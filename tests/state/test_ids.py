"""What names look like, and that they are never met twice."""

import hashlib
import re

from state import ids


def test_ids_look_as_clients_expect_them() -> None:
    assert re.fullmatch(r"file-[1-9A-HJ-NP-Za-km-z]{22}", ids.new_file_id())
    assert re.fullmatch(r"batch_6b49d200[0-9a-f]{24}", ids.new_batch_id(0x6B49D200 + 0.9))
    assert re.fullmatch(r"batch_00000001[0-9a-f]{24}", ids.new_batch_id(2**32 + 1))
    assert re.fullmatch(r"job_[0-9a-f]{24}", ids.new_job_id())
    assert re.fullmatch(r"worker_[0-9a-f]{16}", ids.new_worker_id())


def test_ids_made_at_the_same_moment_differ() -> None:
    assert len({ids.new_batch_id(1.0) for _ in range(100)}) == 100
    assert len({ids.new_file_id() for _ in range(100)}) == 100


def test_a_lines_id_is_made_of_its_identity_alone() -> None:
    """So that it is the same in every attempt, and another for every line of every batch."""
    wanted = hashlib.sha256(b"batch_a:7").hexdigest()[:32]
    assert ids.line_id("batch_a", 7) == f"batch_req_{wanted}"
    assert len({ids.line_id(batch, line) for batch in ("batch_a", "batch_b") for line in range(3)}) == 6
