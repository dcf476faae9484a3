"""`data list` and `data fetch` on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

import archipelago.cli.main
from tests.support import data_files


def test_data_lists_and_fetches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root, site = tmp_path / "root", tmp_path / "site"
    with data_files.served(site) as address:
        data_files.publish_cifar(site, address, monkeypatch)
        for expected in ("missing", "present"):
            assert archipelago.cli.main.main(["data", "list", f"data.root={root}"]) == 0
            (line,) = [x for x in capsys.readouterr().out.splitlines() if x.split()[:1] == ["cifar10"]]
            assert line.split()[1] == expected
            assert archipelago.cli.main.main(["data", "fetch", "cifar10", f"data.root={root}"]) == 0
            printed = capsys.readouterr().out
            assert ("here already" in printed) == (expected == "present") and str(root) in printed
    size = sum(path.stat().st_size for path in (root / "cifar-10-batches-py").iterdir())
    assert f"{size / 1e3:.0f} kB" in line
    assert [path.name for path in root.iterdir()] == ["cifar-10-batches-py"]  # the archive is not kept


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["data"], "Expected `archipelago data list` or `archipelago data fetch NAME`"),
        (["data", "fetch"], "got no name: `data list` shows them"),
        (["data", "list", "cifar10"], "got 'cifar10' too: leave it out"),
        (["data", "list", "rounds=3"], "Expected settings of `data` only"),
        (["data", "fetch", "cifar"], "Did you mean 'cifar10'"),
        (["data=cifar10", "data.root=/nowhere", "method=fedavg"], "data fetch cifar10 data.root=/nowhere"),
    ],
)
def test_data_mistakes_are_sentences(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert archipelago.cli.main.main(arguments) == 2
    assert sentence in capsys.readouterr().err
