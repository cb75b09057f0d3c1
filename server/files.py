"""The routes of /v1/files."""

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from server import content, errors, paging
from server.auth import project_of
from server.errors import ApiError
from server.intake import declared_length, pieces, refuse_encoded
from server.multipart import FormReader
from server.upload import Upload
from server.wire import JSON, file_deleted, file_object, page_object
from state import files
from state.clock import Clock
from state.database import Database
from state.objects import ObjectStore
from state.records import Corrupt, File, FileNotFound, OutOfSpace
from state.settings import Settings

#: What a form may weigh beside its file, in bytes.
_SLACK = 1024 * 1024
#: Uploads at once. Each costs a file handle and less than a MiB.
MOST_UPLOADS = 64


class Files:
    """Handlers and what they need."""

    def __init__(self, *, database: Database, store: ObjectStore, clock: Clock, settings: Settings) -> None:
        self._database, self._store, self._clock, self._settings = database, store, clock, settings
        self._uploads = 0

    def routes(self) -> list[Route]:
        """The routes, in the order of the documentation."""
        return [
            Route("/v1/files", self.create, methods=["POST"]),
            Route("/v1/files", self.page, methods=["GET"]),
            Route("/v1/files/{file_id}", self.retrieve, methods=["GET"]),
            Route("/v1/files/{file_id}", self.delete, methods=["DELETE"]),
            Route("/v1/files/{file_id}/content", self.content, methods=["GET", "HEAD"]),
        ]

    async def create(self, request: Request) -> Response:
        """POST /v1/files. Streams: nothing of the upload is held but the chunk in hand (invariant 12)."""
        refuse_encoded(request)
        reader = FormReader(request.headers.get("content-type", ""))
        length = declared_length(request.headers) or 0
        self._refuse_too_large(length)
        self._refuse_without_room(length)
        if self._uploads >= MOST_UPLOADS:
            message = "Too many uploads at once; try again in a moment."
            raise ApiError(503, message, kind=errors.SERVER, code="overloaded", headers={"retry-after": "1"})
        self._uploads += 1
        try:
            return JSON(file_object(await self._receive(request, reader)))
        finally:
            self._uploads -= 1

    async def _receive(self, request: Request, reader: FormReader) -> File:
        async with Upload(
            database=self._database,
            store=self._store,
            clock=self._clock,
            project_id=project_of(request),
            max_file_bytes=self._settings.max_file_bytes,
            batch_ttl=self._settings.file_ttl,
        ) as upload:
            size = 0
            async for piece in pieces(request):
                size += len(piece)
                self._refuse_too_large(size)
                for event in reader.feed(piece):
                    await upload.take(event)
            reader.finish()
            return await upload.finish()

    def _refuse_too_large(self, length: int) -> None:
        """Refuses by the length of the whole form, so that a client learns it before it has sent everything."""
        if length > self._settings.max_file_bytes + _SLACK:
            raise errors.file_too_large()

    def _refuse_without_room(self, length: int) -> None:
        """Only before the first byte: later the form is part of what fills the disk, and the store looks for itself."""
        free = self._store.free_bytes()
        if free is not None and free - length < self._settings.min_free_bytes:
            raise OutOfSpace("too little room for this upload", needed=length, free=free)

    async def page(self, request: Request) -> Response:
        """GET /v1/files."""
        query = paging.files_query(request.query_params)
        if query.after is not None and not paging.is_id(query.after):
            raise paging.unknown_file_after()
        if query.purpose is not None and not paging.is_id(query.purpose):
            return JSON(page_object([], has_more=False))
        try:
            page = await files.page(
                self._database,
                project_id=project_of(request),
                limit=query.limit,
                after=query.after,
                order=query.order,
                purpose=query.purpose,
            )
        except FileNotFound:
            raise paging.unknown_file_after() from None
        return JSON(page_object([file_object(file) for file in page.items], has_more=page.has_more))

    async def retrieve(self, request: Request) -> Response:
        """GET /v1/files/{file_id}."""
        return JSON(file_object(await self._named(request)))

    async def delete(self, request: Request) -> Response:
        """DELETE /v1/files/{file_id}; 409 while a batch that reads it is validating (invariant 11)."""
        file_id = _file_id(request)
        await files.delete(self._database, project_id=project_of(request), file_id=file_id, now=self._clock.wall())
        return JSON(file_deleted(file_id))

    async def content(self, request: Request) -> Response:
        """GET and HEAD /v1/files/{file_id}/content."""
        file = await self._named(request)
        try:
            return await content.reply(request, file, self._store)
        except Corrupt:
            await self._named(request)  # which says so, if the file was deleted between the row and its bytes
            raise

    async def _named(self, request: Request) -> File:
        return await files.get(self._database, project_id=project_of(request), file_id=_file_id(request))


def _file_id(request: Request) -> str:
    file_id: str = request.path_params["file_id"]
    if not paging.is_id(file_id):
        raise FileNotFound(file_id)
    return file_id
