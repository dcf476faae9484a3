"""What the platform writes into a run directory, by name: nothing else there is deleted, or written through a link.

People keep backups and notes beside results. What has no name of the platform's is left where it is.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from archipelago.core.errors import UserError
from archipelago.core.registry import REGISTRIES

_ROUND = r"\d{6,}"
_PART = r"[A-Za-z0-9][A-Za-z0-9._-]*"
CHECKPOINT = re.compile(rf"round-({_ROUND})")
# Half written or half removed when its process was killed; `removed` is what earlier versions called it.
UNFINISHED_CHECKPOINT = re.compile(rf"round-{_ROUND}\.(?:tmp|old)-\d+|\.round-{_ROUND}\.removed-\d+")
_NUMBERED = re.compile(rf"([A-Za-z0-9_]+)-({_ROUND})\.parquet")  # records and parts
_TEMPORARY = re.compile(r"\.(.+)\.tmp-\d+")  # as `archipelago.core.files.whole_file` calls it

_FOLDERS = {  # folder in the run directory -> files in it
    "": r"(config\.yaml|(environment|vocabulary|status|identity|schedule|loggers)\.json|metrics\.csv"
    r"|timings\.csv|events\.jsonl|(clients|assignments)\.parquet|partition\.safetensors|summary\.md|traceback\.txt|\.lock)",
    "checkpoints": r"(?!)",
    rf"checkpoints/({CHECKPOINT.pattern}|{UNFINISHED_CHECKPOINT.pattern})": rf"(manifest\.json|{_PART}\.safetensors)",
    "federation": r"((clients|counts)\.parquet|facts\.json)",
    "figures": r"partition-(classes|similarity)\.(png|svg)",
    "models": r".+\.safetensors",
    "parts": rf"(clients|assignments)-{_ROUND}\.parquet",
    "records": rf"({_NUMBERED.pattern}|examples\.safetensors)",
    "report": r"(table\.(md|tex|csv)|references\.bib|report\.html)",
    "report/figures": r".+\.(png|svg)",
}
_KNOWN = [(re.compile(folder), re.compile(files)) for folder, files in _FOLDERS.items()]


def logger_folders() -> dict[str, re.Pattern[str]]:
    """Folder -> its files, of every logger that declares the `files` it writes into the folder of its name."""
    entries = REGISTRIES.get("logger", {}).values()
    return {each.section: re.compile(each.capabilities["files"]) for each in entries
            if "files" in each.capabilities}  # fmt: skip


def kept_logger_files(run: Path) -> Iterator[str]:
    """Files, by their names in the run, of loggers that are given no round twice (`keeps_rounds`)."""
    keeping = {each.section for each in REGISTRIES.get("logger", {}).values()
               if each.capabilities.get("keeps_rounds")}  # fmt: skip
    for folder, files in logger_folders().items():
        if folder in keeping and (run / folder).is_dir():
            yield from (f"{folder}/{path.name}" for path in sorted((run / folder).iterdir())
                        if files.fullmatch(path.name) and path.is_file() and not path.is_symlink())  # fmt: skip


def is_own_folder(name: str) -> bool:
    """Whether the platform makes a folder of that name in a run directory.

    >>> [is_own_folder(name) for name in ("checkpoints/round-000010", "checkpoints/round-000010-copy", "mine")]
    [True, False, False]
    """
    return any(folder.fullmatch(name) for folder, _ in _KNOWN) or name in logger_folders()


def is_own_file(name: str) -> bool:
    """Whether the platform writes a file of that name into a run directory, temporary names among them.

    >>> [is_own_file(name) for name in ("metrics.csv", ".metrics.csv.tmp-7", "records/notes.txt", "notes.txt")]
    [True, True, False, False]
    """
    parent, _, file = name.rpartition("/")
    temporary = _TEMPORARY.fullmatch(file)
    file = temporary.group(1) if temporary else file
    if any(folder.fullmatch(parent) and files.fullmatch(file) for folder, files in _KNOWN):
        return True
    logged = logger_folders().get(parent)
    return logged is not None and logged.fullmatch(file) is not None


def numbered_files(folder: Path, name: str | None = None) -> list[tuple[int, Path]]:
    """(round, path) of every `NAME-ROUND.parquet` in `folder`, by name and round; of all names if none is given."""
    found = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        match = _NUMBERED.fullmatch(path.name)
        if match is not None and name in (None, match.group(1)):
            found.append((int(match.group(2)), path))
    return found


def remove_own_files(run: Path, inside: str = "") -> None:
    """Remove the platform's files in a run directory, or in one folder of it, and its folders that are then empty."""
    if inside and (run / inside).is_symlink():
        return
    for folder, _, files in os.walk(run / inside, topdown=False):  # does not follow links
        name = _relative(Path(folder), run)
        if not is_own_folder(name):
            continue
        for file in files:
            if is_own_file(f"{name}/{file}" if name else file):
                (Path(folder) / file).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # somebody else's files are in it
            Path(folder).rmdir()


def refuse_links(run: Path) -> None:
    """A `UserError` if a file or folder of the platform's is a link, which leads elsewhere, or not of its kind."""
    for path, is_file in _own_entries(run):
        refuse_link(path)
        if is_file != path.is_file() or is_file == path.is_dir():
            wanted = "a file" if is_file else "a folder"
            given = "a folder" if path.is_dir() else "a file" if path.is_file() else "a pipe or a device"
            raise UserError(
                f"Expected {path} to be {wanted}, got {given}: restore it, or remove it and see what can be saved.",
                code="damaged",
                file=path,
            )


def refuse_link(path: Path) -> None:
    """The same for one path."""
    if path.is_symlink():
        raise UserError(
            f"Expected {path} to be a file or folder of its own, got a symbolic link to {path.readlink()}, where files "
            "would be changed or deleted: put what it points to in its place, or remove the link.",
            code="symbolic-link", path=path,
        )  # fmt: skip


def _own_entries(run: Path) -> Iterator[tuple[Path, bool]]:
    """(path, whether it should be a file) of everything that has a name of the platform's."""
    for folder, folders, files in os.walk(run):
        at = _relative(Path(folder), run)
        names = {each: f"{at}/{each}" if at else each for each in (*folders, *files)}
        for each, name in names.items():
            if is_own_file(name) or is_own_folder(name):
                yield Path(folder) / each, is_own_file(name)
        folders[:] = [each for each in folders if is_own_folder(names[each])]


def _relative(path: Path, run: Path) -> str:
    name = path.relative_to(run).as_posix()
    return "" if name == "." else name
