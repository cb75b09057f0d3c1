"""The routes of /v1/models: what the ledger knows, never a question to a live engine."""

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from server.wire import JSON, model_object
from state import models
from state.database import Database
from state.records import ModelNotFound


class Models:
    """Handlers and what they need."""

    def __init__(self, *, database: Database) -> None:
        self._database = database

    def routes(self) -> list[Route]:
        """The routes. A model's name may hold slashes."""
        return [
            Route("/v1/models", self.page, methods=["GET"]),
            Route("/v1/models/{model:path}", self.retrieve, methods=["GET"]),
        ]

    async def page(self, request: Request) -> Response:
        """GET /v1/models. This list has no pages, and none of their keys."""
        known = await models.listed(self._database)
        return JSON({"object": "list", "data": [model_object(model) for model in known]})

    async def retrieve(self, request: Request) -> Response:
        """GET /v1/models/{model}."""
        name: str = request.path_params["model"]
        if "\x00" in name or name == "*":  # no database takes NUL in text; `*` stands for any name and is none itself
            raise ModelNotFound(name)
        return JSON(model_object(await models.get(self._database, name=name)))
