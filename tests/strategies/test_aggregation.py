"""Aggregation rules against NumPy and SciPy, by hand, on permuted networks, and with odd clients among the others."""

import itertools

import numpy as np
import pytest
import scipy.stats
import torch

import archipelago.core.torchvision_operators  # noqa: F401  (before lightning)
from archipelago.core.schema import composed
from archipelago.core.settings import AggregationSettings, LocalSettings, ModelSettings
from archipelago.strategies.aggregation import Rule, Uploads, trimmed_mean
from archipelago.strategies.matching import chain, match
from archipelago.strategies.parameters import ModelEntry, ModelSpec, normalised_rows, one_hot, weighted_sums
from archipelago.strategies.references import Models
from lightning_modules.base import build_module
from lightning_modules.flat import FlatModel
from tests.support.errors import refused
from tests.support.experiments import checkpoint_of, outcome, run, session_of

RULES = ("mean", "trimmed_mean", "median", "median_of_means", "matched")


class Delivered:
    """A handle on models that are all at hand; chunks are three columns wide."""

    def __init__(self, table, arrived=None):
        self.table = np.asarray(table, np.float32)
        self.ids = np.arange(len(self.table)) * 7 + 3  # ids are not positions
        self.arrived = np.ones(len(self.table), bool) if arrived is None else np.asarray(arrived)

    def combine(self, weights, otherwise=None):
        matrix = normalised_rows(np.asarray(weights) * self.arrived)
        values = weighted_sums(list(self.table), matrix)
        for k in np.flatnonzero(~matrix.any(axis=1)):
            values[k] = otherwise.values[k]
        return Models(values)

    def average(self, by, weights, clusters, otherwise):
        return self.combine(one_hot(by, clusters, weights), otherwise)

    def gather(self, columns=None):
        table = np.where(self.arrived[:, None], self.table, 0)  # as fleets do: zeros for who did not arrive
        return table if columns is None else table[:, columns]

    def chunks(self, memory=0.0):
        for at in range(0, self.table.shape[1], 3):
            columns = np.arange(at, min(at + 3, self.table.shape[1]))
            yield columns, self.gather(columns)


def flat_spec(width):
    """One linear layer without bias: nothing to match."""
    return ModelSpec((ModelEntry("fc.weight", (1, width), 0, width, "parameter", "head", True),))


def aggregated(
    rule, table, by=None, clusters=1, weights=None, otherwise=None, arrived=None, spec=None, **more
):
    """The aggregate, as a plain array."""
    table = np.asarray(table, np.float32)
    drawn = {name: more.pop(name) for name in ("seed", "round") if name in more}
    uploads = Uploads(
        Delivered(table, arrived),
        np.zeros(len(table), np.int64) if by is None else np.asarray(by),
        np.ones(len(table)) if weights is None else np.asarray(weights, np.float64),
        Models(np.full((clusters, table.shape[1]), 99, np.float32) if otherwise is None else otherwise),
        flat_spec(table.shape[1]) if spec is None else spec,
        **drawn,
    )
    return Rule.chosen(composed(AggregationSettings)(name=rule, **more))(uploads).values


# --- coordinate rules -------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 10, 11, 30])
def test_trimmed_mean_and_median_are_scipys_and_numpys(count):
    values = np.random.default_rng(count).standard_normal((count, 17))
    for share in (0.0, 0.05, 0.1, 0.2, 0.4, 0.45):
        assert trimmed_mean(values, share) == pytest.approx(scipy.stats.trim_mean(values, share), rel=1e-12)
    assert trimmed_mean(values, 0.5) == pytest.approx(np.median(values, axis=0), rel=1e-12)


def test_share_that_is_a_whole_number_of_clients_cuts_that_many():
    values = np.arange(100.0)[:, None] ** 2
    assert int(0.29 * 100) == 28  # what floating point makes of it, and SciPy with it
    assert trimmed_mean(values, 0.29) == pytest.approx((np.arange(29.0, 71.0) ** 2).mean())
    assert trimmed_mean(values[:2], 0.4999999999999) == pytest.approx([0.5])


def test_clusters_by_hand():
    # Cluster 0: 1, 2, 3, 4, 100; cluster 1: 5 and 7 and one that did not arrive; cluster 2: none that counts.
    table = [[1.0], [2.0], [3.0], [4.0], [100.0], [5.0], [7.0], [1e6], [-50.0]]
    by = [0, 0, 0, 0, 0, 1, 1, 1, 2]
    arrived = [True] * 7 + [False, True]
    weights = [1, 1, 1, 1, 1, 1, 3, 1, 0]

    def found(rule, **more):
        return aggregated(rule, table, by, 3, weights, arrived=arrived, **more).ravel().tolist()

    assert found("mean") == [22.0, 6.5, 99.0]  # (5 + 3 * 7) / 4
    assert found("trimmed_mean") == [3.0, 6.0, 99.0]  # 1 and 100 are cut; two clients lose nobody
    assert found("trimmed_mean", trim=0.0) == [22.0, 6.0, 99.0]  # every client counts once
    assert found("median") == [3.0, 6.0, 99.0]
    assert found("matched") == [22.0, 6.5, 99.0]  # one layer: nothing to match, the weighted mean is left


def test_pieces_of_columns_make_the_whole():
    table = np.random.default_rng(1).standard_normal((6, 11))  # three columns a piece, the last one short
    assert aggregated("median", table)[0] == pytest.approx(
        np.median(table.astype(np.float32), axis=0), rel=1e-6
    )
    assert aggregated("trimmed_mean", table)[0] == pytest.approx(
        scipy.stats.trim_mean(table.astype(np.float32), 0.2), rel=1e-6
    )


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("count", [1, 2, 7])
def test_identical_models_are_their_own_aggregate(rule, count):
    model = np.random.default_rng(2).standard_normal(9).astype(np.float32)
    table = np.tile(model, (count, 1))
    assert np.array_equal(aggregated(rule, table, weights=np.arange(1, count + 1))[0], model)


@pytest.mark.parametrize("rule", RULES)
def test_results_are_values_of_their_own(rule):
    table, otherwise = np.ones((4, 5), np.float32), np.zeros((2, 5), np.float32)
    found = aggregated(rule, table, [0, 0, 0, 0], clusters=2, otherwise=otherwise)
    assert found.dtype == np.float32 and found.tolist() == [[1.0] * 5, [0.0] * 5]
    assert not np.shares_memory(found, table) and not np.shares_memory(found, otherwise)
    assert rule == "mean" or not found.flags.writeable
    assert not otherwise.any()


def test_fifth_of_random_clients_moves_the_mean_and_not_the_robust_rules():
    rng = np.random.default_rng(3)
    honest = 0.1 + 0.01 * rng.standard_normal((40, 200))
    faulty = 3.0 * rng.standard_normal((10, 200))
    away = {
        rule: float(
            np.abs(aggregated(rule, np.concatenate([honest, faulty]), batches=50) - honest.mean(axis=0)).max()
        )
        for rule in ("mean", "trimmed_mean", "median", "median_of_means")
    }
    assert away["mean"] > 0.3
    # With batches of one client (50 for 50) the median of means is the median of a bootstrap sample.
    assert max(away["trimmed_mean"], away["median"], away["median_of_means"]) < 0.03


# --- median of means --------------------------------------------------------------------------------------


def test_median_of_means_by_hand():
    table = [[2.0], [6.0], [10.0]]
    # One batch of all three places: the weighted mean of three draws with replacement.
    drawn = [
        aggregated("median_of_means", table, weights=[1, 1, 2], batches=1, round=r)[0, 0] for r in range(40)
    ]
    possible = {
        round((a * 2.0 + b * 6.0 + 2 * c * 10.0) / (a + b + 2 * c), 4)
        for a in range(4)
        for b in range(4 - a)
        for c in [3 - a - b]
    }
    assert {round(float(value), 4) for value in drawn} <= possible and len(set(drawn)) > 4
    # As many batches as clients: each batch is one client, and the result one of them (odd number of batches).
    assert {float(aggregated("median_of_means", table, batches=3, seed=s)[0, 0]) for s in range(20)} <= {
        2,
        6,
        10,
    }


def test_median_of_means_by_hand_for_known_draws(monkeypatch):
    # Five clients in three batches: two draws each, with replacement.
    drawn = np.array([[0, 1], [2, 2], [3, 4]])

    class Known:
        def choice(self, rows, shape):
            assert rows.tolist() == [0, 1, 2, 3, 4] and shape == drawn.shape
            return drawn

    monkeypatch.setattr("archipelago.strategies.aggregation.generator", lambda *key, **more: Known())
    # Means by weight: (1 * 0 + 2 * 3) / 3 = 2, then 5 twice, then (30 + 100) / 2 = 65; the median of 2, 5, 65 is 5.
    table, weights = [[0.0], [3.0], [5.0], [30.0], [100.0]], [1, 2, 1, 1, 1]
    assert aggregated("median_of_means", table, weights=weights, batches=3).tolist() == [[5.0]]
    drawn[1] = [1, 2]  # (2 * 3 + 1 * 5) / 3 = 11 / 3
    found = aggregated("median_of_means", table, weights=weights, batches=3)
    assert found.tolist() == [pytest.approx([11 / 3], rel=1e-6)]


def test_median_of_means_repeats_itself_and_draws_anew_every_round():
    table = np.random.default_rng(4).standard_normal((9, 4))
    first = aggregated("median_of_means", table, seed=1, round=1)
    assert np.array_equal(first, aggregated("median_of_means", table, seed=1, round=1))
    assert not np.array_equal(first, aggregated("median_of_means", table, seed=1, round=2))
    assert not np.array_equal(first, aggregated("median_of_means", table, seed=2, round=1))


# --- matched averaging ------------------------------------------------------------------------------------

NETWORKS = {  # layers in order, the normalisation that follows each, the shape of a sample
    "mlp": (["fc1", "fc2", "fc3"], {}, (1, 4, 4)),
    "cnn_digits": (["conv1", "fc1", "fc2"], {}, (1, 8, 8)),
    "cnn_cifar": (["conv1", "conv2", "fc1", "fc2", "fc3"], {}, (3, 32, 32)),
    "cnn_fashion": (["conv1", "conv2", "fc1"], {"conv1": "norm1", "conv2": "norm2"}, (1, 8, 8)),
}


def flat_network(name, seed=0):
    """A network whose BatchNorms are not all alike, as a flat model."""
    settings = composed(ModelSettings)(name=name, hidden=[12, 8])
    model = FlatModel(build_module(settings, LocalSettings(), NETWORKS[name][2], 10, seed))
    vector = model.vector().copy()
    rng = np.random.default_rng(seed)
    for entry in model.spec.entries:
        if "norm" in entry.name:
            vector[entry.start : entry.stop] = rng.uniform(0.5, 1.5, entry.stop - entry.start)
    return model, vector


def permuted(name, spec, vector, seed):
    """The same function with hidden neurons in another order, worked out from the names of the layers."""
    layers, norms, _ = NETWORKS[name]
    tensors = {
        e.name.removeprefix("network."): vector[e.start : e.stop].reshape(e.shape) for e in spec.entries
    }
    rng = np.random.default_rng(seed)
    for layer, following in itertools.pairwise(layers):
        width = len(tensors[f"{layer}.weight"])
        order = rng.permutation(width)
        along = [f"{layer}.weight", f"{layer}.bias"]
        if layer in norms:
            along += [f"{norms[layer]}.{part}" for part in ("weight", "bias", "running_mean", "running_var")]
        for tensor in along:
            tensors[tensor] = tensors[tensor][order]
        after = tensors[f"{following}.weight"]
        by_channel = after.reshape(len(after), width, -1)[:, order]
        tensors[f"{following}.weight"] = by_channel.reshape(after.shape)
    return np.concatenate([tensors[e.name.removeprefix("network.")].ravel() for e in spec.entries])


def outputs(model, vector, shape):
    model.load(np.ascontiguousarray(vector))
    model.module.eval()
    with torch.no_grad():
        x = torch.from_numpy(np.random.default_rng(9).standard_normal((5, *shape), dtype=np.float32))
        return model.module(x).numpy()


@pytest.mark.parametrize("name", NETWORKS)
def test_model_and_its_permuted_copies_average_to_the_model(name):
    model, vector = flat_network(name)
    copies = [vector, *(permuted(name, model.spec, vector, seed) for seed in (1, 2))]
    shape = NETWORKS[name][2]
    assert not np.array_equal(copies[1], vector)
    assert outputs(model, copies[1], shape) == pytest.approx(outputs(model, vector, shape), abs=1e-5)
    found = aggregated("matched", copies, weights=[3, 1, 2], spec=model.spec)
    assert np.array_equal(found[0], vector)  # in the order of the first


@pytest.mark.parametrize("name", NETWORKS)
def test_noisy_permuted_copies_come_closer_than_by_plain_averaging(name):
    model, vector = flat_network(name)
    shape = NETWORKS[name][2]
    truth = outputs(model, vector, shape)
    rng = np.random.default_rng(5)
    copies = []
    for seed in range(4):
        noise = np.zeros_like(vector)
        for entry in model.spec.entries:
            part = slice(entry.start, entry.stop)
            noise[part] = 0.2 * vector[part].std() * rng.standard_normal(entry.stop - entry.start)
        copies.append(permuted(name, model.spec, vector + noise, seed) if seed else vector + noise)
    plain, matched = (aggregated(rule, copies, spec=model.spec)[0] for rule in ("mean", "matched"))
    away = {"plain": np.linalg.norm(plain - vector), "matched": np.linalg.norm(matched - vector)}
    assert away["matched"] < 0.3 * away["plain"]
    assert away["matched"] < min(np.linalg.norm(copy - vector) for copy in copies)  # noise averages out
    error = {
        "plain": np.abs(outputs(model, plain, shape) - truth).mean(),
        "matched": np.abs(outputs(model, matched, shape) - truth).mean(),
    }
    assert error["matched"] < 0.5 * error["plain"]


def test_matching_by_hand():
    # One input, two hidden neurons with biases, one output: y = v1 relu(a1 x + b1) + v2 relu(a2 x + b2) + d.
    spec = ModelSpec(
        (
            ModelEntry("fc1.weight", (2, 1), 0, 2, "parameter", "head"),
            ModelEntry("fc1.bias", (2,), 2, 4, "parameter", "head"),
            ModelEntry("fc2.weight", (1, 2), 4, 6, "parameter", "head", True),
            ModelEntry("fc2.bias", (1,), 6, 7, "parameter", "head"),
        )
    )
    one = [1.0, -1.0, 0.0, 0.5, 2.0, 3.0, 1.0]  # neurons (1, 0) -> 2 and (-1, 0.5) -> 3
    two = [-1.4, 1.4, 0.9, 0.4, 7.0, 4.0, 3.0]  # neurons (-1.4, 0.9) -> 7 and (1.4, 0.4) -> 4
    # The second's neurons swap. With weights 3 : 1 the means are 1 + 0.4 / 4 = 1.1, -1 - 0.4 / 4 = -1.1;
    # 0.1, 0.5 + 0.4 / 4 = 0.6; (3 * 2 + 4) / 4 = 2.5, (3 * 3 + 7) / 4 = 4; (3 + 3) / 4 = 1.5.
    expected = [1.1, -1.1, 0.1, 0.6, 2.5, 4.0, 1.5]
    assert aggregated("matched", [one, two], weights=[3, 1], spec=spec)[0] == pytest.approx(expected)
    # Two clusters, and a client that did not arrive: each is matched among its own, from its own first.
    found = aggregated(
        "matched",
        [two, one, one, two],
        [1, 0, 1, 0],
        3,
        [1, 3, 3, 1],
        spec=spec,
        arrived=[True, True, True, False],
    )
    assert found[0] == pytest.approx(one)
    assert found[1] == pytest.approx([-1.1, 1.1, 0.6, 0.1, 4.0, 2.5, 1.5])
    assert found[2].tolist() == [99.0] * 7


def test_sweeps_never_take_neurons_further_apart():
    rng = np.random.default_rng(6)

    def spread(neurons, orders):
        ordered = np.take_along_axis(neurons, orders[:, :, None], axis=1)
        return float(((ordered - ordered.mean(axis=0)) ** 2).sum())

    better = 0
    for _ in range(20):
        neurons = rng.standard_normal((5, 6, 3))
        once, often = (match(neurons, np.full(5, 0.2), sweeps) for sweeps in (1, 6))
        assert spread(neurons, often) <= spread(neurons, once) + 1e-9
        better += spread(neurons, often) < spread(neurons, once) - 1e-9
        assert all(sorted(order) == list(range(6)) for order in often.tolist())
    assert better > 5


def test_networks_that_are_no_chain_are_refused_with_a_sentence():
    resnet = FlatModel(
        build_module(ModelSettings(name="resnet_slim"), LocalSettings(), (3, 32, 32), 10, 0)
    ).spec
    with refused("unfit-model", says="'network.blocks.0.conv1'", setting="aggregation"):
        Rule.chosen(AggregationSettings(name="matched")).check(resnet)
    Rule.chosen(AggregationSettings(name="median")).check(resnet)

    def spec_of(*tensors):
        at, entries = 0, []
        for name, shape in tensors:
            size = int(np.prod(shape))
            entries.append(ModelEntry(name, shape, at, at + size, "parameter", "head"))
            at += size
        return ModelSpec(tuple(entries))

    for tensors, facts in [
        ((("a.weight", (4, 2)), ("b.weight", (3, 5))), ("'b.weight' takes 5", "4 of 'a.weight'")),
        ((("a.weight", (4, 2)), ("skip.weight", (3, 4))), ("'skip'", "part of a block")),
        ((("norm.weight", (4,)), ("a.weight", (4, 2))), ("'norm'", "before")),
        ((("a.weight", (4, 2)), ("norm.weight", (3,))), ("'norm.weight' has 3", "4 neurons")),
        ((("rnn.weight_ih_l0", (4, 2)),), ("'rnn'", "no weight")),
        ((("a.weight", (4, 2, 3, 3)), ("ln.weight", (4, 6, 6)), ("ln.bias", (4, 6, 6))), ("'ln'", "neither")),
        ((("a.weight", (4, 2)), ("b.weight", (4, 4, 3, 3))), ("'b.weight' takes 4", "4 of 'a.weight'")),
    ]:
        with refused("unfit-model", says=facts, setting="aggregation"):
            chain(spec_of(*tensors))


# --- in an experiment -------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES[1:])
def test_rules_give_the_same_bits_in_any_layout_and_after_a_restore(rule):
    common = ("method=ifca", "participation.dropouts=0.2")
    batches = ("aggregation.batches=3",) if rule == "median_of_means" else ()
    settings = (*common, f"aggregation={rule}", *batches)
    whole = session_of(*settings)
    expected = outcome(whole, run(whole, 3))
    first = session_of(*settings, blocks=[[7, 0, 3], [5, 1], [2, 6, 4]])
    reports = run(first, 2)
    second = session_of(*settings, blocks=[[5], [0, 1, 2, 3, 4, 6, 7]], checkpoint=checkpoint_of(first))
    reports += run(second, 1, first=3)
    assert outcome(second, reports) == expected
    plain = session_of(*common)
    same = outcome(plain, run(plain, 3)) == expected
    # Clients that start from one model every round keep their neurons in order: then matching is the mean.
    assert same == (rule == "matched")


def test_every_setting_of_a_rule_changes_the_numbers():
    table = np.random.default_rng(8).standard_normal((20, 6))
    assert not np.allclose(
        aggregated("trimmed_mean", table, trim=0.1), aggregated("trimmed_mean", table, trim=0.3)
    )
    assert not np.allclose(
        aggregated("median_of_means", table, batches=4), aggregated("median_of_means", table, batches=11)
    )


def test_one_wild_client_ruins_the_mean_and_not_the_median():
    accuracy = {}
    for rule in ("mean", "median"):
        session = session_of(
            "method=fedavg", f"aggregation={rule}", "data.rotations=1", "local.steps=10", "local.lr=0.1"
        )
        engine = session.fleet.blocks[0].engine
        plain = engine.train_one

        def train_one(job, plain=plain):
            result = plain(job)
            if job.client == 3:
                wild = np.random.default_rng(job.seed).normal(0, 20, result.model.shape)
                object.__setattr__(result, "model", wild.astype(np.float32))
            return result

        engine.train_one = train_one
        reports = run(session, 5)
        accuracy[rule] = reports[-1].metrics["micro_accuracy"]
    assert accuracy["median"] > 0.7 > 0.3 > accuracy["mean"]
