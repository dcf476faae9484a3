"""Mistakes have a code and values: what programs and tests look at, while the prose may change."""

from __future__ import annotations

import pickle
import re

from archipelago.core.errors import UserError
from archipelago.runs.trees import DamagedFile
from docs.hooks.errors import Mistake, errors_page, mistakes, mistakes_in
from tests.support.errors import refused

MISTAKES = list(mistakes())
# What a code that many modules share always carries, so that a program can rely on it.
CARRIES = {
    "unknown-name": {"kind", "name"}, "unknown-option": {"option"}, "unknown-setting": {"setting", "nearest"},
    "unknown-choice": {"setting", "given"}, "unread": {"setting"}, "given-twice": {"setting"},
    "either-or": {"settings"}, "incompatible": {"settings"}, "needs": {"setting", "needed"},
    "wrong-place": {"setting", "meant"}, "out-of-range": {"setting", "given"}, "too-many": {"setting", "most"},
    "wrong-kind": {"kind", "name"}, "wrong-form": {"setting"}, "missing-value": {"setting"},
    "missing-word": {"wanted"}, "not-a-setting": {"word"}, "surplus": {"word"}, "needs-package": {"package"},
    "exists": {"path"}, "not-found": {"path"}, "unwritable": {"path"}, "symbolic-link": {"path"},
    "needs-groups": {"setting"}, "shared-samples": {"setting"}, "test-data": {"setting"},
}  # fmt: skip


def without_code(found: list[Mistake]) -> list[str]:
    return [
        f"{each.path}:{each.line}" for each in found if not re.fullmatch("[a-z]+(-[a-z]+)*", each.code or "")
    ]


def test_user_errors_of_the_source_all_have_a_code() -> None:
    assert len(MISTAKES) > 400
    assert without_code(MISTAKES) == []
    assert without_code([*mistakes_in("raise UserError(text)", "here.py")]) == ["here.py:1"]


def test_shared_codes_always_carry_their_values() -> None:
    assert CARRIES.keys() <= {each.code for each in MISTAKES}
    bare = {
        f"{each.path}:{each.line}: {each.code} without {', '.join(lacks)}"
        for each in MISTAKES
        if "**" not in each.values  # built beside the sentence
        if (lacks := sorted(CARRIES.get(each.code or "", set()) - set(each.values)))
    }
    assert bare == set()


def test_page_of_error_codes_has_every_code_once() -> None:
    rows = re.findall(r"^\| `([a-z-]+)` \|", errors_page(), re.MULTILINE)
    assert rows == sorted({each.code for each in MISTAKES})


def test_user_error_keeps_code_and_values_through_a_pickle_and_in_other_words() -> None:
    error = UserError("No 'x'.", code="unknown-name", kind="thing", name="x")
    for same in (pickle.loads(pickle.dumps(error)), error.rephrased("There is no 'x'.")):
        with refused("unknown-name", kind="thing", name="x"):
            raise same


def test_damaged_file_has_the_code_of_its_class() -> None:
    with refused("damaged"):
        raise DamagedFile("no such file")
