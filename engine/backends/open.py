"""Makes the backend that the settings ask for."""

from engine.backends.echo import EchoEngine
from engine.backends.protocol import Backend
from engine.backends.remote import RemoteEngine
from state.clock import Clock, SystemClock
from state.records import SettingsError
from state.settings import Settings


def open_backend(settings: Settings, *, upstream: str | None, clock: Clock | None = None) -> Backend:
    """The engine of one worker; `upstream` is its base URL where the engine is a remote one. Starts nothing.

    Raises:
        SettingsError: the settings do not fit together.
    """
    if settings.engine_kind == "echo":
        return EchoEngine(settings)
    if settings.engine_kind == "remote":
        if not upstream:
            raise SettingsError("the engine is remote, but there is no upstream; give one with --upstream URL")
        return RemoteEngine(settings, url=upstream, clock=clock or SystemClock())
    from engine.backends.vllm import ManagedVLLM  # loaded only where an engine is run

    return ManagedVLLM(settings)
