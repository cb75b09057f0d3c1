"""The composition root of the HTTP API: which routes there are, and what every request passes on its way in."""

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from server import errors
from server.auth import Door
from server.batches import Batches
from server.crowd import Crowd
from server.files import Files
from server.health import Health
from server.intake import Intake
from server.models import Models
from server.stamp import Stamp
from server.wire import JSON
from state.clock import Clock
from state.database import Database
from state.objects import ObjectStore
from state.settings import Settings
from state.wake import Waker


def create_app(*, settings: Settings, database: Database, store: ObjectStore, waker: Waker, clock: Clock) -> Starlette:
    """Puts the API together. It opens nothing and closes nothing: what it is given belongs to the caller."""
    app = Starlette(
        routes=[
            *Files(database=database, store=store, clock=clock, settings=settings).routes(),
            *Batches(database=database, waker=waker, clock=clock, settings=settings).routes(),
            *Models(database=database).routes(),
            *Health(database=database, store=store, clock=clock).routes(),
        ],
        middleware=[  # from the outside in
            Middleware(Intake, body_timeout=settings.body_timeout, min_body_rate=settings.min_body_rate),
            Middleware(Stamp),
            Middleware(Crowd),
            Middleware(Door, api_keys=settings.api_keys, allowed_hosts=settings.allowed_hosts),
        ],
        exception_handlers={HTTPException: _routing_error},
    )
    app.router.redirect_slashes = False  # a redirect would be built from a Host header, and lose a POST's body
    return app


async def _routing_error(request: Request, error: Exception) -> Response:
    """404 and 405 of the router, in the envelope."""
    path = request.scope["path"]
    told = errors.from_exception(error, method=request.method, path=path, request_id="")
    if told.status == 405:  # the router names the methods of one route, and a path may have several
        routes = [r for r in request.app.routes if isinstance(r, Route) and r.path_regex.match(path)]
        told.headers["allow"] = ", ".join(sorted({method for route in routes for method in route.methods or ()}))
    return JSON(told.body(), told.status, told.headers)
