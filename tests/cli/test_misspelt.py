"""A variable that is nearly a setting is refused; a variable that is somebody else's is not."""

from collections.abc import Callable
from dataclasses import fields

import pytest

from server.cli.misspelt import refuse_misspelt
from server.roles.handover import VARIABLE
from state.records import SettingsError
from state.settings import PREFIX, Settings
from tests.cli.conftest import Ran


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("OVERNIGHT_UPSTREAM", "OVERNIGHT_UPSTREAMS"),
        ("OVERNIGHT_API_KEY", "OVERNIGHT_API_KEYS"),
        ("OVERNIGHT_MODEL_ALIAS", "OVERNIGHT_MODEL_ALIASES"),
        ("OVERNIGHT_ALLOWED_HOST", "OVERNIGHT_ALLOWED_HOSTS"),
        ("OVERNIGHT_MAX_INFLIGHT", "OVERNIGHT_MAX_IN_FLIGHT"),
    ],
)
def test_a_near_miss_is_refused_with_the_name_that_was_meant(name: str, meant: str) -> None:
    with pytest.raises(SettingsError, match=f"{name} is no setting: did you mean {meant}\\?"):
        refuse_misspelt({name: "x"})


@pytest.mark.parametrize(
    "name",
    [
        *("OVERNIGHT_CONFIG", "OVERNIGHT_DEBUG", "OVERNIGHT_ENGINE_HOME", VARIABLE),
        *(
            "OVERNIGHT_SERVICE_HOST",
            "OVERNIGHT_SERVICE_PORT",
            "OVERNIGHT_PORT_8000_TCP",
            "OVERNIGHT_PORT_8000_TCP_ADDR",
        ),
        *("UPSTREAM", "OVERNIGHT_"),
    ],
)
def test_names_of_others_are_left_alone(name: str) -> None:
    refuse_misspelt({name: "x"})


def test_the_settings_themselves_are_right() -> None:
    refuse_misspelt({PREFIX + item.name.upper(): "x" for item in fields(Settings)})


def test_serve_refuses_it_as_a_wrong_setting(overnight: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OVERNIGHT_UPSTREAM", "http://127.0.0.1:1/v1")
    ran = overnight("serve")
    assert ran.code == 2
    assert "did you mean OVERNIGHT_UPSTREAMS?" in ran.err
