"""Experiments as files: where a name is looked up, what a file includes, and its small variant.

    include: bases/thesis.yaml         # one file or a list, relative to this one; later ones win, this file over all
    rounds: 100
    sweep: {seeds: [0, 1, 2, 3, 4]}
    small:                             # replaces the settings above with --small, and is left out without it
      rounds: 8
      sweep: {seeds: [0, 1]}

Sections are merged key by key, lists are replaced. `null` over a setting of an included file, or of the file itself
inside `small:`, takes that setting out, so that it has its default. The small variant of a file called X is called
X-small wherever files are named, and so is its run or sweep.
"""

from __future__ import annotations

import difflib
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from archipelago.core.errors import UserError
from archipelago.core.packaged import TUNE_CONFIGS
from archipelago.core.registry import nearest
from archipelago.experiments.given import parse_yaml

INCLUDE, SMALL, ENDING = "include", "small", "-small"
_LARGEST = 1 << 20  # bytes of a file of settings
_MOST_FILES, _DEEPEST = 100, 20  # of what includes what
_SUFFIXES = (".yaml", ".yml")


def find_config(name: str | Path) -> Path:
    """The file that `--config NAME` means: a path as it is, a bare name among the files of the package.

    >>> find_config("thesis-7.1").name, find_config("somewhere/mine.yaml").as_posix()
    ('thesis-7.1.yaml', 'somewhere/mine.yaml')
    """
    path = Path(name).expanduser()
    if _exists(path) or not _is_bare(str(name)):
        return path
    found = TUNE_CONFIGS / f"{name}.yaml"
    if not _variant(found, small=False)[0].exists():
        raise UserError(
            f"Expected a YAML file or the name of one that comes with the package after --config, got '{name}'. "
            f"{nearest(name, config_names())}",
            code="unknown-config",
            name=name,
        )
    return found


def config_names() -> list[str]:
    """The names of the files that come with the package, in order; each small variant is one with `-small`."""
    return sorted(path.stem for path in TUNE_CONFIGS.glob("*.yaml"))


def read_config(path: Path, small: bool = False) -> dict[Any, Any]:
    """The settings in a YAML file and in what it includes, or of its small variant; mistakes are sentences."""
    path, small = _variant(path, small)
    content = _with_included(path, (), [])
    section = content.pop(SMALL, None)
    if section is not None and not isinstance(section, dict):
        raise UserError(
            f"Expected settings inside '{SMALL}' in '{path}', got {section!r}: write them as in rounds: 8.",
            code="wrong-type", setting=SMALL, given=section,
        )  # fmt: skip
    if not small:
        return content
    if section is None:
        raise UserError(
            f"Expected a section '{SMALL}:' in '{path}' or in a file that it includes beside --small, got none: "
            "leave --small out, or write the settings there that are to be smaller.",
            code="no-small-variant", path=path,
        )  # fmt: skip
    name = {} if content.get("name") is None else {"name": f"{content['name']}{ENDING}"}
    return merged(content, {**name, **section})


def merged(below: Mapping[Any, Any], above: Mapping[Any, Any]) -> dict[Any, Any]:
    """Two mappings of settings, nested or dotted, as one: sections by key, `above` wins, null takes out.

    >>> merged({"local": {"lr": 0.1, "batch": 8}, "rounds": 5}, {"local.lr": 0.5, "rounds": None})
    {'local': {'lr': 0.5, 'batch': 8}}
    """
    return _merged(below, above)


def _merged(
    below: Mapping[Any, Any], above: Mapping[Any, Any], *, sweep: bool = False, later: bool = False
) -> dict[Any, Any]:
    """`sweep`: keys are taken as they are. `later`: nulls stay, to take out settings in a later merge."""
    found, upper = (dict(each) if sweep else _nested(each) for each in (below, above))
    for key, value in upper.items():
        before = found.get(key)
        if value is None and (key in found or sweep) and not later:
            found.pop(key, None)
            continue
        if not sweep and isinstance(before, dict) != isinstance(value, dict):
            before, value = _section(before), _section(value)
        if isinstance(before, dict) and isinstance(value, dict):
            value = _merged(before, value, sweep=sweep or key == "sweep", later=later or key == SMALL)
        found[key] = value
    return found


def _is_bare(name: str) -> bool:
    return Path(name).name == name and not name.endswith(_SUFFIXES)


def _variant(path: Path, small: bool) -> tuple[Path, bool]:
    """The file to read, and whether its small variant is meant: X-small.yaml is that of X.yaml."""
    if not _exists(path) and path.stem.endswith(ENDING):
        whole = path.with_name(f"{path.stem.removesuffix(ENDING)}{path.suffix}")
        if whole.is_file():
            return whole, True
    return path, small


def _with_included(path: Path, chain: tuple[Path, ...], read: list[Path]) -> dict[Any, Any]:
    """`read` are the files read so far: files that include each other many times would never come to an end."""
    read.append(path)
    if len(read) > _MOST_FILES or len(chain) > _DEEPEST:
        raise UserError(
            f"Expected at most {_MOST_FILES} files, {_DEEPEST} deep, to be included by '{(chain or (path,))[0]}', got "
            f"more, the last of them '{path}': include each once.",
            code="too-many", setting=INCLUDE, most=_MOST_FILES,
        )  # fmt: skip
    if _resolved(path) in chain:
        names = " -> ".join(each.name for each in (*chain, path))
        raise UserError(
            f"Expected files that do not include themselves, got {names}: take one include out.",
            code="includes-itself",
        )
    content = parse_yaml(_text(path, chain), str(path))
    if INCLUDE not in content:
        return content
    given = content.pop(INCLUDE)
    listed = given if isinstance(given, list) else [given]
    if not listed or not all(isinstance(each, str) for each in listed):
        raise UserError(
            f"Expected '{INCLUDE}' in '{path}' to be a file or a list of files, got {given!r}: as in "
            "include: base.yaml.",
            code="wrong-type", setting=INCLUDE, given=given,
        )  # fmt: skip
    found: dict[Any, Any] = {}
    for name in listed:
        base = path.parent / Path(name).expanduser()
        if not base.exists() and _is_bare(name):
            base = find_config(name)
        found = merged(found, _with_included(base, (*chain, _resolved(path)), read))
    return merged(found, content)


def _text(path: Path, chain: tuple[Path, ...]) -> str:
    """What a file holds, or a sentence about why it cannot be read."""
    wanted = f"a YAML file in '{INCLUDE}' of '{chain[-1]}'" if chain else "a YAML file after --config"
    try:
        found = path.stat()
    except FileNotFoundError as error:
        raise UserError(
            f"Expected {wanted}, got '{path}', which does not exist: {_hint(path)}",
            code="not-found", path=path,
        ) from error  # fmt: skip
    except OSError as error:
        raise UserError(
            f"Expected {wanted}, got '{path}': {error.strerror}.", code="unreadable", path=path
        ) from error
    if stat.S_ISDIR(found.st_mode):
        raise UserError(
            f"Expected {wanted}, got the folder '{path}': name a file in it.", code="not-a-file", path=path
        )
    if not stat.S_ISREG(found.st_mode):
        raise UserError(
            f"Expected {wanted}, got '{path}', a pipe or a device: write a file and name that.",
            code="not-a-file", path=path,
        )  # fmt: skip
    if found.st_size > _LARGEST:
        raise UserError(
            f"Expected {wanted}, got '{path}' of {found.st_size} bytes: more than {_LARGEST}, so no settings.",
            code="too-large", path=path,
        )  # fmt: skip
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"Expected {wanted}, got '{path}', which is not text.", code="unreadable", path=path
        ) from error
    except OSError as error:
        raise UserError(
            f"Expected {wanted}, got '{path}': {error.strerror}.", code="unreadable", path=path
        ) from error


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a name that is too long
        return False


def _resolved(path: Path) -> Path:
    return Path(os.path.realpath(path))  # of a link to itself, too


def _hint(path: Path) -> str:
    beside = [each.name for each in path.parent.glob("*.y*ml") if each.is_file()]
    close = difflib.get_close_matches(path.name, beside, n=1)
    if close:
        return f"did you mean '{path.parent / close[0]}'?"
    packaged = TUNE_CONFIGS / path.name
    if _variant(packaged, small=False)[0].exists():
        return f"the package has one of this name: --config {path.stem}."
    return "check the path."


def _nested(content: Mapping[Any, Any]) -> dict[Any, Any]:
    """The mapping with sections in place of dotted keys."""
    found: dict[Any, Any] = {}
    for key, value in content.items():
        first, _, rest = key.partition(".") if isinstance(key, str) else (key, "", "")
        if rest:
            before = found.get(first)
            kept = {} if before is None else before if isinstance(before, dict) else _section(before)
            found[first] = (
                _merged(kept, {rest: value}, later=True) if isinstance(kept, dict) else {rest: value}
            )
        elif isinstance(value, dict) and isinstance(found.get(first), dict):
            found[first] = _merged(found[first], value, later=True)
        else:
            found[first] = value
    return found


def _section(value: Any) -> Any:
    """A text is short for the name in a section (`data: digits`)."""
    return {"name": value} if isinstance(value, str) else value
