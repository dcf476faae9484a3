"""Final figures by hand: the mean of the last evaluations, the best by validation, never the best on test."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import pty
import shutil
from pathlib import Path
from typing import Any

import pytest

from archipelago.reports.summary import computed_on, final_metrics, print_table, write_summary
from archipelago.runs.files import RunFiles
from tests.support.errors import refused
from tests.support.written_runs import write_run

CONFIG = {
    "method": "ifca",
    "clients": 20,
    "clusters": 4,
    "rounds": 5,
    "seed": 7,
    "data": {"name": "digits"},
    "local": {"steps": 10, "epochs": None, "lr": 0.05},
    "evaluation": {"last": 3, "weights": "train"},
}

METRICS = """\
round,participants,micro_accuracy,macro_accuracy,worst10_accuracy,std_accuracy,micro_macro_f1,micro_loss,\
validation_micro_loss,cluster_sizes,ari,nmi
1,20,0.9,0.5,0.1,0.2,0.3,1.0,0.75,"[5, 15]",0.5,0.5
2,20,0.25,0.5,0.1,0.2,0.3,1.0,0.25,"[5, 15]",0.5,0.5
3,20,0.5,0.625,0.1,0.2,0.3,1.0,0.5,"[5, 15]",0.5,0.5
4,20,,,,,,,,"[9, 11]",,
5,20,0.75,0.75,0.1,0.2,0.3,1.0,0.25,"[10, 10]",1.0,1.0
"""


def make(path: Path, metrics: str = METRICS, config: dict[str, Any] = CONFIG, **status: Any) -> Path:
    path.mkdir()
    (path / "config.yaml").write_text(json.dumps(config))  # JSON is YAML
    (path / "status.json").write_text(
        json.dumps({"state": "finished", "rounds_done": 5, "rounds": 5, **status})
    )
    (path / "metrics.csv").write_text(metrics)
    (path / "timings.csv").write_text("round,total,train\n1,9.0,8\n2,0.5,0.4\n3,0.25,0.1\n")
    return path


def test_final_metric_is_the_mean_of_the_last_evaluations(tmp_path: Path) -> None:
    figures = final_metrics(make(tmp_path / "run"))
    assert figures["evaluations"] == [2, 3, 5]  # round 4 was not evaluated
    assert figures["final"]["micro_accuracy"] == 0.5
    assert figures["final"]["macro_accuracy"] == 0.625
    assert figures["final"]["ari"] == pytest.approx(2 / 3)
    assert figures["cluster_sizes"] == [10, 10]
    assert figures["rounds_done"] == 5
    assert figures["seconds_per_round"] == 0.5


def test_fewer_evaluations_than_asked_for(tmp_path: Path) -> None:
    config = {**CONFIG, "evaluation": {"last": 10}}
    assert final_metrics(make(tmp_path / "run", config=config))["evaluations"] == [1, 2, 3, 5]


def test_best_round_is_chosen_on_validation_and_never_on_test(tmp_path: Path) -> None:
    best = final_metrics(make(tmp_path / "run"))["best_by_validation"]
    # Round 1 has the best test accuracy; rounds 2 and 5 the lowest validation loss, and 2 comes first.
    assert best["round"] == 2
    assert best["figures"]["micro_accuracy"] == 0.25
    without = METRICS.replace("validation_micro_loss", "something_else")
    assert final_metrics(make(tmp_path / "without", metrics=without))["best_by_validation"] is None


def test_validation_loss_that_is_not_finite_is_never_the_best(tmp_path: Path) -> None:
    metrics = METRICS.replace("1.0,0.25,", "1.0,nan,")
    best = final_metrics(make(tmp_path / "run", metrics=metrics))["best_by_validation"]
    assert best["round"] == 3


def test_diverged_run_says_so(tmp_path: Path) -> None:
    metrics = METRICS.replace("5,20,0.75", "5,20,nan")
    figures = final_metrics(make(tmp_path / "run", metrics=metrics))
    assert math.isnan(figures["final"]["micro_accuracy"])
    text = io.StringIO()
    print_table(tmp_path / "run", text)
    assert "nan" in text.getvalue()


def test_run_that_is_being_written_may_end_in_half_a_line(tmp_path: Path) -> None:
    path = make(tmp_path / "run", metrics=METRICS + "6,20,0.9")
    (path / "events.jsonl").write_text('{"round": 1, "text": "hello"}\n{"round": 2, "te')
    assert final_metrics(path)["evaluations"] == [2, 3, 5]
    assert "round 1: hello" in write_summary(path).read_text()


def test_run_without_rounds(tmp_path: Path) -> None:
    path = make(tmp_path / "run", state="failed", sentence="Client 3 failed.", rounds_done=0)
    for name in ("metrics.csv", "timings.csv"):
        (path / name).unlink()
    figures = final_metrics(path)
    assert figures["final"] == {}
    assert figures["evaluations"] == []
    assert figures["seconds_per_round"] is None
    text = write_summary(path).read_text()
    assert "**Failed**, 0 of 5 rounds." in text
    assert "Client 3 failed." in text
    assert "No round was evaluated yet." in text
    print_table(path, io.StringIO())


def test_summary_says_what_ran_what_came_out_and_what_to_do(tmp_path: Path) -> None:
    path = make(tmp_path / "run")
    events = [{"round": n, "text": f"event {n}\nwith a line break"} for n in range(30)]
    (path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    (path / "models").mkdir()
    (path / "models" / "clusters.safetensors").write_text("")
    (path / "records").mkdir()
    assert write_summary(path) == path / "summary.md"
    text = (path / "summary.md").read_text()
    assert text.startswith("# ifca on digits\n\n**Finished**, 5 of 5 rounds.\n")
    assert "20 clients, K = 4, 10 local steps, lr 0.05, seed 7." in text
    assert "## Test data: mean of 3 evaluations (rounds 2, 3, 5)" in text
    assert "| accuracy | 0.5000 | 0.6250 | 0.1000 | 0.2000 |" in text
    assert "| macro-F1 | 0.3000 | - | - | - |" in text
    assert "## Test data at round 2, which has the lowest validation loss" in text
    assert "weighted* by training samples" in text
    assert "Clusters: 10, 10 clients; against the ground-truth groups: ARI 0.6667" in text
    assert "0.5 s per round" in text
    assert "(10 earlier events are in `events.jsonl`)" in text
    assert "- round 29: event 29 with a line break" in text
    assert "`models`: final models" in text
    assert "`records`" not in text  # it is empty
    assert f'archipelago.open_run("{path}")' in text
    assert "resume" not in text
    assert [entry for entry in path.iterdir() if "tmp" in entry.name] == []


def test_unfinished_run_says_how_to_resume(tmp_path: Path) -> None:
    path = make(tmp_path / "run", state="failed")
    assert f"archipelago resume {path}" in write_summary(path).read_text()


def test_regression_and_training_data_have_their_rows(tmp_path: Path) -> None:
    metrics = "round,micro_mse,macro_mse,micro_loss,train_micro_mse\n1,2500.5,0.25,0.5,0.125\n"
    path = make(tmp_path / "run", metrics=metrics)
    text = io.StringIO()
    print_table(path, text)
    assert text.getvalue().splitlines() == [
        "Test data: evaluation of round 1",
        "                      weighted  plain mean  worst 10%  std",
        "  mean squared error      2500      0.2500          -    -",
        "  loss                  0.5000           -          -    -",
        "Training data: evaluation of round 1",
        "                      weighted  plain mean  worst 10%  std",
        "  mean squared error    0.1250           -          -    -",
        "Time: 0.5 s per round (median), 1 round.",
    ]
    assert "K = " not in write_summary(path).read_text()


def test_terminal_gets_a_drawn_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    reader, writer = pty.openpty()
    with os.fdopen(writer, "w") as stream:
        print_table(make(tmp_path / "run"), stream)
    data = b""
    with contextlib.suppress(OSError):  # how Linux says that the other end is closed
        while chunk := os.read(reader, 1 << 16):
            data += chunk
    os.close(reader)
    text = data.decode()
    assert "┃" in text
    assert "0.6250" in text
    assert "Clusters: 10, 10 clients" in text


def test_what_is_no_run_is_a_sentence(tmp_path: Path) -> None:
    with refused("not-a-run", says=("config.yaml", "status.json")):
        final_metrics(tmp_path)
    path = make(tmp_path / "run")
    (path / "status.json").write_text("{")
    with refused("damaged", says="status.json"):
        write_summary(path)
    shutil.rmtree(path)
    path = make(tmp_path / "run", config={"evaluation": {"last": 0}})
    with refused("damaged", says=("config.yaml", "evaluation.last >= 1", "0")):
        final_metrics(path)


@pytest.mark.parametrize(("name", "best"), [("accuracy", "0.9000"), ("mse", "0.2500")])
def test_every_cluster_model_on_every_ground_truth_distribution(tmp_path: Path, name: str, best: str) -> None:
    rows = ['1,0.5,"[[0.1, 0.2], [0.3, 0.4]]"', '2,0.5,"[[0.25, 0.9], [0.5, 0.5]]"', "3,,", ""]
    metrics = "\n".join([f"round,micro_{name},centre_{name}", *rows])
    text = write_summary(make(tmp_path / "run", metrics)).read_text()
    row = {"0.9000": "| 0 | 0.2500 | **0.9000** |", "0.2500": "| 0 | **0.2500** | 0.9000 |"}[best]
    assert row in text and "| 1 | **0.5000** | **0.5000** |" in text
    assert "on held-out samples, round 2" in text and "| distribution | model 0 | model 1 |" in text
    assert "ground-truth distribution" not in write_summary(make(tmp_path / "other")).read_text()


def test_summary_says_every_device_that_a_run_computed_on_once(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run")
    assert computed_on(RunFiles(path)) == []  # of an earlier version
    parts = [{"compute": {"sentence": text}} for text in ("2 x A GPU", "2 x A GPU", "CPU")]
    (path / "environment.json").write_text(
        json.dumps({**parts[0], "resumed": [*parts[1:], {"python": "3.11"}]})
    )
    assert computed_on(RunFiles(path)) == ["Computed on 2 x A GPU.", "Computed on CPU."]
    assert "- Computed on 2 x A GPU." in write_summary(path).read_text()
