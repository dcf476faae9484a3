"""The trial: hundreds of bad inputs, each answered with one sentence; no traceback, no hang, nothing lost.

The whole of it runs in `make check-all`, a sample in every run.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.warm import Warm
from tests.support.written_runs import write_run
from tests.trial import command_lines, data_files, run_directories, user_modules, yaml_files
from tests.trial.case import TINY, Case, changes, contents
from tests.trial.run_directories import (
    DAMAGE,
    FINISHED,
    REPLACED_FINISHED,
    REPLACED_STOPPED,
    STOPPED,
    SWEEP,
    copied,
    damaged,
    foreign_changes,
    replaced,
    reported,
    resumed,
    wrong_numbers,
)

CASES = [*command_lines.CASES, *yaml_files.CASES, *data_files.CASES, *user_modules.CASES]
PROMISES = Path(__file__).parents[2] / "docs" / "promises.md"
SAMPLE = (
    "+ local.steps=50000000", "+ 'ensemble=[fedavg*100000000]'", "+ sweep.seeds=1000000000",
    "+ storage=s3://me:secret@bucket/x", "yaml: deep lists", "yaml: a FIFO", "yaml: includes that double",
    "images: an image of 30,000 x 30,000", "module: sys.exit(0) at import", "module: training step exits with 0",
)  # fmt: skip


def test_trial_is_as_large_as_is_promised_and_its_inputs_differ() -> None:
    damages = len(DAMAGE) * (len(STOPPED) + 2 * len(FINISHED) + 2 * len(SWEEP))
    damages += len(REPLACED_STOPPED) + len(REPLACED_FINISHED)
    assert len({case.name for case in CASES}) == len(CASES)
    promised = re.search(r"\((\d+) inputs and (\d+) damaged directories\)", PROMISES.read_text())
    assert promised is not None and (len(CASES), damages) == (int(promised[1]), int(promised[2]))
    assert all(case.says for case in CASES)
    assert set(SAMPLE) <= {case.name for case in CASES}


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLE)
def test_trial_sample(name: str, warm_process: Warm, tmp_path: Path) -> None:
    _run(next(case for case in CASES if case.name == name), warm_process, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("case", CASES, ids=[case.name[:80] for case in CASES])
def test_trial(case: Case, warm_process: Warm, tmp_path: Path) -> None:
    _run(case, warm_process, tmp_path)


def _run(case: Case, warm: Warm, tmp_path: Path) -> None:
    faults = case.run(warm, tmp_path / "here", tmp_path)
    assert not faults, "\n".join([case.words, *faults])


@pytest.mark.full
def test_trial_notices_what_it_is_for(warm_process: Warm, tmp_path: Path) -> None:
    """A good command is a wrong success, a false sentence is none, and what is left behind is seen."""
    good = Case("good", TINY, "Expected")
    faults = good.run(warm_process, tmp_path / "good", tmp_path)
    assert {"wrong success", "left behind: runs"} <= set(faults)
    other = Case("other", "rounds=0", "something else")
    assert any(
        fault.startswith("does not say") for fault in other.run(warm_process, tmp_path / "other", tmp_path)
    )


# Run directories ---------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.parametrize("file", STOPPED)
def test_resume_of_a_damaged_run_gives_its_bits_or_a_sentence(
    file: str, kind: str, warm_process: Warm, runs: Path, tmp_path: Path
) -> None:
    folder = copied(runs / "stopped", tmp_path / "here")
    damaged(folder / "run" / file, kind)
    faults = resumed(warm_process, folder, runs / "finished")
    assert not faults, "\n".join(faults)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "kind"),
    [("metrics.csv", "a flipped bit"), ("vocabulary.json", "empty"), ("identity.json", "a FIFO")],
)
def test_resume_of_a_damaged_run_sample(
    file: str, kind: str, warm_process: Warm, runs: Path, tmp_path: Path
) -> None:
    test_resume_of_a_damaged_run_gives_its_bits_or_a_sentence(file, kind, warm_process, runs, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside another"])
@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.parametrize("file", FINISHED)
def test_report_of_a_damaged_run_gives_its_numbers_or_a_sentence(
    file: str, kind: str, beside: bool, warm_process: Warm, runs: Path, tmp_path: Path
) -> None:
    others = [runs / "other"] if beside else []
    table = run_directories.table(warm_process, runs / "finished", *others)
    folder = copied(runs / "finished", tmp_path / "here")
    damaged(folder / "run" / file, kind)
    faults = reported(warm_process, folder, *others, table=table)
    assert not faults, "\n".join(faults)


@pytest.mark.full
@pytest.mark.parametrize(("file", "other"), REPLACED_STOPPED)
def test_resume_takes_no_file_for_another(
    file: str, other: str, warm_process: Warm, runs: Path, tmp_path: Path
) -> None:
    folder = copied(runs / "stopped", tmp_path / "here")
    replaced(folder / "run", file, other)
    faults = resumed(warm_process, folder, runs / "finished")
    assert not faults, "\n".join(faults)


@pytest.mark.full
@pytest.mark.parametrize(("file", "other"), REPLACED_FINISHED)
def test_report_takes_no_file_for_another(
    file: str, other: str, warm_process: Warm, runs: Path, tmp_path: Path
) -> None:
    table = run_directories.table(warm_process, runs / "finished")
    folder = copied(runs / "finished", tmp_path / "here")
    replaced(folder / "run", file, other)
    faults = reported(warm_process, folder, table=table)
    assert not faults, "\n".join(faults)


@pytest.mark.slow
def test_report_of_all_leaves_a_damaged_run_out_and_says_so(warm_process: Warm, tmp_path: Path) -> None:
    write_run(tmp_path / "bad", method="ifca")
    write_run(tmp_path / "good", method="fedavg")
    (tmp_path / "bad/clients.parquet").write_bytes(b"PAR1 no")
    both = warm_process(["report", "bad", "good", "figures=no", "out=out"], tmp_path)
    assert both.code == 0, both.error
    assert (
        "FedAvg" in both.output and "left out" in both.output and "clients.parquet is damaged" in both.output
    )
    alone = warm_process(["report", "bad", "figures=no"], tmp_path)
    assert alone.code == 2 and "clients.parquet is damaged" in alone.error


@pytest.mark.full
@pytest.mark.parametrize("command", ["report", "resume"])
@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.parametrize("file", SWEEP)
def test_damaged_sweep_is_answered_with_a_sentence(
    file: str, kind: str, command: str, warm_process: Warm, runs: Path, tmp_path: Path
) -> None:
    right = run_directories.table(warm_process, runs / "sweep")
    folder = copied(runs / "sweep", tmp_path / "here")
    damaged(folder / "run" / file, kind)
    before = contents(folder)
    ended = warm_process(
        [command, str(folder / "run"), *(["figures=no", f"out={folder}/out"] if command == "report" else [])],
        folder,
    )
    after = contents(folder)
    assert ended.code in (0, 2) and "Traceback" not in ended.error, ended.error
    # The runs of the trials are whole, and nothing is there that nobody asked for.
    allowed = ("out",) if command == "report" else ("run/trials.csv",)
    assert not changes(before, after, allowed) and not foreign_changes(before, after)
    if ended.code == 2:
        assert len(ended.error.splitlines()) == 1 and ended.error.strip().endswith((".", ")"))
    elif command == "report":
        made = (folder / "out/table.csv").read_text()
        assert not wrong_numbers(made, right, ended.output + ended.error), made
