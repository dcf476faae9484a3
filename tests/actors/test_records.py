"""What a run writes down of its clients' models: the right rows, at no cost, whatever the packing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import archipelago
from actors.fleet import Fleet
from actors.records import Tables, client_models, compared_rounds, cosines, principal_components
from archipelago.experiments.config import load_config
from archipelago.experiments.figures_data import tsne
from archipelago.experiments.runner import run_experiment
from tests.support.errors import refused

SMALL = ["clients=6", "clusters=2", "rounds=3", "local.steps=2", "fleet.backend=in_process"]


def run(folder: Path, *overrides: str) -> Path:
    config = load_config(overrides=[*SMALL, f"storage={folder}", "name=run", *overrides], env={})
    return run_experiment(config, quiet=True)


def test_principal_components_are_numpys_up_to_a_sign() -> None:
    points = np.random.Generator(np.random.PCG64(0)).normal(size=(9, 40))
    found = principal_components(points, most=3)
    u, s, _ = np.linalg.svd(points - points.mean(axis=0), full_matrices=False)
    assert np.allclose(np.abs(found), np.abs(u[:, :3] * s[:3]))
    assert (np.take_along_axis(found, np.abs(found).argmax(axis=0)[None], axis=0) > 0).all()
    assert principal_components(np.ones((3, 2))).tolist() == [[0.0], [0.0], [0.0]]


def test_cosines_by_hand() -> None:
    found = cosines(np.array([[1.0, 0.0], [3.0, 4.0], [0.0, 0.0]]))
    assert found.round(12).tolist() == [[1.0, 0.6, 0.0], [0.6, 1.0, 0.0], [0.0, 0.0, 0.0]]


def test_rounds_start_with_the_first_and_end_with_the_last() -> None:
    for rounds in (1, 2, 3, 10, 250):
        for count in (2, 4, 9):
            found = compared_rounds(rounds, count)
            assert found[0] == 1 and found[-1] == rounds and len(found) <= count
            assert list(found) == sorted(set(found))


def test_run_writes_down_models_cosines_and_examples(tmp_path: Path) -> None:
    path = run(tmp_path, "method=wecfl", "records.rounds=2", "records.images=3")
    found = archipelago.open_run(path)
    models, cosine = found.record("models"), found.record("cosine")
    assert sorted(set(models["round"])) == sorted(set(cosine["round"])) == [1, 3]
    last = models[models["round"] == 3]
    assert list(last["client"]) == list(range(6)) and "pc_0" in models
    table = cosine[cosine["round"] == 3].pivot(index="client", columns="other", values="cosine").to_numpy()
    assert np.allclose(np.diag(table), 1.0) and np.array_equal(table, table.T)
    from safetensors.numpy import load_file

    examples = load_file(path / "records" / "examples.safetensors")
    assert examples["images"].shape == (18, 1, 8, 8) and examples["images"].dtype == np.uint8
    assert list(examples["client"]) == [client for client in range(6) for _ in range(3)]
    assert (path / "records" / "tsne-000003.parquet").exists() is False


def test_recording_changes_no_result_and_costs_the_method_nothing(tmp_path: Path) -> None:
    for method in ("fesem+cam", "fedsgd"):
        shared = (f"method={method}", "participation.fraction=0.7")
        some = run(tmp_path / f"{method}3", *shared, "records.rounds=3", "records.clients=4")
        none = run(tmp_path / f"{method}0", *shared, "records.rounds=0")
        assert (some / "metrics.csv").read_bytes() == (none / "metrics.csv").read_bytes()
        assert list((none / "records").glob("models-*")) == []
        if method != "fedsgd":  # it asks for gradients, and no client has a model of its own
            table = archipelago.open_run(some).record("models")
            assert (table.groupby("round").size() == 4).all()
            assert (np.diff(table["client"].to_numpy())[table["round"].diff()[1:] == 0] > 0).all()


def test_other_packings_write_the_same(tmp_path: Path) -> None:
    one, other = (run(tmp_path / f"{n}", "method=ifca", f"fleet.actors={n}") for n in (1, 3))
    for path in sorted((one / "records").glob("*.parquet")):
        left, right = (
            archipelago.open_run(each).record(path.stem.rpartition("-")[0]) for each in (one, other)
        )
        assert left.equals(right)


def test_tsne_at_the_end_of_a_run(tmp_path: Path) -> None:
    found = archipelago.open_run(run(tmp_path, "method=fedavg", "records.rounds=2", "records.tsne=true"))
    table = found.record("tsne")
    assert list(table.columns) == ["round", "client", "x", "y"] and len(table) == 12
    assert np.isfinite(table[["x", "y"]].to_numpy()).all()


def test_tsne_keeps_far_groups_apart_and_repeats() -> None:
    rng = np.random.Generator(np.random.PCG64(0))
    points = np.concatenate([rng.normal(0, 1, (12, 5)), rng.normal(50, 1, (12, 5))])
    found = tsne(points, seed=1)
    assert np.array_equal(found, tsne(points, seed=1))
    centres = found[:12].mean(axis=0), found[12:].mean(axis=0)
    spread = max(
        np.linalg.norm(half - c, axis=1).max()
        for half, c in zip((found[:12], found[12:]), centres, strict=True)
    )
    assert np.linalg.norm(centres[0] - centres[1]) > spread


def test_vectors_have_no_example_images(tmp_path: Path) -> None:
    path = run(tmp_path, "method=fedavg", "data=synthetic")
    assert not (path / "records" / "examples.safetensors").exists()


@pytest.mark.parametrize("setting", ["records.rounds=-1", "records.clients=1"])
def test_settings_have_ranges(setting: str) -> None:

    with refused("out-of-range"):
        load_config(overrides=[setting], env={})


@pytest.mark.parametrize("schedule", ["simultaneous", "global_first", "alternating"])
def test_models_that_are_clustered_are_compared_not_cams_shared_part(
    schedule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared = []

    def noted(fleet: Fleet, most: int) -> Tables:
        assert fleet.first_trained is not None
        compared.append(fleet.first_trained.handle)
        return client_models(fleet, most)

    monkeypatch.setattr("actors.server.client_models", noted)
    run(tmp_path, "method=fesem+cam", "cam.warmup=0", f"cam.schedule={schedule}", "records.rounds=3")
    assert compared and all(handle.endswith(":main") for handle in compared)
