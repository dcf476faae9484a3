"""Pages that are made of what is registered: methods, add-ons, settings, extension points.

Nothing here names a method: a page says what the entry's module says (its paper, its symbols, how ambiguities were
read), what its options declare, and what a small run came to (`small_runs.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from archipelago.cli.vocabulary import registries, setting_of
from archipelago.core.readings import HEADINGS, NOTHING, Reading, documentation, split_readings
from archipelago.core.registry import REGISTRIES, Entry, Registry
from archipelago.core.schema import Leaf, composed, leaves
from archipelago.core.settings import ExperimentSettings, SweepSection
from docs.hooks import small_runs

KINDS = ("method", "add-on")
RULES = ("aggregation rule", "clustering rule", "server optimizer", "update transform", "attack")
_NAMED = 8  # entries of a kind that the table of extension points names
COSTS = {
    "models_down": "models received",
    "models_up": "models delivered",
    "models_stored": "models kept by a client",
    "computation": "computation",
}


# Text -------------------------------------------------------------------------------------------------------


def escaped(text: str) -> str:
    """Plain text whose signs Markdown must leave alone; what stands in backticks stays.

    >>> escaped("a < b * c, `x*y`")
    'a &lt; b \\\\* c, `x*y`'
    """
    parts = re.split(r"(`[^`]*`)", text)
    plain = [part.replace("<", "&lt;").replace("*", r"\*").replace("[", r"\[") for part in parts[::2]]
    return "".join(part for pair in zip(plain, [*parts[1::2], ""], strict=True) for part in pair)


def as_markdown(text: str) -> str:
    """A docstring as Markdown: lines indented by four are preformatted, a list gets its empty line."""
    made: list[str] = []
    code: list[str] = []

    def close() -> None:
        if code:
            while not code[-1]:
                code.pop()
            width = min(len(line) - len(line.lstrip()) for line in code if line)
            made.extend(["", "```text", *(line[width:] for line in code), "```", ""])
            code.clear()

    listed = False
    for line in text.splitlines():
        if line.startswith("    ") and not listed:
            code.append(line)
            continue
        if not line.strip():
            listed = False
            (code if code else made).append("")
            continue
        close()
        if line.startswith("- ") and not listed:
            made.append("")
        listed = listed or line.startswith("- ")
        made.append(escaped(line))
    close()
    return re.sub(r"\n{3,}", "\n\n", "\n".join(made)).strip()


def parts_of(text: str) -> dict[str, str]:
    """Title, paper and map (symbols and equations) of a method's docstring without its readings.

    >>> parts_of("A: b.\\n\\nX et al., 2020.\\n\\n    w  x") == {"title": "A: b.", "paper": "X et al., 2020.", "map": "    w  x"}
    True
    """
    title, *blocks = re.split(r"\n\s*\n", text.strip("\n"))
    found = {"title": " ".join(title.split())}
    if blocks and not blocks[0].startswith(" ") and re.search(r"\b(19|20)\d\d\b|[Tt]hesis", blocks[0]):
        found["paper"] = blocks.pop(0)
    if blocks:
        found["map"] = "\n\n".join(blocks)
    return found


def reading_table(rows: Sequence[Reading]) -> str:
    """Where paper and code are silent or differ, and what is done here."""
    shown = [name for name in HEADINGS if name == "topic" or any(getattr(row, name) for row in rows)]
    lines = [f"| {' | '.join(HEADINGS[name] for name in shown)} |", "|" + "---|" * len(shown)]
    for row in rows:
        cells = {name: cell(getattr(row, name)) or NOTHING for name in shown}
        if row.option:
            # In code a bar ends no cell, and an entity would be shown as it is written.
            cells["option"] = ", ".join(f"`{each.strip()}`" for each in row.option.split(", "))
        lines.append(f"| {' | '.join(cells.values())} |")
    return "\n".join(lines)


# Entries ----------------------------------------------------------------------------------------------------


def entries(kind: str) -> list[Entry[Any]]:
    """The entries of a kind by name, those of the platform alone: a plug-in has its own documents."""
    registries()
    return sorted(REGISTRIES[kind].values(), key=lambda entry: entry.name)


def defined_in(entry: Entry[Any]) -> str:
    """The file, from the project's root."""
    return getattr(entry.value, "origin", entry.value).__module__.replace(".", "/") + ".py"


def options(registry: Registry[Any], entry: Entry[Any]) -> list[Leaf]:
    """Its options by the names that the command line takes."""
    section = registry.section or entry.section
    return [replace(leaf, key=f"{section}.{leaf.key}") for leaf in leaves(entry.options).values()]


def cell(text: str) -> str:
    """Text in a table."""
    return escaped(" ".join(text.split())).replace("|", r"\|")


def option_table(found: Sequence[Leaf]) -> str:
    """Setting, default, what it is and what it may be."""
    lines = ["| setting | default | |", "|---|---|---|"]
    for leaf in found:
        if "choices" in leaf.metadata:
            allowed = ", ".join(f"`{choice}`" for choice in leaf.metadata["choices"])
        else:
            allowed = f"`{leaf.range}`" if leaf.range else leaf.kind.partition(", such as")[0]
        lines.append(f"| `{leaf.key}` | `{leaf.shown_default}` | {cell(leaf.about)}<br>*{allowed}* |")
    return "\n".join(lines)


def cost_table(found: small_runs.Found) -> str:
    """What a participant pays in a round, FedAvg = 1."""
    shown = [(words, found.costs[name]) for name, words in COSTS.items() if name in found.costs]
    if not shown:
        return ""
    heads = " | ".join(words for words, _ in shown)
    rule = "|".join("---:" for _ in shown)
    values = " | ".join(f"{value:.3g}" for _, value in shown)
    return f"| {heads} |\n|{rule}|\n| {values} |"


def method_page(kind: str, entry: Entry[Any]) -> str:
    """The page of a method or an add-on."""
    registry = REGISTRIES[kind]
    about, readings = split_readings(documentation(entry))
    text = parts_of(about)
    found = small_runs.found(kind, entry.name)
    acts = ", in a setting in which it acts" if entry.name in small_runs.ACTS else ""
    lines = [f"# {entry.label}", "", f"`{setting_of(registry).replace('NAME', entry.name)}`: {escaped(entry.about)}.", ""]  # fmt: skip
    lines += [as_markdown(text["title"]), ""]
    if found is not None:
        command = " ".join(["archipelago", *found.words])
        lines += ["```sh", command, "```", ""]
    for name, title in (("paper", "Paper"), ("map", "Symbols and equations")):
        if name in text:
            lines += [f"## {title}", "", as_markdown(text[name]), ""]
    if readings:
        lines += ["## How it is read", "", "Where the paper and its released code are silent or differ.", "",
                  reading_table(readings), ""]  # fmt: skip
    lines += ["## Options", ""]
    own = options(registry, entry)
    lines += [option_table(own) if own else "None of its own; every [setting of an experiment](../settings.md) applies.", ""]  # fmt: skip
    if found is not None:
        lines += ["## Cost", "", "For a participant and a round, measured in the run below; FedAvg is 1.", "",
                  cost_table(found), "", "## A small run", "",
                  f"![{entry.label}: accuracy by round and clients](figures/{entry.name}.svg)", "",
                  f"The command above: scikit-learn's digits, {small_runs.CLIENTS} clients in four groups that see them "
                  f"turned by 0, 90, 180 and 270 degrees, {small_runs.settings(entry.name)['rounds']} rounds, seed 0{acts}. It ends at "
                  f"{100 * found.accuracy:.1f} % accuracy, FedAvg at {100 * found.reference:.1f} %. One small run shows what a "
                  "method does, not how good it is: [tables](../sweeps.md) do.", ""]  # fmt: skip
    else:
        lines += ["## A small run", "", "None is shown: this entry does not run on the digits alone.", ""]
    lines += [f"Read it in `{defined_in(entry)}`.", ""]
    return "\n".join(lines)


def methods_index() -> str:
    """All methods and add-ons in two tables."""
    lines = [
        "# Methods", "",
        "A method is a base and any number of add-ons, as in `method=wecfl+cam+finetune`. One paper is one file; each page "
        "has the paper, how its symbols map to the code, how ambiguities were read, options, cost and a small run.", "",
    ]  # fmt: skip
    for kind, title in zip(KINDS, ("Bases", "Add-ons"), strict=True):
        lines += [f"## {title}", "", "| | | |", "|---|---|---|"]
        for entry in entries(kind):
            lines.append(f"| [{entry.label}]({entry.name}.md) | `{entry.name}` | {cell(entry.about)} |")
        lines.append("")
    lines += ["## What goes with any of them", "", "How models become one, how clients become clusters, how the server steps, what "
              "becomes of an update on its way, and who does not play by the rules.", ""]  # fmt: skip
    for kind in RULES:
        chosen = setting_of(REGISTRIES[kind])
        lines += [f"| {kind}{f', `{chosen}`' if chosen else ''} | |", "|---|---|"]
        lines += [f"| `{entry.name}` | {cell(entry.about)} |" for entry in entries(kind)]
        lines += [""]
        for entry in entries(kind):
            if own := options(REGISTRIES[kind], entry):
                lines += [f"Options of `{entry.name}`:", "", option_table(own), ""]
    lines += ["Several methods at once are an ensemble, `ensemble=[fedavg,ifca]`; how many clusters is chosen by "
              "validation data with `clusters=auto`.", ""]  # fmt: skip
    return "\n".join(lines)


def settings_page() -> str:
    """Every setting of an experiment and of a sweep."""
    registries()
    lines = ["# Settings", "",
             "The one schema behind the command line (`local.lr=0.05`), YAML files and keyword arguments "
             "(`local={\"lr\": 0.05}`). A wrong name or value is refused with a sentence before anything starts. "
             "`archipelago list settings` prints this page.", ""]  # fmt: skip
    for kind, title in ((ExperimentSettings, "Of an experiment"), (SweepSection, "Of a sweep")):
        lines += [f"## {title}", ""]
        sections: dict[str, list[Leaf]] = {}
        for key, leaf in leaves(composed(kind)).items():
            sections.setdefault(key.rpartition(".")[0].partition(".")[0], []).append(leaf)
        for section, found in sections.items():
            lines += [f"### {section or 'General'}", "", option_table(found), ""]
    return "\n".join(lines)


def extension_table() -> str:
    """Every kind of thing that can be replaced: how it is chosen, and which there are."""
    lines = ["| kind | chosen by | there are |", "|---|---|---|"]
    for registry in registries():
        names = [f"`{name}`" for name in registry]
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        chosen = setting_of(registry)
        shown = ", ".join(names[:_NAMED]) + more
        lines.append(f"| {registry.kind} | {f'`{chosen}`' if chosen else ''} | {shown} |")
    return "\n".join(lines)


def simple_table(kind: str, folder: str = "", pictures: Iterable[str] = ()) -> str:
    """Entries with one line each, and a picture below it where there is one."""
    have = set(pictures)
    lines = [f"| {kind} | |", "|---|---|"]
    for entry in entries(kind):
        picture = f"<br>![{entry.name}]({folder}/{entry.name}.png)" if entry.name in have else ""
        lines.append(f"| `{entry.name}` | {cell(entry.about)}{picture} |")
    return "\n".join(lines)
