"""Loggers: what each of them holds of a run, read back by its own tools, and a logger that raises everywhere."""

from __future__ import annotations

import csv
import json
import math
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.logger import Logger

from archipelago import open_run
from archipelago.experiments import loggers
from archipelago.experiments.loggers import LOGGERS
from archipelago.experiments.runner import resume, run_experiment
from archipelago.sweeps.runner import run_sweep
from tests.support.callbacks import StopAfter
from tests.support.errors import refused
from tests.support.experiments import config_of
from tests.support.runs import assert_equal_runs, events
from tests.support.sweeps import rows_of, sweep_of


def accuracies(run: Path) -> dict[int, float]:
    metrics = open_run(run).metrics
    return dict(zip(metrics["round"].tolist(), metrics["micro_accuracy"].tolist(), strict=True))


def stop_and_resume(path: Path, *settings: str) -> Path:
    """A run that is stopped after its third round of four, and resumed from its second."""
    with refused("users-code"):
        run_experiment(config_of(*settings, "checkpoint.every=2"), path, callbacks=[StopAfter(4)], quiet=True)
    return resume(path, quiet=True)


# CSV ----------------------------------------------------------------------------------------------------------


def read_csv(run: Path) -> dict[int, float]:
    with (run / "csv/metrics.csv").open() as file:
        return {int(row["step"]): float(row["micro_accuracy"]) for row in csv.DictReader(file)}


def test_csv_logger_has_every_round_and_the_settings_after_a_resume_too(tmp_path: Path) -> None:
    run = stop_and_resume(tmp_path / "run", "loggers=[csv]")
    assert read_csv(run) == accuracies(run)
    settings = yaml.safe_load((run / "csv/hparams.yaml").read_text())
    assert settings["local.lr"] == 0.05 and settings["method"] == "ifca" and "name" not in settings


def test_lightning_logger_by_import_path_and_as_an_instance(tmp_path: Path) -> None:
    given = CSVLogger(tmp_path, name="", version="given")
    config = config_of("loggers=[lightning.pytorch.loggers.CSVLogger]", "rounds=2")
    run = run_experiment(config, tmp_path / "run", loggers=[given], quiet=True)
    (named,) = (run / "CSVLogger").rglob("metrics.csv")
    for file in (named, tmp_path / "given/metrics.csv"):
        assert [float(row["micro_accuracy"]) for row in csv.DictReader(file.open())] == list(
            accuracies(run).values()
        )
    assert events(run) == []


# MLflow -------------------------------------------------------------------------------------------------------


def mlflow_client(folder: Path) -> Any:
    pytest.importorskip("mlflow", reason="the extra mlflow is not installed")
    from mlflow.tracking import MlflowClient

    return MlflowClient(folder.resolve().as_uri())


@pytest.fixture
def _no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("WANDB_SILENT", "true")


@pytest.mark.usefixtures("_no_server")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # of MLflow itself
def test_mlflow_run_has_metrics_settings_and_the_report(tmp_path: Path) -> None:
    pytest.importorskip("mlflow", reason="the extra mlflow is not installed")
    run = stop_and_resume(tmp_path / "run", "loggers=[mlflow]")
    client = mlflow_client(tmp_path / "mlruns")
    experiment = client.get_experiment_by_name("archipelago")
    (found,) = client.search_runs([experiment.experiment_id])  # a resume continues the same run
    assert found.info.status == "FINISHED" and found.info.run_name == "run"
    assert found.data.params["local.lr"] == "0.05" and found.data.params["method"] == "ifca"
    history = client.get_metric_history(found.info.run_id, "micro_accuracy")
    assert {each.step: each.value for each in history} == accuracies(run)
    kept = {each.path for each in client.list_artifacts(found.info.run_id)}
    assert {"report.html", "summary.md", "metrics.csv", "config.yaml"} <= kept
    assert not any("Warning" in event for event in events(run))


@pytest.mark.usefixtures("_no_server")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_mlflow_has_a_sweep_as_one_experiment(tmp_path: Path) -> None:
    pytest.importorskip("mlflow", reason="the extra mlflow is not installed")
    wanted = (
        "loggers=[mlflow]",
        "sweep.methods=[ifca,ifca+finetune]",
        "rounds=6",
        "fleet.backend=in_process",
    )
    run_sweep(sweep_of(tmp_path, *wanted), str(tmp_path / "swept"), quiet=True)
    client = mlflow_client(tmp_path / "swept/mlruns")
    experiment = client.get_experiment_by_name("swept")
    found = {each.info.run_name: each for each in client.search_runs([experiment.experiment_id])}
    report = found.pop("swept")  # the sweep's own run, with what was asked for and the report as its files
    assert report.info.status == "FINISHED" and report.data.tags["sweep"] == "swept"
    assert report.data.params["sweep.methods"] == "['ifca', 'ifca+finetune']"
    kept = {each.path for each in client.list_artifacts(report.info.run_id)}
    assert {"sweep.yaml", "trials.csv", "report.html", "table.csv"} <= kept
    assert set(found) == {"ifca-seed0", "ifca+finetune-seed0"}
    for name, each in found.items():  # rounds that were taken over from another trial included
        history = client.get_metric_history(each.info.run_id, "micro_accuracy")
        assert {point.step: point.value for point in history} == accuracies(tmp_path / "swept/runs" / name)
        assert each.data.tags["sweep"] == "swept"


# Weights & Biases ---------------------------------------------------------------------------------------------


def wandb_records(run: Path) -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """(what the run was started with, its history) of every offline file, oldest first.

    W&B's own process writes them, and on a busy machine ends them a moment after it said so.
    """
    deadline = time.monotonic() + 30
    while not (found := read_wandb(run)) or not all(begun.pop("ended", False) for begun, _ in found):
        assert time.monotonic() < deadline, found
        time.sleep(0.1)
    return found


def read_wandb(run: Path) -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
    from wandb.proto import wandb_internal_pb2
    from wandb.sdk.internal.datastore import DataStore

    found = []
    for file in sorted(run.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns):
        store = DataStore()
        store.open_for_scan(str(file))
        begun: dict[str, Any] = {}
        history: list[dict[str, Any]] = []
        while (data := store.scan_data()) is not None:
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.HasField("run"):
                begun |= {
                    "group": record.run.run_group,
                    "id": record.run.run_id,
                    "name": record.run.display_name,
                }
            for item in record.history.item if record.HasField("history") else []:
                key = item.key or "/".join(item.nested_key)
                if key == "trainer/global_step":
                    history.append({"step": json.loads(item.value_json)})
            for item in record.history.item if record.HasField("history") else []:
                history[-1][item.key or "/".join(item.nested_key)] = json.loads(item.value_json)
            if record.HasField("exit"):
                begun["ended"] = True
            if record.HasField("artifact"):
                begun.setdefault("artifacts", []).append(record.artifact.name)
            for item in record.config.update if record.HasField("config") else []:
                begun[item.key or "/".join(item.nested_key)] = json.loads(item.value_json)
        found.append((begun, history))
    return found


@pytest.mark.slow
@pytest.mark.usefixtures("_no_server")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_wandb_offline_run_has_metrics_settings_and_the_report(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="the extra wandb is not installed")
    run = stop_and_resume(tmp_path / "run", "loggers=[wandb]", "wandb.offline=true")
    (first, before), (second, after) = wandb_records(run)
    assert first["id"] == second["id"] and first["name"] == "run"
    assert first["local.lr"] == 0.05 and first["method"] == "ifca"
    logged = {row["step"]: row["micro_accuracy"] for row in [*before, *after]}
    assert logged == accuracies(run)
    assert any(name.endswith("-report") for name in second["artifacts"])
    assert not any("Warning" in event for event in events(run))


@pytest.mark.slow
@pytest.mark.usefixtures("_no_server")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_wandb_has_a_sweep_as_one_group(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="the extra wandb is not installed")
    wanted = (
        "loggers=[wandb]",
        "wandb.offline=true",
        "sweep.seeds=[0,1]",
        "rounds=1",
        "fleet.backend=in_process",
    )
    run_sweep(sweep_of(tmp_path, *wanted), str(tmp_path / "swept"), quiet=True)
    for seed in (0, 1):
        ((begun, history),) = wandb_records(tmp_path / f"swept/runs/ifca-seed{seed}")
        assert begun["group"] == "swept" and len(history) == 1
    ((begun, history),) = wandb_records(tmp_path / "swept")
    assert (begun["group"], begun["name"], history) == ("swept", "swept", [])
    assert {name.rpartition("-")[2] for name in begun["artifacts"]} >= {"report", "trials"}


# Failures -----------------------------------------------------------------------------------------------------


class Broken(Logger):
    """Raises from the chosen call on; nothing of a run may depend on it."""

    raises = "__init__"

    def __init__(self) -> None:
        self._at("__init__")

    def _at(self, call: str) -> None:
        if call == Broken.raises:
            raise ConnectionError(f"{call} has no connection")

    name = property(lambda self: "broken")

    @property
    def version(self) -> str:
        self._at("version")
        return "0"

    def log_hyperparams(self, *arguments: Any, **named: Any) -> None:
        self._at("log_hyperparams")

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        assert all(isinstance(value, int | float) and not math.isnan(value) for value in metrics.values())
        if step == 2:
            self._at("log_metrics")

    def save(self) -> None:
        self._at("save")

    def finalize(self, status: str) -> None:
        self._at("finalize")


CALLS = ["__init__", "log_hyperparams", "version", "save", "log_metrics", "finalize"]


@pytest.mark.parametrize("call", CALLS)
def test_logger_that_fails_is_a_warning_and_never_a_lost_run(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(LOGGERS, "_entries", dict(LOGGERS._entries))
    LOGGERS.register("broken", "")(Broken)
    monkeypatch.setattr(Broken, "raises", call)
    run = run_experiment(config_of("loggers=[broken,csv]"), tmp_path / "run")
    warnings = [event for event in events(run) if "Warning: logger 'broken'" in event]
    assert len(warnings) == 1 and f"ConnectionError: {call} has no connection" in warnings[0]
    assert warnings[0] in capsys.readouterr().out
    assert_equal_runs(run, run_experiment(config_of(), tmp_path / "alone", quiet=True))
    assert read_csv(run) == accuracies(run)  # the others are not touched


def test_logger_that_fails_with_the_report_of_a_sweep_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(logger: Any, file: Path) -> None:
        raise ConnectionError("no connection")

    monkeypatch.setattr(LOGGERS, "_entries", dict(LOGGERS._entries))
    LOGGERS.register("full_disk", "", artifact=refuse)(lambda save_dir: CSVLogger(save_dir, version="0"))
    wanted = ("loggers=[full_disk]", "rounds=1", "sweep.seeds=1", "fleet.backend=in_process")
    run_sweep(sweep_of(tmp_path, *wanted), str(tmp_path / "swept"))
    assert {row.status for row in rows_of(tmp_path / "swept").values()} == {"finished"}
    shown = " ".join(capsys.readouterr().out.split())
    assert "Warning: logger 'full_disk' failed at the end (ConnectionError: no connection" in shown


def test_logger_that_missed_rounds_gets_them_when_the_run_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged: list[int] = []

    class Flaky(Broken):
        def log_metrics(self, metrics: Any, step: int | None = None) -> None:
            super().log_metrics(metrics, step)
            logged.append(int(step or 0))

    monkeypatch.setattr(LOGGERS, "_entries", dict(LOGGERS._entries))
    LOGGERS.register("flaky", "")(Flaky)
    monkeypatch.setattr(Broken, "raises", "log_metrics")
    with refused("users-code"):
        run_experiment(config_of("loggers=[flaky]", "checkpoint.every=1"), tmp_path / "run",
                       callbacks=[StopAfter(4)], quiet=True)  # fmt: skip
    assert logged == [1]
    monkeypatch.setattr(Broken, "raises", "")
    resume(tmp_path / "run", quiet=True)
    assert logged == [1, 2, 3, 4]


def test_logger_without_its_package_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loggers.base.importlib.util, "find_spec", lambda name: None)
    with refused("needs-package", package="mlflow"):
        config_of("loggers=[mlflow]")


def test_logger_of_no_such_name_is_refused_with_the_nearest() -> None:
    with refused("unknown-name", kind="logger", name="tensorbord", nearest="tensorboard"):
        config_of("loggers=[tensorbord]")
