"""One upload under way: the form's events in, bytes straight into the object store, a visible file at the end or nothing.

The row comes first and is invisible (`pending`), then the bytes, then the row is published: so a visible row always has
its bytes (invariant 11), and whatever is left of an upload that died is found by its row (ledger rule 5).
"""

import contextlib
from types import TracebackType
from typing import Self

from server import errors
from server.form import BATCH, UploadForm, label
from server.multipart import Event, FileBegin, FileData, FileEnd, Text
from server.sniff import Sniffer
from state import files
from state.clock import Clock
from state.database import Database
from state.ids import new_file_id
from state.objects import ObjectStore, ObjectWriter
from state.records import File, Unavailable


class Upload:
    """Use as a context: leaving it without `finish` takes everything back."""

    def __init__(
        self,
        *,
        database: Database,
        store: ObjectStore,
        clock: Clock,
        project_id: str,
        max_file_bytes: int,
        batch_ttl: int,
    ) -> None:
        self._database, self._store, self._project_id = database, store, project_id
        self._max_file_bytes, self._batch_ttl = max_file_bytes, batch_ttl
        self.file_id = new_file_id()
        self._now = clock.wall()
        self._form = UploadForm()
        self._sniffer = Sniffer()
        self._size = 0
        self._writer: ObjectWriter | None = None
        self._whole = self._published = False
        self._cleanup = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._cleanup.aclose()

    async def take(self, event: Event) -> None:
        """Takes the next event of the form.

        Raises:
            ApiError: 400, the upload is refused; as early as that is known.
            Unavailable: the database or the store does not answer.
        """
        match event:
            case Text():
                self._form.accept(event)
                self._refuse_foreign_content()
            case FileBegin(filename):
                await self._begin(label(filename))
            case FileData(data):
                await self._write(data)
            case FileEnd():
                self._whole = True
                self._refuse_foreign_content()

    async def finish(self) -> File:
        """Makes the file durable and visible.

        Raises:
            ApiError: 400, a field is missing.
            Unavailable: the database or the store does not answer; nothing is visible.
        """
        self._form.check_complete()
        if self._writer is None:
            raise errors.property_required("file")
        stored = await self._writer.commit()
        file = await files.publish(
            self._database,
            file_id=self.file_id,
            size=stored.size,
            sha256=stored.sha256,
            purpose=self._form.purpose,
            expires_at=self._expires_at(),
        )
        self._published = True
        return file

    async def _begin(self, filename: str) -> None:
        if self._writer is not None:
            raise errors.ApiError(400, "The field 'file' is given twice")
        key = f"files/{self.file_id}"
        writer = self._store.writer(key)
        self._cleanup.push_async_callback(self._discard)  # runs last: the bytes go before the row
        await files.reserve(
            self._database,
            file_id=self.file_id,
            project_id=self._project_id,
            purpose=self._form.purpose or "",  # may follow the file; `publish` sets it
            filename=filename,
            object_key=key,
            now=self._now,
            expires_at=self._expires_at(),
        )
        self._writer = await self._cleanup.enter_async_context(writer)

    async def _write(self, data: bytes) -> None:
        assert self._writer is not None
        self._size += len(data)
        if self._size > self._max_file_bytes:
            raise errors.file_too_large()
        self._sniffer.feed(data)
        self._refuse_foreign_content()
        await self._writer.write(data)

    def _refuse_foreign_content(self) -> None:
        if self._form.purpose != BATCH or self._writer is None:
            return
        refusal = self._sniffer.verdict(complete=self._whole)
        if refusal is not None:
            raise refusal

    def _expires_at(self) -> int | None:
        return self._form.expires_at(int(self._now), batch_ttl=self._batch_ttl)

    async def _discard(self) -> None:
        """Marks the row as garbage. Where even that fails, the janitor finds the row by its age."""
        if not self._published:
            with contextlib.suppress(Unavailable):
                await files.discard(self._database, file_id=self.file_id)
