"""What a client's own code sees: its samples, labels, outputs and features, the same on every layout, and counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from archipelago.core.errors import ClientFailure
from tests.support.errors import refused
from tests.support.experiments import digest, outcome, run, session_of
from tests.support.scalar import scalar_fleet

ROOT = Path(__file__).parents[2]


def everything(client: Any, model: Any) -> dict[str, Any]:
    return {
        "samples": client.samples(),
        "labels": client.labels(),
        "counts": client.label_counts(),
        "outputs": client.outputs(model),
        "features": client.features(model),
        "hidden": client.features(model, "fc1"),
        "test": client.unlabelled("test").samples(),
        "draw": client.generator("sketch").standard_normal(3),
    }


def of_networks_own(fleet: Any, client: int, model: Any) -> dict[str, Any]:
    """The same from the block itself, layer by layer."""
    block = next(block for block in fleet.blocks if client in block.clients)
    x, y = block.samples.batch(block.clients[client].train)
    block.model.load(model)
    network = block.model.module.network.eval()
    with torch.no_grad():
        return {"samples": x.numpy(), "labels": y.numpy(), "outputs": network(x).numpy()}


def test_client_view_shows_samples_labels_outputs_and_features() -> None:
    fleet = session_of("method=fedavg", "model.hidden=[8,6]").fleet
    fleet.begin(1)
    model = fleet.initial(1)[0]
    found = fleet.describe(everything, stage="a description", model=model)
    for client in (0, 5):
        expected, own = found[client], of_networks_own(fleet, client, model)
        for name in ("samples", "labels", "outputs"):
            assert np.array_equal(expected[name], own[name]), name
        assert expected["counts"].tolist() == np.bincount(own["labels"], minlength=10).tolist()
        # What enters the last layer, times its weights, is what comes out of it.
        spec = fleet.spec
        weight = model[spec.columns("classifier")].reshape(10, 6)
        bias = model[spec.last_layer()][60:]
        assert expected["features"].shape == (len(own["labels"]), 6)
        assert expected["features"] @ weight.T + bias == pytest.approx(own["outputs"], abs=1e-5)
        assert expected["hidden"].shape[0] == len(own["labels"])
        test = next(b for b in fleet.blocks if client in b.clients).clients[client].test
        assert len(expected["test"]) == len(test)
    assert not np.array_equal(found[0]["draw"], found[1]["draw"])


def test_client_view_costs_what_went_forward_and_what_was_sent() -> None:
    fleet = scalar_fleet([[(1.0, 2.0)], [(1.0, 4.0), (3.0, 4.0)]])
    model = np.float32([2.0])
    outputs = fleet.describe(lambda client, model: client.outputs(model), stage="outputs", model=model)
    assert [each.ravel().tolist() for each in outputs] == [[2.0], [2.0, 6.0]]
    costs = fleet.cost(2, one_training=3.0)
    # Three samples forward, three numbers sent of a model that has one: 1.5 of each a client; one model received.
    assert (costs["cost_forwards"], costs["cost_models_up"], costs["cost_models_down"]) == (1.5, 1.5, 1.0)
    assert costs["cost_computation"] == pytest.approx(3.0 / 9.0)


def test_client_view_without_labels_refuses_them() -> None:
    fleet = session_of("method=fedavg").fleet
    fleet.begin(1)
    for ask in (
        lambda client: client.unlabelled().labels(),
        lambda client: client.unlabelled("test").label_counts(),
        lambda client: client.unlabelled().sample_losses(np.zeros((1, 1), np.float32)),
    ):
        with pytest.raises(ClientFailure, match="this view has no labels"):
            fleet.describe(ask, stage="a description")


def test_client_view_names_an_unknown_layer() -> None:
    fleet = session_of("method=fedavg").fleet
    fleet.begin(1)
    model = fleet.initial(1)[0]
    with refused("unknown-name", kind="layer", name="netwrk"):
        fleet.describe(lambda client, model: client.features(model, "netwrk"), stage="x", model=model)


def test_client_view_counts_no_labels_of_a_regression() -> None:
    fleet = scalar_fleet([[(1.0, 2.0)]])
    with refused("needs-classes"):
        fleet.describe(lambda client: client.label_counts(), stage="x")


@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_client_view_has_the_same_bits_in_any_packing(engine: str) -> None:
    found = []
    for blocks in ([list(range(8))], [[7, 0, 3], [5, 1], [2, 6, 4]]):
        fleet = session_of("method=fedavg", "model=cnn_digits", f"local.engine={engine}", blocks=blocks).fleet
        fleet.begin(1)
        model = fleet.initial(1)[0]
        found.append(
            fleet.describe(
                lambda c, model: (c.samples(), c.labels(), c.features(model)), stage="x", model=model
            )
        )
    assert digest(found[0]) == digest(found[1])


PORTRAITS = '''
"""A method of somebody's own: clients of like mean image and like labels are a cluster."""
import numpy as np

from archipelago.strategies.base import METHODS, ClusteredModels


def portrait(client, model):
    """Runs where the client lives."""
    noise = client.generator("portrait").standard_normal(2)
    return np.concatenate([client.samples().mean(axis=0).ravel(), client.label_counts() / client.size,
                           client.features(model).mean(axis=0), 1e-3 * noise])


@METHODS.register("NAME", "two clusters by what clients look like", label="Portraits")
class Portraits(ClusteredModels):
    def expect(self, fleet):
        seen = np.stack(fleet.describe(portrait, stage="portraits", model=self.clusters[0]))
        away = ((seen - seen[0]) ** 2).sum(axis=1)
        self.report["spread"] = float(away.max())
        return (away > np.median(away)).astype(np.int64)
'''


def test_client_view_of_a_plugin_clusters_in_this_process(
    tmp_path: Path, own_entries: None, monkeypatch: Any
) -> None:
    (tmp_path / "portraits_here.py").write_text(PORTRAITS.replace("NAME", "portraits_here"))
    monkeypatch.syspath_prepend(str(tmp_path))
    settings = ("plugins=[portraits_here]", "method=portraits_here")
    one, two = session_of(*settings), session_of(*settings, blocks=[[3], [7, 0, 1, 2, 4, 5, 6]])
    reports = run(one, 2)
    assert outcome(one, reports) == outcome(two, run(two, 2))
    assert reports[-1].metrics["cost_models_up"] > 1.0  # the portraits count
