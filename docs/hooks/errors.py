"""The page of error codes, read from the source: every `UserError` there is, by its code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from archipelago.core.plugins import PLUGIN

ROOT = Path(__file__).parents[2]
NAMED = {"PLUGIN": PLUGIN}  # codes that the platform itself asks for
PACKAGES = ("archipelago", "actors", "lightning_modules")


@dataclass(frozen=True)
class Mistake:
    """One place where a `UserError` is made."""

    path: str
    line: int
    code: str | None  # None: not a plain text
    values: tuple[str, ...]
    sentence: str  # with `...` for what is filled in


def mistakes(root: Path = ROOT) -> Iterator[Mistake]:
    """All of them, file by file."""
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            yield from mistakes_in(path.read_text(encoding="utf-8"), str(path.relative_to(root)))


def mistakes_in(source: str, path: str) -> Iterator[Mistake]:
    """
    >>> [(each.code, each.values, each.sentence) for each in mistakes_in('UserError(f"No {x}.", code="no", x=x)', "")]
    [('no', ('x',), 'No ....')]
    """
    for call in ast.walk(ast.parse(source)):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "UserError":
            named = {each.arg or "**": each.value for each in call.keywords}
            code = named.pop("code", None)
            if isinstance(code, ast.Attribute):
                continue  # it passes on the code of another
            yield Mistake(
                path, call.lineno,
                _code(code),
                tuple(named), _sentence(call.args[0]) if call.args else "",
            )  # fmt: skip


def _code(code: ast.expr | None) -> str | None:
    if isinstance(code, ast.Name):
        return NAMED.get(code.id)
    return code.value if isinstance(code, ast.Constant) and isinstance(code.value, str) else None


def _sentence(message: ast.expr) -> str:
    if isinstance(message, ast.Constant):
        return str(message.value)
    if isinstance(message, ast.JoinedStr):
        return "".join(
            str(part.value) if isinstance(part, ast.Constant) else "..." for part in message.values
        )
    return "..."


def errors_page() -> str:
    """Every code, with the sentences it stands for and the values it carries."""
    lines = ["# Error codes", "",
             "A mistake in what was asked for is one sentence and exit code 2; from Python it is an "
             "[`archipelago.core.errors.UserError`](api.md) with `code`, which says what kind of mistake it is, and "
             "`values`, what the sentence is about. Programs and tests look at these: the prose may change.", "",
             "| code | values | sentences |", "|---|---|---|"]  # fmt: skip
    by_code: dict[str, list[Mistake]] = {}
    for each in mistakes():
        by_code.setdefault(each.code or "", []).append(each)
    for code, found in sorted(by_code.items()):
        values = ", ".join(
            f"`{name}`" for name in sorted({name for each in found for name in each.values if name != "**"})
        )
        sentences = sorted({each.sentence for each in found if each.sentence.strip(". ")})
        lines.append(f"| `{code}` | {values} | {'<br>'.join(_cell(each) for each in sentences[:4])} |")
    return "\n".join([*lines, ""])


def _cell(sentence: str) -> str:
    first = re.split(r"(?<=[^.][.:;]) ", " ".join(sentence.split()), maxsplit=1)[0]
    return first.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*").replace("_", "\\_")
