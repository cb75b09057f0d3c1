"""Variables that are nearly settings: a flag is called `--upstream`, its variable OVERNIGHT_UPSTREAMS.

A file's unknown name is refused, because a setting that is passed over in silence is found out late. An unknown variable
cannot be: others own names that begin like ours (Kubernetes makes OVERNIGHT_SERVICE_HOST). One that is a letter or two
away from a setting is no such name.
"""

from collections.abc import Mapping
from dataclasses import fields
from difflib import get_close_matches

from state.records import SettingsError
from state.settings import PREFIX, Settings

#: How alike two names are, from 0 to 1, to be taken for the same one: MODEL_ALIAS and MODEL_ALIASES are .92.
ALIKE = 0.88


def refuse_misspelt(environ: Mapping[str, str]) -> None:
    """Looks at the names of the variables.

    Raises:
        SettingsError: one is most probably meant for a setting, but is spelt otherwise.
    """
    known = {PREFIX + item.name.upper() for item in fields(Settings)}
    for name in sorted(environ):
        if not name.startswith(PREFIX) or name in known:
            continue
        own = [one.removeprefix(PREFIX) for one in known]
        if meant := get_close_matches(name.removeprefix(PREFIX), own, n=1, cutoff=ALIKE):
            raise SettingsError(f"{name} is no setting: did you mean {PREFIX}{meant[0]}?")
