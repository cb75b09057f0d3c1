"""Files: invisible until whole, deleted in two steps, not from under a batch that reads them."""

import pytest

from state import batches, files
from state.database import Database
from state.records import File, FileInUse, FileNotFound, FileStatus, JobKind
from tests.state.making import NOW, PROJECT, claim_job, create, plan


async def reserve(db: Database, file_id: str, *, now: float = NOW, **changes: object) -> None:
    values: dict[str, object] = {
        "file_id": file_id,
        "project_id": PROJECT,
        "purpose": "batch",
        "filename": "requests.jsonl",
        "object_key": f"files/{file_id}",
        "now": now,
        "expires_at": None,
    }
    await files.reserve(db, **(values | changes))  # type: ignore[arg-type]


async def upload(db: Database, file_id: str = "file-in", **changes: object) -> File:
    await reserve(db, file_id, **changes)  # type: ignore[arg-type]
    return await files.publish(db, file_id=file_id, size=7, sha256="ab" * 32)


async def listed(db: Database, **changes: object) -> list[str]:
    values: dict[str, object] = {"project_id": PROJECT, "limit": 100, "after": None, "order": "desc", "purpose": None}
    page = await files.page(db, **(values | changes))  # type: ignore[arg-type]
    return [file.id for file in page.items]


async def test_a_file_is_invisible_until_it_is_published(db: Database) -> None:
    """Invariant 11."""
    await reserve(db, "file-in", expires_at=int(NOW) + 60)
    assert await listed(db) == []
    with pytest.raises(FileNotFound):
        await files.get(db, project_id=PROJECT, file_id="file-in")
    published = await files.publish(db, file_id="file-in", size=7, sha256="ab" * 32)
    assert published == File(
        id="file-in",
        project_id=PROJECT,
        purpose="batch",
        filename="requests.jsonl",
        status=FileStatus.PROCESSED,
        object_key="files/file-in",
        bytes=7,
        sha256="ab" * 32,
        created_at=int(NOW),
        expires_at=int(NOW) + 60,
    )
    assert await files.get(db, project_id=PROJECT, file_id="file-in") == published
    assert await listed(db) == ["file-in"]


async def test_another_projects_file_does_not_exist(db: Database) -> None:
    await upload(db)
    assert await listed(db, project_id="other") == []
    with pytest.raises(FileNotFound):
        await files.get(db, project_id="other", file_id="file-in")
    with pytest.raises(FileNotFound):
        await files.delete(db, project_id="other", file_id="file-in", now=NOW)
    with pytest.raises(FileNotFound):
        await listed(db, project_id="other", after="file-in")


async def test_reserving_and_publishing_again_is_the_same_file(db: Database) -> None:
    """Ledger rule 4: a caller whose answer was lost sends the same again."""
    first = await upload(db)
    assert await upload(db) == first


async def test_publishing_other_bytes_under_the_same_id_is_refused(db: Database) -> None:
    await upload(db)
    with pytest.raises(FileNotFound):
        await files.publish(db, file_id="file-in", size=7, sha256="cd" * 32)


async def test_an_upload_given_up_is_garbage_and_cannot_be_published(db: Database) -> None:
    await reserve(db, "file-in")
    await files.discard(db, file_id="file-in")
    assert await files.garbage(db) == [("file-in", "files/file-in")]
    with pytest.raises(FileNotFound):
        await files.publish(db, file_id="file-in", size=7, sha256="ab" * 32)


async def test_discarding_does_not_touch_a_published_file(db: Database) -> None:
    await upload(db)
    await files.discard(db, file_id="file-in")
    assert await listed(db) == ["file-in"]


async def test_deleting_hides_at_once_and_leaves_the_bytes_to_the_janitor(db: Database) -> None:
    await upload(db)
    await files.delete(db, project_id=PROJECT, file_id="file-in", now=NOW)
    assert await listed(db) == []
    with pytest.raises(FileNotFound):
        await files.delete(db, project_id=PROJECT, file_id="file-in", now=NOW)
    assert await files.garbage(db) == [("file-in", "files/file-in")]
    await files.forget(db, file_ids=["file-in"])
    assert await files.garbage(db) == []


async def test_only_deleted_files_can_be_forgotten(db: Database) -> None:
    await upload(db)
    await files.forget(db, file_ids=["file-in"])
    assert await listed(db) == ["file-in"]


async def test_an_input_can_be_deleted_only_when_its_batch_is_planned(db: Database) -> None:
    """Invariant 11: from then on the batch has its own copy."""
    await upload(db)
    batch = await create(db)
    with pytest.raises(FileInUse) as caught:
        await files.delete(db, project_id=PROJECT, file_id="file-in", now=NOW)
    assert caught.value.batch_id == batch.id
    assert await listed(db) == ["file-in"]
    await plan(db, batch, 1)
    await files.delete(db, project_id=PROJECT, file_id="file-in", now=NOW)
    assert await listed(db) == []


async def test_files_expire_when_their_time_has_come(db: Database) -> None:
    await upload(db, "file-now", expires_at=int(NOW))
    await upload(db, "file-later", expires_at=int(NOW) + 1)
    await upload(db, "file-never")
    await reserve(db, "file-pending", expires_at=int(NOW))
    assert await files.expire(db, now=NOW) == 1
    assert await listed(db) == ["file-never", "file-later"]
    assert await files.garbage(db) == [("file-now", "files/file-now")]


async def test_an_input_does_not_expire_while_its_batch_is_validating(db: Database) -> None:
    await upload(db, expires_at=int(NOW))
    await create(db)
    assert await files.expire(db, now=NOW + 10) == 0
    job = await claim_job(db, JobKind.PLAN)
    await batches.refused(db, job=job, faults=[], now=NOW)
    assert await files.expire(db, now=NOW + 10) == 1


async def test_expiry_goes_in_steps(db: Database) -> None:
    for i in range(5):
        await upload(db, f"file-{i}", expires_at=int(NOW))
    assert [await files.expire(db, now=NOW, limit=2) for _ in range(4)] == [2, 2, 1, 0]


async def test_uploads_that_never_ended_are_found_by_their_age(db: Database) -> None:
    await reserve(db, "file-old", now=NOW - 100)
    await reserve(db, "file-new", now=NOW)
    await upload(db, "file-done", now=NOW - 100)
    assert await files.stale_pending(db, created_before=int(NOW) - 50, limit=10) == ["file-old"]


async def test_a_list_is_in_order_of_time_and_ties_in_order_of_creation(db: Database) -> None:
    for name, now in (("c", NOW + 1), ("a", NOW), ("b", NOW + 0.5), ("d", NOW + 1.2)):
        await upload(db, f"file-{name}", now=now)
    assert await listed(db) == ["file-d", "file-c", "file-b", "file-a"]
    assert await listed(db, order="asc") == ["file-a", "file-b", "file-c", "file-d"]


@pytest.mark.parametrize("order", ["asc", "desc"])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 6])
async def test_pages_put_together_are_the_list(db: Database, order: str, size: int) -> None:
    for i in range(5):
        await upload(db, f"file-{i}", now=NOW + i // 2)
    seen: list[str] = []
    after: str | None = None
    more = True
    while more:
        page = await files.page(
            db,
            project_id=PROJECT,
            limit=size,
            after=after,
            order=order,
            purpose=None,  # type: ignore[arg-type]
        )
        seen += [file.id for file in page.items]
        more, after = page.has_more, seen[-1]
    assert seen == await listed(db, order=order)


async def test_a_list_may_be_of_one_purpose(db: Database) -> None:
    await upload(db, "file-1")
    await upload(db, "file-2", purpose="user_data")
    assert await listed(db, purpose="user_data") == ["file-2"]
    assert await listed(db, purpose="nonsense") == []


async def test_paging_goes_on_after_a_file_that_was_deleted_meanwhile(db: Database) -> None:
    """A script that deletes what it lists asks for the page after a file it has just deleted."""
    for i in range(4):
        await upload(db, f"file-{i}")
    await files.delete(db, project_id=PROJECT, file_id="file-2", now=NOW)
    assert await listed(db, after="file-2") == ["file-1", "file-0"]
    for unknown in ("file-x", ""):
        with pytest.raises(FileNotFound) as caught:
            await listed(db, after=unknown)
        assert caught.value.object_id == unknown
