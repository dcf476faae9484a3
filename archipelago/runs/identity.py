"""What a run is of: one hash of its settings, its partition and its format, written when it is made.

`identity.json` holds the hash and what it was made of, `status.json` and the manifest of every checkpoint hold the
hash. Whoever continues, reports or adopts a run compares: a config that was edited since, another partition or a
checkpoint of another run is noticed, and the sentence names what differs. Runs from before have none.

Beside it stand digests of the code of somebody's own that the run imports (plug-ins, import paths): a part of its own,
as code changes without the results changing. `resume` and `adopt` report a difference, as reports do of rows.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

from archipelago.core.errors import UserError
from archipelago.core.files import check_regular, complete_lines, write_whole
from archipelago.runs.checksums import chain_of, damaged
from archipelago.runs.format import FORMAT

FILE = "identity.json"

# Settings that may differ between two processes of one run: where it lives, how it is executed, what listens to it.
ELSEWHERE = ("name", "storage", "fleet.", "checkpoint.", "records.", "idle_rounds", "callbacks", "loggers",
             "tensorboard", "choose_clusters", "data.root", "data.download", "data.cache", "data.mapped",
             "partition.cache", "local.engine", "local.executor", "local.normalise")  # fmt: skip


def describe(config: Mapping[str, Any], folder: Path, code: Iterable[str] = ()) -> dict[str, Any]:
    """The content of `identity.json` of a run with this config, whose files are in `folder`."""
    content = {"settings": _settings(config), "partition": _partition(folder), "format": FORMAT}
    return {
        "identity": _hash(content),
        **content,
        "code": {name: digest_of_code(name) for name in sorted(code)},
    }


def identity_of(run: Path) -> str | None:
    """The hash that a run was made with; None of a run from before, or of a folder that is none."""
    return None if (known := _read(run)) is None else str(known["identity"])


def difference(run: Path, config: Mapping[str, Any], stated: str | None) -> str | None:
    """What differs from what the run was made with, in words; None if nothing does.

    `config` is the run's config as it is now, `stated` the hash in its `status.json`. A partition that is missing is
    no difference: runs are published without it, as without their models (`check_identity` asks for it).
    """
    known = _read(run)
    if known is None:
        return f"{FILE} is missing" if stated is not None else None
    content = {key: known[key] for key in ("settings", "partition", "format")}
    if _hash(content) != known["identity"] or stated not in (None, known["identity"]):
        return f"{FILE} is not the one that the run was made with"
    other = first_difference(known["settings"], config)
    if other is not None:
        return f"{other} in config.yaml"
    if _partition(run) not in (None, known["partition"]):
        return "partition.safetensors is another one"
    return None


def first_difference(then: Mapping[str, Any], now: Mapping[str, Any], also: Iterable[str] = ()) -> str | None:
    """The first setting that counts and differs, with both values; None if none does. `also` may differ as well.

    >>> first_difference({"local": {"lr": 0.1}, "name": "a"}, {"local": {"lr": 0.5}, "name": "b"})
    'local.lr was 0.1 and is 0.5'
    """
    before, after = _settings(then), _settings(now)
    ignored = set(also)
    for key in dict.fromkeys([*before, *after]):
        same = key in before and key in after and before[key] == after[key]
        if key not in ignored and not same and _shown(before, key) != _shown(after, key):
            return f"{key} was {_shown(before, key)} and is {_shown(after, key)}"
    return None


def seal(run: Path, tables: Mapping[str, str], models: list[str]) -> None:
    """Write down, of a run that is finished, the digests of its tables (`checksums.py`) and which models it has."""
    known = _read(run)
    if known is not None:
        write_whole(
            run / FILE,
            json.dumps({**known, "tables": dict(tables), "models": models}, indent=2, ensure_ascii=False)
            + "\n",
        )


def missing_model(run: Path) -> str | None:
    """A final model of the run that is gone, in words; a run that is published without `models/` lacks none."""
    if not (run / "models").is_dir():
        return None
    gone = [
        name for name in (_read(run) or {}).get("models") or [] if not (run / "models" / str(name)).exists()
    ]
    return f"models/{gone[0]} is missing" if gone else None


def changed_table(run: Path, name: str) -> str | None:
    """How a table of a finished run is not as it was written, in words; None if it is, or nobody knows."""
    for table, stated in ((_read(run) or {}).get("tables") or {}).items():
        if table != name:
            continue
        if not (run / name).exists():
            return f"{name} is missing"
        try:
            header, *rows = csv.reader(io.StringIO(complete_lines(run / name)))
            chain = chain_of(dict(zip(header, row, strict=True)) for row in rows)
        except (ValueError, KeyError) as error:
            raise damaged(run / name, f"its lines cannot be read: {error}") from error
        if (chain[max(chain)] if chain else "") != stated:
            return f"{name} is not as it was written"
    return None


def check_identity(run: Path, config: Mapping[str, Any], stated: str | None) -> None:
    """A `UserError` if a run's config or partition was changed, or its partition removed, since it was made."""
    other = difference(run, config, stated)
    if other is None and _partition(run) is None and (_read(run) or {}).get("partition") is not None:
        other = "partition.safetensors is missing"
    if other is not None:
        raise UserError(
            f"Expected {run} as it was made, got another one: {other}. Set it back, or start a run of its own with "
            "name=...",
            code="other-config", run=run,
        )  # fmt: skip


def code_digests(run: Path) -> dict[str, str]:
    """{module or import path: digest of its file} of the code of somebody's own, as it was when the run was made."""
    known = _read(run) or {}
    code = known.get("code", known.get("plugins"))  # what earlier versions called it
    return {str(name): str(digest) for name, digest in code.items()} if isinstance(code, dict) else {}


def changed_code(run: Path) -> list[str]:
    """Modules and import paths whose file is another one than when the run was made; nothing is imported."""
    return [name for name, digest in code_digests(run).items() if digest_of_code(name) != digest]


def _read(run: Path) -> dict[str, Any] | None:
    check_regular(run / FILE)
    try:
        content = json.loads((run / FILE).read_text(encoding="utf-8"))
        if not isinstance(content["identity"], str) or not isinstance(content["settings"], dict):
            raise TypeError("a hash and settings were expected")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{run / FILE} is damaged ({error}); the run cannot be used.", code="damaged", file=run / FILE
        ) from error
    known: dict[str, Any] = content
    return known


def _settings(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The settings that count, by dotted key."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            found |= _settings(value, f"{name}.")
        elif not any(name == each or (each.endswith(".") and name.startswith(each)) for each in ELSEWHERE):
            found[name] = value
    return found


def _partition(folder: Path) -> str | None:
    check_regular(folder / "partition.safetensors")
    try:
        return hashlib.blake2b((folder / "partition.safetensors").read_bytes(), digest_size=16).hexdigest()
    except OSError:
        return None


def digest_of_code(name: str) -> str:
    """The digest of the file of a module, or of the module that an import path begins with; empty if it is not here."""
    try:
        spec = _spec(name.split("."))
        if spec is not None and spec.origin:
            return hashlib.blake2b(Path(spec.origin).read_bytes(), digest_size=8).hexdigest()
    except (ImportError, OSError, ValueError):
        pass
    return ""


def _spec(parts: Sequence[str]) -> ModuleSpec | None:
    """Where the module is that these names begin with; nothing is imported, as `importlib.util.find_spec` does."""
    found, inside = None, None
    for end in range(1, len(parts) + 1):
        name = ".".join(parts[:end])
        finders = (finder for finder in sys.meta_path if hasattr(finder, "find_spec"))
        spec = next((spec for finder in finders if (spec := finder.find_spec(name, inside))), None)
        if spec is None and end == 1:  # plug-ins are found in the working directory, too
            spec = PathFinder.find_spec(name, [str(Path.cwd())])
        if spec is None:
            break
        found, inside = spec, spec.submodule_search_locations
        if inside is None:
            break
    return found


def _hash(content: Mapping[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _shown(settings: Mapping[str, Any], key: str) -> str:
    return json.dumps(settings[key], default=str) if key in settings else "not there"
