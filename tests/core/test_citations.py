"""One source of citations: the thesis by its real title everywhere, and CITATION.cff beside it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml

from archipelago.core.citations import CITATIONS, bibtex

ROOT = Path(__file__).parents[2]


def test_citations_name_the_thesis_by_its_title() -> None:
    assert CITATIONS["thesis-2023"].short.startswith(
        "J. Ma, Clustered Federated Learning, PhD thesis, University of Technology Sydney, 2023"
    )


def test_citations_of_papers_have_all_authors_and_the_venue() -> None:
    assert CITATIONS["fedsoft-2022"].short == (
        "Y. Ruan, C. Joe-Wong, FedSoft: Soft Clustered Federated Learning with Proximal Local Updating, AAAI 2022"
    )


def test_citations_as_bibtex() -> None:
    assert CITATIONS["thesis-2023"].bibtex == (
        "@phdthesis{thesis-2023,\n"
        "  author = {Jie Ma},\n"
        "  title = {{Clustered Federated Learning}},\n"
        "  school = {University of Technology Sydney},\n"
        "  year = {2023},\n"
        "}"
    )
    assert bibtex().count("\n@") == len(CITATIONS) - 1


def test_citations_are_the_only_place_of_the_thesis_title() -> None:
    """Its former, wrong title is nowhere; the CAM paper really has these words in its own."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout")
    wrong = "Structured Federated " + "Learning"
    found = subprocess.run(
        ["git", "grep", "-I", "-h", "-o", f"{wrong}.\\{{0,40\\}}"], cwd=ROOT, capture_output=True, text=True
    ).stdout.splitlines()
    assert found, "the CAM paper is cited"
    assert [line for line in found if not line.startswith(f"{wrong} through Clustered Additive Mode")] == []


def test_citation_file_has_the_version_and_the_papers() -> None:
    cff = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    tomllib = pytest.importorskip("tomllib", reason="a part of Python 3.11")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert cff["cff-version"] == "1.2.0"
    assert (cff["version"], cff["license"]) == (project["version"], project["license"])
    assert {"message", "title", "authors"} <= set(cff)
    papers = {
        (
            each["title"],
            each["year"],
            tuple(f"{one['given-names']} {one['family-names']}" for one in each["authors"]),
        )
        for each in cff["references"]
    }
    assert papers == {(each.title, each.year, each.authors) for each in CITATIONS.values()}
