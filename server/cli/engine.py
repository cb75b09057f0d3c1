"""`overnight engine install`: builds the environment in which vLLM runs."""

import argparse
import time

from engine.environment import engine_home
from engine.install import install as build
from server.cli import screen
from server.cli.exits import FAILED, OK, Failure
from state.records import SettingsError
from state.settings import Settings


def install(args: argparse.Namespace) -> int:
    """Builds it, or finds that it is there; each step is a line on stderr."""
    settings = Settings.load({"data": args.data, "engine_python": args.engine_python})
    began = time.monotonic()

    def echo(text: str) -> None:
        screen.note(f"[{time.monotonic() - began:3.0f} s] {text}")

    folder = engine_home(settings.data)
    try:
        python = build("cpu" if args.cpu else "gpu", folder=folder, python=settings.engine_python or None, echo=echo)
    except SettingsError as error:  # right flags, and yet it cannot be done: a failure, not wrong use
        raise Failure(str(error), FAILED) from error
    screen.out(str(python))
    return OK
