"""`list`: every kind, every entry, every setting."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import archipelago.experiments.config
from archipelago.cli.main import main
from archipelago.core.registry import REGISTRIES
from tests.support.clusters import ROOT


def test_list_has_one_line_for_everything(command: Any) -> None:
    code, out, error = command("list")
    assert (code, error) == (0, "")
    assert {"method", "add-on", "data set", "partition", "model", "metric"} <= set(REGISTRIES)
    for registry in REGISTRIES.values():
        for name, entry in registry.items():
            lines = [line for line in out.splitlines() if line.split()[:1] == [name]]
            assert [line for line in lines if entry.about in line], name


def test_list_says_where_every_method_is_from() -> None:
    from archipelago.strategies import ADDONS, METHODS

    ours = {"local", "oracle", "random"}  # references of our own, or of nobody in particular
    for name, entry in [*METHODS.items(), *ADDONS.items()]:
        if name not in ours:
            assert re.search(r"\(.*(19|20)\d\d\)|thesis|FeSEM's", entry.about), (name, entry.about)


def test_round_fits_on_a_screen() -> None:
    import inspect

    from archipelago.strategies import ADDONS, METHODS

    for name, entry in [*METHODS.items(), *ADDONS.items()]:
        assert len(inspect.getsource(entry.value.round).splitlines()) <= 40, name


KINDS = ("methods", "data", "partitions", "models", "metrics", "configs", "settings")


@pytest.mark.parametrize("kind", KINDS)
def test_list_of_one_kind(kind: str, command: Any) -> None:
    code, out, _ = command("list", kind)
    assert code == 0
    known = {
        "methods": "fedprox",
        "data": "synthetic",
        "partitions": "iid",
        "models": "mlp",
        "metrics": "accuracy",
        "configs": "thesis-7.1",
        "settings": "local.lr",
    }
    assert [other for other, name in known.items() if re.search(rf"^ +{name} ", out, re.MULTILINE)] == [kind]


def test_list_settings_shows_every_setting_with_its_range(command: Any) -> None:
    _, out, _ = command("list", "settings")
    for leaf in archipelago.experiments.config.leaves(archipelago.experiments.config.full_schema()).values():
        (line,) = [line for line in out.splitlines() if line.split()[:1] == [leaf.key]]
        assert leaf.about in line
    assert "0 < participation.fraction <= 1" in out


def test_list_of_an_entry_shows_what_it_declares(command: Any) -> None:
    from archipelago.strategies import METHODS

    code, out, error = command("list", "ifca")
    assert (code, error) == (0, "")
    assert "ifca (method, method=ifca)" in out and METHODS["ifca"].about in out
    assert re.search(rf"label +{METHODS['ifca'].label}\n", out)
    assert re.search(r"ifca\.noise +0\.1 +.*\[ifca\.noise > 0\]", out)
    assert "independent | perturbed | balanced" in out
    assert "An Efficient Framework for Clustered Federated Learning" in out and "\nReadings\n" in out
    assert re.search(
        r"\nFirst models\n +paper +.*\n +released code +.*\n +here +K independent draws\n +option +ifca.init",
        out,
    )
    assert "data set, data=digits" in command("list", "digits")[1]
    assert re.search(r"unit +%\n", command("list", "accuracy")[1])


def test_list_of_an_entry_that_a_plug_in_brought(command: Any) -> None:
    from archipelago.strategies import METHODS

    METHODS.register("mine", "a method of my own", label="Mine", clustered=True)(METHODS["fedavg"].value)
    try:
        assert "a method of my own" in command("list", "methods")[1]
        assert re.search(r"clustered +yes", command("list", "mine")[1])
    finally:
        METHODS.remove("mine")


OWN = '''
from dataclasses import dataclass

from archipelago.core.settings import setting
from archipelago.strategies.base import METHODS
from archipelago.strategies.fedavg import FedAvg


@dataclass
class ListedOptions:
    """`listed.strength=...`"""

    strength: float = setting(0.5, "how much of it", at_least=0)


@METHODS.register("listed", "a method in a file of my own", label="Listed")
class Listed(FedAvg):
    """What it does."""

    Options = ListedOptions
'''


def test_list_shows_what_a_plugin_brings(command: Any, own_entries: None) -> None:
    assert command("list", "listed")[0] == 2
    Path("own_listed.py").write_text(OWN)
    code, out, error = command("list", "methods", "plugins=[own_listed]")
    assert (code, error) == (0, "") and re.search(r"listed +a method in a file of my own", out)
    assert re.search(
        r"listed.strength +0.5 +how much of it", command("list", "plugins=[own_listed]", "listed")[1]
    )
    assert "listed.strength" in command("list", "settings", "plugins=[own_listed]")[1]
    (found,) = json.loads(command("list", "listed", "plugins=[own_listed]", "--json")[1])
    assert (found["label"], found["defined_in"]) == ("Listed", "own_listed")


@pytest.mark.parametrize(
    ("word", "named"), [("plugins=[nobody_has_it]", "nobody_has_it"), ("rounds=3", "rounds=3"), ("plugins=", "plugins")]
)  # fmt: skip
def test_list_refuses_other_settings_and_missing_plugins(word: str, named: str, command: Any) -> None:
    code, out, error = command("list", "methods", word)
    assert (code, out) == (2, "") and named in error and len(error.splitlines()) == 1


def test_list_as_json_has_every_kind_with_what_entries_declare(command: Any) -> None:
    from archipelago.strategies import METHODS

    code, out, error = command("list", "--json")
    assert (code, error) == (0, "")
    found = json.loads(out)
    assert list(found)[:4] == ["methods", "data", "partitions", "models"]
    entries = {(each["kind"], each["name"]): each for kind in found.values() for each in kind}
    assert set(entries) == {(kind, name) for kind, registry in REGISTRIES.items() for name in registry}
    prox = entries["method", "fedprox"]
    assert set(prox) == {"kind", "name", "about", "label", "options", "capabilities"}
    (option,) = [each for each in prox["options"] if each["name"] == "fedprox.mu"]
    assert option["range"] == "fedprox.mu >= 0" and option["about"]
    assert option["default"] == METHODS["fedprox"].options().mu
    assert entries["metric", "accuracy"]["capabilities"]["better"] == "higher"
    code, out, _ = command("list", "ifca", "--json")
    (ifca,) = json.loads(out)
    assert (
        ifca["readings"][0]["topic"] == "Data of the K losses"
        and ifca["defined_in"] == "archipelago.strategies.ifca"
    )
    settings = {
        each["name"]: each for each in json.loads(command("list", "settings", "--json")[1])["settings"]
    }
    assert settings["local.lr"]["default"] == 0.05 and settings["local.lr"]["range"] == "local.lr > 0"
    assert "sweep.seeds" in settings
    configs = {
        each["name"]: each["about"] for each in json.loads(command("list", "configs", "--json")[1])["configs"]
    }
    assert configs["demo"].startswith("One run rather than a comparison")


def test_tables_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "100")
    assert main(["list", "settings"]) == 0
    out = capsys.readouterr().out
    assert "participation.fraction" in out
    assert "[0 <" in out  # brackets are text, not markup


def test_list_into_a_closed_pipe_is_no_failure() -> None:
    command = f"{shlex.quote(sys.executable)} -m platform.launch list settings | head -n 1"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        cwd=ROOT, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
