"""Where a setting's value comes from, and what is said when it cannot be used."""

from pathlib import Path

import pytest

from state.records import SettingsError
from state.settings import Settings


def load(flags: dict | None = None, environ: dict | None = None, config: Path | None = None) -> Settings:
    return Settings.load(flags, environ=environ or {}, config=config)


def test_flags_win_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    config = tmp_path / "overnight.toml"
    config.write_text('port = 1\nmax_in_flight = 1\nhost = "127.0.0.2"\n')
    settings = load({"port": 3, "max_in_flight": None}, {"OVERNIGHT_PORT": "2", "OVERNIGHT_MAX_IN_FLIGHT": "2"}, config)
    assert (settings.port, settings.max_in_flight, settings.host) == (3, 2, "127.0.0.2")


def test_the_environment_can_name_the_file(tmp_path: Path) -> None:
    config = tmp_path / "overnight.toml"
    config.write_text("port = 9\n")
    assert load(environ={"OVERNIGHT_CONFIG": str(config)}).port == 9


@pytest.mark.parametrize(
    ("raw", "want"), [("1", True), ("true", True), ("YES", True), ("0", False), ("no", False), ("", False)]
)
def test_a_switch_takes_the_usual_words(raw: str, want: bool) -> None:
    assert load(environ={"OVERNIGHT_STRICT_WINDOW": raw}).strict_window is want


def test_lists_are_comma_separated_in_the_environment_and_arrays_in_the_file(tmp_path: Path) -> None:
    config = tmp_path / "overnight.toml"
    config.write_text('upstreams = ["http://c/v1"]\n')
    assert load(environ={"OVERNIGHT_UPSTREAMS": "http://a/v1, http://b/v1"}).upstreams == ("http://a/v1", "http://b/v1")
    assert load(config=config).upstreams == ("http://c/v1",)


@pytest.mark.parametrize(
    ("environ", "says"),
    [
        ({"OVERNIGHT_PORT": "http"}, "OVERNIGHT_PORT: 'http' is not a valid int"),
        ({"OVERNIGHT_STRICT_WINDOW": "maybe"}, "OVERNIGHT_STRICT_WINDOW: 'maybe' is not a valid bool"),
        ({"OVERNIGHT_MAX_REQUESTS": "0"}, "max_requests is 0, but must be at least 1"),
        ({"OVERNIGHT_PORT": "65536"}, "port is 65536, but must be at most 65535"),
        ({"OVERNIGHT_ENGINE": "gpu"}, "must be vllm, remote or echo"),
        ({"OVERNIGHT_CONFIG": "/nowhere.toml"}, "cannot read the configuration file /nowhere.toml"),
    ],
)
def test_a_bad_value_is_named_with_its_source(environ: dict, says: str) -> None:
    with pytest.raises(SettingsError, match=says):
        load(environ=environ)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("prot = 1\n", "unknown setting 'prot'"),
        ("port = true\n", "port: True is not of the right kind"),
        ("port = [1]\n", "port: .* is not of the right kind"),
        ("port = \n", "not valid TOML"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, text: str, says: str) -> None:
    config = tmp_path / "overnight.toml"
    config.write_text(text)
    with pytest.raises(SettingsError, match=says):
        load(config=config)


def test_the_embedded_default_lies_in_the_data_folder(tmp_path: Path) -> None:
    settings = load({"data": tmp_path})
    assert settings.sqlite
    assert settings.database == f"sqlite+aiosqlite:///{tmp_path}/overnight.db"
    assert settings.objects == f"{tmp_path}/objects"
    assert settings.spool_folder == tmp_path / "spool"


def test_a_home_folder_is_meant_wherever_the_setting_comes_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    home = tmp_path / "night"
    assert load({"data": Path("~/night"), "spool": Path("~/night")}).data == home
    assert load({"data": Path("~/night"), "spool": Path("~/night")}).spool == home
    assert load(environ={"OVERNIGHT_DATA": "~/night"}).data == home


def test_a_user_without_a_home_is_told_what_to_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    with pytest.raises(SettingsError, match="OVERNIGHT_DATA"):
        load()
    assert load({"data": tmp_path}).data == tmp_path


def test_the_engine_follows_from_what_is_given() -> None:
    assert load().engine_kind == "vllm"
    assert load({"upstreams": ("http://a/v1",)}).engine_kind == "remote"
    assert load({"engine": "echo", "upstreams": ("http://a/v1",)}).engine_kind == "echo"


def test_every_setting_is_described() -> None:
    import dataclasses

    assert [f.name for f in dataclasses.fields(Settings) if not f.metadata.get("help")] == []
