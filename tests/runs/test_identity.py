"""What a run is of: noticed where its config, its partition or its checkpoints are another's."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import pytest

from archipelago import adopt, open_run
from archipelago.experiments.new_clients import NewClient
from archipelago.experiments.runner import check_code, resume, run_experiment
from archipelago.reports.groups import make_groups
from archipelago.reports.tables import build_tables
from archipelago.runs.files import RunFiles
from archipelago.runs.identity import code_digests, digest_of_code, identity_of
from archipelago.runs.status import read_status
from archipelago.runs.sweeps import find_trials
from tests.support.errors import refused
from tests.support.experiments import config_of
from tests.support.runs import assert_equal_runs, events


def made(path: Path, *settings: str) -> Path:
    return run_experiment(
        config_of("method=fedavg", "checkpoint.every=1", "rounds=3", *settings), path, quiet=True
    )


def interrupted(path: Path, *settings: str) -> Path:
    """A finished run as a kill after its second round left it."""
    made(path, *settings)
    shutil.rmtree(path / "checkpoints/round-000003")
    status = json.loads((path / "status.json").read_text())
    (path / "status.json").write_text(json.dumps({**status, "state": "failed", "rounds_done": 2}))
    return path


def edit(run: Path, pattern: str, text: str) -> None:
    before = (run / "config.yaml").read_text()
    after = re.sub(pattern, text, before, count=1, flags=re.M)
    assert before != after
    (run / "config.yaml").write_text(after)


def test_identity_is_one_in_status_and_manifests_and_differs_by_what_counts(tmp_path: Path) -> None:
    first = made(tmp_path / "first")
    identity = identity_of(first)
    assert identity is not None and read_status(first).identity == identity
    for manifest in first.glob("checkpoints/*/manifest.json"):
        assert json.loads(manifest.read_text())["identity"] == identity
    assert identity_of(made(tmp_path / "same", "fleet.gpus=0", "checkpoint.keep=3")) == identity
    assert identity_of(made(tmp_path / "seed", "seed=1")) != identity


@pytest.mark.parametrize(
    ("pattern", "text", "sentence"),
    [
        (r"^  lr: .*", "  lr: 0.5", "local.lr was 0.05 and is 0.5"),
        (r"^seed: .*", "seed: 7", "seed was 0 and is 7"),
        (r"^rounds: .*", "rounds: 9", "rounds was 3 and is 9"),
        (r"^method: .*", "method: local", 'method was "fedavg" and is "local"'),
        (r"^weights: .*\n", "", 'weights was "size" and is not there'),
    ],
)
def test_identity_of_an_edited_config_is_refused_by_the_key(
    tmp_path: Path, pattern: str, text: str, sentence: str
) -> None:
    run = interrupted(tmp_path / "run")
    edit(run, pattern, text)
    x, y = config_samples()
    for use in (lambda: resume(run, quiet=True), lambda: adopt(run, [NewClient(x, y, x, y)])):
        with refused("other-config", says=sentence):
            use()
    (group,) = make_groups(find_trials([run]))
    assert sentence in group.note


def config_samples():  # type: ignore[no-untyped-def]
    from archipelago.data import load_dataset

    data = load_dataset(config_of().data, 0)
    return data.x_train[:4], data.y_train[:4]


def test_identity_lets_a_run_move_and_change_its_fleet(tmp_path: Path) -> None:
    run = interrupted(tmp_path / "run")
    edit(run, r"^  actors: .*", "  actors: 2")
    moved = tmp_path / "elsewhere"
    run.rename(moved)
    resume(moved, quiet=True)
    assert_equal_runs(moved, made(tmp_path / "straight"))


def test_identity_of_another_partition_or_checkpoint_is_noticed(tmp_path: Path) -> None:
    other = made(tmp_path / "other", "seed=1")
    run = interrupted(tmp_path / "run", "checkpoint.keep=3")
    shutil.rmtree(run / "checkpoints/round-000002")
    shutil.copytree(other / "checkpoints/round-000002", run / "checkpoints/round-000002")
    resume(run, quiet=True)  # from round 1, whose checkpoint is its own
    assert any("is of another run" in event for event in events(run))
    assert_equal_runs(run, made(tmp_path / "straight"))
    run = interrupted(tmp_path / "second")
    shutil.copy(other / "partition.safetensors", run)
    with refused("other-config", says=("partition.safetensors", "another")):
        resume(run, quiet=True)
    (run / "partition.safetensors").unlink()
    with refused("other-config", says=("partition.safetensors", "missing")):
        resume(run, quiet=True)


def test_identity_has_the_code_that_a_run_imports_and_reports_say_where_it_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    module = tmp_path / "identity_of_mine.py"
    module.write_text("from archipelago import Callback\nclass Mine(Callback):\n    pass\n")
    named = "callbacks=[identity_of_mine.Mine]"
    runs = [interrupted(tmp_path / "zero", named)]
    module.write_text(module.read_text() + "# changed\n")
    runs.append(made(tmp_path / "one", named, "seed=1"))
    before, after = (code_digests(run)["identity_of_mine.Mine"] for run in runs)
    assert before and after and before != after
    check_code(runs[0])
    assert (
        "was made with other code of identity_of_mine.Mine" in caplog.text
    )  # what `resume` and `adopt` begin with
    resume(runs[0], quiet=True)
    assert any("code of identity_of_mine.Mine is not the one" in event for event in events(runs[0]))
    assert_equal_runs(runs[0], made(tmp_path / "straight", named))  # it is told, not refused
    (group,) = make_groups(find_trials(runs))
    assert "2 versions of the code of identity_of_mine.Mine" in group.note
    assert (runs[0] / "summary.md").read_text().count(f"Identity {identity_of(runs[0])}") == 1


def test_identity_of_a_run_published_without_its_partition_keeps_its_rank(tmp_path: Path) -> None:
    runs = [made(tmp_path / "one"), made(tmp_path / "two", "local.lr=0.2")]
    for run in runs:
        (run / "partition.safetensors").unlink()
    (table,) = build_tables(make_groups(find_trials(runs)))
    assert {row.cells["micro_accuracy"].rank for row in table.rows} == {1, 2} and not table.rows[1].note


def test_identity_of_a_run_published_without_its_models_is_not_altered(tmp_path: Path) -> None:
    path = made(tmp_path / "run")
    (model,) = (path / "models").iterdir()
    model.unlink()
    assert RunFiles(path).altered == f"models/{model.name} is missing"
    (path / "models").rmdir()
    assert RunFiles(path).altered is None


def test_identity_of_a_finished_run_that_was_edited_costs_its_rank(tmp_path: Path) -> None:
    runs = [made(tmp_path / "one"), made(tmp_path / "two", "local.lr=0.2")]
    edit(runs[1], r"^  lr: .*", "  lr: 0.3")
    (table,) = build_tables(make_groups(find_trials(runs)))
    ranks = [row.cells["micro_accuracy"].rank for row in table.rows]
    assert ranks == [1, None] and "local.lr was 0.2 and is 0.3" in table.rows[1].note


def test_identity_that_is_gone_or_damaged_is_a_sentence_and_old_runs_have_none(tmp_path: Path) -> None:
    run = interrupted(tmp_path / "run")
    (run / "identity.json").write_text("{")
    with refused("damaged", says="identity.json"):
        resume(run, quiet=True)
    (run / "identity.json").unlink()
    with refused("other-config", says=("identity.json", "missing")):
        resume(run, quiet=True)
    old = interrupted(tmp_path / "old")
    (old / "identity.json").unlink()
    status = json.loads((old / "status.json").read_text())
    del status["identity"]
    (old / "status.json").write_text(json.dumps({**status, "format": 2}))
    for manifest in old.glob("checkpoints/*/manifest.json"):
        content = json.loads(manifest.read_text())
        del content["identity"]
        manifest.write_text(json.dumps(content))
    resume(old, quiet=True)
    assert open_run(old).status.state == "finished"


def test_digest_of_code_finds_files_of_packages_and_the_working_directory_and_imports_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "never_imported"
    package.mkdir()
    for name in ("__init__.py", "inner.py"):
        (package / name).write_text(f"raise RuntimeError({name!r})")
    monkeypatch.chdir(tmp_path)
    whole, inner, named, beyond = (
        digest_of_code(f"never_imported{rest}") for rest in ("", ".inner", ".inner.Mine", ".gone")
    )
    assert whole and inner and whole != inner
    assert (named, beyond) == (inner, whole)  # the module that an import path begins with
    assert digest_of_code("no_such_module.at_all") == ""
    assert not [name for name in sys.modules if name.startswith("never_imported")]
