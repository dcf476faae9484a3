"""A sweep from its description to its directory: trials on Ray Tune, or one after the other in this process."""

from __future__ import annotations

import contextlib

from actors.cluster import connected
from archipelago.core.errors import UserError
from archipelago.core.metrics import client_columns
from archipelago.core.registry import closest, nearest
from archipelago.core.settings import ExperimentSettings
from archipelago.experiments.given import code_of
from archipelago.runs.storage import Mirror, is_address, join, name_of, reading
from archipelago.runs.sweeps import FINISHED, OVER, RUNNING, STOPPED, identity_of_sweep, read_sweep
from archipelago.runs.trust import check_trust
from archipelago.sweeps.axes import with_label
from archipelago.sweeps.config import Sweep
from archipelago.sweeps.directory import SweepDirectory, absolute
from archipelago.sweeps.resources import check_shared_storage
from archipelago.sweeps.shared_prefix import in_order, prefix_of, shared_prefixes
from archipelago.sweeps.tune import TuneSweep
from archipelago.sweeps.view import SweepView


def run_sweep(sweep: Sweep, address: str, *, command: str | None = None, quiet: bool = False) -> str:
    """Run every trial; returns the sweep's address. A trial that fails does not stop the others."""
    _check_data(sweep)
    address = absolute(address)
    directory = SweepDirectory.create(address, sweep)
    with contextlib.closing(directory):
        try:
            _run_trials(directory, command, quiet)
        except UserError:  # refused before a trial began: the same command, mended, may have the name
            directory.discard()
            raise
    return address


def check_code(address: str, trust: bool = False) -> None:
    """A `UserError` that names the code which a sweep from elsewhere would import here, unless it is trusted."""
    document = read_sweep(address)
    check_trust(address, identity_of_sweep(document), code_of(document), trust)


def resume_sweep(address: str, *, quiet: bool = False) -> str:
    """Resume a sweep: what is finished stays, what was running resumes from its last checkpoint."""
    address = absolute(address)
    directory = SweepDirectory.open(address)
    with contextlib.closing(directory):
        left = [row for row in directory.rows.values() if row.status not in (FINISHED, STOPPED)]
        known = len(directory.rows) >= directory.sweep.planned or not directory.sweep.sampler.adaptive
        if not left and known:
            raise UserError(
                f"Expected a sweep that is not over, got {address} with all {len(directory.rows)} trials done: "
                "open its runs with archipelago.open_run, or run it again under another name.",
                code="finished", path=address,
            )  # fmt: skip
        for row in left:  # a trial that failed is given another chance
            row.status, row.reason = "waiting", ""
        directory.write()
        _run_trials(directory, None, quiet)
    return address


def _check_data(sweep: Sweep) -> None:
    """What only the data can say (is it there, does the network take it) is said before anything is started."""
    from actors.node_data import forget, shared_federation
    from archipelago.experiments.config import check_network

    seen: set[str] = set()
    for label, config in sweep.combinations.items():
        key = repr((config.data, config.partition, config.clients, config.model))
        if key in seen:
            continue
        seen.add(key)

        def try_it(config: ExperimentSettings = config) -> None:
            federation, _ = shared_federation(config)
            check_network(config, federation.input_shape, federation.classes)
            _check_metric(sweep, federation.classes)

        with_label(try_it, label, len(sweep.combinations))
    forget()  # the trials' own processes load what they need


def _check_metric(sweep: Sweep, classes: int | None) -> None:
    """A metric that no trial reports would switch the tuning off without a word."""
    known = [
        f"validation_{name}"
        for name in client_columns(classes, sweep.base.plugins, sweep.base.evaluation.metrics)
    ]
    if sweep.chooses and sweep.settings.metric not in known:
        task = "a regression" if classes is None else f"a task of {classes} classes"
        raise UserError(
            f"Expected sweep.metric to be a metric of {task}, got '{sweep.settings.metric}'. "
            f"{nearest(sweep.settings.metric, known)}",
            code="unknown-name", kind="metric", name=sweep.settings.metric,
            nearest=closest(sweep.settings.metric, known),
        )  # fmt: skip


def _run_trials(directory: SweepDirectory, command: str | None, quiet: bool) -> None:
    sweep = directory.sweep
    with SweepView(directory, quiet=quiet) as view:
        if sweep.base.fleet.backend == "in_process":
            _one_after_the_other(directory, view, command)
        else:
            with connected(sweep.base.fleet, name=name_of(directory.address)) as where:
                view.note(f"{directory.address}: {sweep.planned} trials on {where}")
                check_shared_storage(directory.address)
                TuneSweep(directory, view, command).run()
        _log_report(directory, view)


def _log_report(directory: SweepDirectory, view: SweepView) -> None:
    """The sweep's own report, for loggers that take files; at an address it is kept there too."""
    from archipelago.experiments.loggers.sweeps import LiveSweep, log_sweep, takes_files

    sweep, address = directory.sweep, directory.address
    if not takes_files(sweep.base):
        return
    with reading(address) as folder:
        path = folder / "report" if is_address(address) else folder
        live = LiveSweep(sweep.base, sweep.document, path, name_of(address), view.note)
        log_sweep(folder, live)
        if is_address(address) and path.is_dir():
            directory.hold()
            Mirror(path, join(address, "report")).push()


# In this process ---------------------------------------------------------------------------------------------


def _one_after_the_other(directory: SweepDirectory, view: SweepView, command: str | None) -> None:
    from actors.node_data import forget
    from archipelago.sweeps.trial import TrialRun, payload

    forget()  # files may have changed since an earlier sweep of this process
    trials = directory.sweep.trials()
    prefixes = shared_prefixes(trials)
    for trial in in_order(trials, prefixes):
        if directory.rows[trial.name].status in OVER:
            continue
        prefix = prefix_of(trial, prefixes, directory.run_address)
        given = payload(trial, directory.run_address(trial.name), command=command, **prefix)
        run = TrialRun(**{key: value for key, value in given.items() if key != "trial"})
        directory.set(trial.name, RUNNING)
        view.started(trial.name)
        try:
            while True:
                result = run.step()
                if result["done"]:
                    directory.set(trial.name, result["state"], result["reason"])
                view.update(trial.name, result)
                if result["done"]:
                    break
        finally:
            run.close()
