"""What vLLM is started with."""

from pathlib import Path
from typing import Any

import pytest

from engine.backends.vllm_command import (
    CPU_PLUGIN,
    OURS,
    Distribution,
    Names,
    check_flags,
    command_line,
    environment,
    flag_value,
    max_num_seqs,
    names_of,
)
from engine.inside import cpu_attention
from state.records import SettingsError

CPU = Distribution("0.32.0", cpu=True, launcher=False, exact_attention=True)
GPU = Distribution("0.32.0", cpu=False, launcher=True, exact_attention=False)


def line(distribution: Distribution, *args: str) -> list[str]:
    return command_line(
        python=Path("/e/python"),
        distribution=distribution,
        model="org/m",
        names=Names("org/m", ("a",)),
        socket=Path("/s"),
        args=args,
    )


def test_the_distribution_for_cpus_is_started_by_its_module() -> None:
    assert " ".join(line(CPU)) == (
        "/e/python -m vllm.entrypoints.launchers.api_server.entry --model org/m --uds /s --served-model-name org/m a "
        "--enable-prompt-tokens-details --disable-uvicorn-access-log --allowed-media-domains none.invalid "
        "--enforce-eager --dtype bfloat16 --max-num-seqs 64"
    )


def test_vllm_itself_is_started_by_its_command() -> None:
    assert " ".join(line(GPU)) == (
        "/e/python -m vllm.entrypoints.cli.main serve org/m --uds /s --served-model-name org/m a "
        "--enable-prompt-tokens-details --disable-uvicorn-access-log --allowed-media-domains none.invalid"
    )


def test_what_the_user_says_wins_over_our_choices() -> None:
    command = line(CPU, "--dtype=float32", "--max_num_seqs", "8", "--allowed-media-domains", "example.org")
    assert command[-5:] == ["--dtype=float32", "--max_num_seqs", "8", "--allowed-media-domains", "example.org"]
    assert not {"bfloat16", "64", "none.invalid"} & set(command)


def test_without_the_plugin_a_cpu_computes_in_float32() -> None:
    command = line(Distribution("0.32.0", cpu=True, launcher=False, exact_attention=False))
    assert command[command.index("--dtype") + 1] == "float32"


@pytest.mark.parametrize(
    "flag",
    [
        *(f"--{name}" for name in OURS),
        *("--por", "--served_model_name=x", "--api-key=k", "--api_key.x", "--grpc", "--grpc_port=1", "--config=f.yaml"),
    ],
)
def test_flags_that_are_ours_are_refused_in_any_spelling(flag: str) -> None:
    with pytest.raises(SettingsError, match="cannot be given to the engine"):
        check_flags(["--seed", "1", flag, "x"])


def test_other_flags_pass() -> None:
    check_flags(["--max-model-len", "4096", "--hf-overrides", "{}", "-O3", "--api-server-count", "2"])


@pytest.mark.parametrize(
    ("args", "value"),
    [
        (["--max-num-seqs", "8"], "8"),
        (["--max-num-seqs=8"], "8"),
        (["--max_num_seqs=8", "--seed", "1"], "8"),
        (["--max-num-seqs", "8", "--max-num-seqs", "9"], "9"),
        (["--max-num-seqs"], None),
        (["--other", "8"], None),
    ],
)
def test_a_flags_value_is_found_in_any_spelling(args: list[str], value: str | None) -> None:
    assert flag_value(args, "max-num-seqs") == value


def test_how_many_run_at_once() -> None:
    assert max_num_seqs(["--max-num-seqs", "8"], cpu=True) == 8
    assert (max_num_seqs([], cpu=True), max_num_seqs([], cpu=False)) == (64, 256)
    with pytest.raises(SettingsError, match="must be a number from 1"):
        max_num_seqs(["--max-num-seqs", "many"], cpu=True)


@pytest.mark.parametrize(
    ("model", "aliases", "names"),
    [
        ("demo", {}, ("smollm2-135m-instruct", "demo")),
        ("demo", {"gpt": "demo", "x": "other", "*": "demo"}, ("smollm2-135m-instruct", "demo", "gpt")),
        ("org/m", {"gpt": "org/m"}, ("org/m", "gpt")),
        ("org/m", {"--port": "org/m"}, ("org/m",)),  # no name that vLLM would read as a flag
        ("/models/phi", {}, ("phi", "/models/phi")),
    ],
)
def test_what_a_model_is_called(model: str, aliases: dict[str, str], names: tuple[str, ...]) -> None:
    assert names_of(model, aliases).all == names


def test_the_engines_variables() -> None:
    given = {
        "PATH": "/bin",
        "HF_TOKEN": "t",
        "OVERNIGHT_API_KEYS": "k",
        "VLLM_PORT": "1",
        "VLLM_API_KEY": "k",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    wanted: dict[str, Any] = {
        "PATH": "/e/bin:/bin",
        "HF_TOKEN": "t",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_RPC_BASE_PATH": "/private",
        "PYTHONUNBUFFERED": "1",
        "VLLM_ENGINE_READY_TIMEOUT_S": "604800",  # vLLM would give up on a large model after ten minutes
    }
    place: dict[str, Any] = {"python": Path("/e/bin/python"), "folder": Path("/private")}
    assert environment(given, distribution=GPU, model="org/m", **place) == wanted
    wanted |= {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    assert environment(given, distribution=CPU, model="demo", **place) == wanted


def test_the_users_own_variables_for_vllm_are_kept() -> None:
    given = {"VLLM_CPU_KVCACHE_SPACE": "8", "VLLM_ENGINE_READY_TIMEOUT_S": "60"}
    found = environment(given, distribution=CPU, model="org/m", python=Path("/e/python"), folder=Path("/p"))
    assert {name: found[name] for name in given} == given


def test_a_list_of_plugins_does_not_lose_the_one_that_makes_answers_right() -> None:
    place: dict[str, Any] = {"model": "org/m", "python": Path("/e/python"), "folder": Path("/p")}
    assert environment({"VLLM_PLUGINS": "a"}, distribution=CPU, **place)["VLLM_PLUGINS"] == "a,overnight_cpu_attention"
    assert environment({"VLLM_PLUGINS": "a"}, distribution=GPU, **place)["VLLM_PLUGINS"] == "a"
    assert f"{CPU_PLUGIN} = " in cpu_attention.ENTRY_POINTS
