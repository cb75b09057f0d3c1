"""What can be typed after `overnight`. The flags of the servers are made from the settings' own descriptions."""

import argparse
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn, get_type_hints

from state.records import BatchStatus
from state.settings import Settings

#: The settings that have flags, by the heading under which `--help` lists them. The others: variables, or the TOML file.
FLAGS: dict[str, tuple[str, ...]] = {
    "where things are": ("data", "objects_url", "spool"),
    "the door": ("host", "port", "allowed_hosts", "shutdown_timeout"),
    "limits": ("max_file_bytes", "max_requests", "file_ttl", "output_ttl", "strict_window"),
    "the engine": (
        *("model", "upstreams", "engine", "model_aliases", "max_in_flight", "request_timeout", "max_attempts"),
        *("engine_python", "echo_latency"),
    ),
    "leases": ("lease_ttl", "lease_heartbeat", "lease_grace", "stop_grace"),
    "logs": ("log_level", "log_format"),
}

_SERVERS = ("serve", "api", "orchestrator", "worker")

#: Flags that are given once per value, and are called by the singular.
REPEATED = {"upstreams": "upstream", "model_aliases": "model-alias", "allowed_hosts": "allowed-host"}

METAVARS = {
    **{
        "data": "DIR",
        "spool": "DIR",
        "objects_url": "URL",
        "upstreams": "URL",
        "model_aliases": "NAME=MODEL",
        "model": "NAME",
    },
    **{"allowed_hosts": "HOST", "engine": "KIND", "max_in_flight": "N", "engine_python": "PATH"},
}

CHOICES = {
    "engine": ("vllm", "remote", "echo"),
    "log_level": ("debug", "info", "warning", "error"),
    "log_format": ("text", "json"),
}

INTRO = """\
A self-hosted, OpenAI-compatible Batch API in front of vLLM.

  overnight serve --model demo                     a server with a small model on the CPU
  overnight serve --upstream http://gpu:8001/v1    in front of a server that already runs
  overnight submit requests.jsonl --watch          send a file, follow its progress
  overnight download batch_...                     fetch its two result files
"""

SERVER_NOTE = """\
Every setting can also be given as a variable (OVERNIGHT_PORT=9000) or in a TOML file (--config): docs/configuration.md.
What may hold a key or password has no flag, because others can read those: OVERNIGHT_API_KEYS,
OVERNIGHT_UPSTREAM_API_KEY, OVERNIGHT_DATABASE_URL.
"""

CLIENT_NOTE = """\
OPENAI_BASE_URL says where the server is (http://127.0.0.1:8000/v1 if unset), OPENAI_API_KEY holds the key.
Exit codes: 0 done, 1 failed, 2 wrong use, 3 no such object, 4 no server, 5 wrong key, 6 the batch ended otherwise
than completed, 130 interrupted.
"""


def parse(argv: list[str]) -> argparse.Namespace:
    """The arguments; ends the process with a message and code 2 when they make no sense."""
    own, mark, rest = _split(argv)
    parser = build()
    args = parser.parse_args(own)
    if mark and not getattr(args, "takes_engine_flags", False):
        parser.error("only `serve` and `worker` take flags for vLLM after --")
    args.engine_args = tuple(rest) if mark else None
    return args


def build() -> argparse.ArgumentParser:
    """The whole tree of commands."""
    parser = _Parser(prog="overnight", description=INTRO, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=_Parser)
    _add_servers(commands)
    _add_engine(commands)
    _add_batch_commands(commands)
    _add_object_commands(commands)
    return parser


def flag_of(name: str) -> str:
    """The flag for a setting: `--max-in-flight`."""
    return "--" + REPEATED.get(name, name).replace("_", "-")


def _split(argv: list[str]) -> tuple[list[str], bool, list[str]]:
    """Our arguments, whether there is a `--` before flags for vLLM, and what follows it.

    To the commands for clients `--` means what it always means: `overnight submit -- -odd-name.jsonl`.
    """
    if "--" not in argv or argv[0] not in _SERVERS:
        return argv, False, []
    at = argv.index("--")
    return argv[:at], True, argv[at + 1 :]


def _command(commands: Any, name: str, run: str, summary: str, *, note: str, example: str = "") -> Any:
    epilog = f"example:\n  {example}\n\n{note}" if example else note
    form = argparse.RawDescriptionHelpFormatter
    command = commands.add_parser(name, help=summary, description=summary, epilog=epilog, formatter_class=form)
    command.set_defaults(run=run)
    return command


def _add_servers(commands: Any) -> None:
    """`serve` and the three roles."""
    where = "server.cli.serve:"
    serve = _command(
        *(commands, "serve", where + "serve", "run everything on this machine: api, orchestrator and worker"),
        note=SERVER_NOTE,
        example="overnight serve --model Qwen/Qwen3-8B -- --max-model-len 16384",
    )
    api = _command(
        *(commands, "api", where + "api", "run the HTTP api alone, with an orchestrator beside it"), note=SERVER_NOTE
    )
    api.add_argument("--no-orchestrator", action="store_true", help="run no orchestrator beside the api")
    orchestrator = _command(
        *(commands, "orchestrator", where + "orchestrator", "run an orchestrator alone: plan, finish, sweep"),
        note=SERVER_NOTE,
    )
    worker = _command(
        *(commands, "worker", where + "worker", "run a worker alone: one engine, and the batches for its models"),
        note=SERVER_NOTE,
    )
    for command in (serve, api, orchestrator, worker):
        _add_settings(command)
    for command in (serve, api, orchestrator, worker):
        command.usage = f"overnight {command.prog.split()[-1]} [options]"
    for command in (serve, worker):
        command.usage += " [-- flags for vLLM]"
        command.set_defaults(takes_engine_flags=True)


def _add_settings(command: Any) -> None:
    command.add_argument("--config", type=Path, metavar="FILE", help="TOML file with settings")
    told = {item.name: item.metadata["help"] for item in fields(Settings)}
    hints = get_type_hints(Settings)
    for heading, names in FLAGS.items():
        group = command.add_argument_group(heading)
        for name in names:
            group.add_argument(flag_of(name), dest=name, **_kind(name, hints[name]), help=told[name].replace("%", "%%"))


def _kind(name: str, hint: Any) -> dict[str, Any]:
    """How argparse is to read the flag of a setting."""
    if hint is bool:
        return {"action": argparse.BooleanOptionalAction, "default": None}
    kind: dict[str, Any] = {"metavar": METAVARS.get(name) or {int: "N", float: "SECONDS"}.get(hint, "TEXT")}
    if name in CHOICES:
        return {"choices": CHOICES[name]}
    if name in REPEATED:
        return {"action": "append", **kind}
    if name in ("data", "spool"):
        return {"type": Path, **kind}
    return {"type": hint, **kind}


def _add_engine(commands: Any) -> None:
    engine = commands.add_parser("engine", help="the environment in which vLLM runs", description="vLLM's environment")
    inner = engine.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=_Parser)
    install = _command(
        *(inner, "install", "server.cli.engine:install", "build the environment in which vLLM runs"),
        note="It takes some minutes and, on the CPU, about 3 GB. Repeating it mends what is missing.",
        example="overnight engine install --cpu",
    )
    which = install.add_mutually_exclusive_group(required=True)
    which.add_argument("--cpu", action="store_true", help="vLLM for CPUs, and the demo model")
    which.add_argument("--gpu", action="store_true", help="vLLM as it comes, for CUDA")
    install.add_argument("--data", type=Path, metavar="DIR", help="data folder, in which the environment lies")
    install.add_argument("--engine-python", metavar="PATH", help="python that makes the environment (default: ours)")


def _client(commands: Any, name: str, run: str, summary: str, example: str = "") -> Any:
    command = _command(commands, name, run, summary, note=CLIENT_NOTE, example=example)
    command.add_argument("--base-url", metavar="URL", help="the server, instead of OPENAI_BASE_URL")
    command.add_argument("--json", action="store_true", help="print JSON for programs")
    return command


def _add_batch_commands(commands: Any) -> None:
    """What one does with a batch."""
    where = "server.cli.batches:"
    submit = _client(
        *(commands, "submit", "server.cli.submit:submit", "upload a file and start a batch of its requests"),
        example="overnight submit requests.jsonl --metadata team=search --watch",
    )
    submit.add_argument("file", type=Path, metavar="FILE", help="requests, one JSON object a line")
    submit.add_argument("--endpoint", metavar="E", help="such as /v1/chat/completions; default: the first line's url")
    submit.add_argument(
        "--window", default="24h", metavar="W", help="completion window: 24h, or as 90m, 2d (default 24h)"
    )
    submit.add_argument(
        "--metadata", action="append", default=[], metavar="K=V", help="a note on the batch; repeatable"
    )
    submit.add_argument("--watch", action="store_true", help="then follow it until it ends")
    watch = _client(commands, "watch", "server.cli.watch:watch", "follow a batch until it ends; Ctrl-C only detaches")
    get = _client(commands, "get", where + "get", "show a batch (or a file) in full")
    download = _client(
        *(commands, "download", "server.cli.download:download", "fetch the result files of a batch"),
        example="overnight download batch_... -o results/",
    )
    download.add_argument(
        "-o", "--output", type=Path, default=Path(), metavar="DIR", help="folder for them (default .)"
    )
    cancel = _client(commands, "cancel", where + "cancel", "stop a batch; what is finished is kept")
    for command in (watch, get, download, cancel):
        command.add_argument("id", metavar="ID", help="the batch's id" + (", or a file's" if command is get else ""))


def _add_object_commands(commands: Any) -> None:
    where = "server.cli.batches:"
    ls = _client(commands, "ls", where + "ls", "list batches, newest first")
    ls.add_argument("--limit", type=_positive, default=20, metavar="N", help="how many at most (default 20)")
    ls.add_argument(
        "--status", choices=[status.value for status in BatchStatus], metavar="S", help="only those with this status"
    )
    _client(commands, "models", where + "models", "list the models one can ask for")
    validate = _command(
        *(commands, "validate", "server.cli.validate:validate", "check a file as the server would, without a server"),
        note="Exit codes: 0 the file is good, 1 it has faults (listed), 2 wrong use.",
        example="overnight validate requests.jsonl",
    )
    validate.add_argument("file", type=Path, metavar="FILE")
    validate.add_argument("--endpoint", metavar="E", help="default: the first line's url")
    validate.add_argument("--json", action="store_true", help="print JSON for programs")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage block in front of it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"overnight: {message} (see `{self.prog} --help`)\n")


class _Version(argparse.Action):
    """Looks the version up only when asked for it: that takes longer than everything else here."""

    def __call__(self, parser: argparse.ArgumentParser, *unused: Any, **also_unused: Any) -> None:
        from importlib.metadata import version

        print(f"overnight {version('overnight')}")
        parser.exit()
