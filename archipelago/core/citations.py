"""The works that this platform implements and compares with: the one place of authors, titles, venues and BibTeX.

`published_results.csv` and the notes of tables name a work by its key (`thesis-2023`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Citation:
    """One work; `authors` are full names, family name last."""

    key: str
    authors: tuple[str, ...]
    title: str
    venue: str  # as the short form names it, without the year
    year: int
    kind: str  # BibTeX's: phdthesis, inproceedings, article, misc
    note: str = ""  # what a reader who compares numbers must know

    @property
    def short(self) -> str:
        """`J. Ma, Clustered Federated Learning, PhD thesis, University of Technology Sydney, 2023`."""
        thesis = "PhD thesis, " if self.kind == "phdthesis" else ""
        separator = ", " if self.kind == "phdthesis" else " "
        text = f"{', '.join(map(initials, self.authors))}, {self.title}, {thesis}{self.venue}{separator}{self.year}"
        return f"{text}{self.note}"

    @property
    def bibtex(self) -> str:
        """An entry for a bibliography, its key without anything that LaTeX trips over."""
        place = {
            "phdthesis": "school",
            "inproceedings": "booktitle",
            "article": "journal",
            "misc": "howpublished",
        }
        fields = {
            "author": " and ".join(self.authors),
            "title": f"{{{self.title}}}",
            place[self.kind]: self.venue,
            "year": str(self.year),
        }
        lines = [f"  {name} = {{{value}}}," for name, value in fields.items()]
        return "\n".join([f"@{self.kind}{{{self.key},", *lines, "}"])


def initials(name: str) -> str:
    """
    >>> initials("Jie Ma"), initials("Carlee Joe-Wong")
    ('J. Ma', 'C. Joe-Wong')
    """
    *given, family = name.split()
    return " ".join([*(f"{part[0]}." for part in given), family])


_CAM = "Structured Federated Learning through Clustered Additive Modeling"

CITATIONS = {
    each.key: each
    for each in (
        Citation(
            "thesis-2023",
            ("Jie Ma",),
            "Clustered Federated Learning",
            "University of Technology Sydney",
            2023,
            "phdthesis",
            note=f"; its Tables 7.1 and 7.3 are Tables 1 and 2 of Ma et al., {_CAM}, NeurIPS 2023",
        ),
        Citation(
            "cam-2023",
            ("Jie Ma", "Tianyi Zhou", "Guodong Long", "Jing Jiang", "Chengqi Zhang"),
            _CAM,
            "NeurIPS",
            2023,
            "inproceedings",
        ),
        Citation(
            "fedsoft-2022",
            ("Yichen Ruan", "Carlee Joe-Wong"),
            "FedSoft: Soft Clustered Federated Learning with Proximal Local Updating",
            "AAAI",
            2022,
            "inproceedings",
        ),
        Citation(
            "fesem-2022",
            ("Guodong Long", "Ming Xie", "Tao Shen", "Tianyi Zhou", "Xianzhi Wang", "Jing Jiang"),
            "Multi-Center Federated Learning: Clients Clustering for Better Personalization",
            "World Wide Web",
            2023,
            "article",
            note=" (online 2022)",
        ),
        Citation(
            "femam-2024",
            ("Shutong Chen", "Tianyi Zhou", "Guodong Long", "Jie Ma", "Jing Jiang", "Chengqi Zhang"),
            "Multi-Level Additive Modeling for Structured Non-IID Federated Learning",
            "arXiv:2405.16472",
            2024,
            "misc",
        ),
    )
}


def bibtex(keys: Iterable[str] = CITATIONS) -> str:
    """The BibTeX entries of these works, one beneath the other."""
    return "\n\n".join(CITATIONS[key].bibtex for key in keys) + "\n"
