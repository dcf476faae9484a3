"""Tables of the published results: which files repeat which tables, and how many numbers are known of each."""

from __future__ import annotations

import csv
from collections import Counter

from archipelago.core.citations import CITATIONS
from archipelago.core.packaged import TUNE_CONFIGS, first_comment
from archipelago.experiments.config_files import config_names
from archipelago.reports import published
from docs.hooks.entries import cell


def config_table() -> str:
    """The files that come with the package, with the sentence each begins with."""
    lines = ["| `--config` | |", "|---|---|"]
    lines += [f"| `{name}` | {cell(first_comment(name))} |" for name in config_names()]
    return "\n".join(lines)


def published_table() -> str:
    """Works and tables whose numbers are known, and the file that runs them."""
    path = published.__file__.replace("published.py", "published_results.csv")
    with open(path, encoding="utf-8", newline="") as file:  # noqa: PTH123
        rows = list(csv.DictReader(file))
    counts = Counter((row["source"], row["table"]) for row in rows)
    named = {name: (TUNE_CONFIGS / f"{name}.yaml").read_text(encoding="utf-8") for name in config_names()}
    lines = ["| work | table | numbers | `--config` |", "|---|---|---:|---|"]
    for (source, table), count in counts.items():
        files = [name for name, text in named.items() if f"{source}:{table}" in text]
        work = CITATIONS[source]
        shown = f"{work.authors[0].split()[-1]}{' et al.' if len(work.authors) > 1 else ''} {work.year}"
        lines.append(f"| {shown} | {table} | {count} | {', '.join(f'`{name}`' for name in files)} |")
    return "\n".join(lines)
