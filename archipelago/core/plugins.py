"""Code of a researcher's own: modules that register what they bring, imported first in every process.

`plugins: [package.module]` is a setting, so it is stored with the run and known to the driver, the server, the
clients, every trial and `resume`. Installed packages offer theirs as entry points of the group
`archipelago.plugins`. Modules are found where Python finds them, and in the working directory.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys
from collections.abc import Iterable, Sequence
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType
from typing import Any

from archipelago.core.causes import USERS, cause_of, refuse_end
from archipelago.core.errors import UserError

GROUP = "archipelago.plugins"
PLUGIN = "plugin"  # code of a `UserError` about code of the user's own that cannot be imported; its value is `name`
BUILT_IN = (
    "archipelago.strategies",
    "archipelago.data",
    "lightning_modules.networks",
    "lightning_modules.engines",
    "lightning_modules.optimizers",
    "lightning_modules.augmentations",
    "archipelago.sweeps.samplers",
    "archipelago.sweeps.schedulers",
    "archipelago.experiments.callbacks",
    "archipelago.experiments.loggers",
)

_loaded: set[str] = set()  # in this process


def is_ours(path: str) -> bool:
    """Whether a dotted name is part of the platform."""
    return path.split(".")[0] in ("archipelago", "actors", "lightning_modules")


def load_built_in() -> None:
    """Import the modules that register the platform's own entries, which are plug-ins like anybody's."""
    for name in BUILT_IN:
        importlib.import_module(name)


def import_all_of(package: str, path: Iterable[str], but: Sequence[str] = ()) -> None:
    """Import every module of a package: each registers what it defines."""
    for module in pkgutil.iter_modules(path):
        if module.name not in but:
            importlib.import_module(f"{package}.{module.name}")


def load_plugins(modules: Iterable[str] = ()) -> None:
    """Import what installed packages offer, then these modules; each once in a process."""
    if GROUP not in _loaded:
        _loaded.add(GROUP)
        for offered in entry_points(group=GROUP):
            _load_offered(offered)
    for name in modules:
        if name not in _loaded:
            import_plugin(name)
            _loaded.add(name)


def import_plugin(name: str) -> ModuleType:
    """Import one plug-in; one that is missing or raises is a sentence that names it."""
    if not name or name.startswith(".") or not all(part.isidentifier() for part in name.split(".")):
        raise UserError(
            f"Expected plugins to name modules, as in plugins=[package.module], got '{name}': without folders and .py.",
            code=PLUGIN,
            name=name,
        )
    return _imported(name, f"Plug-in '{name}' (setting plugins)")


def installed_plugins() -> dict[str, str]:
    """{name: package and version} of the entry points of installed packages."""
    return {
        offered.name: f"{offered.dist.name} {offered.dist.version}" if offered.dist else offered.value
        for offered in entry_points(group=GROUP)
    }


def import_object(path: str, what: str) -> Any:
    """The object at `package.module.Name`; `what` says in a sentence what it should have been."""
    module, _, name = path.rpartition(".")
    if module == "__main__":
        raise UserError(
            f"Expected {what} that every process can import, got '{path}', which is defined in a notebook or in the "
            f"started script: put it into a file of its own (`%%writefile my_{name.lower()}.py`) and import it.",
            code="not-importable", name=path,
        )  # fmt: skip
    found = _imported(module, f"Module '{module}' of '{path}'")
    if not hasattr(found, name):
        raise UserError(
            f"Expected {what} called '{name}' in module '{module}' ({getattr(found, '__file__', '?')}), got a module "
            "without it: check the name.",
            code="not-importable", name=name, module=module,
        )  # fmt: skip
    return getattr(found, name)


def import_path(thing: Any) -> str:
    """`package.module.Name` of a class or function, by which other processes find it.

    >>> from collections import OrderedDict
    >>> import_path(OrderedDict)
    'collections.OrderedDict'
    """
    name = getattr(thing, "__qualname__", type(thing).__qualname__)
    if not name.isidentifier():
        raise UserError(
            f"Expected a class or function of a module, got '{name}', which is defined inside another one: move it to "
            "the top of its file, where other processes can import it.",
            code="no-import-path",
            name=name,
        )
    return f"{thing.__module__}.{name}"


def _load_offered(offered: EntryPoint) -> None:
    try:
        offered.load()
    except UserError:
        raise
    except USERS as error:
        refuse_end(error)
        package = offered.dist.name if offered.dist else offered.value
        raise UserError(
            f"Plug-in '{offered.name}' of the installed package {package} cannot be imported: {cause_of(error)}; "
            "update or uninstall that package.",
            code=PLUGIN,
            name=offered.name,
        ) from error


def _imported(name: str, what: str) -> ModuleType:
    here = os.getcwd()  # noqa: PTH109  (a text, as sys.path holds)
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)  # last: a folder of the user's cannot hide an installed package
    if not is_ours(name):  # it may import lightning, and need not know what that needs here
        importlib.import_module("archipelago.core.torchvision_operators")
    try:
        return importlib.import_module(name)
    except UserError:
        raise
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(f"{error.name}.")):
            raise UserError(
                f"{what} cannot be found: expected an installed module or one in the working directory ({here}); run "
                "in the folder that has it, or install it.",
                code=PLUGIN,
                name=name,
            ) from error
        raise _not_imported(what, name, error) from error
    except USERS as error:  # whatever the user's own code raises
        refuse_end(error)
        raise _not_imported(what, name, error) from error


def _not_imported(what: str, name: str, error: BaseException) -> UserError:
    return UserError(f"{what} cannot be imported: {cause_of(error)}.", code=PLUGIN, name=name)
