"""A resume stands on rounds that are there: with tables missing it goes further back, and says so."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from actors.reports import RoundReport
from archipelago.experiments.callbacks.base import Callback, LiveRun
from archipelago.experiments.runner import resume, run_experiment
from tests.support.errors import refused
from tests.support.experiments import config_of
from tests.support.runs import assert_equal_runs, events

SETTINGS = ("method=ifca", "rounds=5", "checkpoint.every=2", "checkpoint.keep=9")


class Stopper(Callback):
    """Says something in round 2, and ends the process in the round after `round`."""

    def __init__(self, round: int) -> None:
        self._round = round

    def on_round(self, run: LiveRun, report: RoundReport) -> None:
        if report.round == 2:
            run.note("Two rounds are done.")
        if report.round == self._round + 1:
            raise KeyboardInterrupt


def stopped_after(path: Path, round: int) -> Path:
    """A run whose process ended in the round after `round`."""
    with pytest.raises(KeyboardInterrupt):
        run_experiment(config_of(*SETTINGS), path, callbacks=[Stopper(round)], quiet=True)
    return path


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_experiment(config_of(*SETTINGS), tmp_path_factory.mktemp("straight") / "run", quiet=True)


def drop_row(path: Path, without: int) -> None:
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if not line.startswith(f"{without},")))


@pytest.mark.parametrize(
    ("damage", "begins"),
    [
        (lambda run: None, 4),
        (lambda run: drop_row(run / "metrics.csv", 3), 2),
        (lambda run: drop_row(run / "metrics.csv", 1), 0),
        (lambda run: (run / "metrics.csv").unlink(), 0),
        (lambda run: (run / "parts/clients-000004.parquet").unlink(), 2),
        (lambda run: (run / "parts/assignments-000004.parquet").unlink(), 2),
        (lambda run: (run / "parts/clients-000002.parquet").unlink(), 0),
        (lambda run: shutil.rmtree(run / "parts"), 0),
        (lambda run: (run / "timings.csv").unlink(), 0),
        (lambda run: drop_row(run / "timings.csv", 3), 2),
    ],
)
def test_resume_with_missing_tables_goes_back_to_where_they_are_complete(
    tmp_path: Path, straight: Path, damage, begins: int
) -> None:  # type: ignore[no-untyped-def]
    run = stopped_after(tmp_path / "run", 4)
    damage(run)
    resume(run, quiet=True)
    assert_equal_runs(run, straight)
    said = [event for event in events(run) if "are complete in the run's tables" in event]
    assert bool(said) == (begins < 4)
    if said:
        assert ("starts over" in said[0]) if begins == 0 else (f"resuming from round {begins}" in said[0])
    rounds = [int(line.partition(",")[0]) for line in (run / "metrics.csv").read_text().splitlines()[1:]]
    assert rounds == [1, 2, 3, 4, 5]
    assert json.loads((run / "status.json").read_text())["state"] == "finished"


def test_resume_without_the_events_of_before_says_that_they_are_missing(
    tmp_path: Path, straight: Path
) -> None:
    run = stopped_after(tmp_path / "run", 4)
    (run / "events.jsonl").unlink()
    resume(run, quiet=True)
    assert_equal_runs(run, straight)
    assert any("events.jsonl is not as it was written" in event for event in events(run))


def test_resume_without_a_recorded_table_goes_back_to_before_it(tmp_path: Path, straight: Path) -> None:
    run = stopped_after(tmp_path / "run", 4)
    (run / "records/models-000003.parquet").unlink()
    resume(run, quiet=True)
    assert_equal_runs(run, straight)  # with that table again
    assert any("a table of records/ is missing" in event for event in events(run))


def test_sentence_about_a_damaged_file_says_what_is_whole_and_what_resume_does(tmp_path: Path) -> None:
    run = stopped_after(tmp_path / "run", 4)
    (run / "timings.csv").write_text("round,total\n1,2,3\n")
    with refused("damaged", file=run / "timings.csv") as caught:
        resume(run, quiet=True)
    sentence = str(caught.value)
    assert "or remove it, and `resume` runs the rounds again" in sentence
    assert sentence.endswith("; metrics.csv, the checkpoints of round 2 and 4 can be read.")
    (run / "timings.csv").unlink()
    resume(run, quiet=True)  # as it says
    assert json.loads((run / "status.json").read_text())["state"] == "finished"
