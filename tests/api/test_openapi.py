"""openapi.yaml describes exactly what is served."""

from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from starlette.applications import Starlette
from starlette.routing import Route

from server.creation import ENDPOINTS, LEAST_TTL_S, MOST_TTL_S
from server.form import PURPOSES
from server.paging import MOST_BATCHES, MOST_FILES, USUAL_BATCHES
from state import models, workers
from state.records import BatchStatus, Model
from tests.api.conftest import Api

DOCUMENT: dict[str, Any] = yaml.safe_load((Path(__file__).parents[2] / "openapi.yaml").read_text())
SCHEMAS: dict[str, Any] = DOCUMENT["components"]["schemas"]
VERBS = ("get", "head", "post", "put", "patch", "delete")
TYPES = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool, "null": type(None)}


def faults(value: Any, schema: dict[str, Any], at: str = "") -> list[str]:
    """Where a value is not what the schema says; as much of JSON Schema as the document uses for replies."""
    if "$ref" in schema:
        return faults(value, resolved(schema), at)
    if "oneOf" in schema:
        return [] if any(not faults(value, one, at) for one in schema["oneOf"]) else [f"{at}: fits none"]
    kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    if not any(type(value) is TYPES[kind] for kind in kinds):
        return [f"{at}: {value!r} is not {kinds}"]
    found = [] if value in schema.get("enum", [value]) and value == schema.get("const", value) else [f"{at}: {value!r}"]
    if isinstance(value, list):
        return found + [fault for n, item in enumerate(value) for fault in faults(item, schema["items"], f"{at}[{n}]")]
    return found + (faults_inside(value, schema, at) if isinstance(value, dict) else [])


def faults_inside(value: dict[str, Any], schema: dict[str, Any], at: str) -> list[str]:
    found = [f"{at}: lacks {name}" for name in schema.get("required", []) if name not in value]
    known, others = schema.get("properties", {}), schema.get("additionalProperties", True)
    for name, item in value.items():
        inner = known.get(name, others)
        if inner is False:
            found.append(f"{at}: has {name}")
        elif inner is not True:
            found += faults(item, inner, f"{at}.{name}")
    return found


def resolved(schema: dict[str, Any]) -> dict[str, Any]:
    target: Any = DOCUMENT
    for step in schema["$ref"].removeprefix("#/").split("/"):
        target = target[step]
    return dict(target)


def documented(method: str, path: str, status: int) -> dict[str, Any]:
    """The schema of a reply's body."""
    reply = DOCUMENT["paths"][path][method.lower()]["responses"][str(status)]
    if "$ref" in reply:
        reply = resolved(reply)
    return dict(reply["content"]["application/json"]["schema"])


def test_the_document_names_exactly_the_routes_there_are(api: Api) -> None:
    app: Starlette = api.client._transport.app  # type: ignore[attr-defined,union-attr]
    served: set[tuple[str, str]] = set()
    for route in app.routes:
        assert isinstance(route, Route)
        path = route.path.replace(":path}", "}")
        served |= {(path, method) for method in route.methods or ()}
    written = {(path, verb.upper()) for path, item in DOCUMENT["paths"].items() for verb in item if verb in VERBS}
    implied = {(path, "HEAD") for path, method in served if method == "GET"}  # HEAD follows from GET
    assert written <= served
    assert served - written <= implied


def test_limits_and_choices_are_those_of_the_code() -> None:
    def query(path: str, name: str) -> dict[str, Any]:
        [schema] = [p["schema"] for p in DOCUMENT["paths"][path]["get"]["parameters"] if p["name"] == name]
        return dict(schema)

    assert SCHEMAS["Endpoint"]["enum"] == list(ENDPOINTS)
    assert SCHEMAS["FileUpload"]["properties"]["purpose"]["enum"] == list(PURPOSES)
    assert set(SCHEMAS["Batch"]["properties"]["status"]["enum"]) == {str(status) for status in BatchStatus}
    assert (query("/v1/files", "limit")["maximum"], query("/v1/files", "limit")["default"]) == (MOST_FILES, MOST_FILES)
    limit = query("/v1/batches", "limit")
    assert (limit["maximum"], limit["default"]) == (MOST_BATCHES, USUAL_BATCHES)
    seconds = SCHEMAS["BatchCreate"]["properties"]["output_expires_after"]["properties"]["seconds"]
    assert (seconds["minimum"], seconds["maximum"]) == (LEAST_TTL_S, MOST_TTL_S)


def test_every_reference_leads_somewhere() -> None:
    def walk(node: Any) -> None:
        if isinstance(node, dict):
            if "$ref" in node:
                resolved(node)
            for value in node.values():
                walk(value)
        elif isinstance(node, list):
            for value in node:
                walk(value)

    walk(DOCUMENT)


async def test_real_replies_are_as_documented(api: Api) -> None:
    def check(reply: httpx.Response, method: str, path: str, status: int) -> dict[str, Any]:
        assert reply.status_code == status, reply.text
        assert faults(reply.json(), documented(method, path, status)) == []
        return dict(reply.json())

    client = api.client
    known = Model("m", "m", "overnight", 1, 0.0)
    await models.register(api.database, models=[known], now=api.clock.wall())
    check(await client.get("/readyz/engine"), "GET", "/readyz/engine", 503)
    await workers.seen(
        api.database, worker_id="w", engine="echo", state="ready", cause=None, models=["m"], now=api.clock.wall()
    )
    file = check(await api.upload(), "POST", "/v1/files", 200)
    check(await api.upload(b"no"), "POST", "/v1/files", 400)
    check(await client.get("/v1/files"), "GET", "/v1/files", 200)
    check(await client.get(f"/v1/files/{file['id']}"), "GET", "/v1/files/{file_id}", 200)
    batch = check(await api.create(file["id"], metadata={"k": "v"}), "POST", "/v1/batches", 200)
    check(await api.create(file["id"], nothing=1), "POST", "/v1/batches", 400)
    check(await client.get("/v1/batches"), "GET", "/v1/batches", 200)
    check(await client.get(f"/v1/batches/{batch['id']}"), "GET", "/v1/batches/{batch_id}", 200)
    check(await client.get("/v1/batches/batch_x"), "GET", "/v1/batches/{batch_id}", 404)
    check(await client.delete(f"/v1/files/{file['id']}"), "DELETE", "/v1/files/{file_id}", 409)
    check(await client.post(f"/v1/batches/{batch['id']}/cancel"), "POST", "/v1/batches/{batch_id}/cancel", 200)
    check(await client.delete(f"/v1/files/{file['id']}"), "DELETE", "/v1/files/{file_id}", 200)
    check(await client.get("/v1/models"), "GET", "/v1/models", 200)
    check(await client.get("/v1/models/m"), "GET", "/v1/models/{model}", 200)
    check(await client.get("/v1/models/n"), "GET", "/v1/models/{model}", 404)
    check(await client.get("/healthz"), "GET", "/healthz", 200)
    check(await client.get("/readyz"), "GET", "/readyz", 200)
    check(await client.get("/readyz/engine"), "GET", "/readyz/engine", 200)


@pytest.mark.parametrize(
    ("value", "fits"),
    [({"message": "m", "type": "server_error", "param": None, "code": None}, True), ({"message": "m"}, False)],
)
def test_the_check_itself_can_fail(value: dict[str, Any], fits: bool) -> None:
    assert (faults({"error": value}, SCHEMAS["Error"]) == []) is fits
