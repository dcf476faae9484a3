"""Classes of a user's own, named by import path in a setting."""

from __future__ import annotations

import importlib

from foundation.errors import UserError


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
            "package.module.Class, with the package in the working directory or installed."
        ) from error
    if not (isinstance(found, type) and issubclass(found, base)):
        raise UserError(f"Expected {setting} to name a {base.__name__}, got '{path}' which is not one.")
    return found
