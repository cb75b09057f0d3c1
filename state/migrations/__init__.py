"""The schema's history, run from inside the installed package; there is no configuration file.

A migration is written by hand, with explicit tables: it must go on meaning what it meant when `state.tables` has moved
on. Each one only expands what the version before can live with, or contracts what no supported version uses (invariant
14). A test holds the sum of the migrations against `state.tables`.
"""

from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection


def config() -> Config:
    """Alembic's configuration, for the scripts in this folder."""
    made = Config()
    made.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    made.set_main_option("path_separator", "os")
    return made


def head() -> str:
    """The newest revision of this version."""
    found = ScriptDirectory.from_config(config()).get_current_head()
    assert found is not None
    return found


def pending(revision: str | None) -> bool:
    """Whether a database at this revision has migrations before it.

    A revision that this version does not know was made by a newer one, which keeps its schema fit for us (invariant 14).
    """
    if revision is None:
        return True
    known = {script.revision for script in ScriptDirectory.from_config(config()).walk_revisions()}
    return revision in known and revision != head()


def run(connection: Connection) -> None:
    """Runs what is pending, in the connection's own transaction."""
    if pending(MigrationContext.configure(connection).get_current_revision()):
        made = config()
        made.attributes["connection"] = connection
        command.upgrade(made, "head")
