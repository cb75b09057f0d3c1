"""All settings, in one frozen dataclass: flags over `OVERNIGHT_*` variables over a TOML file over the defaults here.

Each field's metadata holds its one-line description; the configuration page of the docs and `--help` are made of them, and
a test holds the page against this file.
"""

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Self, get_args, get_origin, get_type_hints
from urllib.parse import quote

from state.records import SettingsError

MIB = 1024 * 1024
PREFIX = "OVERNIGHT_"


def _default_data() -> Path:
    try:
        base = os.environ.get("XDG_DATA_HOME") or str(Path.home() / ".local" / "share")
    except RuntimeError as error:
        raise SettingsError("this user has no home folder: say where the data belongs with OVERNIGHT_DATA") from error
    return Path(base) / "overnight"


def _say(text: str, **kw: Any) -> Any:
    return field(metadata={"help": text}, **kw)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a process of Overnight is told. Sizes are bytes, times are seconds, unless the name says otherwise."""

    # Where things are
    data: Path = _say("folder of the embedded store: database, objects, spool", default_factory=_default_data)
    database_url: str = _say("SQLAlchemy URL of a SQLite file; empty: one in the data folder", default="")
    objects_url: str = _say("folder of the objects; empty: one in the data folder", default="")
    spool: Path | None = _say("folder for temporary files; empty: `spool` in the data folder", default=None)
    min_free_bytes: int = _say(
        "uploads and result files stop while less than this is free on the disk", default=256 * MIB
    )

    # The door
    host: str = _say("address to listen on; anything but loopback needs keys", default="127.0.0.1")
    port: int = _say("port to listen on", default=8000)
    allowed_hosts: tuple[str, ...] = _say("Host names accepted beside loopback ones while no key exists", default=())
    api_keys: tuple[str, ...] = _say("keys that open the project `default`; none: local programs only", default=())
    header_timeout: float = _say("longest wait for a request's header", default=20.0)
    body_timeout: float = _say("longest wait for the next byte of a request's body", default=60.0)
    min_body_rate: float = _say(
        "slowest average of a request's body in bytes per second, once its waits add up to body_timeout", default=1024.0
    )
    shutdown_timeout: float = _say("how long a stopping api lets requests under way finish", default=8.0)

    # Limits
    max_file_bytes: int = _say("largest upload", default=200 * MIB)
    max_requests: int = _say("most requests in one batch", default=50_000)
    max_line_bytes: int = _say("longest line of an input file", default=16 * MIB)
    max_custom_id_bytes: int = _say("longest custom_id, UTF-8 bytes", default=1024)
    max_depth: int = _say("deepest nesting of a line's JSON", default=512)
    strict_window: bool = _say("accept only completion_window 24h, as OpenAI does", default=False)
    file_ttl: int = _say("seconds until an uploaded batch file expires", default=30 * 86_400)
    output_ttl: int = _say("seconds until result files expire; a batch may say otherwise", default=30 * 86_400)

    # Leases
    lease_ttl: float = _say("a lease is good for so long after its last renewal", default=30.0)
    lease_heartbeat: float = _say("how often leases are renewed", default=5.0)
    lease_grace: float = _say("how much later than its end a lease may be taken over", default=20.0)
    stop_grace: float = _say("how long a worker may take to close the shards of a stopped batch", default=20.0)

    # The worker
    engine: str = _say("vllm, remote or echo; empty: remote if there is an upstream, else vllm", default="")
    model: str = _say("model for vLLM: a folder, a name on the hub, or `demo`", default="")
    upstreams: tuple[str, ...] = _say("base URLs of OpenAI-compatible servers, such as http://host:8001/v1", default=())
    upstream_api_key: str = _say("key sent to the upstreams; a client's key never is", default="")
    model_aliases: tuple[str, ...] = _say("NAME=MODEL pairs; `*=MODEL` accepts any name", default=())
    engine_python: str = _say("python of the engine's environment; empty: the one `engine install` made", default="")
    engine_args: tuple[str, ...] = _say("further flags for vLLM (what follows `--`)", default=())
    engine_hung_after: float = _say(
        "a vLLM of ours that has requests and makes no progress for so long is ended; 0: 120, on a CPU 600", default=0.0
    )
    max_in_flight: int = _say("requests at the engine at once; 0: 64, or 1.25 x max_num_seqs for vLLM", default=0)
    max_in_flight_bytes: int = _say("request bytes at the engine at once", default=256 * MIB)
    max_reply_bytes: int = _say("largest reply that is kept", default=64 * MIB)
    request_timeout: float = _say("longest wait for one reply", default=3600.0)
    max_attempts: int = _say("how often a request that fails by itself is tried", default=4)
    segment_lines: int = _say("results are committed after so many lines,", default=256)
    segment_bytes: int = _say("so many bytes,", default=16 * MIB)
    segment_interval: float = _say("or so many seconds, whatever comes first", default=2.0)
    echo_latency: float = _say("seconds the echo engine takes for a reply", default=0.0)

    # The orchestrator
    finish_spool_bytes: int = _say(
        "results larger than this are written in plan order, without a spool", default=8192 * MIB
    )

    # Logs
    log_level: str = _say("debug, info, warning or error", default="info")
    log_format: str = _say("text or json", default="text")

    def __post_init__(self) -> None:
        for name, least in _AT_LEAST.items():
            if getattr(self, name) < least:
                raise SettingsError(f"{name} is {getattr(self, name)}, but must be at least {least}")
        if self.port > 65_535:
            raise SettingsError(f"port is {self.port}, but must be at most 65535")
        if self.engine not in ("", "vllm", "remote", "echo"):
            raise SettingsError(f"engine is {self.engine!r}, but must be vllm, remote or echo")
        if self.log_format not in ("text", "json"):
            raise SettingsError(f"log_format is {self.log_format!r}, but must be text or json")
        if self.log_level not in ("debug", "info", "warning", "error"):
            raise SettingsError(f"log_level is {self.log_level!r}, but must be debug, info, warning or error")

    @property
    def sqlite(self) -> bool:
        """Whether this is the embedded default (or another SQLite file)."""
        return not self.database_url or self.database_url.startswith("sqlite")

    @property
    def database(self) -> str:
        """The database's URL, the embedded default filled in."""
        return self.database_url or f"sqlite+aiosqlite:///{quote(str(self.data.absolute() / 'overnight.db'))}"

    @property
    def objects(self) -> str:
        """The object store's URL or folder, the embedded default filled in."""
        return self.objects_url or str(self.data.absolute() / "objects")

    @property
    def spool_folder(self) -> Path:
        """The folder for temporary files."""
        return self.spool or self.data.absolute() / "spool"

    @property
    def engine_kind(self) -> str:
        """`vllm`, `remote` or `echo`."""
        return self.engine or ("remote" if self.upstreams else "vllm")

    @classmethod
    def load(
        cls,
        flags: Mapping[str, Any] | None = None,
        *,
        environ: Mapping[str, str] | None = None,
        config: Path | None = None,
    ) -> Self:
        """Puts the settings together. `flags` holds only what was given; None values are as good as absent.

        The TOML file is `config`, else `OVERNIGHT_CONFIG`, else none. Lists in the environment are comma-separated.

        Raises:
            SettingsError: an unknown name, or a value of the wrong kind; the message names the source and the mend.
        """
        environ = os.environ if environ is None else environ
        values: dict[str, Any] = {}
        path = config or (Path(environ[PREFIX + "CONFIG"]) if environ.get(PREFIX + "CONFIG") else None)
        if path is not None:
            values |= _from_toml(path)
        hints = get_type_hints(cls)
        for item in fields(cls):
            raw = environ.get(PREFIX + item.name.upper())
            if raw is not None:
                values[item.name] = _parse(hints[item.name], raw, PREFIX + item.name.upper())
        values |= {k: v for k, v in (flags or {}).items() if v is not None}
        for name in ("data", "spool"):  # a shell leaves the ~ of `--data=~/x` as it is
            if values.get(name):
                values[name] = values[name].expanduser()
        return cls(**values)


_AT_LEAST: dict[str, float] = {
    "port": 0,
    "max_file_bytes": 1,
    "max_requests": 1,
    "max_line_bytes": 1024,
    "max_custom_id_bytes": 1,
    "max_depth": 8,
    "max_in_flight": 0,
    "engine_hung_after": 0,
    "max_attempts": 1,
    "segment_lines": 1,
    "lease_ttl": 0.5,
    "lease_heartbeat": 0.1,
    "min_free_bytes": 0,
    "min_body_rate": 0.001,
}


def _from_toml(path: Path) -> dict[str, Any]:
    try:
        table = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise SettingsError(f"cannot read the configuration file {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} is not valid TOML: {error}") from error
    hints = get_type_hints(Settings)
    known = {item.name for item in fields(Settings)}
    for name, value in table.items():
        if name not in known:
            raise SettingsError(f"{path}: unknown setting {name!r}; the known ones are listed in docs/configuration.md")
        table[name] = _convert(hints[name], value, f"{path}: {name}")
    return table


def _convert(kind: Any, value: Any, where: str) -> Any:
    """A value from TOML as the field wants it."""
    if isinstance(value, str) and kind is not str:
        return _parse(kind, value, where)
    if get_origin(kind) is tuple and isinstance(value, list):
        return tuple(str(v) for v in value)
    wanted: Any = {int: int, float: (int, float), bool: bool, str: str}.get(kind)
    if wanted is None or not isinstance(value, wanted) or (kind is not bool and isinstance(value, bool)):
        raise SettingsError(f"{where}: {value!r} is not of the right kind")
    return float(value) if kind is float else value


def _parse(kind: Any, raw: str, where: str) -> Any:
    """A value from text as the field wants it."""
    if get_origin(kind) is tuple:
        return tuple(part.strip() for part in raw.split(",") if part.strip())
    if kind is Path or Path in get_args(kind):
        return Path(raw).expanduser() if raw else None
    try:
        if kind is bool:
            return {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False, "": False}[
                raw.lower()
            ]
        return kind(raw)
    except (ValueError, KeyError):
        raise SettingsError(f"{where}: {raw!r} is not a valid {kind.__name__}") from None
