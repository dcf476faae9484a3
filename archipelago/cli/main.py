"""The front door: `python -m platform.launch`. The only reader of the command line.

Heavy imports (torch, Ray, Lightning) stand inside the commands that need them, so that help and mistakes are
answered at once. Nothing imports this module, and nothing defined here is sent to a Ray worker: there, the
name `platform` may be the standard module's.
"""

from __future__ import annotations

import functools
import json
import os
import shlex
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from archipelago.core.errors import UserError
from archipelago.core.packaged import TUNE_CONFIGS
from archipelago.core.registry import nearest

if TYPE_CHECKING:
    from archipelago.experiments.config import Leaf
    from archipelago.reports.build import Report
    from archipelago.runs.storage import Mirror
    from archipelago.sweeps.config import Sweep

DEMONSTRATION = TUNE_CONFIGS / "comparison.yaml"
DOOR = "python -m platform.launch"
KINDS = ("methods", "data", "partitions", "models", "settings")

HELP = """\
Archipelago: experiments in clustered federated learning, on Ray actors and Lightning modules.

Usage
  python -m platform.launch                                        the demonstration, ends in a table
  python -m platform.launch [--config FILE] [setting=value ...]    run one experiment
  python -m platform.launch list [KIND]                            what there is to choose from; KIND is
                                                                   methods, data, partitions, models, settings
  python -m platform.launch [--dry-run] --config SWEEP [--small]   run a sweep; dry: say what it would run
  python -m platform.launch partition [setting=value ...]          divide the data only, and draw it
  python -m platform.launch resume RUN                             go on with a run or sweep that was stopped
  python -m platform.launch report RUN ... [option=value ...]      tables, figures and one HTML file of runs
                                                                   and sweeps; options are out=FOLDER,
                                                                   table=3.1 (published), test=t or wilcoxon,
                                                                   against=METHOD, metrics=NAME,NAME,
                                                                   figures=no, yes or all (of more than 80
                                                                   figures, `yes` draws those of one run)
  python -m platform.launch choose-clusters [setting=value ...]    try several numbers of clusters
  python -m platform.launch data list [data.root=FOLDER]           which data sets are here
  python -m platform.launch data fetch NAME [data.root=FOLDER]     download one
  python -m platform.launch doctor                                 what this machine or cluster has

Examples
  FedAvg on scikit-learn's digits, split over 20 clients, 10 rounds:
    python -m platform.launch method=fedavg data=digits clients=20 rounds=10
  IFCA with 4 cluster models, on digits rotated in 4 groups of clients:
    python -m platform.launch method=ifca clusters=4 data=digits data.rotations=4
  FedProx on skewed labels, half of the clients in each round:
    python -m platform.launch method=fedprox fedprox.mu=0.1 partition=dirichlet participation.fraction=0.5
  An experiment from a file, with another seed and its results elsewhere:
    python -m platform.launch --config tune_configs/demo.yaml seed=1 storage=~/archipelago-runs
  What a partition looks like, before anything is trained on it:
    python -m platform.launch partition clients=100 partition=cluster_dirichlet partition.groups=10
  Your own images, from one .npz file:
    python -m platform.launch method=ifca data=npz data.root=~/images.npz
  Without Ray, all in this process (the same numbers):
    python -m platform.launch method=ifca fleet.backend=in_process rounds=5
  One actor for each client, four of them on one GPU:
    python -m platform.launch method=ifca fleet.clients_per_actor=1 fleet.gpus=0.25
  On a Ray cluster (give storage: a job's own folder is deleted):
    ray job submit --working-dir . -- python -m platform.launch method=ifca storage=~/archipelago-runs

Settings
  A setting is one dotted name, as in local.lr=0.1; `list settings` shows all, with defaults and ranges.
  data=NAME, partition=NAME and model=NAME are short for data.name=NAME and so on. A file holds the same
  names as YAML. What is given on the command line wins over the file.

Exit codes: 0 done, 1 failed (resume goes on), 2 a mistake in what was asked for, 130 stopped by Ctrl-C,
143 by `ray job stop` or another SIGTERM (resume goes on after both).
"""

NEXT = """\
What to try next:
  python -m platform.launch --config tune_configs/comparison.yaml rounds=50 sweep.seeds=5   more rounds and seeds
  python -m platform.launch list                                                            what there is
  python -m platform.launch --dry-run --config tune_configs/thesis-7.6.yaml --small         a paper's table, small"""


@dataclass
class Request:
    """What the command line asks for."""

    command: str = "run"
    file: Path | None = None
    overrides: list[str] = field(default_factory=list)
    argument: str | None = None
    dry: bool = False  # say what would be run, and run nothing
    small: bool = False  # the small variant of the file
    words: list[str] = field(default_factory=list)  # of report: directories, options; of data fetch: names
    typed: list[str] = field(default_factory=list)  # the command line as it was given


def parse(arguments: Sequence[str]) -> Request:
    """Read the command line; a word that means nothing is answered with a sentence."""
    if any(word in ("--help", "-h", "help") for word in arguments):
        return Request("help")
    if arguments and arguments[0] == "data":
        return _parse_data(arguments[1:])
    if arguments and arguments[0] in ("list", "resume", "doctor"):
        return _parse_command(arguments[0], arguments[1:])
    if arguments and arguments[0] == "report":
        return Request("report", words=list(arguments[1:]))
    request = Request()
    if arguments and arguments[0] in ("choose-clusters", "partition"):
        request.command, arguments = arguments[0], arguments[1:]
    words = iter(arguments)
    for position, word in enumerate(words):
        option, equals, value = word.partition("=")
        if option == "--config":
            value = value if equals else next(words, "")
            if not value:
                raise UserError(
                    "Expected a file after --config, got nothing: as in --config tune_configs/demo.yaml."
                )
            if request.file is not None:
                raise UserError(
                    f"Expected --config once, got both '{request.file}' and '{value}': leave one out."
                )
            from archipelago.experiments.config_files import find_config

            request.file = find_config(value)
        elif word == "--dry-run":
            request.dry = True
        elif word == "--small":
            request.small = True
        elif word.startswith("-"):
            raise _unknown_option(word)
        elif equals:
            request.overrides.append(word)
        else:
            raise _unknown_word(word, first=position == 0)
    if not arguments:
        request.file = DEMONSTRATION
    if request.small and request.file is None:
        raise UserError("Expected --config FILE beside --small, got none: as in --config thesis-7.6 --small.")
    return request


def _parse_command(command: str, rest: Sequence[str]) -> Request:
    limit, usage = {
        "list": (1, f"list [{'|'.join(KINDS)}]"),
        "resume": (1, "resume RUN"),
        "doctor": (0, "doctor"),
    }[command]
    if len(rest) > limit:
        raise UserError(f"Expected `{DOOR} {usage}`, got '{rest[limit]}' too: leave it out.")
    if command == "resume" and not rest:
        raise UserError(
            f"Expected a run directory after resume, got nothing: as in `{DOOR} resume runs/NAME`."
        )
    if command == "list" and rest and rest[0] not in KINDS:
        raise UserError(f"Unknown kind '{rest[0]}' to list. {nearest(rest[0], KINDS)}")
    return Request(command, argument=rest[0] if rest else None)


def _parse_data(rest: Sequence[str]) -> Request:
    """`data list` and `data fetch NAME ...`, with settings of the section `data`."""
    overrides = [word for word in rest if "=" in word]
    words = [word for word in rest if "=" not in word]
    action = words[0] if words else ""
    if action not in ("list", "fetch"):
        raise UserError(f"Expected `{DOOR} data list` or `{DOOR} data fetch NAME`, got 'data {action}'.")
    if (action == "fetch") != (len(words) > 1):
        given = f"'{words[1]}' too: leave it out" if action == "list" else "no name: `data list` shows them"
        raise UserError(
            f"Expected `{DOOR} data {action}{' NAME' if action == 'fetch' else ''}`, got {given}."
        )
    foreign = next((word for word in overrides if not word.startswith("data.")), None)
    if foreign is not None:
        raise UserError(f"Expected settings of `data` only, as in data.root=FOLDER, got '{foreign}'.")
    return Request("data", argument=action, overrides=overrides, words=words[1:])


def _unknown_option(word: str) -> UserError:
    name = word.lstrip("-").partition("=")[0]
    close = nearest(name, ["config", "dry-run", "small", "help"])
    if "Did you mean" in close:
        return UserError(
            f"Unknown option '{word}'. Did you mean '--{close.split(chr(39))[1]}'? `--help` shows all."
        )
    return UserError(
        f"Unknown option '{word}': settings are written without dashes, as in {name or 'rounds'}=VALUE."
    )


def _unknown_word(word: str, first: bool) -> UserError:
    from archipelago.core.settings import ExperimentSettings
    from archipelago.experiments.config import leaves

    if word.endswith((".yaml", ".yml")):
        return UserError(f"Expected setting=value, got the file '{word}': write --config {word}.")
    if (Path(word) / "config.yaml").is_file():
        return UserError(f"Expected setting=value, got the run directory '{word}': write resume {word}.")
    if not first or word in leaves(ExperimentSettings) or word in ("data", "partition", "model"):
        return UserError(f"Expected setting=value, got '{word}': write it as in rounds=10.")
    known = [name for name in COMMANDS if name not in ("run", "help")]
    return UserError(f"Unknown command '{word}'. {nearest(word, [*known, '--help'])}")


# Commands -------------------------------------------------------------------------------------------------


def run(request: Request) -> None:
    """Run one experiment to its end and show its table."""
    from archipelago.experiments.config import load_config
    from archipelago.sweeps.config import load_sweep

    sweep = load_sweep(request.file, request.overrides, small=request.small)
    if sweep is not None:
        _run_sweep(sweep, request)
        return
    if request.dry:
        raise UserError(
            "Expected a sweep beside --dry-run, got one experiment: leave it out, or add sweep.seeds=3."
        )
    config = load_config(request.file, request.overrides, small=request.small)
    from archipelago.experiments.plan import run_address
    from archipelago.experiments.runner import run_experiment
    from archipelago.runs.storage import writable

    address = run_address(config)
    with _resumable(address), writable(address) as (path, mirror):
        run_experiment(config, path, command=_typed(request), **_following(mirror))
        _send(mirror)
        _show_results(path, address)


def _following(mirror: Mirror | None) -> dict[str, Any]:
    """After every round, an object store gets what a new checkpoint stands on."""
    return {} if mirror is None else {"mirror": mirror}


def _send(mirror: Mirror | None) -> None:
    """Whoever lost the right to write at an address must not get as far as its report."""
    if mirror is not None:
        mirror.push()


def _typed(request: Request) -> str:
    return f"{DOOR} {shlex.join(request.typed)}".strip()


def _run_sweep(sweep: Sweep, request: Request) -> None:
    """Run all trials of a sweep and show their table; or, dry, only say what would be run."""
    from archipelago.sweeps.directory import sweep_address

    if sweep.settings.table:
        from archipelago.reports.published import find_table

        find_table(sweep.settings.table)  # or its report would be refused after hours
    if request.dry:
        from archipelago.sweeps.dry_run import describe

        for title, rows in describe(sweep):
            _print_table(title, rows)
        return
    from archipelago.sweeps.runner import run_sweep

    address = sweep_address(sweep)
    with _resumable(address):
        run_sweep(sweep, address, command=_typed(request))
    _show_sweep(address, demonstration=request.file == DEMONSTRATION)


def show_partition(request: Request) -> None:
    """Divide the data among the clients, say what came out, and draw it."""
    from archipelago.experiments.config import load_config

    config = load_config(request.file, request.overrides, small=request.small)
    from archipelago.experiments.partition_preview import held_out_clients, partition_address, write_partition
    from archipelago.runs.storage import join, writable

    address = partition_address(config)
    with writable(address) as (path, _):
        write_partition(config, path)
        from archipelago.reports.drawing_federation import draw_federation
        from archipelago.reports.federation import describe

        rows = [*describe(path), *held_out_clients(config)]
        _print_table(f"Partition {config.partition.name}, seed {config.seed}", rows)
        drawn = [join(address, file.relative_to(path).as_posix()) for file in draw_federation(path)]
    print(f"Figures: {', '.join(drawn)}")
    print(f"Tables and indices: {address}")


def resume(request: Request) -> None:
    """Go on with a run or a sweep from its last checkpoints and show its table."""
    from archipelago.experiments.runner import resume as go_on
    from archipelago.runs.storage import writable
    from archipelago.sweeps.directory import is_sweep
    from archipelago.sweeps.runner import resume_sweep

    address = str(request.argument)
    if is_sweep(address):
        with _resumable(address):
            resume_sweep(address)
        _show_sweep(address)
        return
    with _resumable(address), writable(address) as (path, mirror):
        go_on(path, **_following(mirror))
        _send(mirror)
        _show_results(path, address)


def choose(request: Request) -> None:
    """Try several numbers of clusters by FeSEM's recipe and say which one fits best."""
    from archipelago.experiments.config import load_config

    config = load_config(request.file, [*request.overrides, "clusters=auto"], small=request.small)
    from archipelago.experiments.choose_clusters import Trial, choose_clusters

    def show(trial: Trial) -> None:
        print(
            f"clusters={trial.clusters:<3} validation loss {trial.loss:.4f}  score {trial.score:.4f}",
            flush=True,
        )

    choice = choose_clusters(config, on_trial=show)
    print(choice.sentence)
    print(f"Use it: {DOOR} {shlex.join(request.overrides)} clusters={choice.clusters}")


def _show_results(path: Path, address: str) -> None:
    from archipelago.reports.summary import print_table

    print_table(path)
    print(f"Report: {_report(path, address)[1]}{_drawn(address)}")
    print(f"Results: {address} (summary.md tells what is in it)")


def _report(folder: Path, address: str) -> tuple[Report, str]:
    """The report of a run or a sweep whose files are in `folder`, kept with it where it is stored; and where.

    Without PNG and SVG files, which take longest: the command `report` makes them at any time.
    """
    from archipelago.reports.build import ReportRequest, build_report
    from archipelago.runs.storage import join

    built = build_report(ReportRequest([str(folder)], figures="no"), method_labels)
    return built, _kept(built, join(address, "report"))


def method_labels() -> dict[str, str]:
    """What the platform's methods are called, for reports of runs from before runs wrote it down."""
    import archipelago.strategies  # noqa: F401  (registers them)
    from archipelago.core.vocabulary import registered_labels

    return registered_labels()


def _drawn(address: str) -> str:
    return f" (its figures as PNG and SVG: {DOOR} report {shlex.quote(address)})"


def _kept(built: Report, folder: str) -> str:
    """Where the page of a report is that belongs into `folder`: sent there if that is in an object store."""
    from archipelago.runs.storage import Mirror, is_address, join

    if built.warning:
        print(built.warning, file=sys.stderr)
    if not is_address(folder):
        return str(built.folder / "report.html")
    Mirror(built.folder, folder).push()
    return join(folder, "report.html")


def _show_sweep(address: str, demonstration: bool = False) -> None:
    """The table of a sweep, why trials failed, where the report is and what to do next."""
    from archipelago.reports.table_text import print_tables
    from archipelago.runs.storage import reading
    from archipelago.sweeps.directory import read_rows

    with reading(address) as folder:
        built, page = _report(folder, address)
    print_tables(built.tables, sys.stdout)
    rows = read_rows(address)
    for row in rows:
        if row.status == "failed":
            print(f"Failed: {row.trial}: {row.reason}")
    print(f"Report: {page}{_drawn(address)}")
    print(f"Results: {address}")
    if rows and all(row.status == "failed" for row in rows):
        every = "its only trial" if len(rows) == 1 else f"all {len(rows)} trials"
        raise _Stopped(1, f"Failed: {every}, each for the reason above. {_way_on(address)}")
    if demonstration:
        print(NEXT)


def report(request: Request) -> None:
    """Tables, figures and one HTML file of runs and sweeps."""
    from archipelago.reports.build import ReportRequest, build_report
    from archipelago.reports.table_text import print_tables
    from archipelago.runs.storage import is_address, join, reading, scratch

    addresses = [word for word in request.words if is_address(word) and "=" not in word.partition("://")[0]]
    with ExitStack() as stack:
        words = [
            str(stack.enter_context(reading(word))) if word in addresses else word for word in request.words
        ]
        asked = ReportRequest.parse(words)
        into = asked.out
        if is_address(into):
            asked.out = str(stack.enter_context(scratch(into)))
        elif addresses and len(asked.paths) == 1 and not into:
            into = join(addresses[0], "report")
        built = build_report(asked, method_labels)
        page = _kept(built, into)
    print_tables(built.tables, sys.stdout)
    print(f"Report: {page} (beside it: tables, and figures/ for papers)")


class _Stopped(Exception):
    """A run that came to no end, and the exit code that says so; the message is the last line printed."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


@contextmanager
def _resumable(address: str) -> Iterator[None]:
    """Whatever stops the run or sweep at `address`, say how to go on with it."""
    from archipelago.runs.lease import LeaseLost

    try:
        yield
    except UserError:
        raise
    except LeaseLost as error:
        raise _Stopped(1, f"Failed: {error} Once that one is done or gone: {_way_on(address)}") from error
    except KeyboardInterrupt as stop:
        raise _Stopped(130, f"Stopped. {_way_on(address)}") from stop
    except SystemExit as stop:  # what actors/cluster.py turns SIGTERM (`ray job stop`) into
        raise _Stopped(143, f"Ended from outside. {_way_on(address)}") from stop
    except Exception as error:
        if isinstance(getattr(error, "cause", None), UserError):  # a mistake that only an actor could see
            raise error.cause from error  # type: ignore[attr-defined]  # RayTaskError's, seen the line before
        traceback.print_exc()
        raise _Stopped(1, f"Failed: {type(error).__name__}. {_way_on(address)}") from error


def _way_on(address: str) -> str:
    from archipelago.runs.directory import is_run
    from archipelago.runs.storage import is_address, join, read_text
    from archipelago.sweeps.directory import is_sweep

    swept = is_sweep(address)
    known = (
        read_text(join(address, "status.json")) is not None if is_address(address) else is_run(Path(address))
    )
    if not swept and not known:
        return "Nothing was written."
    if not swept and json.loads(read_text(join(address, "status.json")) or "{}").get("state") == "finished":
        return f"The run is finished, in {address}; its report: {DOOR} report {shlex.quote(address)}"
    return (
        f"The {'sweep' if swept else 'run'} is in {address}; go on with: {DOOR} resume {shlex.quote(address)}"
    )


def show_list(request: Request) -> None:
    """Print what there is to choose from, one line each."""
    for kind in [request.argument] if request.argument else KINDS[:-1]:
        for title, rows in _listing(str(kind)):
            _print_table(title, rows)
    if request.argument is None:
        print(f"Every setting, with its default and its range: {DOOR} list settings")


def _listing(kind: str) -> Iterable[tuple[str, list[tuple[str, ...]]]]:
    from archipelago.experiments.config import full_schema

    if kind == "methods":
        from archipelago.strategies import ADDONS, AGGREGATION, CLUSTERING, METHODS

        yield "Methods (method=NAME)", [(entry.name, entry.about) for entry in METHODS.values()]
        if ADDONS:
            yield "Add-ons (method=BASE+NAME)", [(entry.name, entry.about) for entry in ADDONS.values()]
        yield (
            "Aggregation rules (aggregation=NAME)",
            [(each.name, each.about) for each in AGGREGATION.values()],
        )
        yield (
            "Clustering rules (METHOD.clustering=NAME)",
            [(each.name, each.about) for each in CLUSTERING.values()],
        )
    elif kind == "data":
        from archipelago.data import DATASETS

        yield "Data sets (data=NAME)", [(entry.name, entry.about) for entry in DATASETS.values()]
    elif kind == "partitions":
        from archipelago.data import PARTITIONS

        yield "Partitions (partition=NAME)", [(entry.name, entry.about) for entry in PARTITIONS.values()]
    elif kind == "models":
        import archipelago.core.torchvision_operators  # noqa: F401  (before the first lightning import)
        from lightning_modules.networks import NETWORKS

        yield "Models (model=NAME)", [(entry.name, entry.about) for entry in NETWORKS.values()]
    else:
        yield "Settings (setting=value), with their defaults", _setting_rows(full_schema())
        from archipelago.core.schema import composed
        from archipelago.core.settings import SweepSection
        from archipelago.sweeps.axes import AXES, OTHERS

        axes = {name: about for name, (_, about) in AXES.items()} | OTHERS
        yield (
            "Sweeps: what varies (sweep.NAME=[...], or the section sweep: of a file)",
            [(f"sweep.{name}", about) for name, about in axes.items()],
        )
        yield "Sweeps: how trials are chosen and run", _setting_rows(composed(SweepSection))


def _setting_rows(schema: type) -> list[tuple[str, ...]]:
    from archipelago.experiments.config import leaves, quote

    return [
        (leaf.key, quote(leaf.default), leaf.about + (f" [{_allowed(leaf)}]" if leaf.range else ""))
        for leaf in leaves(schema).values()
    ]


def data(request: Request) -> None:
    """List the data sets with where they are, or fetch some."""
    from archipelago.data.catalogue import fetch_dataset, listing
    from archipelago.experiments.config import load_config

    settings = load_config(None, request.overrides).data
    if request.argument == "list":
        _print_table(f"Data sets (data.root={settings.root})", [*listing(settings)])
        return
    for name in request.words:
        print(fetch_dataset(name, settings))


def _allowed(leaf: Leaf) -> str:
    return " | ".join(leaf.metadata["choices"]) if "choices" in leaf.metadata else leaf.range


def _print_table(title: str, rows: Sequence[tuple[str, ...]]) -> None:
    """A table on a terminal; aligned plain lines, never cut, anywhere else."""
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.table import Table

        table = Table(title=title, title_justify="left", title_style="bold", show_header=False, box=None)
        for column in range(len(rows[0])):
            table.add_column(style="cyan" if column == 0 else None, overflow="fold", no_wrap=column == 0)
        for row in rows:
            table.add_row(*(_escape(cell) for cell in row))
        Console().print(table, "")
        return
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    print(title)
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        print("  " + "  ".join([*cells, row[-1]]))
    print()


def _escape(cell: str) -> str:
    from rich.markup import escape

    return escape(cell)


# doctor ---------------------------------------------------------------------------------------------------


def doctor(request: Request) -> None:
    """Say what this machine or cluster has, and what a run would use; whatever is missing is only said."""
    ray = _RayProbe(os.environ)  # asks in the background while torch is imported
    try:
        _print_table("This machine", _machine())
        _print_table("Packages", _packages())
        _print_table("Data sets", _data_sets())
        _print_table("Ray", ray.rows())
        _print_table("What a run with the default settings would use", _plan(ray))
    finally:
        ray.close()


def _machine() -> list[tuple[str, ...]]:
    import psutil

    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = psutil.virtual_memory()
    rows: list[tuple[str, ...]] = [
        ("CPUs", f"{usable} usable of {os.cpu_count()}"),
        ("memory", f"{memory.available / 2**30:.1f} GB free of {memory.total / 2**30:.1f} GB"),
    ]
    try:
        import torch

        devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    except (ImportError, RuntimeError) as error:  # a driver that does not fit is worth reading, not a crash
        return [*rows, ("GPUs", f"not readable: {error}")]
    rows += [
        (f"GPU {i}", f"{each.name}, {each.total_memory / 2**30:.1f} GB") for i, each in enumerate(devices)
    ]
    return rows if devices else [*rows, ("GPUs", "none")]


def _packages() -> list[tuple[str, ...]]:
    from importlib import metadata

    rows: list[tuple[str, ...]] = [("python", sys.version.split()[0])]
    for name in ("archipelago-fl", "ray", "lightning", "torch", "torchvision", "torchmetrics", "medmnist",
                 "scikit-learn", "omegaconf", "numpy"):  # fmt: skip
        try:
            rows.append((name, metadata.version(name)))
        except metadata.PackageNotFoundError:
            rows.append((name, "not installed"))
    return rows


def _data_sets() -> list[tuple[str, ...]]:
    """Those that are here, then the names of the others."""
    from archipelago.core.settings import DataSettings
    from archipelago.data.catalogue import listing

    settings = DataSettings()
    rows = listing(settings, sizes=False)
    here: list[tuple[str, ...]] = [(name, where) for name, state, _, where in rows if state == "present"]
    absent = [name for name, state, *_ in rows if state == "missing"]
    return [*here, ("not here", f"{', '.join(absent)} (data.root={settings.root}; `data list` says more)")]


class _RayProbe:
    """Asks the Ray cluster that a run would join, in another process: if it hangs, nothing else does."""

    _CODE = (
        "import json, ray, sys; ray.init(address=sys.argv[1], log_to_driver=False, logging_level='ERROR');"
        "print(json.dumps([node['Resources'] for node in ray.nodes() if node['Alive']]))"
    )
    _SECONDS = 30.0  # importing Ray and joining a cluster takes a busy machine that long; a dead port answers at once

    def __init__(self, env: Mapping[str, str]) -> None:
        self.env = env
        self.address = env.get("RAY_ADDRESS") or "local"
        self.problem = ""
        self.deadline = time.monotonic() + self._SECONDS
        self.process: subprocess.Popen[str] | None = None
        if self.address == "local":
            return
        self.problem = _knock(self.address)
        if not self.problem:
            self.process = subprocess.Popen(
                [sys.executable, "-c", self._CODE, self.address],
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )  # fmt: skip

    @functools.cached_property
    def nodes(self) -> list[dict[str, float]] | None:
        """The resources of each node of the cluster; None if there is none or it did not answer."""
        if self.process is None:
            return None
        try:
            output, errors = self.process.communicate(timeout=max(self.deadline - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            self.close()
            self.problem = f"no answer in {self._SECONDS:g} s"
            return None
        if self.process.returncode != 0:
            lines = [line for line in errors.splitlines() if line.strip()]
            self.problem = lines[-1].strip() if lines else f"exit code {self.process.returncode}"
            return None
        nodes: list[dict[str, float]] = json.loads(output.splitlines()[-1])
        return nodes

    def close(self) -> None:
        """End the asking process if it still runs."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.communicate()

    def rows(self) -> list[tuple[str, ...]]:
        """What to print about Ray."""
        token = _token_place(self.env)
        alone = "none (RAY_ADDRESS is not set): a run starts Ray on this machine"
        rows: list[tuple[str, ...]] = [
            ("address", alone if self.address == "local" else self.address),
            ("token", f"set ({token})" if token else "none (a cluster may ask for one: RAY_AUTH_TOKEN)"),
        ]
        if self.address == "local":
            return rows
        nodes = self.nodes
        if nodes is None:
            return [*rows, ("reachable", f"no: {self.problem}")]
        cpus, gpus, memory = (sum(node.get(name, 0.0) for node in nodes) for name in ("CPU", "GPU", "memory"))
        held = f"{_count(len(nodes), 'node')}, {_count(cpus, 'CPU')}, {_count(gpus, 'GPU')}"
        return [*rows, ("reachable", f"yes: {held}, {memory / 2**30:.1f} GB memory")]


def _knock(address: str) -> str:
    """Why nothing answers at host:port, empty if something does (or if the address is no such pair)."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        return ""
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=1.0).close()
    except (OSError, OverflowError) as error:
        return str(error)
    return ""


def _token_place(env: Mapping[str, str]) -> str:
    """Where Ray would find its token, empty if nowhere; never the token itself."""
    if env.get("RAY_AUTH_TOKEN"):
        return "RAY_AUTH_TOKEN"
    if env.get("RAY_AUTH_TOKEN_PATH"):
        return "RAY_AUTH_TOKEN_PATH" if Path(env["RAY_AUTH_TOKEN_PATH"]).expanduser().is_file() else ""
    return "~/.ray/auth_token" if Path("~/.ray/auth_token").expanduser().is_file() else ""


def _plan(ray: _RayProbe) -> list[tuple[str, ...]]:
    """The answers that a run would find for itself."""
    from actors.placement import actor_count
    from archipelago.experiments.config import check, full_schema, gpu_count

    config = full_schema()()
    fleet = config.fleet
    here = {"CPU": float(os.cpu_count() or 1), "GPU": float(gpu_count())}
    try:
        if ray.address != "local" and ray.nodes is None:
            raise UserError(
                "unknown, because the Ray cluster does not answer: unset RAY_ADDRESS to run here."
            )
        actors = actor_count(fleet, config.clients, ray.nodes or [here])
        share = f"{_count(fleet.cpus, 'CPU')}" + (f" and {_count(fleet.gpus, 'GPU')}" if fleet.gpus else "")
        placement = (
            f"{_count(actors, 'client actor')} of {share} each, for {_count(config.clients, 'client')}"
        )
    except UserError as error:
        placement = str(error)
    executor = config.local.engine
    if executor == "auto":
        executor = "vmap (GPU)" if fleet.gpus else "loop (CPU)"
    try:
        check(config)
        storage = f"{Path(config.storage).expanduser().resolve()} (can be written)"
    except UserError as error:
        storage = str(error)
    return [
        ("experiment", f"{config.method} on {config.data.name}, {_count(config.rounds, 'round')}"),
        ("actors", placement),
        ("executor", executor),
        ("storage", storage),
    ]


def _count(number: float, name: str) -> str:
    return f"{number:g} {name}" + ("" if number == 1 else "s")


# The door -------------------------------------------------------------------------------------------------

COMMANDS: dict[str, Callable[[Request], None]] = {
    "run": run,
    "partition": show_partition,
    "resume": resume,
    "choose-clusters": choose,
    "report": report,
    "list": show_list,
    "data": data,
    "doctor": doctor,
    "help": lambda request: print(HELP, end=""),
}


def main(arguments: Sequence[str]) -> int:
    """Do what the command line asks for; returns the exit code (see the end of `HELP`)."""
    try:
        request = parse(arguments)
        request.typed = list(arguments)
        COMMANDS[request.command](request)
        sys.stdout.flush()
    except UserError as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return 2
    except _Stopped as stop:
        print(stop, file=sys.stderr)
        return stop.code
    except KeyboardInterrupt:
        print("Stopped. Nothing was written.", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `list | head` is no failure
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def command_line() -> None:
    """The installed command `archipelago`."""
    sys.exit(main(sys.argv[1:]))
