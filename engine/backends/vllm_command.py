"""How vLLM is started: its command line and its environment variables. Pure; facts are of vLLM 0.32.

The only module that knows vLLM's flags. What follows `--` on our command line is passed on as it is, except flags that
would open another door to the engine than our private socket.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from state.records import SettingsError

#: Flags that are ours to set, and what to do instead.
OURS: Final[Mapping[str, str]] = {
    "host": "the engine listens on a private socket",
    "port": "the engine listens on a private socket",
    "uds": "the engine listens on a private socket",
    "api-key": "the engine listens on a private socket and needs no key",
    "ssl-keyfile": "the engine listens on a private socket",
    "ssl-certfile": "the engine listens on a private socket",
    "ssl-ca-certs": "the engine listens on a private socket",
    "grpc-port": "the engine listens on a private socket",
    "root-path": "the engine listens on a private socket",
    "model": "say --model in front of the `--`",
    "served-model-name": "say --model-alias NAME=MODEL in front of the `--`",
    "headless": "a worker needs an engine that answers",
    "config": "a file of flags may hold some that cannot be given; give its flags themselves",
    "hf-token": "process lists and logs show it; set the variable HF_TOKEN instead",
}

#: vLLM runs so many requests at once unless told otherwise: ours for the CPU, its own for most GPUs.
CPU_MAX_NUM_SEQS: Final = 64
GPU_MAX_NUM_SEQS: Final = 256

#: Seconds vLLM waits for its own core to load the model. Its default of ten minutes would end large ones; we wait for ever.
LOADS_WITHIN_S: Final = 7 * 86_400

#: The plugin that makes attention in bfloat16 right on CPUs (engine/inside/cpu_attention).
CPU_PLUGIN: Final = "overnight_cpu_attention"

#: A name that never resolves (RFC 2606): an empty list of domains would allow all of them.
NO_DOMAIN: Final = "none.invalid"


@dataclass(frozen=True, slots=True)
class Distribution:
    """What an environment holds. `cpu`: a build for CPUs; `launcher`: vLLM's own command does not work there."""

    version: str
    cpu: bool
    launcher: bool
    exact_attention: bool
    """Whether attention in bfloat16 is safe: `engine install --cpu` puts a plugin there (engine/inside/cpu_attention)."""


@dataclass(frozen=True, slots=True)
class Names:
    """The name of a model and the others it answers to."""

    root: str
    others: tuple[str, ...] = ()

    @property
    def all(self) -> tuple[str, ...]:
        return (self.root, *self.others)


def names_of(model: str, aliases: Mapping[str, str]) -> Names:
    """What the engine calls its model: the demo by its name, a folder by its last part, a model of the hub by its own.

    Aliases of it become names of the engine's own, so that bodies need no change; `*` cannot be one, nor can what would be
    read as a flag.
    """
    if model == "demo":
        names = ["smollm2-135m-instruct", "demo"]
    elif _is_folder(model):
        names = [Path(model).resolve().name, model]
    else:
        names = [model]
    names += [alias for alias, target in aliases.items() if target in names and alias != "*" and alias[0] != "-"]
    return Names(names[0], tuple(dict.fromkeys(n for n in names[1:] if n != names[0])))


def check_flags(args: Sequence[str]) -> None:
    """Refuses flags that are ours, also shortened ones, which vLLM's parser would accept.

    Raises:
        SettingsError: names the flag and what to do instead.
    """
    for name in flag_names(args):
        for ours, why in OURS.items():
            if len(name) > 1 and ours.startswith(name):
                raise SettingsError(f"--{name} cannot be given to the engine: {why}")


def flag_names(args: Sequence[str]) -> tuple[str, ...]:
    """The long flags among the arguments, as vLLM reads them: `--max_num_seqs=8` is `max-num-seqs`, `--a.b=8` part of `a`."""
    names = (a[2:].partition("=")[0].partition(".")[0] for a in args if a.startswith("--"))
    return tuple(name.replace("_", "-") for name in names)


def flag_value(args: Sequence[str], name: str) -> str | None:
    """The value of a flag, the last one if there are several; None if it is not given."""
    value = None
    for place, arg in enumerate(args):
        if flag_names([arg]) == (name,):
            _, equals, given = arg.partition("=")
            value = given if equals else (args[place + 1] if place + 1 < len(args) else None)
    return value


def max_num_seqs(args: Sequence[str], *, cpu: bool) -> int:
    """How many requests the engine runs at once.

    Raises:
        SettingsError: the flag's value is no number.
    """
    given = flag_value(args, "max-num-seqs")
    if given is None:
        return CPU_MAX_NUM_SEQS if cpu else GPU_MAX_NUM_SEQS
    if not given.isdecimal() or int(given) < 1:
        raise SettingsError(f"--max-num-seqs is {given!r}, but must be a number from 1")
    return int(given)


def command_line(
    *, python: Path, distribution: Distribution, model: str, names: Names, socket: Path, args: Sequence[str]
) -> list[str]:
    """What starts the engine. What the user said wins over our choices.

    Raises:
        SettingsError: a flag that is ours.
    """
    check_flags(args)
    given = flag_names(args)
    if distribution.launcher:
        command = [str(python), "-m", "vllm.entrypoints.cli.main", "serve", model]
    else:
        command = [str(python), "-m", "vllm.entrypoints.launchers.api_server.entry", "--model", model]
    command += ["--uds", str(socket), "--served-model-name", *names.all]
    command += ["--enable-prompt-tokens-details", "--disable-uvicorn-access-log"]
    if "allowed-media-domains" not in given:
        command += ["--allowed-media-domains", NO_DOMAIN]
    if distribution.cpu:
        command += _for_cpu(distribution, given)
    return [*command, *args]


def _for_cpu(distribution: Distribution, given: Sequence[str]) -> list[str]:
    """Compiled graphs give wrong text in bfloat16 on CPUs, and so does attention on AMX tiles without the plugin."""
    flags = [] if "enforce-eager" in given else ["--enforce-eager"]
    if "dtype" not in given:
        flags += ["--dtype", "bfloat16" if distribution.exact_attention else "float32"]
    if "max-num-seqs" not in given:
        flags += ["--max-num-seqs", str(CPU_MAX_NUM_SEQS)]
    return flags


#: Not for the engine: they would move its door, change what it imports, or keep its environment from being compiled once.
DROPPED: Final = (
    "VLLM_PORT",
    "VLLM_API_KEY",
    "PYTHONPATH",
    "PYTHONHOME",
    "PYTHONSTARTUP",
    "PYTHONDONTWRITEBYTECODE",
    "VIRTUAL_ENV",
)


def environment(
    environ: Mapping[str, str], *, distribution: Distribution, model: str, python: Path, folder: Path
) -> dict[str, str]:
    """The engine's variables: ours are not for it (they hold keys), the user's own for vLLM are kept.

    `folder` is the private one with the socket; vLLM's own sockets go there too.
    """
    kept = {k: v for k, v in environ.items() if k not in DROPPED and not k.startswith("OVERNIGHT_")}
    kept |= {
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_RPC_BASE_PATH": str(folder),
        "PYTHONUNBUFFERED": "1",
        "PATH": f"{python.parent}{os.pathsep}{environ.get('PATH', os.defpath)}",
    }
    kept.setdefault("VLLM_ENGINE_READY_TIMEOUT_S", str(LOADS_WITHIN_S))
    if distribution.cpu:
        kept.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
    if distribution.exact_attention and "VLLM_PLUGINS" in kept:  # a list of those to load, which leaves out all others
        kept["VLLM_PLUGINS"] += f",{CPU_PLUGIN}"
    if model == "demo" or _is_folder(model):
        kept.setdefault("HF_HUB_OFFLINE", "1")
    return kept


def _is_folder(model: str) -> bool:
    return model.startswith(("/", "./", "../", "~")) or Path(model).is_dir()
