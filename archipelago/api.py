"""Experiments from Python: `ar.run(...)` and `ar.sweep(...)`, and what they leave behind as objects.

    import archipelago as ar

    run = ar.run(method="ifca+cam", clusters=4, data="digits", rounds=20, local={"lr": 0.05})
    run.metrics; run.clients; run.models; run.report(); run.figure("cluster_sizes")

    sweep = ar.sweep(methods=["fedavg", "ifca"], seeds=3, data="digits")
    sweep.table(); sweep.report()

Keyword arguments have the names of the settings (`archipelago list settings`); a section is a dictionary. Wherever
something is chosen, a name, an import path and a class are accepted alike. A mistake is a `UserError` with the
sentence that the command line prints. Objects read run directories when they are asked: there is no second truth.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from archipelago.core.errors import UserError
from archipelago.core.plugins import import_path, is_ours, load_built_in
from archipelago.core.registry import REGISTRIES
from archipelago.runs import reader
from archipelago.runs.storage import local_copy, writable
from archipelago.runs.sweeps import check_is_sweep, is_sweep, read_rows

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from archipelago.experiments.callbacks import Callback
    from archipelago.reports.build import Report

AXES = ("methods", "partitions", "grid", "cases", "sample", "seeds")  # of a sweep, as keyword arguments
SHARED_AXES = ("data", "clusters")  # an axis as a list, a setting otherwise


class Run(reader.Run):
    """A run directory: data frames, models and config as properties, its report and figures as methods.

    >>> made = run(method="ifca", clusters=2, rounds=2, storage=folder, name="made", **quick)
    >>> made.metrics["round"].tolist(), sorted(made.models), made.config["method"]
    ([1, 2], ['clusters'], 'ifca')
    >>> type(made.figure("convergence")).__name__, "convergence" in made.figures
    ('Figure', True)
    """

    def report(self, out: str | Path = "", **options: str) -> Page:
        """Its tables, figures and one HTML file (see `archipelago report --help` for the options)."""
        return report(self.path, out=str(out), **options)

    def figure(self, name: str) -> Figure:
        """One of its figures, by matplotlib: a notebook shows it. `run.figures` lists the names."""
        from archipelago.reports.api import draw

        figure = draw(self.path, name)
        # A notebook shows figures of pyplot alone, and these are nobody's but the caller's: they show themselves.
        figure._repr_png_ = functools.partial(_png, figure)  # type: ignore[attr-defined]  # asked for by IPython
        return figure

    @property
    def figures(self) -> list[str]:
        """The names of the figures that this run has."""
        from archipelago.reports.api import figure_names

        return figure_names(self.path)

    def resume(self, *, callbacks: Sequence[Callback] = (), quiet: bool = False, trust: bool = False) -> Run:
        """Continue an unfinished run from its last checkpoint, to the bits of a run that was never stopped."""
        resumed = resume(self.path, callbacks=callbacks, quiet=quiet, trust=trust)
        assert isinstance(resumed, Run)
        return resumed


class Sweep:
    """A sweep's directory: its trials, their runs, its table and report.

    >>> asked = sweep(methods=["fedavg", "local"], seeds=1, rounds=1, storage=folder, name="asked", **quick)
    >>> asked.trials[["trial", "status"]].values.tolist()
    [['fedavg-seed0', 'finished'], ['local-seed0', 'finished']]
    >>> asked.table()["method"].unique()[:2].tolist(), len(asked.runs)
    (['FedAvg', 'Local'], 2)
    >>> asked
    Sweep '...asked': 2 trials (2 finished)
      .trials .runs .table() .report()
    """

    def __init__(self, path: str | Path) -> None:
        self.address = str(path)
        check_is_sweep(self.address)

    @property
    def path(self) -> Path:
        """The folder; one in an object store is copied to this machine first."""
        return local_copy(self.address)

    @property
    def trials(self) -> pd.DataFrame:
        """One row a trial: name, group, seed, status, reason, run."""
        import pandas as pd

        return pd.DataFrame([asdict(row) for row in read_rows(self.address)])

    @property
    def runs(self) -> list[Run]:
        """The runs of the trials that have started."""
        path = self.path
        return [Run(path / run) for run in self.trials["run"] if run]

    def table(self) -> pd.DataFrame:
        """Mean and standard deviation over seeds, one row a group of settings, as the report has them."""
        from archipelago.reports.api import tables

        return tables([self.path])

    def report(self, out: str | Path = "", **options: str) -> Page:
        """Its tables, figures and one HTML file."""
        return report(self.path, out=str(out), **options)

    def resume(self, *, quiet: bool = False, trust: bool = False) -> Sweep:
        """Continue the trials that are not over; finished ones stay."""
        resumed = resume(self.address, quiet=quiet, trust=trust)
        assert isinstance(resumed, Sweep)
        return resumed

    def __repr__(self) -> str:
        counts = self.trials["status"].value_counts()
        states = ", ".join(f"{count} {state}" for state, count in counts.items())
        return f"Sweep '{self.address}': {len(self.trials)} trials ({states})\n  .trials .runs .table() .report()"


class Page:
    """A report that was written: its HTML page, tables and files. A notebook shows the tables and a link.

    >>> page = run(method="fedavg", rounds=1, storage=folder, name="reported", **quick).report(figures="no")
    >>> page.path.name, page.markdown.count("| FedAvg |"), "tabular" in page.latex
    ('report.html', 1, True)
    """

    def __init__(self, built: Report) -> None:
        self.folder = built.folder
        self.path = built.folder / "report.html"
        self.files = [Path(file) for file in built.files]
        self._built = built

    @property
    def markdown(self) -> str:
        """The tables as Markdown."""
        return (self.folder / "table.md").read_text(encoding="utf-8")

    @property
    def latex(self) -> str:
        """The tables as LaTeX."""
        return (self.folder / "table.tex").read_text(encoding="utf-8")

    def __repr__(self) -> str:
        return f"Report '{self.path}' ({len(self.files)} files)"

    def _repr_markdown_(self) -> str:
        return f"{self.markdown}\n[{self.path}]({self.path})"


def run(
    config: str | Path | None = None,
    *,
    callbacks: Sequence[Callback | type[Callback] | str] = (),
    loggers: Sequence[Any] = (),
    small: bool = False,
    quiet: bool = False,
    **settings: Any,
) -> Run:
    """Run one experiment to its end. `config` is a YAML file, or the name of one that comes with the package.

    `callbacks` and `loggers` (any of Lightning's) are names, import paths, classes, or instances: those belong to this
    call alone, the others are recorded with the run and come back when it is resumed.

        >>> found = run(method="fedavg", clients=2, rounds=1, local={"steps": 1}, fleet={"backend": "in_process"},
        ...             storage=folder, name="tiny", quiet=True)
        >>> found.status.state, len(found.metrics)
        ('finished', 1)
    """
    from archipelago.experiments.config import load_config
    from archipelago.experiments.plan import run_address
    from archipelago.experiments.runner import run_experiment

    instances, names = _instances(callbacks)
    logging, logger_names = _instances(loggers)
    settings |= {"callbacks": names} if names else {}
    settings |= {"loggers": logger_names} if logger_names else {}
    loaded = load_config(_file(config), named(settings), small=small)
    address = run_address(loaded)
    with writable(address) as (path, mirror):
        run_experiment(loaded, path, callbacks=instances, loggers=logging, mirror=mirror, quiet=quiet)
    return open_run(address)


def sweep(
    config: str | Path | None = None, *, small: bool = False, quiet: bool = False, **settings: Any
) -> Sweep:
    """Run every combination of what varies, on Ray Tune.

    What varies are keyword arguments: `methods`, `data`, `partitions`, `clusters` (as lists), `grid={"local.lr":
    [0.01, 0.1]}`, `cases`, `sample`, `seeds`; how trials are chosen and run is `sweep={"concurrent": 2}`; every
    other keyword is a setting of all trials.

        >>> named = {"rounds": 1, "storage": folder, "name": "rates"}
        >>> rates = sweep(methods=["fedavg"], grid={"local.lr": [0.01, 0.1]}, seeds=[7], **named, **quick)
        >>> rates.trials["group"].tolist()
        ['fedavg | local.lr=0.01', 'fedavg | local.lr=0.1']
    """
    from archipelago.sweeps.config import load_sweep
    from archipelago.sweeps.directory import sweep_address
    from archipelago.sweeps.runner import run_sweep

    asked = dict(settings.pop("sweep", {}))
    for name in [*AXES, *(name for name in SHARED_AXES if isinstance(settings.get(name), list | tuple))]:
        if name in settings:
            asked[name] = settings.pop(name)
    loaded = load_sweep(_file(config), named({**settings, "sweep": asked}), small=small)
    if loaded is None:
        raise UserError(
            "Expected something that varies, got one experiment: add seeds=3, or use archipelago.run.",
            code="nothing-varies",
        )
    address = sweep_address(loaded)
    run_sweep(loaded, address, quiet=quiet)
    return Sweep(address)


def resume(
    path: str | Path, *, callbacks: Sequence[Callback] = (), quiet: bool = False, trust: bool = False
) -> Run | Sweep:
    """Continue a run or a sweep that was stopped, from its last checkpoints.

    `trust`: import the code of somebody's own that a run from elsewhere names; it is asked for once for each run.

        >>> class Interrupted(Callback):
        ...     def on_round(self, run, report):
        ...         raise RuntimeError("the light went out")
        >>> run(method="fedavg", rounds=2, storage=folder, name="half", callbacks=[Interrupted()], **quick)
        Traceback (most recent call last):
        archipelago.experiments.callbacks.base.CallbackFailure: ...the light went out...
        >>> resume(f"{folder}/half", quiet=True).metrics["round"].tolist()
        [1, 2]
    """
    from archipelago.experiments import runner
    from archipelago.sweeps.runner import check_code, resume_sweep

    if is_sweep(path):
        check_code(str(path), trust)
        return Sweep(resume_sweep(str(path), quiet=quiet))
    with writable(str(path)) as (folder, mirror):
        runner.check_code(folder, trust)
        runner.resume(folder, callbacks=callbacks, mirror=mirror, quiet=quiet)
    return open_run(path)


def report(*paths: str | Path, out: str | Path = "", **options: str) -> Page:
    """Tables, figures and one HTML file of runs and sweeps; options as of the command line (`test="wilcoxon"`).

    >>> names = ("fedavg", "local")
    >>> both = [run(method=name, rounds=1, storage=folder, name=f"{name}-1", **quick) for name in names]
    >>> report(*(each.path for each in both), out=f"{folder}/both", figures="no")
    Report '...both/report.html' (... files)
    """
    from archipelago.reports.build import ReportRequest, build_report

    words = [str(local_copy(str(path))) for path in paths]
    words += [f"{name}={value}" for name, value in {"out": str(out), **options}.items() if value]
    return Page(build_report(ReportRequest.parse(words)))


def open_run(path: str | Path) -> Run:
    """Open a run directory for reading: data frames, models, config (imports neither Ray nor Lightning).

    One in an object store is copied to this machine first.

        >>> path = run(method="fedavg", rounds=1, storage=folder, name="opened", **quick).path
        >>> open_run(path).clients[["round", "client"]].values.tolist()
        [[1, 0], [1, 1]]
    """
    return Run(local_copy(path))


def open_sweep(path: str | Path) -> Sweep:
    """Open a sweep's directory for reading.

    >>> address = sweep(method="fedavg", seeds=2, rounds=1, storage=folder, name="seeds", **quick).address
    >>> open_sweep(address).trials["seed"].tolist()
    [0, 1]
    """
    return Sweep(path)


def partition(config: str | Path | None = None, **settings: Any) -> pd.DataFrame:
    """Divide the data as an experiment would: how many samples of each class every client holds, one row each.

    >>> held = partition(data="digits", clients=3, partition={"name": "n_class", "classes": 2})
    >>> held.shape[0], (held.filter(like="class ") > 0).sum(axis=1).tolist()
    (3, [2, 2, 2])
    """
    import pandas as pd

    from archipelago.data import build_federation
    from archipelago.experiments.config import load_config

    # Whatever divides the data, no method looks at it: one that needs fewer clusters than clients shall not object.
    asked = settings if config is not None else {"method": "fedavg", **settings}
    loaded = load_config(_file(config), named(asked))
    federation = build_federation(loaded.data, loaded.partition, loaded.clients, loaded.seed)
    counts = pd.DataFrame(federation.tables()["counts"])
    held = counts[counts["part"] == "train"].pivot_table(
        index="client", columns="label", values="samples", aggfunc="sum", fill_value=0
    )
    clients = pd.DataFrame(federation.tables()["clients"]).set_index("client")
    return clients.join(held.add_prefix("class "))


def _png(figure: Figure) -> bytes:
    picture = io.BytesIO()
    figure.savefig(picture, format="png", bbox_inches="tight")
    return picture.getvalue()


# What was given --------------------------------------------------------------------------------------------


def named(value: Any) -> Any:
    """Settings as a file would hold them: classes and functions become names that every process finds."""
    if isinstance(value, Mapping):
        return {str(key): named(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [named(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, type) or callable(value):
        return _name_of(value)
    return value


def _name_of(thing: Any) -> str:
    path = import_path(thing)
    if is_ours(path):
        load_built_in()
        for registry in REGISTRIES.values():
            for entry in registry.values():
                if entry.value is thing:
                    return entry.name
    return path


def _instances(given: Sequence[Any]) -> tuple[list[Any], list[str]]:
    """(instances, names of those that are named or given as a class, which the run records)."""
    recorded = [each for each in given if isinstance(each, str | type)]
    return [each for each in given if not isinstance(each, str | type)], [named(each) for each in recorded]


def _file(config: str | Path | None) -> Path | None:
    if config is None:
        return None
    from archipelago.experiments.config_files import find_config

    return find_config(str(config))
