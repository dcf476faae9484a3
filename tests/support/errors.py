"""What is said about a user's mistake, checked by its code and values: the prose is free to improve."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from archipelago.core.errors import UserError


@contextmanager
def refused(code: str, **values: Any) -> Iterator[pytest.ExceptionInfo[UserError]]:
    """Fail unless the block raises a `UserError` of this code, with at least these values, in one line."""
    with pytest.raises(UserError) as caught:
        yield caught
    error = caught.value
    assert error.code == code, f"expected {code!r}, got {error.code!r}: {error}"
    found = {name: error.values.get(name, "(none)") for name in values}
    assert found == values, f"{error}"
    assert "\n" not in str(error)
