"""The routes of /v1/batches. A batch is made and stopped here and nowhere run: a wake-up tells the orchestrator."""

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from server import errors, paging
from server.auth import project_of
from server.creation import Creation, parse_creation
from server.errors import ApiError
from server.form import BATCH
from server.intake import read_json_body, read_object
from server.wire import JSON, batch_object, page_object
from state import batches, files
from state.clock import Clock
from state.database import Database
from state.ids import new_batch_id
from state.records import BatchNotFound, FileNotFound
from state.settings import Settings
from state.wake import Waker


class Batches:
    """Handlers and what they need."""

    def __init__(self, *, database: Database, waker: Waker, clock: Clock, settings: Settings) -> None:
        self._database, self._waker, self._clock, self._settings = database, waker, clock, settings

    def routes(self) -> list[Route]:
        """The routes, in the order of the documentation."""
        return [
            Route("/v1/batches", self.create, methods=["POST"]),
            Route("/v1/batches", self.page, methods=["GET"]),
            Route("/v1/batches/{batch_id}", self.retrieve, methods=["GET"]),
            Route("/v1/batches/{batch_id}/cancel", self.cancel, methods=["POST"]),
        ]

    async def create(self, request: Request) -> Response:
        """POST /v1/batches. When the answer goes out, the batch is durable (ledger rule 4)."""
        wanted = parse_creation(await read_object(request), strict_window=self._settings.strict_window)
        project_id = project_of(request)
        await self._refuse_other_purpose(project_id, wanted)
        now = self._clock.wall()
        batch = await batches.create(
            self._database,
            batch_id=new_batch_id(now),
            project_id=project_id,
            endpoint=wanted.endpoint,
            input_file_id=wanted.input_file_id,
            completion_window=wanted.completion_window,
            window_s=wanted.window_s,
            metadata=wanted.metadata,
            output_expires_after=wanted.output_expires_after,
            now=now,
        )
        self._waker.notify("orchestrator")
        return JSON(batch_object(batch))

    async def _refuse_other_purpose(self, project_id: str, wanted: Creation) -> None:
        """A file that is not there is for validation to report; one of another purpose is plainly a mistake."""
        try:
            file = await files.get(self._database, project_id=project_id, file_id=wanted.input_file_id)
        except FileNotFound:
            return
        if file.purpose != BATCH:
            message = (
                f"Invalid 'input_file_id': expected a file with purpose 'batch', but its purpose is '{file.purpose}'."
            )
            raise ApiError(400, message, param="input_file_id", code="invalid_value")

    async def page(self, request: Request) -> Response:
        """GET /v1/batches, newest first."""
        query = paging.batches_query(request.query_params)
        if query.after is not None and not paging.is_id(query.after):
            raise BatchNotFound(query.after)
        if query.limit == 0:
            return JSON(page_object([], has_more=False))
        page = await batches.page(self._database, project_id=project_of(request), limit=query.limit, after=query.after)
        return JSON(page_object([batch_object(batch) for batch in page.items], has_more=page.has_more))

    async def retrieve(self, request: Request) -> Response:
        """GET /v1/batches/{batch_id}."""
        batch_id = _batch_id(request)
        return JSON(batch_object(await batches.get(self._database, project_id=project_of(request), batch_id=batch_id)))

    async def cancel(self, request: Request) -> Response:
        """POST /v1/batches/{batch_id}/cancel; a body is not needed, and not looked into."""
        await read_json_body(request)
        batch = await batches.cancel(
            self._database,
            project_id=project_of(request),
            batch_id=_batch_id(request),
            now=self._clock.wall(),
        )
        self._waker.notify("orchestrator")
        self._waker.notify("worker")  # which aborts what is in flight
        return JSON(batch_object(batch))


def _batch_id(request: Request) -> str:
    batch_id: str = request.path_params["batch_id"]
    if not batch_id.startswith("batch"):
        message = f"Invalid 'batch_id': '{errors.echo(batch_id)}'. Expected an ID that begins with 'batch'."
        raise ApiError(400, message, param="batch_id", code="invalid_value")
    if not paging.is_id(batch_id):
        raise BatchNotFound(batch_id)
    return batch_id
