"""What the demonstration says before and after its table: what is compared, and what the numbers show.

Nothing here is known beforehand: every sentence is made of the table that has just been run.
"""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from archipelago.core.program import program

if TYPE_CHECKING:
    from archipelago.reports.tables import Table, TableRow

METRIC, MACRO, WORST, FOUND = "micro_accuracy", "micro_macro_f1", "worst10_accuracy", "ari"
EXACTLY = 0.995  # an ARI that is shown as 1.00
SECONDS = 20  # to answer whether to open the report


def introduction(about: str) -> str:
    """What is about to be seen; `about` is the first sentence of the demonstration's file."""
    return (
        f"{about}\nNo method is told which client belongs to which group. It takes a minute or two; equal seeds give "
        "the same numbers, however many processes compute them."
    )


def findings(tables: Sequence[Table]) -> list[str]:
    """What the tables show, problem by problem: sentences made of their numbers; none where they have none."""
    problems = [
        (table.title, {_method(row): row for row in table.rows if _mean(row, METRIC) is not None})
        for table in tables if table.ranked
    ]  # fmt: skip
    said: list[str] = []
    for title, rows in problems:
        sentences = [*_clusters_and_one_model(rows), *_groups_found(rows), *_addon(rows)]
        if sentences and len(problems) > 1:
            said.append(f"  {title}")
        said += [f"  - {sentence}" for sentence in sentences]
    said += _about_addons([rows for _, rows in problems])
    return ["What it shows:", *said] if said else []


def _method(row: TableRow) -> str:
    return str(row.group.config.get("method", "")) if row.group is not None else ""


def _mean(row: TableRow, name: str) -> float | None:
    return None if row.group is None else row.group.mean(name)


def _percent(row: TableRow, name: str) -> float:
    return 100 * (_mean(row, name) or 0.0)


def _listed(names: Sequence[str]) -> str:
    """
    >>> _listed(["IFCA"]), _listed(["IFCA", "WeCFL", "CFL"])
    ('IFCA', 'IFCA, WeCFL and CFL')
    """
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _clusters_and_one_model(rows: dict[str, TableRow]) -> list[str]:
    alone = [row for row in rows.values() if row.group is not None and not row.group.clustered]
    others = [row for row in rows.values() if not alone or row is not alone[0]]
    if not alone or not others:
        return []
    one, best = alone[0], max(others, key=lambda row: _percent(row, METRIC))
    gain = _percent(best, METRIC) - _percent(one, METRIC)
    if gain <= 0:
        return [
            f"No other method is better than one model for all ({one.label}, {_percent(one, METRIC):.1f} %)."
        ]
    sentence = (
        f"One model for all ({one.label}) reaches {_percent(one, METRIC):.1f} % accuracy, {best.label} "
        f"{_percent(best, METRIC):.1f} %: {gain:+.1f} points"
    )
    if _mean(one, WORST) is not None and _mean(best, WORST) is not None:
        sentence += (
            f" ({_percent(best, WORST) - _percent(one, WORST):+.1f} for the worst tenth of the clients)"
        )
    return [f"{sentence}."]


def _groups_found(rows: dict[str, TableRow]) -> list[str]:
    """Who found the groups with every seed, and who did not; ARI is 1 where clusters and groups are the same."""
    by_seed = {
        row.label: list(row.group.by_repeat(FOUND).values()) for row in rows.values() if row.group is not None
    }
    found = {label: values for label, values in by_seed.items() if values}
    exact = [label for label, values in found.items() if min(values) >= EXACTLY]
    missed = [
        f"{label} (ARI {sum(values) / len(values):.2f}, its worst seed {min(values):.2f})"
        for label, values in found.items() if min(values) < EXACTLY
    ]  # fmt: skip
    said = []
    if exact:
        said.append(f"{_listed(exact)} found the groups with every seed.")
    if missed:
        said.append(f"Not with every seed: {_listed(missed)}.")
    return said


def _pairs(rows: dict[str, TableRow]) -> list[tuple[TableRow, TableRow]]:
    """Methods that were run without and with an add-on."""
    return [(rows[name], rows[more]) for name in rows for more in rows if more.startswith(f"{name}+")]


def _addon(rows: dict[str, TableRow]) -> list[str]:
    """What the add-on changed: in the mean, and with how many seeds for the better."""
    said = []
    for base, lifted in _pairs(rows):
        points = [
            f"{_percent(lifted, name) - _percent(base, name):+.2f} points of {words}"
            for name, words in ((METRIC, "accuracy"), (MACRO, "macro-F1"))
            if _mean(base, name) is not None and _mean(lifted, name) is not None
        ]
        before, after = base.by_repeat(METRIC), lifted.by_repeat(METRIC)
        both = [seed for seed in before if seed in after]
        won = sum(after[seed] > before[seed] for seed in both)
        seeds = f" (more accurate with {won} of {len(both)} seeds)" if both else ""
        said.append(f"{base.label} to {lifted.label}: {', '.join(points)}{seeds}.")
    return said


def _about_addons(problems: Sequence[dict[str, TableRow]]) -> list[str]:
    """On which of the problems a shared model under the clusters helped; nothing where none was tried."""
    gains = [
        _percent(lifted, METRIC) - _percent(base, METRIC)
        for rows in problems
        for base, lifted in _pairs(rows)
    ]
    if not gains:
        return []
    helped = sum(gain > 0 for gain in gains)
    many = (
        "everywhere" if helped == len(gains) else "nowhere" if not helped else f"in {helped} of {len(gains)}"
    )
    return [
        f"  What a shared model under the clusters adds depends on what the groups share; here it helped {many}. "
        f"Its paper, readings and what was measured: {program()} list cam"
    ]


def next_steps() -> str:
    """What to try after the demonstration."""
    steps = [
        ("--config comparison rounds=50 sweep.seeds=5", "more rounds and seeds"),
        ("list", "what there is"),
        ("--dry-run --config thesis-7.6 --small", "a paper's table, small"),
    ]
    width = max(len(step) for step, _ in steps)
    lines = [f"  {program()} {step.ljust(width)}   {about}" for step, about in steps]
    return "\n".join(["What to try next:", *lines])


# The offer --------------------------------------------------------------------------------------------------


def offer_to_open(address: str) -> None:
    """Ask whether to open the report, where somebody can answer and a browser can show it; never wait for long."""
    if not _somebody_is_there():
        return
    import webbrowser

    try:
        browser = webbrowser.get()
    except webbrowser.Error:
        return
    print(f"Open it in a browser? y and Enter within {SECONDS} s: ", end="", flush=True)
    answered, _, _ = select.select([sys.stdin], [], [], SECONDS)
    answer = sys.stdin.readline() if answered else ""
    if not answered:
        print()
    if answer.strip().lower() in ("y", "yes"):
        browser.open(address)


def _somebody_is_there() -> bool:
    """A terminal on both sides, a screen, and no automation that says so."""
    if os.name != "posix" or any(os.environ.get(name) for name in ("CI", "SSH_CONNECTION")):
        return False
    if not (sys.stdin and sys.stdin.isatty() and sys.stdout.isatty()):
        return False
    return sys.platform == "darwin" or any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))
