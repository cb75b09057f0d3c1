"""What a person may want to know next: why a batch does not move, what a fault asks for, where the results are.

Pure: from what a server said to a line of text, or to none.
"""

from collections.abc import Iterable, Mapping
from typing import Any

#: In an engine's list of models: any name will do.
ANY = "*"


def why_waiting(batch: Mapping[str, Any], readiness: Mapping[str, Any]) -> str | None:
    """Why nothing of the batch runs now, by what `/readyz/engine` answered; None where that does not say it."""
    error = readiness.get("error")
    if isinstance(error, Mapping):
        return f"waiting: {error.get('message')}" if error.get("code") == "no_engine" else None
    engines = [one for one in readiness.get("engines") or [] if isinstance(one, Mapping)]
    served = {str(name) for one in engines if one.get("state") == "ready" for name in one.get("models") or []}
    model = batch.get("model")
    if not model or not served or model in served or ANY in served:
        return None
    return f"waiting: no engine serves {model!r} now; there is {', '.join(sorted(served))}"


def about_faults(faults: Iterable[Mapping[str, Any]], models: Iterable[str]) -> str | None:
    """How to get past faults that the file alone does not explain; None where it does."""
    if not any(fault.get("code") == "model_not_found" for fault in faults):
        return None
    names = list(models)
    if not names:
        return None
    return (
        f"this server has: {', '.join(names)}. Name one of them in the file, or start the server with "
        f"--model-alias '*={names[0]}', which runs files that name any other model"
    )


def next_step(batch: Mapping[str, Any]) -> str | None:
    """How to get the results of a batch that has ended, if it has any."""
    if batch.get("output_file_id") or batch.get("error_file_id"):
        return f"fetch the results with: overnight download {batch.get('id')}"
    return None
