"""The files of `tune_configs/`: each says what it is, each is valid, and one in turn is run in miniature."""

from __future__ import annotations

import datetime
import functools
import itertools
import json
import re
from pathlib import Path

import pytest
import yaml

import archipelago.cli.main
from archipelago.cli.run import DEMONSTRATION
from archipelago.core.plugins import is_ours
from archipelago.core.settings import ExperimentSettings
from archipelago.experiments.config import config_to_yaml
from archipelago.experiments.config_files import config_names, find_config
from archipelago.reports.published import deviations, find_table, published_for, rows_of
from archipelago.runs.sweeps import read_rows
from archipelago.strategies import ADDONS, METHODS, parse_method
from archipelago.strategies.cam import CAMOptions
from archipelago.sweeps.config import Sweep, load_sweep
from tests.support import trial_digests

FOLDER = Path(__file__).parents[2] / "tune_configs"
TABLES = [
    *(f"thesis-{chapter}.{table}" for chapter in range(3, 8) for table in range(1, 5)),
    "thesis-7.5", "thesis-7.6", "cam-1", "cam-2", "fesem-2", "fesem-3",
    *(f"fedsoft-{table}" for table in range(1, 5)), "femam",
]  # fmt: skip
COMPARISONS = [  # groups of methods, of no published table; parts of tables, and what papers ran beside them
    "adoption", "attacks", "clustered", "drift", "personalised", "privacy", "fedsoft-1-synthetic", "fedsoft-cifar10",
    "femam-published",
]  # fmt: skip
OTHERS = [  # what results/ has runs of
    "cifar10-table", "cifar10-released", "cifar10-converged", "pathmnist-subset", "fashion-mnist", "fedsoft-femnist",
    "best-composition",
]  # fmt: skip
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the same, faster
NUMBER = r"\d+|an?|one|two|three|few"  # of hours, say
SMALL = [f"{name}-small" for name in (*TABLES, *COMPARISONS)]


def text_of(name: str) -> str:
    return (FOLDER / f"{name}.yaml").read_text(encoding="utf-8")


def header_of(name: str) -> str:
    """What a file says of itself, or of its small variant."""
    header = re.match(r"(#.*\n)+", text_of(name.removesuffix("-small")))
    assert header is not None
    whole, _, small = header.group().partition("# Small variant, ")
    return small if name.endswith("-small") else whole


@functools.cache
def sweep_of(name: str, *overrides: str) -> Sweep:
    sweep = load_sweep(find_config(name), overrides, env={})
    assert sweep is not None
    return sweep


def test_tune_configs_has_a_file_for_every_published_table_and_no_copy_beside_it() -> None:
    assert {path.stem for path in FOLDER.glob("*.yaml")} == {
        *TABLES,
        *COMPARISONS,
        *OTHERS,
        "demo",
        "comparison",
        "tuning",
    }
    assert config_names() == sorted(path.stem for path in FOLDER.glob("*.yaml"))
    # 50 that can be named and 5 bases; there were 68 before files shared bases. Another one needs a reason.
    assert len(list(FOLDER.rglob("*.yaml"))) == 55


def test_tune_configs_ask_for_the_trials_that_they_always_asked_for() -> None:
    """By the names of the files that were there before they shared bases, small copies among them."""
    pinned = json.loads(trial_digests.TABLE.read_text())
    assert set(pinned) == {*TABLES, *COMPARISONS, *SMALL, *OTHERS, "demo", "comparison", "tuning"}
    found = trial_digests.digests(FOLDER, list(pinned))
    assert {name for name in pinned if found[name] != pinned[name]} == set()


def test_defaults_are_those_that_the_files_were_written_for() -> None:
    """A default that changes changes what every file asks for that does not say it: *Results changed*."""
    pinned, found = json.loads(trial_digests.DEFAULTS.read_text()), trial_digests.defaults()
    assert {key: (was, found.get(key)) for key, was in pinned.items() if found.get(key) != was} == {}


@pytest.mark.parametrize("name", ["thesis-7.6", "fesem-3", "femam"])
def test_small_is_the_variant_that_is_named_so(name: str) -> None:
    asked = load_sweep(find_config(name), env={}, small=True)
    assert asked is not None and asked.trials() == sweep_of(f"{name}-small").trials()


@pytest.mark.parametrize("name", [*TABLES, *COMPARISONS, *SMALL, *OTHERS])
def test_file_opens_with_command_source_cost_and_score(name: str) -> None:
    header, whole = header_of(name), name.removesuffix("-small")
    option = " --small" if name.endswith("-small") else r"( \S+)?"
    assert re.search(
        rf"^#   python -m platform.launch --config tune_configs/{whole}.yaml{option}$", header, re.M
    )
    for word in ("Reproduces:", "Cost:", "Expected:"):
        assert f"# {word}" in header
    expected, *measured = header.split("# Expected:")[1].split(
        "# Measured:"
    )  # printed, and beside it what we saw
    for each in measured:
        pages = re.findall(r"results/[\w.-]+\.md", each)
        assert pages and all((FOLDER.parent / page).is_file() for page in pages), each
    cost = header.split("# Cost:")[1].split("# Expected:")[0]
    spans = re.findall(r"(?:second|minute|hour|day|week)s?\b", cost)
    assert spans and len(spans) == len(re.findall(rf"(?<!\S)(?:{NUMBER}) (?:{'|'.join(spans)})\b", cost)), (
        cost
    )
    assert cost.split()[:2] == [str(sweep_of(name).planned), "trials"]
    assert re.search(r"\d", expected) or name.startswith("femam"), expected  # FeMAM's text prints no numbers
    if table := sweep_of(name).settings.table:
        rows = rows_of(find_table(table))
        printed = {each.mean for each in rows} | {each.std for each in rows}
        assert {float(number) for number in re.findall(r"\d+\.\d+", expected)} <= printed


def test_demonstration_shows_methods_at_their_defaults() -> None:
    """A pin of one warm-up once made it print other numbers than its page states."""
    sweep = sweep_of(DEMONSTRATION.stem)
    cams = [trial.config.cam for trial in sweep.trials() if "cam" in trial.config.method]
    assert cams and all(cam == CAMOptions() for cam in cams)


def test_demonstration_states_the_numbers_of_its_page() -> None:
    """What its file expects are means, or gains of FeSEM+CAM over FeSEM, of the tables in `docs/first-steps.md`."""
    page = (
        (FOLDER.parent / "docs/first-steps.md")
        .read_text(encoding="utf-8")
        .split("## What `make run` shows")[1]
    )
    cells = r"^(FedAvg|IFCA|FeSEM|FeSEM\+CAM) .*?(\d+\.\d+) ± .*?(\d+\.\d+) ± "
    rows = [(name, float(acc), float(f1)) for name, acc, f1 in re.findall(cells, page, re.M)]
    assert len(rows) == 8
    means = [value for _, *both in rows for value in both]
    gains = [
        new - old
        for (base, *before), (more, *after) in itertools.pairwise(rows)
        if more == f"{base}+CAM"
        for old, new in zip(before, after, strict=True)
    ]
    assert len(gains) == 4
    expected = header_of(DEMONSTRATION.stem).split("# Expected:")[1]
    stated = re.findall(r"[+-]?\d+\.\d+", expected)
    assert len(stated) >= 4
    for number in stated:
        shown = gains if number[0] in "+-" else means
        assert min(abs(float(number) - value) for value in shown) < 0.051, number  # one decimal of two


@pytest.mark.parametrize("name", ["demo", "comparison", "tuning"])
def test_commands_of_an_example_run_the_file_they_stand_in(name: str) -> None:
    commands = re.findall(r"^#   python -m platform\.launch(.*)$", text_of(name), re.M)
    assert commands
    for command in commands:
        named = re.search(r"--config tune_configs/(\S+)\.yaml", command)
        assert (named.group(1) if named else DEMONSTRATION.stem) == name, command


@pytest.mark.parametrize("name", [*TABLES, *COMPARISONS, *SMALL, *OTHERS])
def test_file_is_a_valid_sweep(name: str) -> None:
    """All that can be known without the data: names, values, combinations."""
    sweep = sweep_of(name)
    assert sweep.planned >= 2 and sweep.base.name == name
    assert len(sweep.trials()) == sweep.planned


def clusters_of(config: ExperimentSettings) -> int | None:
    """K as a report tells it: of the clusters, of the copies in an ensemble, or none."""
    copies = re.fullmatch(r".*\*(\d+)", config.ensemble[0]) if len(config.ensemble) == 1 else None
    if copies:
        return int(copies[1])
    base = parse_method(config.method)[0]
    several = config.ensemble or METHODS.find(base).clustered or base in ("fedsoft", "fedem")
    return int(config.clusters) if several else None


@pytest.mark.parametrize("name", TABLES)
def test_numbers_beside_a_table_are_its_own_and_its_settings_the_papers(name: str) -> None:
    sweep = sweep_of(name)
    paper, _, number = name.rpartition("-")
    table = {
        "thesis": "thesis-2023",
        "cam": "thesis-2023",
        "fesem": "fesem-2022",
        "fedsoft": "fedsoft-2022",
    }.get(paper)
    own = f"{table}:{({'cam-1': '7.1', 'cam-2': '7.3'}).get(name, number)}" if table else ""
    assert sweep.settings.table == own
    for label, config in sweep.combinations.items() if own else ():
        settings = yaml.load(config_to_yaml(config), Loader=_LOADER)
        found = published_for(settings, clusters_of(config), find_table(own))
        assert found, label
        assert {(each.source, each.table) for each in found.values()} == {find_table(own)}
        offered = (
            ["fedem.predict=mixture (fedsoft-2022: largest)"] if label.startswith("fedem mixture") else []
        )
        assert deviations(settings, [find_table(own)[0]]) == offered, label


def test_femam_has_the_released_schedule_and_personalised_references() -> None:
    configs = sweep_of("femam-published").combinations.values()
    for name in ("femam", "femam-published"):
        assert {"ditto", "fedper"} <= {config.method for config in sweep_of(name).combinations.values()}
    (schedule,) = {(*c.femam.schedule, c.femam.window) for c in configs if c.method == "femam"}  # type: ignore[attr-defined]  # added by the registry
    assert schedule == (400, 50, 50, 50, 50, 50)


@pytest.mark.parametrize("name", ["fesem-2", "fesem-3", "fesem-2-small", "fesem-3-small"])
def test_fesems_own_tables_take_the_mean_of_its_equation(name: str) -> None:
    uniform = {label for label, config in sweep_of(name).combinations.items() if config.weights == "uniform"}
    matched = "fesem matched K=3 (equals fesem)"  # rows that are compared weigh alike
    assert uniform == {*(f"fesem K={number}" for number in (2, 3, 4)), matched}
    robust = [config for config in sweep_of(name).combinations.values() if config.method == "robust"]
    assert [config.robust.outliers for config in robust] == [0.0]  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", SMALL)
def test_small_variant_runs_the_same_methods(name: str) -> None:
    def methods(of: str) -> set[str]:
        return {str(config.ensemble or config.method) for config in sweep_of(of).combinations.values()}

    def plain(found: set[str]) -> set[str]:
        return {re.sub(r"\*\d+", "*", each) for each in found}

    assert plain(methods(name)) == plain(methods(name.removesuffix("-small")))


def test_every_method_is_in_a_comparison_with_a_small_variant() -> None:
    """By what the files say: composing their trials would take seconds."""
    named: set[str] = set()
    for name in (*COMPARISONS, "fesem-2", "thesis-3.1", "thesis-5.1"):
        sweep = yaml.load(text_of(name), Loader=_LOADER)["sweep"]
        for entry in (*sweep.get("methods", ()), *sweep.get("cases", ())):
            method = entry if isinstance(entry, str) else entry.get("method")
            base, addons = parse_method(method) if method else ("", ())
            named |= {base, *addons}
    # The lower reference of clustered methods, which no paper runs, and the add-on that is FedProx on any base.
    ours = {
        name
        for table in (METHODS, ADDONS)
        for name, entry in table.items()
        if is_ours(entry.value.__module__)
    }  # tests register others
    assert ours - named == {"random", "prox"}


@pytest.mark.slow
def test_one_small_variant_in_turn_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Another one every day; `make check-all` runs them all."""
    run_tiny(SMALL[datetime.date.today().toordinal() % len(SMALL)], tmp_path, capsys)


@pytest.mark.full
@pytest.mark.parametrize("name", SMALL)
def test_every_small_variant_runs(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_tiny(name, tmp_path, capsys)


def run_tiny(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny = ["rounds=2", "sweep.seeds=[0]", "fleet.backend=in_process", f"storage={folder}"]
    assert archipelago.cli.main.main(["--config", str(FOLDER / f"{name}.yaml"), *tiny]) == 0, name
    printed = capsys.readouterr()
    rows = read_rows(folder / name)
    assert rows and {row.status for row in rows} == {"finished"}, [row for row in rows if row.reason]
    assert f"Results: {folder / name}" in printed.out
