"""The documents as tests see them: every fenced block, and whether it says why it is not run."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCUMENTS = (
    *("README.md", "CONTRIBUTING.md", "ARCHITECTURE.md", "DECISIONS.md", "CHANGELOG.md"),
    *sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("results/*.md")),
    *sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("examples/**/README.md")),
    *sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("recipes/**/README.md")),
    *sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/**/*.md")),
)
_BLOCK = re.compile(
    r"(?:<!-- not run: (?P<why>[^\n]+) -->\n)?^```(?P<kind>\w*)\n(?P<text>.*?)^```", re.M | re.S
)
_INLINE = re.compile(r"`((?:python -m |ray get-auth|archipelago )[^`\n]+)`")
_INDENTED = re.compile(r"^ {4,}(?:\$ )?((?:python|archipelago|make|ray|sh|pip) [^\n]+)", re.M)
DOOR = "python -m platform.launch"


@dataclass(frozen=True)
class Block:
    """A fenced block; `why` it is not run, where it says so."""

    document: str
    kind: str
    text: str
    why: str = ""

    @property
    def folder(self) -> str:
        """Where its commands are typed: where a `cd` leads, an example's own folder, or the project's root."""
        if found := re.search(r"^cd (\S+)$", self.text, re.M):
            return found[1]
        return str(Path(self.document).parent) if self.document.startswith("examples/") else "."

    @property
    def lines(self) -> list[str]:
        """Its commands, comments left out; `archipelago` in the project's root is the command of the checkout."""
        lines = [re.sub(r"\s+#.*", "", line).strip() for line in self.text.replace("\\\n", " ").splitlines()]
        if self.folder == ".":
            lines = [re.sub(r"^archipelago\b(?! plugins)", DOOR, line) for line in lines]
        return [line for line in lines if line]


def blocks() -> list[Block]:
    """Every fenced block of every document."""
    return [
        Block(document, found["kind"], found["text"], found["why"] or "")
        for document in DOCUMENTS
        for found in _BLOCK.finditer((ROOT / document).read_text(encoding="utf-8"))
    ]


def inline(document: str) -> list[str]:
    """Commands that stand in a sentence."""
    return _INLINE.findall((ROOT / document).read_text(encoding="utf-8"))


def indented(document: str) -> list[str]:
    """Commands that no fence shows as such: there should be none."""
    return _INDENTED.findall(_BLOCK.sub("", (ROOT / document).read_text(encoding="utf-8")))


def commands() -> list[tuple[str, str]]:
    """(folder, command) of all that is to be run, each once."""
    found = [
        (block.folder, line)
        for block in blocks()
        if block.kind == "sh" and not block.why
        for line in block.lines
    ]
    found += [
        (".", line)
        for document in DOCUMENTS
        for line in inline(document)
        if not line.startswith("archipelago ")
    ]
    return list(dict.fromkeys(found))


def python(document: str) -> str:
    """The Python blocks of a document, one after the other: one program."""
    return "\n".join(
        block.text
        for block in blocks()
        if block.document == document and block.kind == "python" and not block.why
    )
