"""Model aliases: `NAME=MODEL` lets files that say `gpt-4o-mini` run on the model there is; `*=MODEL` takes any name. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from engine.backends.protocol import ServedModel
from state.records import SettingsError


def parse_aliases(pairs: Iterable[str]) -> dict[str, str]:
    """The aliases by name.

    Raises:
        SettingsError: a pair is not `NAME=MODEL`, or a name has two models.
    """
    aliases: dict[str, str] = {}
    for pair in pairs:
        name, _, model = (part.strip() for part in pair.partition("="))
        if not name or not model:
            raise SettingsError(f"model alias {pair!r} must be NAME=MODEL")
        if aliases.setdefault(name, model) != model:
            raise SettingsError(f"model alias {name!r} is given twice, for {aliases[name]!r} and for {model!r}")
    return aliases


def with_aliases(models: Sequence[ServedModel], aliases: Mapping[str, str]) -> tuple[ServedModel, ...]:
    """The models, each with the aliases that stand for it behind its own names. An alias of another model is left out."""
    return tuple(
        replace(
            model, names=(*model.names, *(n for n, m in aliases.items() if m in model.names and n not in model.names))
        )
        for model in models
    )


def check_aliases(models: Sequence[ServedModel], aliases: Mapping[str, str], *, engine: str) -> None:
    """Holds every alias against what the engine serves.

    Raises:
        SettingsError: an alias stands for a model that the engine does not serve; the message lists those it does.
    """
    known = [name for model in models for name in model.names]
    for name, target in aliases.items():
        if target not in known:
            offered = ", ".join(repr(k) for k in known) or "nothing"
            raise SettingsError(f"model alias {name}={target}: {engine} does not serve {target!r}; it serves {offered}")
