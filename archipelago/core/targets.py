"""Classes of a user's own, named by import path in a setting."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from archipelago.core.causes import USERS, cause_of, refuse_end
from archipelago.core.errors import UserError


def load_class(setting: str, path: str, base: type) -> type:
    """The class at `package.module.Class`, which must be a kind of `base`.

    >>> load_class("data.target", "collections.OrderedDict", dict).__name__
    'OrderedDict'
    """
    module, _, name = path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(
            f"Expected {setting} to name an importable {base.__name__}, got '{path}' ({error}): write it as "
            "package.module.Class, with the package in the working directory or installed.",
            code="not-importable", name=path,
        ) from error  # fmt: skip
    except USERS as error:  # whatever the user's own code raises
        refuse_end(error)
        raise UserError(
            f"Expected {setting} to be importable, got '{path}': {cause_of(error)}.",
            code="not-importable", name=path,
        ) from error  # fmt: skip
    if not (isinstance(found, type) and issubclass(found, base)):
        raise UserError(
            f"Expected {setting} to name a {base.__name__}, got '{path}' which is not one.",
            code="wrong-kind", kind=base.__name__, name=path,
        )  # fmt: skip
    return found


def construct(setting: str, path: str, found: Any, **known: Any) -> Any:
    """An object of a user's class, which is given what it has parameters for among all that is `known`."""
    named = [
        each
        for each in list(inspect.signature(found.__init__).parameters.values())[1:]  # all but self
        if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    ]
    missing = [each.name for each in named if each.default is each.empty and each.name not in known]
    if missing:
        raise UserError(
            f"{setting}={path} needs {', '.join(missing)} to be made, but is given {', '.join(known)} at most: give "
            "the others defaults, for example in a subclass.",
            code="needs-arguments", name=path, missing=missing,
        )  # fmt: skip
    try:
        return found(**{each.name: known[each.name] for each in named if each.name in known})
    except UserError:
        raise
    except USERS as error:  # whatever the user's own code raises
        refuse_end(error)
        raise UserError(
            f"{setting}={path} cannot be made: {cause_of(error)}.", code="cannot-be-made", name=path
        ) from error
