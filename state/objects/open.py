"""Which store a deployment uses, decided by one setting."""

from pathlib import Path

from state.objects import ObjectStore
from state.objects.local import LocalStore
from state.records import SettingsError
from state.settings import Settings


def open_store(settings: Settings) -> ObjectStore:
    """The store that `objects_url` names: today a folder, made where it is missing.

    Raises:
        SettingsError: a kind of store that this version does not know.
        Unavailable: the folder cannot be made or written to.
    """
    where = settings.objects
    if "://" in where:
        raise SettingsError(f"objects_url is {where!r}, but this version keeps objects in a folder only: give its path")
    return LocalStore(Path(where).expanduser(), min_free_bytes=settings.min_free_bytes)
