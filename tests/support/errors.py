"""What is said about a user's mistake, checked by its code and values: the prose is free to improve."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, TypeAlias

import pytest

from archipelago.core.errors import UserError

Mistake: TypeAlias = Callable[[], AbstractContextManager[pytest.ExceptionInfo[UserError]]]


@contextmanager
def refused(
    code: str, *, says: str | tuple[str, ...] = (), **values: Any
) -> Iterator[pytest.ExceptionInfo[UserError]]:
    """Fail unless the block raises a `UserError` of this code, with at least these values, in one line.

    `says` are facts that its sentence must have beside the values, and never its wording: numbers, names, settings.
    """
    with pytest.raises(UserError) as caught:
        yield caught
    error = caught.value
    assert error.code == code, f"expected {code!r}, got {error.code!r}: {error}"
    found = {name: error.values.get(name, "(none)") for name in values}
    assert found == values, f"{error}"
    for fact in (says,) if isinstance(says, str) else says:
        assert fact in str(error), f"expected {fact!r} in: {error}"
    assert "\n" not in str(error)


def mistake(code: str, **about: Any) -> Mistake:
    """`refused` of a row of a table of mistakes: `with expected():` checks it."""
    return partial(refused, code, **about)
