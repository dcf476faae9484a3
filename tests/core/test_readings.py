"""The table of readings: one form in every method's docstring, for `list` and for reports."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import archipelago as ar
from archipelago.core.readings import NOTHING, Reading, documentation, readings_of, split_readings
from archipelago.core.schema import composed, leaves
from archipelago.core.settings import ExperimentSettings
from archipelago.reports.build import ReportRequest, build_report
from archipelago.strategies import ADDONS, AGGREGATION, METHODS
from archipelago.strategies.attacks import ATTACKS
from archipelago.strategies.server_optimizers import SERVER_OPTIMIZERS
from archipelago.strategies.updates import TRANSFORMS

REGISTRIES = (METHODS, ADDONS, AGGREGATION, ATTACKS, SERVER_OPTIMIZERS, TRANSFORMS)
PARTS = [entry for registry in REGISTRIES for entry in registry.values()]
OURS = [entry for entry in PARTS if entry.value.__module__.startswith("archipelago.")]


@pytest.fixture(scope="module")
def known() -> dict[str, Any]:
    return leaves(composed(ExperimentSettings))


@pytest.mark.parametrize("entry", OURS, ids=lambda entry: entry.name)
class TestReadingsOfEveryPart:
    def test_readings_are_there_and_whole(self, entry: ar.core.registry.Entry) -> None:
        _, rows = split_readings(documentation(entry))  # raises where the form is not kept
        assert rows
        assert len({row.topic for row in rows}) == len(rows)
        assert all(row.paper or row.code or row.here for row in rows)

    def test_readings_name_settings_that_exist(
        self, entry: ar.core.registry.Entry, known: dict[str, Any]
    ) -> None:
        for row in readings_of(entry):
            for key, value in re.findall(r"\b([a-z_]+\.[a-z_]+)(=[\w|]+)?", row.option):
                assert key in known, f"{row.topic}: {key}"
                choices = known[key].metadata.get("choices")
                if value and choices:
                    assert set(value[1:].split("|")) <= set(choices), f"{row.topic}: {key}{value}"


class TestFormOfReadings:
    def test_readings_without_here_are_refused(self) -> None:
        with pytest.raises(ValueError, match="Ties"):
            split_readings("Mine.\n\nReadings\n\nTies\n    paper   none\n")

    @pytest.mark.parametrize("line", ["   here    x", "    there   x", "    here    again"])
    def test_readings_of_another_form_are_refused(self, line: str) -> None:
        with pytest.raises(ValueError, match="expected a topic"):
            split_readings(f"Mine.\n\nReadings\n\nTies\n    here    lowest\n{line}\n")

    def test_readings_are_none_where_a_docstring_has_none(self) -> None:
        assert split_readings("Mine.\n\nReadings: prose.") == ("Mine.\n\nReadings: prose.", ())

    def test_reading_row_marks_silent_sources(self) -> None:
        assert Reading("Ties", "lowest", option="x.y").row() == ("Ties", NOTHING, NOTHING, "lowest", "x.y")


class TestReadingsOfARun:
    def test_readings_go_from_the_run_into_its_report(self, tmp_path: Path) -> None:
        run = ar.run(
            method="ifca+prox", data="digits", clients=4, clusters=2, rounds=1, storage=str(tmp_path), name="one",
            fleet={"backend": "in_process"}, local={"steps": 1},
        )  # fmt: skip
        stored = json.loads((run.path / "vocabulary.json").read_text())["readings"]
        assert stored.keys() == {"ifca", "prox"}
        assert [Reading(**row) for row in stored["ifca"]] == list(readings_of(METHODS["ifca"]))
        build_report(ReportRequest([str(run.path)], out=str(tmp_path / "report"), figures="no"))
        page = (tmp_path / "report" / "report.html").read_text()
        assert "Readings of IFCA" in page
        assert "<td>K independent draws</td>" in page
