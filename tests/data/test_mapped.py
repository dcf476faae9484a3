"""Memory-mapped copies: made once, all or nothing, named by content, sent by address."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from archipelago.core.errors import UserError
from archipelago.core.settings import DataSettings, PartitionSettings
from archipelago.data import build_federation, load_dataset
from archipelago.data.mapped import MappedArray, Recipe, Stored, in_chunks, open_mapped, stored
from tests.support import data_files
from tests.support.errors import refused

X = data_files.pixels(10, 1, 6, 6)
Y = np.arange(10, dtype=np.int64) % 2


def recipe(x: np.ndarray = X) -> Recipe:
    return Recipe(x.shape, lambda: [x[:7], x[7:]], Y[: len(x)], train=8, owners=np.arange(len(x)) // 2)


def make(root: Path, made: list[int] | None = None, x: np.ndarray = X, **settings: object) -> Stored:
    """A copy of one input file; `made` counts how often it is really made."""
    if not (root / "input").exists():
        (root / "input").touch()

    def counted() -> Recipe:
        if made is not None:
            made.append(1)
        return recipe(x)

    return stored(DataSettings(root=str(root), **settings), "mine", [root / "input"], ["option"], counted)


def test_made_once_and_split_as_asked(tmp_path: Path) -> None:
    made: list[int] = []
    for _ in range(2):
        parts = make(tmp_path, made, mapped="yes").parts()
        assert (parts["x_train"] == X[:8]).all() and (parts["x_test"] == X[8:]).all()
        assert parts["y_test"].tolist() == [0, 1] and parts["owners_train"].tolist() == [
            0,
            0,
            1,
            1,
            2,
            2,
            3,
            3,
        ]
        assert isinstance(parts["stored"], MappedArray) and (parts["stored"] == X).all()
        assert "sources_train" not in parts
    assert made == [1]


def test_changed_input_is_another_copy_and_equal_content_the_same_one(tmp_path: Path) -> None:
    made: list[int] = []
    first = make(tmp_path, made, mapped="yes")
    (tmp_path / "input").write_text("changed")
    second = make(tmp_path, made, mapped="yes")  # made again, with the same content
    assert made == [1, 1] and first.x.address == second.x.address
    (tmp_path / "input").write_text("changed again")
    third = make(tmp_path, made, x=X[::-1].copy(), mapped="yes")
    assert third.x.address != first.x.address and (third.x == X[::-1]).all()
    folders = [path for path in (tmp_path / "mapped").iterdir() if path.is_dir()]
    assert len(folders) == 2


def test_small_copies_are_read_into_memory_unless_asked_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not isinstance(make(tmp_path).x, MappedArray)
    monkeypatch.setattr("archipelago.data.mapped.IN_MEMORY", X.nbytes - 1)
    assert isinstance(make(tmp_path).x, MappedArray)
    assert not isinstance(make(tmp_path, mapped="no").x, MappedArray)


def test_failure_leaves_nothing(tmp_path: Path) -> None:
    def broken() -> Recipe:
        def chunks():
            yield X[:5]
            raise UserError("no more")

        return Recipe(X.shape, chunks, Y, 8)

    settings = DataSettings(root=str(tmp_path))
    with pytest.raises(UserError, match="no more"):
        stored(settings, "mine", [], [], broken)
    for short in (lambda: [X[:5]], lambda: [X, X[:1]], lambda: [X[:, :, :3]]):
        with pytest.raises(ValueError, match=r"expected|fit"):
            stored(settings, "mine", [], [], lambda short=short: Recipe(X.shape, short, Y, 8))
    assert [*(tmp_path / "mapped").iterdir()] == []


def test_copy_whose_files_are_gone_is_made_again(tmp_path: Path) -> None:
    made: list[int] = []
    place = Path(make(tmp_path, made, mapped="yes").x.address)
    place.unlink()
    (place.parent / "about.json").unlink()
    place.parent.joinpath("y.npy").unlink()
    place.parent.joinpath("owners.npy").unlink()
    place.parent.rmdir()
    assert (make(tmp_path, made).x == X).all() and made == [1, 1]


@pytest.mark.parametrize("file", ["x.npy", "y.npy", "owners.npy", "about.json"])
@pytest.mark.parametrize("how", ["cut", "gone", "another"])
def test_damaged_copy_is_made_again(file: str, how: str, tmp_path: Path) -> None:
    made: list[int] = []
    place = Path(make(tmp_path, made, mapped="yes").x.address).parent / file
    content = place.read_bytes()
    if how == "cut":
        place.write_bytes(content[: len(content) // 2])
    elif how == "gone":
        place.unlink()
    elif file.endswith("npy"):
        np.save(place, np.zeros((3, 1, 6, 6), np.uint8))
    else:
        place.write_text('{"train": 8, "shape": [3, 1, 6, 6]}')
    for _ in range(2):
        again = make(tmp_path, made, mapped="yes")
        assert (again.x == X).all() and again.y.tolist() == Y.tolist() and len(again.owners) == 10
    assert made == [1, 1]
    assert len([path for path in (tmp_path / "mapped").iterdir() if path.is_dir()]) == 1


@pytest.mark.parametrize("file", ["x.npy", "y.npy", "owners.npy"])
def test_copy_with_other_content_under_its_name_is_made_again(file: str, tmp_path: Path) -> None:
    made: list[int] = []
    place = Path(make(tmp_path, made, mapped="yes").x.address).parent / file
    other = np.load(place)
    np.save(place, np.roll(other, 1, axis=0))  # of the same shape and type
    for _ in range(2):
        again = make(tmp_path, made, mapped="yes")
        assert (again.x == X).all() and again.y.tolist() == Y.tolist()
    assert made == [1, 1]


def test_copy_that_was_copied_is_read_once_and_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    folder = Path(make(tmp_path, made, mapped="yes").x.address).parent
    for path in folder.glob("*.npy"):
        os.utime(path, ns=(5, 5))
    assert (make(tmp_path, made, mapped="yes").x == X).all() and made == [1]
    monkeypatch.setattr("archipelago.data.mapped._digest", None)  # not asked again
    assert (make(tmp_path, made, mapped="yes").x == X).all() and made == [1]


def test_killed_maker_leaves_nothing_that_is_taken_for_a_copy(tmp_path: Path) -> None:
    code = f"""
import numpy as np, os, signal
from archipelago.data.mapped import Recipe, stored
from archipelago.core.settings import DataSettings
def chunks():
    yield np.zeros((5, 1, 6, 6), np.uint8)
    os.kill(os.getpid(), signal.SIGKILL)
stored(DataSettings(root={str(tmp_path)!r}), "mine", [], ["option"],
       lambda: Recipe((10, 1, 6, 6), chunks, np.zeros(10, np.int64), 8))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], capture_output=True)
    assert done.returncode == -9, done.stderr
    assert [*(tmp_path / "mapped").glob(".making-*")]
    fine = stored(DataSettings(root=str(tmp_path)), "mine", [], ["option"], recipe)
    assert (fine.x == X).all()
    assert not [*(tmp_path / "mapped").glob(".making-*")]  # nor anything that stays for ever


def test_where_the_root_has_no_room_the_default_root_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    root = tmp_path / "root"
    root.mkdir()
    (root / "mapped").write_text("a file: no folder can be made here")
    assert (make(root).x == X).all()
    assert [*(tmp_path / "home" / ".cache" / "archipelago" / "mapped").iterdir()]
    assert (make(root, cache=str(tmp_path / "elsewhere")).x == X).all() and [
        *(tmp_path / "elsewhere").iterdir()
    ]
    with refused("unwritable", says="data.cache"):
        make(root, cache=str(root / "mapped"))


def test_sent_by_address_and_parts_of_it_by_content(tmp_path: Path) -> None:
    x = make(tmp_path, mapped="yes").x
    sent = pickle.dumps(x)
    assert len(sent) < 400 and x.tobytes()[:50] not in sent
    again = pickle.loads(sent)
    assert isinstance(again, MappedArray) and (again == X).all() and not again.flags.writeable
    part = pickle.loads(pickle.dumps(x[2:4]))
    assert (part == X[2:4]).all() and type(part) is np.ndarray
    Path(x.address).rename(tmp_path / "away.npy")
    with refused("unreadable", says=("data.cache", "data.mapped=no")):
        open_mapped(x.address)


def test_in_chunks_keeps_the_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("archipelago.data.mapped.CHUNK", 3)
    order = np.array([4, 0, 9, 1, 1, 7, 2])
    chunks = list(in_chunks(lambda i: X[i], order))
    assert [len(chunk) for chunk in chunks] == [3, 3, 1] and (np.concatenate(chunks) == X[order]).all()


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_is_shown(
    terminal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: terminal)
    monkeypatch.setenv("TERM", "xterm")
    make(tmp_path)
    printed = capsys.readouterr()
    assert printed.out == "" and "Storing mine" in printed.err
    assert ("100%" in printed.err) == terminal and ("10 samples, once" in printed.err) == (not terminal)
    make(tmp_path)
    assert capsys.readouterr().err == ""  # made already


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    data_files.tiny_imagenet(tmp_path / "tiny-imagenet-200", classes=2, train=12, val=8)
    return tmp_path


def test_federation_of_mapped_samples_is_the_one_in_memory(tiny: Path) -> None:
    made = []
    for mapped in ("yes", "no"):
        settings = DataSettings(name="tiny_imagenet", root=str(tiny), mapped=mapped)
        made.append(build_federation(settings, PartitionSettings(), 4, seed=0))
    assert isinstance(made[0].x, MappedArray) and not isinstance(made[1].x, MappedArray)
    assert made[0].fingerprint == made[1].fingerprint
    assert len(pickle.dumps(made[0])) < 5_000 < made[0].x.nbytes
    assert pickle.loads(pickle.dumps(made[0])).fingerprint == made[0].fingerprint


def test_rotated_samples_are_in_memory_and_the_copy_stays_as_it_is(tiny: Path) -> None:
    settings = DataSettings(name="tiny_imagenet", root=str(tiny), mapped="yes", rotations=2)
    before = np.array(load_dataset(settings, 0).stored)
    turned = build_federation(settings, PartitionSettings(), 4, seed=0)
    assert not isinstance(turned.x, MappedArray) and (turned.x != before).any()
    assert (load_dataset(settings, 0).stored == before).all()


def test_same_bits_mapped_or_not_per_batch_or_per_actor(tiny: Path, tmp_path: Path) -> None:
    import archipelago
    from archipelago.experiments.config import load_config
    from archipelago.experiments.runner import run_experiment

    models = []
    for number, (mapped, normalise) in enumerate(
        [("yes", "batch"), ("yes", "actor"), ("no", "batch"), ("no", "actor")]
    ):
        config = load_config(None, [
            "method=fedavg", "data=tiny_imagenet", f"data.root={tiny}", f"data.mapped={mapped}", "clients=2",
            "rounds=1", "local.steps=2", "local.batch=4", f"local.normalise={normalise}", "model=linear",
            "fleet.backend=in_process", f"storage={tmp_path}", f"name=run{number}",
        ])  # fmt: skip
        models.append(archipelago.open_run(run_experiment(config, quiet=True)).models)
    (name,) = [key for key in models[0] if not key.startswith("private")]
    assert len({np.asarray(each[name]).tobytes() for each in models}) == 1
