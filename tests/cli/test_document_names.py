"""Settings and files that documents name are there today; of the changelog its newest part says what is."""

from __future__ import annotations

import json
import re

import pytest

import archipelago.cli.main
from archipelago.strategies.interface import FleetView
from tests.support.documents import DOCUMENTS, ROOT

# Options of entries that the reader of a page writes.
OF_EXAMPLES = {"partition.stripes", "data.spread"}
ENDINGS = (
    "py",
    "yaml",
    "csv",
    "md",
    "run",
)  # of files that are called like a section, and of a run of CIFAR-10


def code_of(document: str) -> list[str]:
    """What stands between backticks in sentences and tables."""
    text = (ROOT / document).read_text(encoding="utf-8")
    if document == "CHANGELOG.md":
        text = text.split("\n## ")[1]
    return re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S))


def test_settings_that_documents_name_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert archipelago.cli.main.main(["list", "settings", "--json"]) == 0
    names = {each["name"] for each in json.loads(capsys.readouterr().out)["settings"]} | OF_EXAMPLES
    names |= {f"fleet.{name}" for name in dir(FleetView)}
    sections = {name.partition(".")[0] for name in names if "." in name}
    found, unknown = 0, []
    for document in DOCUMENTS:
        for code in code_of(document):
            for name in re.findall(r"(?<![\w./])([a-z_]+\.[a-z_]+)(?=[=\s]|$)", code):
                if name.partition(".")[0] in sections and name.rpartition(".")[2] not in ENDINGS:
                    found += 1
                    unknown += [f"{document}: {name}"] if name not in names else []
    assert unknown == [] and found > 150


def test_files_of_the_project_that_documents_name_exist() -> None:
    """Those with a folder of the project in front."""
    tops = "|".join(path.name for path in ROOT.iterdir() if path.is_dir() and path.name[0] not in "._")
    found, gone = 0, []
    for document in DOCUMENTS:
        for code in code_of(document):
            for name in re.findall(
                rf"(?<![\w./*{{-])((?:{tops})/[\w/.-]+\.(?:py|md|ya?ml|jsonl?|toml|csv))\b", code
            ):
                if not name.startswith("runs/"):
                    found += 1
                    gone += [f"{document}: {name}"] if not (ROOT / name).exists() else []
    assert gone == [] and found > 60
