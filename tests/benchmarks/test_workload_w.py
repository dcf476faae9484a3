"""Both sides of the comparison do the same arithmetic; nothing here looks at a clock."""

import numpy as np
import pytest
import torch

from actors.session import InProcessSession
from benchmarks import workload_w
from benchmarks.bare import BareLoop, Net, Trainer, batches, normalised
from benchmarks.workload import MINIATURE, Workload

TOLERANCE = 1e-5
SMALL = Workload(clients=3, samples=10, steps=3, batch=4)
RAGGED = Workload(clients=6, samples=20, steps=3, batch=8, ragged=True)


def fresh(workload):
    return Workload(**{**workload.__dict__, "keep_momentum": False})


def test_workload_w_is_what_it_is_said_to_be():
    workload = Workload()
    assert (workload.clients, workload.samples, workload.steps, workload.batch) == (200, 250, 10, 32)
    assert sum(p.numel() for p in Net().parameters()) == 62_006


def test_batches_are_shuffled_passes():
    one_pass = [batch.tolist() for batch in batches(SMALL, client=1, round=1)]
    assert [len(batch) for batch in one_pass] == [4, 4, 2]
    assert sorted(row for batch in one_pass for row in batch) == list(range(10, 20))
    longer = Workload(clients=3, samples=10, steps=5, batch=4)
    assert [len(batch) for batch in batches(longer, client=1, round=1)] == [4, 4, 2, 4, 4]


def test_ragged_workload_w_has_as_many_images_in_unequal_numbers():
    equal, ragged = Workload(), Workload(ragged=True)
    assert ragged.sizes().sum() == equal.sizes().sum() == 50_000
    assert set(equal.sizes()) == {250}
    assert ragged.sizes().min() < 100 and ragged.sizes().max() > 400
    rows = np.concatenate([ragged.train_indices(client) for client in range(ragged.clients)])
    assert sorted(rows.tolist()) == list(range(50_000))


@pytest.mark.parametrize(
    "workload",
    [SMALL, pytest.param(fresh(SMALL), marks=pytest.mark.full), RAGGED],
    ids=["momentum kept", "fresh momentum", "ragged"],
)
def test_bare_loop_and_the_platform_end_at_the_same_model(workload):
    session = InProcessSession(workload.plan("fleet.backend=in_process"))
    start = session.models()["models"]["global"]
    model = torch.from_numpy(start.copy())
    trainer = Trainer(workload, list(range(workload.clients)), *normalised(workload))
    total = torch.zeros_like(model)
    for round in (1, 2, 3):
        session.run_round(round)
        trainer.round(round, model, total)
        model.copy_(total)
    ours = session.models()["models"]["global"]
    assert np.abs(ours - start).max() > 100 * TOLERANCE
    np.testing.assert_allclose(model.numpy(), ours, rtol=0, atol=TOLERANCE)


def test_kept_momentum_matters():
    """Or the two variants would measure the same thing."""
    models = []
    for workload in (SMALL, fresh(SMALL)):
        trainer = Trainer(workload, list(range(workload.clients)), *normalised(workload))
        model = 0.05 * torch.randn(62_006, generator=torch.Generator().manual_seed(0))
        total = torch.zeros_like(model)
        for round in (1, 2):
            trainer.round(round, model, total)
            model.copy_(total)
        models.append(model.numpy())
    assert np.abs(models[0] - models[1]).max() > TOLERANCE


@pytest.mark.slow
def test_two_bare_processes_make_the_average_of_one():
    start = 0.05 * torch.randn(62_006, generator=torch.Generator().manual_seed(0))
    trainer = Trainer(SMALL, list(range(SMALL.clients)), *normalised(SMALL))
    total = torch.zeros_like(start)
    trainer.round(1, start, total)
    with BareLoop(SMALL, start.numpy()) as bare:
        assert len(set(bare.pids)) == 2
        bare.run_round(1)
        found = bare.model.clone()
    torch.testing.assert_close(found, total, rtol=0, atol=TOLERANCE)
    assert (found - start).abs().max() > 100 * TOLERANCE


@pytest.mark.ray
@pytest.mark.full
def test_comparison_through_ray(ray_cluster):
    rounds = 2
    found = workload_w.compare(MINIATURE, rounds)
    assert set(found["seconds"]) == {"platform", "bare"}
    assert set(found["processor_seconds"]) == {"platform", "client actors", "bare"}
    for kind in ("seconds", "processor_seconds"):
        assert all(len(values) == rounds for values in found[kind].values())
    assert found["parameters"] == 62_006
    assert found["largest_difference"] < TOLERANCE < found["largest_change"] / 100
    # Processor time comes in hundredths of a second: too coarse for a miniature's ratios.
    fine = dict.fromkeys(found["processor_seconds"], [1.0] * rounds)
    found["ratios"] = workload_w.ratios({**found, "processor_seconds": fine})
    result = {"limit": workload_w.LIMIT, "ratio": 1.25, "variants": {"momentum kept": found}}
    text = workload_w.report(result)
    assert "62,006 parameters" in text
    assert "Ratio 1.250, limit 1.10: MISSED" in text
