"""`import archipelago as ar`: experiments from a script or a notebook, over the same settings, sentences and files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import archipelago as ar
from archipelago.strategies.ifca import IFCA
from tests.support.errors import refused

ROOT = Path(__file__).parents[1]
SMALL: dict[str, Any] = {
    "clients": 4, "clusters": 2, "rounds": 2, "local": {"steps": 1}, "model": "mlp",
    "fleet": {"backend": "in_process"}, "quiet": True,
}  # fmt: skip


class Listener(ar.Callback):
    """Writes down which rounds it heard of."""

    def __init__(self) -> None:
        self.heard: list[int] = []

    def on_round(self, run: Any, report: Any) -> None:
        self.heard.append(report.round)


def test_run_is_an_object_over_its_directory(tmp_path: Path) -> None:
    listener = Listener()
    run = ar.run(
        method="ifca+cam", **SMALL, storage=tmp_path, name="one", callbacks=[listener], evaluation={"last": 1}
    )
    assert run.path == tmp_path / "one" and run.status.state == "finished"
    assert listener.heard == [1, 2] == run.metrics["round"].tolist()
    assert set(run.clients["round"]) == {1, 2} and run.models["clusters"].shape[0] == 2
    assert ar.open_run(run.path).metrics.equals(run.metrics)
    assert not (tmp_path / "one" / "report").exists()
    page = run.report(figures="no")
    assert page.path.is_file() and "IFCA+CAM" in page.markdown and "IFCA+CAM" in page._repr_markdown_()
    assert "\\begin{" in page.latex


def test_run_draws_its_figures_for_a_notebook(tmp_path: Path) -> None:
    from matplotlib.figure import Figure

    run = ar.run(method="ifca", **SMALL, storage=tmp_path, name="one")
    assert "cluster_sizes" in run.figures
    assert isinstance(run.figure("cluster_sizes"), Figure)
    with refused("unknown-name", says="'cluster_sizes'", kind="figure", name="cluster_size"):
        run.figure("cluster_size")


def test_run_takes_classes_names_and_import_paths_alike(tmp_path: Path) -> None:
    chosen: list[Any] = ["ifca", IFCA, "archipelago.strategies.ifca.IFCA"]
    runs = [ar.run(method=each, **SMALL, storage=tmp_path, name=f"run{i}") for i, each in enumerate(chosen)]
    assert len({(run.path / "metrics.csv").read_bytes() for run in runs}) == 1
    assert runs[0].config.method == runs[1].config.method == "ifca"


@pytest.mark.parametrize(
    ("settings", "code", "values"),
    [
        ({"method": "fedavgg"}, "unknown-name", {"kind": "method", "nearest": "fedavg"}),
        ({"local": {"lrr": 0.1}}, "unknown-setting", {"setting": "local.lrr", "nearest": "local.lr"}),
        ({"local": {"lr": -1}}, "out-of-range", {"setting": "local.lr", "given": -1}),
        ({"local": 3}, "a-section", {"setting": "local"}),
        ({"rounds": "many"}, "wrong-type", {"setting": "rounds", "given": "many"}),
        ({"learning_rate": 0.1}, "unknown-setting", {"nearest": "local.lr"}),
        ({"config": "thesis-7.99"}, "unknown-config", {"name": "thesis-7.99"}),
        ({"method": lambda: None}, "no-import-path", {"name": "<lambda>"}),
    ],
)
def test_mistakes_in_python_are_those_of_the_command_line(
    settings: dict[str, Any], code: str, values: dict[str, Any], tmp_path: Path
) -> None:
    with refused(code, **values):
        ar.run(**{**SMALL, "storage": tmp_path, **settings})
    assert list(tmp_path.iterdir()) == []


def test_sweep_compares_and_tells_in_a_table(tmp_path: Path) -> None:
    small = {**SMALL, "rounds": 1}
    sweep = ar.sweep(methods=["fedavg", IFCA], seeds=2, **small, storage=tmp_path, name="both")
    assert sorted(sweep.trials["status"]) == ["finished"] * 4 and len(sweep.runs) == 4
    table = sweep.table()
    assert {"FedAvg", "IFCA"} <= set(table["method"])
    assert "4 finished" in repr(sweep) and sweep.report(figures="no").path.is_file()
    assert ar.open_sweep(sweep.path).trials.equals(sweep.trials)


def test_sweep_without_anything_that_varies_is_refused(tmp_path: Path) -> None:
    with refused("nothing-varies", says="archipelago.run"):
        ar.sweep(method="fedavg", **SMALL, storage=tmp_path)


def test_resume_finishes_a_run_that_a_callback_stopped(tmp_path: Path) -> None:
    class Stop(ar.Callback):
        def on_round(self, run: Any, report: Any) -> None:
            if report.round == 1:
                raise KeyboardInterrupt

    settings = {**SMALL, "method": "fedavg", "storage": tmp_path, "checkpoint": {"every": 1}}
    whole = ar.run(**settings, name="whole")
    with pytest.raises(KeyboardInterrupt):
        ar.run(**settings, name="stopped", callbacks=[Stop()])
    resumed = ar.open_run(tmp_path / "stopped").resume(quiet=True)
    assert resumed.status.state == "finished"
    assert (resumed.path / "metrics.csv").read_bytes() == (whole.path / "metrics.csv").read_bytes()


def test_partition_shows_what_clients_would_hold() -> None:
    held = ar.partition(data="digits", clients=5, partition={"name": "n_class", "classes": 2})
    assert len(held) == 5 and ((held.filter(like="class ") > 0).sum(axis=1) == 2).all()


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = (
        "import archipelago, sys; print({'torch', 'ray', 'lightning', 'pandas', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
    assert set(ar.__all__) <= set(dir(ar)) and all(getattr(ar, name) for name in ar.__all__)


@pytest.mark.ray
def test_example_of_an_own_method_passes_its_own_tests(tmp_path: Path) -> None:
    folder = ROOT / "examples" / "own_method"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull, f"--rootdir={tmp_path}",
         "-W", "ignore", str(folder)],
        cwd=folder, env=env, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 passed" in done.stdout


def test_public_names_all_have_an_example() -> None:
    """Which runs as a doctest: `archipelago/` is collected with the tests."""
    without = {name for name in ar.__all__ if ">>> " not in (getattr(ar, name).__doc__ or "")}
    assert without == set()
