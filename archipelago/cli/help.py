"""The general help; a command's own is made by Typer from its function (`app.Command`)."""

from __future__ import annotations

from collections.abc import Sequence

from archipelago.cli.app import WIDTH, Described, wrapped

EXAMPLES = [
    ("FedAvg on scikit-learn's digits, split over 20 clients, 10 rounds",
     "{program} method=fedavg data=digits clients=20 rounds=10"),
    ("IFCA with 4 cluster models, on digits rotated in 4 groups of clients",
     "{program} method=ifca clusters=4 data=digits data.rotations=4"),
    ("FedProx on skewed labels, half of the clients in each round",
     "{program} method=fedprox fedprox.mu=0.1 partition=dirichlet participation.fraction=0.5"),
    ("An experiment from a file (or one that comes with the package), with another seed, stored elsewhere",
     "{program} --config demo seed=1 storage=~/archipelago-runs"),
    ("What a partition looks like, before anything is trained on it",
     "{program} partition clients=100 partition=cluster_dirichlet partition.groups=10"),
    ("Your own images, from one .npz file",
     "{program} method=ifca data=npz data.root=~/images.npz"),
    ("Without Ray, all in this process (the same numbers)",
     "{program} method=ifca fleet.backend=in_process rounds=5"),
    ("One actor for each client, four of them on one GPU",
     "{program} method=ifca fleet.clients_per_actor=1 fleet.gpus=0.25"),
    ("On a Ray cluster (give storage: a job's own folder is deleted)",
     "ray job submit --working-dir . -- {program} method=ifca storage=~/archipelago-runs"),
]  # fmt: skip

SETTINGS = """\
Settings
  A setting is one dotted name, as in local.lr=0.1; `list settings` shows all, with defaults and ranges.
  data=NAME, partition=NAME and model=NAME are short for data.name=NAME and so on. A file holds the same
  names as YAML. What is given on the command line wins over the file. zsh wants lists in quotes, as in
  'ensemble=[fedavg,ifca]'.

`list`, `doctor` and `report` take --json: one JSON document on standard output, for other programs.

Exit codes: 0 done, 1 failed (the last line says whether resume helps), 2 a mistake in what was asked for,
130 stopped by Ctrl-C, 143 by `ray job stop` or another SIGTERM (resume continues after both)."""

COMPLETION = ("--install-completion [SHELL]", "complete commands, settings and names in bash, zsh or fish")


def general_help(program: str, commands: Sequence[Described]) -> str:
    """What `--help` prints."""
    rows = [("", "the demonstration, ends in a table")]
    rows += [row for each in commands for row in each.in_general_help()]
    rows += [("COMMAND --help", "arguments, options and examples of one command"), COMPLETION]
    rows += [("--version", "the version of the package")]
    column = min(max(len(f"{program} {usage}") for usage, _ in rows), WIDTH - 44) + 4
    lines = ["Archipelago: experiments in clustered federated learning, on Ray actors and Lightning modules."]
    lines += ["", "Usage"]
    for usage, about in rows:
        lines += _row(f"{program} {usage}".rstrip(), about, column)
    lines += ["", "Examples"]
    for about, line in EXAMPLES:
        lines += [f"  {about}:", f"    {line.format(program=program)}"]
    return "\n".join([*lines, "", SETTINGS])


def _row(usage: str, about: str, column: int) -> list[str]:
    beside, *below = wrapped(about, WIDTH - 2 - column)
    first = [f"  {usage.ljust(column)}{beside}"]
    if len(usage) > column - 2:  # no space is left beside it
        first = [f"  {usage}", f"  {' ' * column}{beside}"]
    return [*first, *(f"  {' ' * column}{line}" for line in below)]
