"""Puts the engine's own name for a model in the place of an alias that the engine does not know itself, such as `*`. Pure."""

from collections.abc import Iterable, Mapping

import msgspec

from engine.splice import splice_model


class _Asked(msgspec.Struct):
    model: str | None = None


_decode_asked = msgspec.json.Decoder(_Asked).decode


class Renaming:
    """The aliases of one engine, and the names it knows by itself."""

    def __init__(self, aliases: Mapping[str, str], *, served: Iterable[str]) -> None:
        self._served = frozenset(served)
        self._aliases = {name: target for name, target in aliases.items() if name not in self._served}

    def renamed(self, body: bytes) -> bytes:
        """The body, with the model's value replaced where it must be, and not a byte else changed."""
        if not self._aliases:
            return body
        try:
            asked = _decode_asked(body).model
        except (msgspec.DecodeError, RecursionError):
            return body  # the engine says what is wrong with it
        if asked is None or asked in self._served:
            return body
        target = self._aliases.get(asked) or self._aliases.get("*")
        return body if target is None else splice_model(body, target)
