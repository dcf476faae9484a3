"""The final metrics of one run: as numbers, as a printed table and as `summary.md`.

Reads the files of a run directory and nothing else, so a run of another machine or another year will do.
"""

from __future__ import annotations

import math
import os
import statistics
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TextIO

from archipelago.core.errors import UserError
from archipelago.core.files import write_whole
from archipelago.core.program import program
from archipelago.core.vocabulary import Vocabulary, of_run
from archipelago.reports.centres import centre_columns, centre_metrics
from archipelago.reports.health import concerns
from archipelago.runs.files import Row, RunFiles

_KINDS = {"micro": "weighted", "macro": "plain mean", "worst10": "worst 10%", "std": "std"}
_JUDGED = {
    "groups": "against the ground-truth groups",
    "distances": "by the distances they are made of",
    "labels": "by classes",
}
_SHOWN_EVENTS = 20


def final_metrics(path: str | Path) -> dict[str, Any]:
    """The figures to publish: the mean of the last evaluations, and the best round by validation.

    - `final`: every figure, averaged over the last `evaluation.last` evaluations; those of cluster models on
      ground-truth distributions by what the models are for (`archipelago/reports/centres.py`).
    - `evaluations`: the rounds of those evaluations.
    - `best_by_validation`: `round` and `figures` of the evaluation with the lowest size-weighted validation
      loss (the earliest of equals); None without a validation split. Never chosen on test data.
    - `cluster_sizes`: as the last round left them; None for a method without clusters.
    - `rounds_done`, `seconds_per_round` (the median; None before the first round).
    """
    return figures_of(RunFiles(Path(path)))


def write_summary(path: str | Path) -> Path:
    """Write `summary.md` into the run directory: what ran, the final table, what happened, what is where."""
    run = RunFiles(Path(path))
    target = run.path / "summary.md"
    write_whole(target, _markdown(run, figures_of(run)))
    return target


def print_table(path: str | Path, stream: TextIO | None = None) -> None:
    """Print the final table of a run: with colours and lines on a terminal, as plain text elsewhere."""
    stream = sys.stdout if stream is None else stream
    run = RunFiles(Path(path))
    figures = figures_of(run)
    words = of_run(run.path)
    blocks = _blocks(figures, words)
    facts = [*_facts(figures, words), *concerns(run)]
    if stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb"):
        from rich.console import Console
        from rich.table import Table

        console = Console(file=stream)
        for title, rows in blocks:
            table = Table(title=title, title_justify="left", title_style="bold")
            for name in ("", *_KINDS.values()):
                table.add_column(name, justify="left" if name == "" else "right")
            for row in rows:
                table.add_row(*row)
            console.print(table)
        for fact in facts:
            console.print(fact, markup=False, highlight=False)
        return
    for title, rows in blocks:
        lines = [["", *_KINDS.values()], *rows]
        widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
        print(title, file=stream)
        for line in lines:
            rest = (cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True))
            print("  ".join(["", line[0].ljust(widths[0]), *rest]).rstrip(), file=stream)
    for fact in facts:
        print(fact, file=stream)


# Figures ----------------------------------------------------------------------------------------------------


def figures_of(run: RunFiles) -> dict[str, Any]:
    """`final_metrics` of a run whose files are read already."""
    evaluations = [row for row in run.metrics if any(name.startswith("micro_") for name in row)]
    count = run.setting("evaluation.last")
    if not isinstance(count, int) or count < 1:
        raise UserError(
            f"{run.path / 'config.yaml'} is damaged: expected evaluation.last >= 1, got {count}.",
            code="damaged", file=run.path / "config.yaml",
        )  # fmt: skip
    last = evaluations[-count:]
    names = dict.fromkeys(name for row in last for name in row if name != "round")
    final = {name: mean for name in names if (mean := _mean(row.get(name) for row in last)) is not None}
    final |= centre_metrics(last, of_run(run.path))
    if last and "epsilon" in last[-1]:
        final["epsilon"] = last[-1]["epsilon"]  # of the whole run, and no mean
    sizes = [row["cluster_sizes"] for row in run.metrics if "cluster_sizes" in row]
    seconds = [row["total"] for row in run.timings if "total" in row]
    return {
        "evaluations": [row["round"] for row in last],
        "final": final,
        "best_by_validation": _best(evaluations),
        "cluster_sizes": sizes[-1] if sizes else None,
        "rounds_done": run.metrics[-1]["round"] if run.metrics else 0,
        "seconds_per_round": statistics.median(seconds) if seconds else None,
        "dropped_share": run.dropped_share,
    }


def _best(evaluations: Iterable[Row]) -> dict[str, Any] | None:
    key = "validation_micro_loss"
    candidates = [row for row in evaluations if math.isfinite(row.get(key, math.nan))]
    if not candidates:
        return None
    best = min(candidates, key=lambda row: float(row[key]))  # min keeps the earliest of equals
    figures = {name: value for name, value in best.items() if name != "round" and not isinstance(value, list)}
    return {"round": best["round"], "figures": figures}


def _mean(values: Iterable[Any]) -> float | None:
    known = [value for value in values if isinstance(value, int | float)]
    if not known:
        return None
    return math.fsum(known) / len(known) if all(map(math.isfinite, known)) else sum(known) / len(known)


# Words ------------------------------------------------------------------------------------------------------


def _blocks(figures: Mapping[str, Any], words: Vocabulary) -> list[tuple[str, list[list[str]]]]:
    """Titled tables: a row per metric, a column per way of summing up clients."""
    blocks = []
    rounds = figures["evaluations"]
    over = f"evaluation of round {rounds[0]}" if len(rounds) == 1 else f"mean of {len(rounds)} evaluations"
    if len(rounds) > 1:
        shown = ", ".join(map(str, rounds)) if len(rounds) <= 5 else f"{rounds[0]} to {rounds[-1]}"
        over += f" (rounds {shown})"
    for split, title in (("", "Test data"), ("train_", "Training data")):
        if rows := _table(figures["final"], split, words):
            blocks.append((f"{title}: {over}", rows))
    best = figures["best_by_validation"]
    if best and (rows := _table(best["figures"], "", words)):
        blocks.append((f"Test data at round {best['round']}, which has the lowest validation loss", rows))
    return blocks


def _table(figures: Mapping[str, Any], split: str, words: Vocabulary) -> list[list[str]]:
    return [
        [label, *(_number(figures.get(f"{split}{kind}_{metric}")) for kind in _KINDS)]
        for metric, label in words.summary().items()
        if f"{split}micro_{metric}" in figures
    ]


def _facts(figures: Mapping[str, Any], words: Vocabulary) -> list[str]:
    facts = []
    if figures["cluster_sizes"] is not None:
        text = f"Clusters: {', '.join(map(str, figures['cluster_sizes']))} clients"
        for needs, title in _JUDGED.items():
            specs = [spec for spec in words.shown("summary", over="clusters") if spec.needs == needs]
            judged = [
                f"{spec.label} {_number(figures['final'][spec.name])}"
                for spec in specs
                if spec.name in figures["final"]
            ]
            text += f"; {title}: {', '.join(judged)}" if judged else ""
        facts.append(text + ".")
    down, up = (figures["final"].get(f"cost_models_{way}") for way in ("down", "up"))
    if down is not None and up is not None:
        samples = [f"{figures['final'].get(f'cost_{kind}', 0):,.0f}" for kind in ("gradients", "forwards")]
        stored, work = (figures["final"].get(f"cost_{kind}") for kind in ("models_stored", "computation"))
        counted = stored is not None and work is not None
        multiples = f"storage {stored:.3g}, computation {work:.3g}, " if counted else ""
        facts.append(
            f"Cost per participant and round, FedAvg = 1: {multiples}models received {down:.3g} and delivered {up:.3g} "
            f"({samples[0]} samples trained on, {samples[1]} only evaluated)."
        )
    if "epsilon" in figures["final"]:
        facts.append(
            f"Client-level privacy: epsilon {figures['final']['epsilon']:.3g} at update.delta, of the models that "
            "clients sent (cluster choices and metrics are not covered)."
        )
    if figures["dropped_share"]:
        facts.append(
            f"{100 * figures['dropped_share']:.3g} % of the updates were not finite and were dropped."
        )
    seconds = figures["seconds_per_round"]
    if seconds is not None:
        done = figures["rounds_done"]
        rounds = "1 round" if done == 1 else f"{done} rounds"
        facts.append(f"Time: {seconds:.3g} s per round (median), {rounds}.")
    return facts


def computed_on(run: RunFiles) -> list[str]:
    """One sentence for each kind of device, engine, precision and determinism that the run had, in their order."""
    environment = run.environment
    parts = [environment, *environment.get("resumed", [])]
    found = [
        str(part["compute"].get("sentence", "")) for part in parts if isinstance(part.get("compute"), dict)
    ]
    return [f"Computed on {sentence}." for sentence in dict.fromkeys(found) if sentence]


def _number(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4f}" if not math.isfinite(value) or abs(value) < 1000 else f"{value:.4g}"


def _markdown(run: RunFiles, figures: Mapping[str, Any]) -> str:
    of = f" of {run.setting('rounds')}" if run.setting("rounds") else ""
    lines = [
        f"# {run.setting('method')} on {of_run(run.path).data_label(run.config)}",
        "",
        f"**{run.status.state.capitalize()}**, {figures['rounds_done']}{of} rounds.",
    ]
    if run.status.sentence:
        lines.append(f"{_line(run.status.sentence)}")
    lines += ["", _what(run, clustered=figures["cluster_sizes"] is not None), ""]
    weights = {"train": "training", "test": "test"}.get(str(run.setting("evaluation.weights")))
    words = of_run(run.path)
    for title, rows in _blocks(figures, words):
        header = ["", *_KINDS.values()]
        lines += [f"## {title}", "", f"| {' | '.join(header)} |", "|---|" + "---:|" * len(_KINDS)]
        lines += [f"| {' | '.join(row)} |" for row in rows]
        lines.append("")
    lines += _centres(run.metrics, words)
    if figures["evaluations"]:
        by = f" by {weights} samples" if weights else ""
        lines += [
            f"Over clients: *weighted*{by} (micro), *plain mean* (macro), mean of the *worst 10%*, *std* "
            "(ddof 0).",
            "",
        ]
    else:
        lines += ["No round was evaluated yet.", ""]
    lines += [f"- {fact}" for fact in [*_facts(figures, words), *concerns(run), *computed_on(run)]]
    if run.identity:
        lines.append(f"- Identity {run.identity} (settings, partition and format: `identity.json`).")
    lines += ["", "## What happened", ""]
    shown = run.events[-_SHOWN_EVENTS:]
    if len(shown) < len(run.events):
        lines.append(f"- ({len(run.events) - len(shown)} earlier events are in `events.jsonl`)")
    lines += [f"- round {event['round']}: {_line(event['text'])}" for event in shown]
    if not shown:
        lines.append("Nothing out of the ordinary.")
    lines += ["", "## What is here", "", *_files(run.path), "", "## Continue", ""]
    if run.status.state != "finished":
        lines.append(f"Resume: `{program()} resume {run.path}`")
        lines.append("")
    lines.append(f'Open it in Python: `import archipelago; run = archipelago.open_run("{run.path}")`')
    return "\n".join(lines) + "\n"


def _centres(metrics: list[Row], words: Vocabulary) -> list[str]:
    """Every cluster model on held-out samples of every ground-truth distribution, at the last evaluation; best bold."""
    for name, spec in centre_columns((name for row in metrics for name in row), words).items():
        measured = [row for row in metrics if name in row]
        best = max if spec.better == "higher" else min
        matrix = measured[-1][name]
        header = ["distribution", *(f"model {k}" for k in range(len(matrix[0])))]
        lines = [
            "## Cluster models on every ground-truth distribution",
            "",
            f"Each model's {spec.label} on held-out samples, round {measured[-1]['round']}:",
            "",
            f"| {' | '.join(header)} |",
            "|---|" + "---:|" * len(matrix[0]),
        ]
        for number, row in enumerate(matrix):
            cells = [f"**{_number(value)}**" if value == best(row) else _number(value) for value in row]
            lines.append(f"| {' | '.join([str(number), *cells])} |")
        return [*lines, ""]
    return []


def _what(run: RunFiles, *, clustered: bool) -> str:
    """One sentence from the config."""
    labels = {
        "clients": "{} clients",
        "clusters": "K = {}",
        "partition.name": "partition {}",
        "model.name": "model {}",
        "local.steps": "{} local steps",
        "local.epochs": "{} local epochs",
        "local.batch": "batch {}",
        "local.lr": "lr {}",
        "participation.fraction": "participation {}",
        "seed": "seed {}",
    }
    if run.setting("local.epochs") is not None:
        del labels["local.steps"]
    if not clustered:
        del labels["clusters"]
    values = ((label, run.setting(key)) for key, label in labels.items())
    return ", ".join(label.format(value) for label, value in values if value is not None) + "."


_ABOUT = {
    "config.yaml": "the resolved config",
    "environment.json": "versions, processor, devices, commit, command",
    "metrics.csv": "one row a round",
    "clients.parquet": "per round and client",
    "assignments.parquet": "cluster of every client in every round",
    "timings.csv": "seconds by round and stage",
    "events.jsonl": "what happened, by round",
    "partition.safetensors": "which client holds which samples",
    "federation": "the federation as tables: clients, what they hold, facts",
    "models": "final models as safetensors, with their spec",
    "records": "tables that figures are drawn from",
    "checkpoints": "what a resume starts from",
}


def _files(path: Path) -> list[str]:
    def is_there(name: str) -> bool:
        entry = path / name
        return any(entry.iterdir()) if entry.is_dir() else entry.exists()

    return [f"- `{name}`: {about}" for name, about in _ABOUT.items() if is_there(name)]


def _line(text: Any) -> str:
    return " ".join(str(text).split())
