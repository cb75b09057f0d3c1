"""What a request's body must hold to be accepted into a batch, by endpoint, and the key by which prompts are put in order.

Only what every engine would refuse, or what makes no sense in a batch, is refused here. Whether `temperature` may be -1 is
the engine's to say, and it says so for that request alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
from msgspec import Raw

from engine.json_text import Reveal, has_surrogates, kind, shown, text
from state.records import Model

_ABSENT = Raw()


class Fields(msgspec.Struct):
    """The parts of a body that Overnight looks at, as they stand there; empty where they are absent."""

    model: Raw = _ABSENT
    messages: Raw = _ABSENT
    prompt: Raw = _ABSENT
    prompt_embeds: Raw = _ABSENT
    input: Raw = _ABSENT
    stream: Raw = _ABSENT
    background: Raw = _ABSENT
    previous_response_id: Raw = _ABSENT
    conversation: Raw = _ABSENT
    cache_salt: Raw = _ABSENT
    chat_template: Raw = _ABSENT
    chat_template_kwargs: Raw = _ABSENT
    tools: Raw = _ABSENT
    documents: Raw = _ABSENT
    instructions: Raw = _ABSENT


DECODER = msgspec.json.Decoder(Fields)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One endpoint's demands. One of `required` must be there; the prompt is made of `prompt`, in the order rendered."""

    title: str
    required: tuple[str, ...] = ()
    prompt: tuple[str, ...] = ()
    forbidden: tuple[str, ...] = ()


#: An endpoint that is not listed here (/v1/score, /v1/rerank) needs a model only, and keeps input order.
ENDPOINTS: Mapping[str, Endpoint] = {
    "/v1/chat/completions": Endpoint(
        "Chat Completions",
        required=("messages",),
        # A different salt or template shares nothing, so they come first; then what templates render before the messages.
        prompt=("cache_salt", "chat_template", "tools", "chat_template_kwargs", "documents", "messages"),
    ),
    "/v1/completions": Endpoint(
        "Completions", required=("prompt", "prompt_embeds"), prompt=("cache_salt", "prompt_embeds", "prompt")
    ),
    "/v1/responses": Endpoint(
        "Responses",
        required=("input",),
        prompt=("cache_salt", "tools", "chat_template_kwargs", "instructions", "input"),
        forbidden=("background", "previous_response_id", "conversation"),
    ),
    "/v1/embeddings": Endpoint("Embeddings", required=("input", "messages")),
    "/v1/moderations": Endpoint("Moderations", required=("input",)),
}


class Refusal(Exception):
    """A line may not be in the batch. The fields are those of an entry in the batch's `errors`."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code, self.message, self.param = code, message, param


@dataclass(frozen=True, slots=True)
class Catalogue:
    """The models that may be asked for. `models` None: nobody knows any, so every name will do (checking offline)."""

    models: Mapping[str, Model] | None = None

    def find(self, name: str) -> Model | None:
        """The row that serves a name, the one for any name (`*`) last."""
        known = self.models or {}
        return known.get(name) or known.get("*")


def endpoint(path: str) -> Endpoint:
    """The demands of an endpoint."""
    return ENDPOINTS.get(path) or Endpoint(path)


def ordered_by_prefix(path: str) -> bool:
    """Whether requests for this endpoint have prompts whose prefixes an engine can reuse."""
    return bool(endpoint(path).prompt)


def check_body(fields: Fields, path: str, catalogue: Catalogue, reveal: Reveal) -> str:
    """The model a body asks for.

    Raises:
        Refusal: see docs/input-format.md for what is refused, in which order.
    """
    rules = endpoint(path)
    model = _check_model(reveal(fields.model), path, catalogue)
    if rules.required and all(_missing(getattr(fields, name)) for name in rules.required):
        name = rules.required[0]
        raise Refusal("invalid_request", f"{name.capitalize()} parameter is required.", f"body.{name}")
    if not _missing(fields.stream) and bytes(fields.stream) != b"false":
        message = f"{rules.title}: Streaming is not supported in the Batch API."
        raise Refusal("streaming_unsupported", message, "body.stream")
    for name in rules.forbidden:
        value = getattr(fields, name)
        if not _missing(value) and bytes(value) != b"false":
            message = f"{rules.title}: '{name}' is not supported in the Batch API."
            raise Refusal("invalid_request", message, f"body.{name}")
    return model


def prompt_key(fields: Fields, path: str, reveal: Reveal) -> bytes:
    """What requests are ordered by: the parts an engine renders into the prompt, in that order, as raw JSON.

    A NUL between parts, which JSON cannot hold, keeps a part that is absent from being taken for its neighbour. There are
    no lengths in it: two keys share exactly as many bytes as their prompts share.
    """
    return b"\x00".join([reveal(getattr(fields, name)) for name in endpoint(path).prompt])


def _check_model(raw: bytes, path: str, catalogue: Catalogue) -> str:
    if raw in (b"", b"null", b'""'):
        raise Refusal("invalid_request", "Model parameter is required.", "body.model")
    if not raw.startswith(b'"'):
        message = f"Invalid type for 'body.model': expected a string, but got {kind(raw)} instead."
        raise Refusal("invalid_type", message, "body.model")
    name = text(raw)
    if catalogue.models is None and not has_surrogates(name):
        return name
    model = catalogue.find(name)
    if model is None or has_surrogates(name):
        message = f"The provided model '{shown(name)}' is not supported by the Batch API."
        raise Refusal("model_not_found", message, "body.model")
    if model.endpoints is not None and path not in model.endpoints:
        message = f"The provided model '{shown(name)}' does not serve the endpoint '{path}'."
        raise Refusal("invalid_request", message, "body.model")
    return name


def _missing(value: Raw) -> bool:
    return len(value) == 0 or bytes(value) == b"null"
