"""Experiments as files: names, includes and small variants; what is wrong is one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from archipelago.core.packaged import TUNE_CONFIGS
from archipelago.experiments.config import load_config
from archipelago.experiments.config_files import find_config, read_config
from tests.support.errors import Mistake, mistake, refused


def write(folder: Path, name: str, text: str) -> Path:
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def test_find_config_takes_a_path_as_it_is_and_a_name_from_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_config("thesis-7.1") == TUNE_CONFIGS / "thesis-7.1.yaml"
    assert read_config(find_config("thesis-7.1-small"))["name"] == "thesis-7.1-small"
    assert find_config("folder/mine.yaml") == Path("folder/mine.yaml")
    (tmp_path / "demo").write_text("rounds: 3")  # a file of the user's own comes first
    assert find_config("demo") == Path("demo")


def test_find_config_answers_a_wrong_name_with_the_nearest() -> None:
    with refused("unknown-config", name="thesis-7.11"):
        find_config("thesis-7.11")


def test_read_config_of_a_file_that_the_package_has_elsewhere_says_its_name(tmp_path: Path) -> None:
    with refused("not-found", says="thesis-7.1-small"):
        read_config(tmp_path / "tune_configs" / "thesis-7.1-small.yaml")


def test_include_merges_sections_and_the_later_file_wins(tmp_path: Path) -> None:
    write(tmp_path, "bases/one.yaml", "rounds: 5\nlocal: {lr: 0.1, batch: 8}\nsweep: {seeds: [0, 1]}")
    write(tmp_path, "bases/two.yaml", "rounds: 6\ndata: digits\nsweep: {grid: {local.momentum: [0, 0.5]}}")
    file = write(
        tmp_path,
        "mine.yaml",
        "include: [bases/one.yaml, bases/two.yaml]\nlocal.lr: 0.2\ndata: {rotations: 4}\nsweep: {seeds: [7]}",
    )
    assert read_config(file) == {
        "rounds": 6,
        "local": {"lr": 0.2, "batch": 8},
        "data": {"name": "digits", "rotations": 4},
        "sweep": {"seeds": [7], "grid": {"local.momentum": [0, 0.5]}},
    }


def test_include_of_an_include_is_relative_to_its_own_file(tmp_path: Path) -> None:
    write(tmp_path, "bases/deep/one.yaml", "rounds: 5\nclients: 9")
    write(tmp_path, "bases/two.yaml", "include: deep/one.yaml\nclients: 8")
    file = write(tmp_path, "mine.yaml", "include: bases/two.yaml")
    assert read_config(file) == {"rounds": 5, "clients": 8}


def test_include_takes_a_file_of_the_package_by_name(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, "mine.yaml", "include: demo\nrounds: 3"), env={})
    assert (config.method, config.data.rotations, config.rounds) == ("ifca", 4, 3)


def test_include_null_takes_a_setting_out(tmp_path: Path) -> None:
    write(tmp_path, "base.yaml", "rounds: 5\nlocal: {epochs: 3, lr: 0.1}")
    file = write(
        tmp_path, "mine.yaml", "include: base.yaml\nlocal: {epochs: null, steps: 4}\nfleet: {actors: null}"
    )
    assert read_config(file) == {"rounds": 5, "local": {"lr": 0.1, "steps": 4}, "fleet": {"actors": None}}


MISTAKES = [  # (what is wrong, the text of mine.yaml, the text of base.yaml)
    (
        mistake("includes-itself", says="mine.yaml -> base.yaml -> mine.yaml"),
        "include: base.yaml",
        "include: mine.yaml",
    ),
    (mistake("not-found", says="base.yaml"), "include: bose.yaml", "rounds: 3"),
    (mistake("wrong-type", setting="include", given=3), "include: 3", ""),
    (mistake("unknown-config", name="tesis-7.1", says="thesis-7.1"), "include: tesis-7.1", ""),
    (mistake("not-yaml", says="base.yaml"), "include: base.yaml", "a: ["),
    (mistake("wrong-type", setting="small", given=3), "rounds: 3\nsmall: 3", ""),
]


@pytest.mark.parametrize(("wrong", "mine", "base"), MISTAKES)
def test_include_mistakes_are_one_sentence(wrong: Mistake, mine: str, base: str, tmp_path: Path) -> None:
    for name, text in (("mine.yaml", mine), ("base.yaml", base)):
        write(tmp_path, name, text)
    with wrong():
        read_config(tmp_path / "mine.yaml")


def test_small_replaces_settings_and_is_left_out_without_it(tmp_path: Path) -> None:
    write(tmp_path, "base.yaml", "small: {clients: 4, sweep: {data: null, seeds: [0]}}")
    text = """
    include: base.yaml
    name: mine
    clients: 50
    rounds: 100
    sweep: {data: [cifar10], seeds: [0, 1], table: x}
    small: {rounds: 2, data: digits, sweep: {table: null}}
    """
    file = write(tmp_path, "mine.yaml", text)
    assert read_config(file) == {
        "name": "mine",
        "clients": 50,
        "rounds": 100,
        "sweep": {"data": ["cifar10"], "seeds": [0, 1], "table": "x"},
    }
    small = {"name": "mine-small", "clients": 4, "rounds": 2, "sweep": {"seeds": [0]}, "data": "digits"}
    assert read_config(file, small=True) == read_config(tmp_path / "mine-small.yaml") == small


def test_small_of_a_later_base_keeps_what_it_takes_out(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write(tmp_path, f"{name}.yaml", "sweep: {data: [cifar10]}\nsmall: {sweep: {data: null}}")
    file = write(tmp_path, "mine.yaml", "include: [one.yaml, two.yaml]\nrounds: 3")
    assert read_config(file, small=True) == {"sweep": {}, "rounds": 3}


def test_small_of_a_file_without_it_is_one_sentence(tmp_path: Path) -> None:
    file = write(tmp_path, "mine.yaml", "rounds: 3")
    with refused("no-small-variant", says="mine.yaml"):
        load_config(file, env={}, small=True)


def test_small_file_that_is_really_there_is_read_as_it_is(tmp_path: Path) -> None:
    write(tmp_path, "mine.yaml", "rounds: 3\nsmall: {rounds: 1}")
    file = write(tmp_path, "mine-small.yaml", "rounds: 2")
    assert read_config(file) == {"rounds": 2}
