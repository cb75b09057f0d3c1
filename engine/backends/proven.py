"""Remembers that an engine, as configured, was once healthy: what fails then may pass, and is tried again for ever.

A worker that was killed and started again by the same supervisor must know it as well. Else an engine that cannot start
for a while, because the memory of a GPU is not free yet, would be taken for a wrong configuration, which ends everything.
"""

import contextlib
import hashlib
import json
import os
from pathlib import Path

from engine.backends import guard
from state.settings import Settings


class Proof:
    """A file that names who was healthy: this configuration, under this parent process, in this boot."""

    def __init__(self, path: Path, settings: Settings) -> None:
        parent = guard.read_process(os.getppid())
        facts = [
            *(guard.boot_id(), os.getppid(), parent.start if parent else 0),
            *(settings.model, settings.engine_python, settings.engine_args),
        ]
        self._path = path
        self._digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()  # flags may be of a private kind
        self._given = False

    @property
    def given(self) -> bool:
        """Whether it was healthy, here or in the worker before."""
        if not self._given:
            with contextlib.suppress(OSError, UnicodeDecodeError):
                self._given = self._path.read_text("ascii") == self._digest
        return self._given

    def give(self) -> None:
        """It is healthy. A disk that is full costs the memory of it only."""
        if not self.given:
            self._given = True
            with contextlib.suppress(OSError):
                self._path.write_text(self._digest, "ascii")
