"""A child is told everything by one variable, and nobody can read it on the command line."""

import os
from pathlib import Path

import pytest

from server.roles.handover import VARIABLE, Orders, environment, orders_from
from state.records import SettingsError
from state.settings import Settings


@pytest.fixture
def orders(tmp_path: Path) -> Orders:
    settings = Settings(
        data=tmp_path,
        spool=tmp_path / "spool",
        api_keys=("sk-one", "sk,two"),
        engine_args=("--hf-overrides", '{"a": 1, "b": 2}'),
        lease_ttl=1.5,
        strict_window=True,
    )
    reading, writing = os.pipe()
    return Orders(settings, "worker-1-0a1b", reading, (writing,), "http://user:secret@host/v1")


def test_orders_arrive_as_they_were_given(orders: Orders) -> None:
    assert orders_from(environment(orders, {})) == orders


def test_the_childs_environment_holds_no_setting_but_in_the_orders(orders: Orders) -> None:
    given = {"PATH": "/bin", "OVERNIGHT_API_KEYS": "sk-one", "OVERNIGHT_CONFIG": "x", "OVERNIGHT_ENGINE_HOME": "/e"}
    told = environment(orders, given)
    assert set(told) == {"PATH", "OVERNIGHT_ENGINE_HOME", VARIABLE}
    orders_from(told)
    assert set(told) == {"PATH", "OVERNIGHT_ENGINE_HOME"}  # and the child's own children inherit none


def test_descriptors_are_not_passed_on(orders: Orders) -> None:
    for descriptor in (orders.lifeline, *orders.kept):
        os.set_inheritable(descriptor, True)
    orders_from(environment(orders, {}))
    assert not os.get_inheritable(orders.lifeline)
    assert not os.get_inheritable(orders.kept[0])


def test_a_process_started_by_a_person_has_no_orders() -> None:
    assert orders_from({}) is None


@pytest.mark.parametrize("raw", ["", "{}", "5", '{"settings": {}, "kept": [], "holder": "x", "lifeline": 999999}'])
def test_a_variable_that_holds_something_else_is_refused(raw: str) -> None:
    with pytest.raises(SettingsError, match=VARIABLE):
        orders_from({VARIABLE: raw})
