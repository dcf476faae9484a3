"""Runs from elsewhere: which code they would import here, asked about once.

A run directory holds no code, but its config names some: plug-ins and import paths, which `resume` and `adopt`
import. Runs and sweeps that were made by this user on this machine are known by their identity, in a file each in the
user's state folder; any other that names code of somebody's own is refused until its user has said `--trust` once.
(`report` imports nothing that a run names.)
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

from archipelago.core.errors import UserError

_VARIABLE = "ARCHIPELAGO_STATE"


def state_folder() -> Path:
    """The folder of this user in which is kept what is to be known the next time."""
    if chosen := os.environ.get(_VARIABLE):
        return Path(chosen)
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "archipelago"


def remember(identity: str | None, code: Mapping[str, str]) -> None:
    """This user made, or trusts, a run of this identity that imports this code ({name: the setting that names it})."""
    if not code:
        return
    path = _file(identity, code)
    with contextlib.suppress(OSError):  # a home that cannot be written: it will be asked about
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.touch(mode=0o600)


def check_trust(what: str, identity: str | None, code: Mapping[str, str], trust: bool) -> None:
    """A `UserError` that names the code, if a run that was not made here would import some and nobody trusts it."""
    if not code or _file(identity, code).is_file():
        return
    if trust:
        remember(identity, code)
        return
    names = ", ".join(f"{name} ({setting})" for name, setting in sorted(code.items()))
    raise UserError(
        f"Expected a run that was made here, got {what} from elsewhere, which wants to import code: {names}. Look at "
        "that code where Python finds it, then say --trust once (trust=True in Python).",
        code="untrusted",
        imports=sorted(code),
    )


def _file(identity: str | None, code: Mapping[str, str]) -> Path:
    content = json.dumps([identity, sorted(code)])
    return state_folder() / "trusted" / hashlib.blake2b(content.encode(), digest_size=16).hexdigest()
