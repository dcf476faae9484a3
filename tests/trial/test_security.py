"""Runs from elsewhere, keys in addresses, formulas in tables."""

from __future__ import annotations

import csv
import io
import shutil
from pathlib import Path

import pytest

from archipelago.core.redaction import redacted
from archipelago.runs.storage import refuse_bad_address
from archipelago.runs.trust import check_trust, remember
from tests.support.errors import refused
from tests.support.warm import Warm
from tests.trial.case import TINY

_PLUGIN = "import pathlib\npathlib.Path('imported').touch()\n"
_WORDS = TINY.replace("{folder}/", "").split()


def _stopped(warm: Warm, folder: Path, state: Path) -> Path:
    """A run with a plug-in that fails in its second round, made by a user whose state folder this is."""
    (folder / "mine.py").write_text(
        f"{_PLUGIN}from archipelago import Callback\nclass Mine(Callback):\n"
        "    def on_round(self, run, report):\n        if report.round == 2 and pathlib.Path('stop').exists(): raise ValueError\n"
    )
    (folder / "stop").touch()
    words = [*_WORDS, "plugins=[mine]", "callbacks=[mine.Mine]", "checkpoint.every=1"]
    assert warm(words, folder, ARCHIPELAGO_STATE=str(state)).code == 2
    (folder / "stop").unlink()
    (folder / "imported").unlink()
    return folder / "runs/x"


@pytest.mark.slow
def test_run_from_elsewhere_is_asked_about_once_and_one_made_here_never(
    warm_process: Warm, tmp_path: Path
) -> None:
    run = _stopped(warm_process, tmp_path, tmp_path / "state")
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    stranger = {"ARCHIPELAGO_STATE": str(tmp_path / "another")}
    refusal = warm_process(["resume", str(copy)], tmp_path, **stranger)
    assert refusal.code == 2 and "--trust" in refusal.error
    assert "mine (plugins)" in refusal.error and "mine.Mine (callbacks)" in refusal.error
    report = warm_process(["report", str(copy), "figures=no"], tmp_path, **stranger)
    assert report.code == 0, report.error
    assert not (tmp_path / "imported").exists()  # neither of them imported it
    here = warm_process(["resume", str(run)], tmp_path, ARCHIPELAGO_STATE=str(tmp_path / "state"))
    assert here.code == 0 and (tmp_path / "imported").exists(), here.error
    trusted = warm_process(["resume", str(copy), "--trust"], tmp_path, **stranger)
    assert trusted.code == 0, trusted.error
    again = warm_process(["resume", str(copy)], tmp_path, **stranger)
    assert "is not finished" in again.error  # it is not asked about again


def test_trust_is_of_one_identity_and_its_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARCHIPELAGO_STATE", str(tmp_path))
    check_trust("runs/x", "abc", {}, False)  # names no code
    with refused("untrusted", imports=["mine"]):
        check_trust("runs/x", "abc", {"mine": "plugins"}, False)
    remember("abc", {"mine": "plugins"})
    check_trust("runs/x", "abc", {"mine": "plugins"}, False)
    with refused("untrusted", imports=["mine", "other.Thing"]):
        check_trust("runs/x", "abc", {"mine": "plugins", "other.Thing": "model.target"}, False)
    check_trust("runs/x", "abd", {"mine": "plugins"}, True)
    check_trust("runs/x", "abd", {"mine": "plugins"}, False)  # remembered


@pytest.mark.parametrize(
    "address",
    [
        "s3://AKIA:secret@bucket/x",
        "s3://bucket/x?secret_key=secret",
        "abfs://x@y/z?account_key=secret",
        "gs://t:secret@b/x?a=1",
    ],
)
def test_keys_in_an_address_are_refused_and_never_shown(address: str) -> None:
    with refused("keys-in-address") as caught:
        refuse_bad_address(address)
    assert "secret@" not in str(caught.value) and "=secret" not in str(caught.value)
    assert "secret@" not in redacted(f"resume {address}") and "=secret" not in redacted(f"resume {address}")


def test_addresses_without_keys_are_left_as_they_are() -> None:
    for address in (
        "s3://bucket/x?region=here&endpoint_override=127.0.0.1:9",
        "gs://bucket/monkey=1",
        "runs/key=3",
    ):
        assert redacted(address) == address
        if "://" in address:
            refuse_bad_address(address)


def test_text_cells_of_a_table_are_no_formulas() -> None:
    from archipelago.reports.groups import Group
    from archipelago.reports.table_text import as_csv
    from archipelago.reports.tables import build_tables
    from archipelago.runs.sweeps import Trial

    lost = Trial(None, "=HYPERLINK(1)", 0, "failed", "@SUM(1)")
    group = Group("=HYPERLINK(1)", "", {}, [], [lost], "x")
    rows = list(csv.reader(io.StringIO(as_csv(build_tables([group])))))
    assert all(not cell.startswith(("=", "+", "@")) for row in rows for cell in row)


def test_trials_with_a_formula_in_their_reason_come_back_as_they_were(tmp_path: Path) -> None:
    from archipelago.core.csv_cells import quoted_cell
    from archipelago.runs.sweeps import read_rows

    (tmp_path / "trials.csv").write_text(
        f"trial,group,seed,status,reason,run\nt0,{quoted_cell('+x')},0,failed,{quoted_cell('=1+1')},\n"
    )
    (row,) = read_rows(tmp_path)
    assert (row.group, row.reason) == ("+x", "=1+1")
