"""`overnight engine install`: builds the environment in which vLLM runs, and for the CPU a small model to try it with.

For the CPU the whole set of packages is pinned in `constraints-cpu.txt` and installed without a resolver, by two pips at
once (torch, everything else): on two cores the environment is there in about a minute. Nothing is taken for installed
until vLLM was imported and the demo model answered; an installation that broke off is built anew.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, Literal

from engine import demo_model
from engine.environment import python_in
from engine.inside import cpu_attention
from state.records import SettingsError

Kind = Literal["cpu", "gpu"]
Echo = Callable[[str], None]

VLLM: Final = "0.32.0"
TORCH: Final = "2.13.0+cpu"
CONSTRAINTS: Final = Path(__file__).with_name("constraints-cpu.txt")

#: Where torch for CPUs is published. Asked second: pip may be set up with a place that has it.
TORCH_INDEX: Final = "https://download.pytorch.org/whl/cpu"

#: vLLM for CPUs is built for these, and for glibc 2.28 or newer.
MACHINES: Final = ("x86_64", "aarch64")
OLDEST_PYTHON, NEWEST_PYTHON = (3, 11), (3, 14)

#: Imported once at the end: it proves that vLLM works there, and compiles what its first start would compile.
PROOF: Final = "import vllm.entrypoints.launchers.api_server.entry, vllm.v1.engine.core, vllm.v1.worker.cpu_worker"
GPU_PROOF: Final = "import vllm"


@dataclass(frozen=True, slots=True)
class Marker:
    """What was installed. Equal markers mean equal environments."""

    kind: str
    vllm: str
    packages: str
    """A digest of the pinned packages."""


def wanted(kind: Kind) -> Marker:
    """The marker of an installation made now."""
    text = CONSTRAINTS.read_bytes() + TORCH.encode() if kind == "cpu" else b""
    return Marker(kind, VLLM, hashlib.sha256(text).hexdigest()[:16])


def pip(python: Path, *args: str) -> list[str]:
    """A pip command of that environment, that asks nothing. Bytecode is made when something is first imported."""
    return [
        *(str(python), "-m", "pip", "install", "--no-input", "--disable-pip-version-check", "--no-compile"),
        *("--progress-bar", "off", *args),
    ]


def torch_commands(python: Path) -> list[list[str]]:
    """Ways to get torch for CPUs, to be tried in this order. Its version is a local one, which PyPI cannot hold."""
    plain = pip(python, "--no-deps", f"torch=={TORCH}")
    return [plain, [*plain, "--index-url", TORCH_INDEX]]


def packages_command(python: Path) -> list[str]:
    """Everything else for the CPU, vLLM included."""
    return pip(python, "--no-deps", "--requirement", str(CONSTRAINTS))


def gpu_command(python: Path) -> list[str]:
    """The release on PyPI is built for CUDA; with all it depends on."""
    return pip(python, f"vllm=={VLLM}")


def check_machine(kind: Kind, *, system: str, machine: str, version: tuple[int, int]) -> None:
    """Pure.

    Raises:
        SettingsError: vLLM cannot run there; says what can be done.
    """
    if system != "Linux" or machine not in MACHINES:
        raise SettingsError(
            f"vLLM is published for Linux on x86_64 and aarch64, and this is {system} on {machine}: "
            "use an OpenAI-compatible server that runs here, with --upstream URL"
        )
    if not OLDEST_PYTHON <= version <= NEWEST_PYTHON:
        raise SettingsError(
            f"vLLM {VLLM} needs Python 3.11 to 3.14 and this is {version[0]}.{version[1]}: name another with --engine-python"
        )


class Steps:
    """Runs commands, their output into the log; a failure becomes one line."""

    def __init__(self, *, folder: Path, echo: Echo, log: int) -> None:
        """`folder` is where commands run and `install.log` lies; `log` is the descriptor of that file."""
        self.echo = echo
        self._folder, self._log = folder, log

    def run(self, command: Sequence[str], *, mend: str) -> None:
        """Raises SettingsError, with the command's last line and the mend, if it fails."""
        os.write(self._log, f"$ {' '.join(command)}\n".encode())
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=clean(os.environ),
                cwd=self._folder,
                check=False,
            )
        except OSError as error:
            raise SettingsError(f"{command[0]} cannot be run: {error.strerror}") from error
        os.write(self._log, done.stdout)
        if done.returncode != 0:
            said = last_error(done.stdout.decode("utf-8", "replace"))
            raise SettingsError(f"{said} ({mend}; more in {self._folder / 'install.log'})")

    def first_of(self, commands: Sequence[Sequence[str]], *, mend: str) -> None:
        """Runs the commands until one succeeds; the last one's failure is raised."""
        for command in commands[:-1]:
            with contextlib.suppress(SettingsError):
                self.run(command, mend=mend)
                return
        self.run(commands[-1], mend=mend)


def install(kind: Kind, *, folder: Path, python: str | None, echo: Echo) -> Path:
    """Builds the environment in `folder`/venv, unless it is there already; returns its python.

    `python` makes the environment (None: the one that runs us); `echo` is told of each step in one line.

    Raises:
        SettingsError: it cannot be done; one line with the mend. Details are in `folder`/install.log.
    """
    maker = python or sys.executable
    check_machine(kind, system=platform.system(), machine=platform.machine(), version=_version_of(maker))
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with _alone(folder), (folder / "install.log").open("ab") as log:
        steps = Steps(folder=folder, echo=echo, log=log.fileno())
        if _installed(folder) == wanted(kind) and python_in(folder).exists():
            echo(f"vLLM {VLLM} ({kind}) is already installed in {folder}")
        else:
            _build(kind, folder, maker, steps)
        if kind == "cpu":
            demo_model.build(home=folder, python=python_in(folder), run=steps.run, echo=echo)
    return python_in(folder)


def _build(kind: Kind, folder: Path, maker: str, steps: Steps) -> None:
    """Makes the environment from nothing; the marker comes last."""
    (folder / "installed.json").unlink(missing_ok=True)
    shutil.rmtree(folder / "venv", ignore_errors=True)
    steps.echo(f"making an environment in {folder / 'venv'}")
    steps.run([maker, "-m", "venv", str(folder / "venv")], mend="is the venv module of that python installed?")
    python = python_in(folder)
    if kind == "gpu":
        steps.echo(f"installing vLLM {VLLM} for GPUs: several GB")
        steps.run(gpu_command(python), mend="is PyPI reachable, and is there space for 15 GB?")
        steps.run([str(python), "-c", GPU_PROOF], mend="vLLM does not import; are the GPU's drivers installed?")
    else:
        _build_cpu(folder, python, steps)
    _write(folder / "installed.json", json.dumps(asdict(wanted(kind))))


def _build_cpu(folder: Path, python: Path, steps: Steps) -> None:
    steps.echo(f"installing vLLM {VLLM} and torch {TORCH} for CPUs: 2 GB on disk")
    with ThreadPoolExecutor() as both:
        torch = both.submit(steps.first_of, torch_commands(python), mend=f"is {TORCH_INDEX} reachable?")
        rest = both.submit(steps.run, packages_command(python), mend="is PyPI reachable, and is there space for 2 GB?")
        torch.result()
        rest.result()
    _add_plugin(python)
    steps.echo("importing vLLM once, which compiles it, and making the demo model")
    with ThreadPoolExecutor() as both:
        proof = both.submit(steps.run, [str(python), "-c", PROOF], mend="vLLM does not import there")
        model = both.submit(demo_model.build, home=folder, python=python, run=steps.run, echo=steps.echo)
        proof.result()
        model.result()


def _add_plugin(python: Path) -> None:
    """Puts the plugin into the environment, as an installed distribution: by its entry point vLLM finds it."""
    site = next((python.parent.parent / "lib").glob("python3*/site-packages"))
    shutil.copyfile(str(cpu_attention.__file__), site / "overnight_cpu_attention.py")
    facts = site / "overnight_cpu_attention-1.dist-info"
    facts.mkdir(exist_ok=True)
    _write(facts / "METADATA", cpu_attention.METADATA)
    _write(facts / "entry_points.txt", cpu_attention.ENTRY_POINTS)


def clean(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables for a python that is not ours: none that would lead it to our packages, or keep it from caching."""
    dropped = (
        "PYTHONPATH",
        "PYTHONHOME",
        "PYTHONDONTWRITEBYTECODE",
        "VIRTUAL_ENV",
        "PIP_REQUIRE_VIRTUALENV",
        "PIP_USER",
    )
    return {k: v for k, v in environ.items() if k not in dropped} | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}


def last_error(output: str) -> str:
    """The line that says most: the last that pip marks as an error, else the last one."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")]
    return (errors or lines or ["it failed without a word"])[-1]


def _version_of(python: str) -> tuple[int, int]:
    code = "import sys; print(*sys.version_info[:2])"
    try:
        said = subprocess.run([python, "-I", "-c", code], capture_output=True, check=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise SettingsError(f"{python} is no python that can be run: name another with --engine-python") from error
    major, minor = said.split()
    return int(major), int(minor)


def _installed(folder: Path) -> Marker | None:
    try:
        return Marker(**json.loads((folder / "installed.json").read_text("utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def _write(path: Path, text: str) -> None:
    """Whole or not at all."""
    draft = path.with_name(path.name + ".new")
    draft.write_text(text, "utf-8")
    draft.replace(path)


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Two installations at once would break each other's environment."""
    with (folder / "install.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise SettingsError(f"another installation is under way in {folder}; wait for it") from error
        yield
