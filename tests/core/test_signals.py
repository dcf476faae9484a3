"""SIGTERM leaves through `finally`, whatever the code that it interrupts makes of it."""

import os
import signal

import pytest

from archipelago.core.signals import EndedFromOutside, ended_in_order


def test_sigterm_raises_where_it_arrives() -> None:
    cleaned = []
    with pytest.raises(EndedFromOutside) as found, ended_in_order():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            cleaned.append(True)
    assert cleaned and found.value.code == 143


def test_sigterm_is_an_end_from_outside_though_compiled_code_leaves_by_an_exit_of_its_own() -> None:
    with pytest.raises(EndedFromOutside) as found, ended_in_order():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except SystemExit:
            raise SystemExit(1) from None
    assert found.value.code == 143


def test_exit_of_a_users_code_stays_what_it_is() -> None:
    with pytest.raises(SystemExit) as found, ended_in_order():
        raise SystemExit(3)
    assert found.value.code == 3 and not isinstance(found.value, EndedFromOutside)
