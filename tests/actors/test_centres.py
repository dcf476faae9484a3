"""Every cluster model on held-out samples of every ground-truth distribution (FedSoft's Tables 1, 3 and 4)."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.metrics import f1_score

from archipelago.strategies.references import Models
from tests.support.experiments import digest, plan_of, run, session_of

MIXED = (
    "method=fedsoft", "data=synthetic", "data.sources=2", "data.samples=1200", "data.rotations=1",
    "partition=mixture", "clients=6", "model=linear", "local.optimizer=adam", "local.lr=0.05",
)  # fmt: skip


def test_row_for_each_distribution_and_a_column_for_each_centre():
    session = session_of(*MIXED)
    (report,) = run(session, 1)
    plan = plan_of(*MIXED)
    assert [len(each) for each in plan.block.holdout] == [60, 60]
    found = report.metrics["centre_mse"]
    record = report.records["centres"]
    assert record["distribution"].tolist() == [0, 0, 1, 1] and record["centre"].tolist() == [0, 1, 0, 1]
    for s, held in enumerate(plan.block.holdout):
        x, y = plan.x[held], plan.y[held]
        for k, model in enumerate(session.server.method.base.clusters.values):
            expected = np.mean((x @ model[:10] + (model[10] if len(model) > 10 else 0) - y) ** 2)
            assert found[s][k] == pytest.approx(expected, rel=1e-4)
            assert record["mse"][2 * s + k] == found[s][k]
    assert record["samples"].tolist() == [60] * 4


def test_ground_truth_models_are_best_on_their_own_distribution():
    from archipelago.data.embedded import ground_truth_weights
    from tests.support.experiments import config_of

    session = session_of(*MIXED)
    weights = ground_truth_weights(config_of(*MIXED).data, 0).astype(np.float32)
    size = session.fleet.spec.size
    models = np.zeros((2, size), np.float32)
    models[:, :10] = weights[::-1]
    session.server.method.base.clusters = Models(models)
    rows = session.fleet.measure(session.server.method.centre_models(), 2)
    mse = np.array([row["mse"] for row in rows]).reshape(2, 2)
    assert mse[0, 1] < 2 < mse[0, 0] and mse[1, 0] < 2 < mse[1, 1]  # the noise alone has variance 1


ROTATED = ("data.rotations=2", "partition.holdout=0.5", "method=ifca")


def test_images_have_accuracy_and_macro_f1_and_any_layout_gives_the_same_bits():
    one, other = session_of(*ROTATED), session_of(*ROTATED, blocks=[[0, 5], [1, 2, 3], [4, 6, 7]])
    reports = [run(session, 2) for session in (one, other)]
    assert digest(reports[0]) == digest(reports[1])
    assert digest(dict(reports[0][-1].records)) == digest(dict(reports[1][-1].records))
    matrix = np.array(reports[0][-1].metrics["centre_accuracy"])
    assert matrix.shape == (2, 2) and ((matrix >= 0) & (matrix <= 1)).all()
    assert set(reports[0][-1].records["centres"]) == {
        "distribution", "centre", "samples", "loss", "accuracy", "macro_f1",
    }  # fmt: skip


def test_centre_of_cam_is_its_cluster_model_and_the_shared_one():
    session = session_of(*ROTATED[:2], "method=ifca+cam", "cam.warmup=0")
    run(session, 1)
    strategy, block = session.server.method, session.fleet.blocks[0]
    centres = strategy.centre_models()
    assert [len(centre) for centre in centres] == [2, 2]
    assert np.array_equal(centres[1][1], strategy.addons[0].shared)
    figures = session.fleet.measure(centres, 2)
    index = block.setup.holdout[1]
    logits = block.forward.sum_of_outputs(
        [strategy.base.clusters.values[0], strategy.addons[0].shared], index
    )
    predicted, y = logits.argmax(dim=1).numpy(), block.samples.targets(index).numpy()
    assert figures[2]["accuracy"] == pytest.approx((predicted == y).mean())
    assert figures[2]["macro_f1"] == pytest.approx(f1_score(y, predicted, average="macro", zero_division=0))


def test_nothing_is_measured_without_held_out_samples_or_models_of_the_server():
    for settings in (("method=ifca",), ("data.rotations=2", "partition.holdout=0.5", "method=local")):
        (report,) = run(session_of(*settings), 1)
        assert "centre_accuracy" not in report.metrics and "centres" not in report.records
    (report,) = run(session_of("data.rotations=2", "partition.holdout=0.5", "method=fedavg"), 1)
    assert np.array(report.metrics["centre_accuracy"]).shape == (2, 1)


def test_agreement_with_every_ground_truth_level():
    settings = ("method=oracle", "clusters=4", "data.rotations=1", "partition=multilevel")
    (report,) = run(session_of(*settings), 1)
    coarse, fine = report.metrics["ari_by_level"]
    assert fine == report.metrics["ari"] == 1.0 and 0 < coarse < 1
