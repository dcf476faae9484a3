"""The compiled engine: float64's numbers to rounding, on every network of the papers and on shapes nobody chose.

A step is compared with the same step of torch in double precision, from the same float32 start, so that rounding does
not add up over steps. Where a max-pool or a ReLU is decided by less than float32 can tell, single contributions to a
gradient go elsewhere: then float64 decides as the kernels did, within the same tolerance, and such steps are counted.
"""

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from archipelago.strategies.cks import PairwisePull, SharedPull
from archipelago.strategies.con import ContrastOfOutputs, ContrastOfParameters
from archipelago.strategies.penalties import Linear, Proximal
from lightning_modules.engines import Term, TrainJob, make_engine
from lightning_modules.engines.compiled.build import CannotBuild, library
from lightning_modules.engines.objective import _outputs_by_torch
from tests.support.compiled import Bench, errors, network, ties_noted

try:
    library()
except CannotBuild as missing:  # an ARM laptop, say; with CI set, `test_compiled_build` fails there
    pytest.skip(str(missing), allow_module_level=True)

NETWORKS = {  # (shape of a sample, classes, options of the model)
    "linear": ((1, 8, 8), 5, {}),
    "linear_regression": ((12,), None, {}),
    "mlp": ((1, 8, 8), 5, {"hidden": [40, 17]}),
    "cnn_digits": ((1, 8, 8), 5, {}),
    "cnn_cifar": ((3, 32, 32), 5, {}),
    "cnn_fashion": ((1, 28, 28), 5, {}),
    "cnn_femnist": ((1, 12, 12), 5, {}),
    "cnn_fedem": ((1, 16, 16), 5, {}),
    "cnn_celeba": ((3, 21, 18), 5, {}),
    "cnn_letters": ((1, 12, 12), 5, {}),
    "cnn_fedsoft_cifar": ((3, 8, 8), 5, {}),
    "resnet_slim": ((3, 25, 25), 5, {}),
}
MODEL, STATE, OBJECTIVE = 1e-5, 5e-6, 5e-6  # relative to the largest number of each kind
MOST_TIES = 40  # of a step, that are tried


def sgd(**options):
    # Small enough for every network and option: where training diverges, there is nothing to compare.
    return lambda parameters: torch.optim.SGD(parameters, **({"lr": 0.005} | options))


def adam(**options):
    # An epsilon of the size of the gradients: with a tiny one, gradients that are rounding noise move by lr.
    return lambda parameters: torch.optim.Adam(parameters, **({"lr": 0.01, "eps": 1e-3} | options))


def compare(bench, job, factor=1.0):
    """Step by step; not more than a fifth of the steps, or one, may be decided by a hair."""
    assert not bench.engine.notes
    start, state, close = job.start, job.optimizer_state, 0
    for batch in job.batches:
        one = dataclasses.replace(job, start=start, batches=[batch], optimizer_state=state)
        found = bench.engine.train_one(one)
        assert np.isfinite(found.objective)
        wide, turned = beside_float64(bench, one, found, factor)
        assert max(wide) <= 1, (wide, turned)
        close += bool(turned)
        start, state = found.model, found.optimizer_state
    assert not bench.engine.notes
    assert close <= max(1, len(job.batches) // 5), close


def beside_float64(bench, job, found, factor):
    """(distances of a step in tolerances, the ties that the kernels decided otherwise than float64)."""

    def beside(turned):
        with ties_noted(turned) as ties:
            exact = bench.in_float64(job)
        model, kept, objective = errors(found, exact, job.start, bench.logits)
        # A parameter is a float32: half a unit in the last place of the largest is no error of the kernels.
        rounding = 1.2e-7 * np.abs(exact.model).max() / np.abs(exact.model - job.start).max()
        grows, grows_kept = (factor * each for each in bench.sensitivity())
        wide = [
            model / (MODEL * grows + rounding),
            kept / (STATE * grows_kept),
            objective / (OBJECTIVE * factor),
        ]
        if "0.exp_avg" in found.optimizer_state:
            moved = bench.moved_by_adam(job.start[: bench.model.spec.parameters], found.optimizer_state)
            away = np.abs(found.model[: len(moved)] - moved).max() / np.abs(exact.model - job.start).max()
            wide.append(away / (MODEL + rounding))
        return wide, float(np.linalg.norm(found.model - exact.model)), ties

    turned = []
    wide, distance, ties = beside(turned)
    while max(wide) > 1:  # turn what brings float64 nearest, one at a time
        tried = [(beside([*turned, tie]), tie) for tie in ties[:MOST_TIES] if tie not in turned]
        nearest, tie = min(tried, key=lambda each: each[0][1], default=((wide, math.inf, []), None))
        if nearest[1] >= distance:
            break
        turned.append(tie)
        wide, distance, _ = nearest
    return wide, turned


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_of_the_papers_agree_with_float64(name):
    shape, classes, options = NETWORKS[name]
    bench = Bench(network(name, shape, classes, **options), shape, classes=classes,
                  optimizer=sgd(momentum=0.9, weight_decay=0.01))  # fmt: skip
    compare(bench, bench.job([16, 7, 20, 16] * 5))


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize("steps", [2, pytest.param(20, marks=pytest.mark.full)])
def test_resnet18_agrees_with_float64(norm, steps):
    bench = Bench(network("resnet18", (3, 16, 16), 5, norm=norm), (3, 16, 16), optimizer=sgd(momentum=0.9))
    # Seventeen normalisations, the last of a single pixel: each divides rounding by a deviation.
    compare(bench, bench.job([16, 9] * (steps // 2)), factor=20)


@pytest.mark.parametrize("name", ["mlp", "cnn_digits"])
def test_twenty_steps_in_a_row_stay_beside_float64(name):
    """Here rounding may add up: a thousandth of the way that the model went."""
    shape, classes, options = NETWORKS[name]
    bench = Bench(
        network(name, shape, classes, **options), shape, optimizer=sgd(momentum=0.9, weight_decay=0.01)
    )
    job = bench.job([16, 7, 20, 16] * 5)
    model, state, objective = errors(bench.engine.train_one(job), bench.in_float64(job), job.start)
    assert max(model, state, objective) <= 1e-3, (model, state, objective)


def proximal(bench):
    rng = np.random.default_rng(0)
    anchor = rng.standard_normal(bench.model.spec.parameters).astype(np.float32) * np.float32(0.1)
    return [Term(Proximal(0.3, anchor), {"anchor": torch.from_numpy(anchor)})]


def contrasts(bench):
    """CON's two forms: one of the head's parameters, one of the outputs on the batch."""
    rng = np.random.default_rng(0)
    models = [0.1 * each for each in rng.standard_normal((3, bench.model.spec.size))]
    models = np.stack([with_statistics(bench, each) for each in models])
    columns = bench.model.spec.columns("head")
    own, heads = torch.tensor(1), torch.from_numpy(models[:, : bench.model.spec.parameters])
    return [
        Term(ContrastOfParameters(0.5, 1.0, columns, models, own), {"models": heads, "own": own}),
        Term(ContrastOfOutputs(0.5, 1.0, models, own), {"own": own}, {"models": models}),
    ]


def pulls(bench):
    """CKS: towards the mean of all clients, and towards each cluster."""
    rng = np.random.default_rng(0)
    models = rng.standard_normal((3, bench.model.spec.parameters)).astype(np.float32) * np.float32(0.1)
    columns, shares = bench.model.spec.columns("backbone"), np.float32([0.2, 0.5, 0.3])
    if not len(columns):  # a linear model is all head
        columns = bench.model.spec.columns("head")
    few = {"models": torch.from_numpy(models), "weights": torch.from_numpy(shares)}
    return [
        Term(SharedPull(0.3, columns, models[0]), {"mean": torch.from_numpy(models[0])}),
        Term(PairwisePull(0.2, columns, models, shares), few),
    ]


def weights(bench):
    rng = np.random.default_rng(0)
    order = rng.permutation(60)
    return order, rng.uniform(0.1, 3.0, 60).astype(np.float32)


def frozen(bench):
    start = bench.model.vector()
    return [with_statistics(bench, factor * start) for factor in (0.5, -1.5)]


def with_statistics(bench, model):
    """A model with the network's own running statistics: a variance is not negative."""
    model, buffers = model.astype(np.float32), bench.model.spec.columns("buffers")
    model[buffers] = bench.model.vector()[buffers]
    return model


OPTIONS = {
    "plain SGD": (sgd(), {}),
    "Nesterov": (sgd(momentum=0.8, nesterov=True, weight_decay=0.05), {}),
    "dampening": (sgd(momentum=0.8, dampening=0.3), {}),
    "Adam": (adam(weight_decay=0.02), {}),
    "frozen logits": (sgd(momentum=0.9), {"on_top_of": frozen}),
    "sample weights": (sgd(momentum=0.9), {"sample_weights": weights}),
    "scaled logits": (sgd(), {"on_top_of": frozen, "scale": lambda bench: 0.4}),
    "proximal": (sgd(momentum=0.9), {"penalties": proximal}),
    "contrasts": (adam(), {"penalties": contrasts, "sample_weights": weights}),
    "pulls of CKS": (sgd(momentum=0.9), {"penalties": pulls}),
    "clipping by norm": (sgd(momentum=0.9), {"clip": 0.2, "clip_by": "norm"}),
    "clipping by value": (adam(), {"clip": 0.01, "clip_by": "value"}),
}
# On every network, several at a time.
TOGETHER = {
    "Nesterov, frozen logits, weights, scale, proximal, clipping by norm": (
        sgd(momentum=0.8, nesterov=True, weight_decay=0.05),
        {"on_top_of": frozen, "sample_weights": weights, "scale": lambda bench: 0.4, "penalties": proximal,
         "clip": 0.5, "clip_by": "norm"},
    ),
    "Adam, contrasts, pulls of CKS": (
        adam(weight_decay=0.02), {"penalties": lambda bench: [*contrasts(bench), *pulls(bench)]},
    ),
    "dampening, contrasts, clipping by value": (
        sgd(momentum=0.8, dampening=0.3), {"penalties": contrasts, "clip": 0.01, "clip_by": "value"},
    ),
}  # fmt: skip
FEW = ("mlp", "cnn_digits")  # the others are in the full suite


def compare_with(name, optimizer, extra):
    shape, classes, options = NETWORKS[name]
    bench = Bench(network(name, shape, classes, **options), shape, classes=classes, optimizer=optimizer)
    limits = {key: value for key, value in extra.items() if key.startswith("clip")}
    bench.model.recipe = dataclasses.replace(bench.model.recipe, **limits)
    more = {key: make(bench) for key, make in extra.items() if key not in limits}
    compare(bench, bench.job([16, 5, 33, 16] * 5, **more))


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize(
    "name", [*FEW, *(pytest.param(each, marks=pytest.mark.full) for each in NETWORKS if each not in FEW)]
)
def test_options_agree_with_float64(name, option):
    compare_with(name, *OPTIONS[option])


@pytest.mark.full
@pytest.mark.parametrize("options", TOGETHER)
@pytest.mark.parametrize("name", NETWORKS)
def test_every_network_with_options_together_agrees_with_float64(name, options):
    compare_with(name, *TOGETHER[options])


def test_a_regression_agrees_with_float64():
    bench = Bench(lambda: nn.Sequential(nn.Linear(9, 6), nn.ReLU(), nn.Linear(6, 1)), (9,), classes=None, raw="floats",
                  optimizer=sgd(momentum=0.9))  # fmt: skip
    compare(bench, bench.job([16, 3, 20], sample_weights=weights(bench), scale=1.5))


def test_a_penalty_changes_what_is_learned():
    results = []
    for mu in (0.0, 5.0):
        bench = Bench(network("mlp", (1, 8, 8), 5), (1, 8, 8))
        anchor = np.zeros(bench.model.spec.parameters, np.float32)
        job = bench.job([8] * 3, penalties=[Term(Proximal(mu, anchor), {"anchor": torch.from_numpy(anchor)})])
        results.append(bench.engine.train_one(job))
    assert np.abs(results[1].model).sum() < np.abs(results[0].model).sum()
    assert results[1].objective > results[0].objective
    slope = np.ones(bench.model.spec.parameters, np.float32)
    term = Term(
        Linear(0.1, slope, slope), {"slope": torch.from_numpy(slope), "origin": torch.from_numpy(slope)}
    )
    compare(bench, bench.job([8], penalties=[term]))


# -- Shapes nobody chose -----------------------------------------------------------------------------------------


@st.composite
def networks(draw):
    """A convolutional network of random shapes, with its sample's shape and the sizes of two batches."""
    numbers = {name: draw(st.integers(low, high)) for name, low, high in (
        ("channels", 1, 5), ("first", 1, 19), ("second", 1, 10), ("hidden", 1, 21), ("classes", 2, 6))}  # fmt: skip
    side = st.tuples(st.integers(5, 13), st.integers(5, 13))
    pair, small = (
        st.tuples(st.integers(1, 4), st.integers(1, 4)),
        st.tuples(st.integers(1, 3), st.integers(1, 3)),
    )
    pad = st.tuples(st.integers(0, 3), st.integers(0, 3))
    height, width = draw(side)
    first, stride, padding, pool = draw(pair), draw(small), draw(pad), draw(small)
    kind, norm = (
        draw(st.sampled_from(["max", "average", "none"])),
        draw(st.sampled_from(["batch", "group", "none"])),
    )
    extra = {"ceil_mode": draw(st.booleans())}
    again, bias = draw(small), draw(st.booleans())

    def make():
        layers = [nn.Conv2d(numbers["channels"], numbers["first"], first, stride, padding, bias=bias)]
        layers += {"batch": [nn.BatchNorm2d(numbers["first"])], "group": [nn.GroupNorm(1, numbers["first"])],
                   "none": []}[norm]  # fmt: skip
        layers += [nn.ReLU()]
        layers += {
            "max": [nn.MaxPool2d(pool, **extra)],
            "average": [nn.AvgPool2d(pool, **extra)],
            "none": [],
        }[kind]
        layers += [
            nn.Conv2d(numbers["first"], numbers["second"], again, padding=(again[0] - 1, again[1] - 1))
        ]
        layers += [nn.ReLU(), nn.Flatten()]
        with torch.no_grad():
            size = nn.Sequential(*layers).eval()(torch.zeros(1, numbers["channels"], height, width)).numel()
        layers += [
            nn.Linear(size, numbers["hidden"]),
            nn.ReLU(),
            nn.Linear(numbers["hidden"], numbers["classes"]),
        ]
        return nn.Sequential(*layers)

    batches = [draw(st.integers(2, 40)), draw(st.integers(2, 40))]
    return make, (numbers["channels"], height, width), numbers["classes"], batches


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(networks())
def _random_shapes(taken, refused, drawn):
    make, shape, classes, batches = drawn
    try:
        make()
    except (RuntimeError, ValueError):
        refused.append(shape)  # by torch: nothing to compare with
        return
    taken.append(shape)
    bench = Bench(make, shape, classes=classes, optimizer=sgd())
    # A normalisation of few and nearly equal numbers divides rounding by a small deviation.
    compare(bench, bench.job(batches), factor=20)


def test_random_shapes_agree_with_float64():
    taken, refused = [], []
    _random_shapes(taken, refused)
    assert len(taken) >= 20, f"{len(refused)} of {len(taken) + len(refused)} shapes were refused by torch"


def test_pools_with_padding_and_overlap_agree_with_float64():
    def make():
        return nn.Sequential(
            nn.Conv2d(2, 6, 3), nn.MaxPool2d(3, 2, padding=1), nn.AvgPool2d(3, 1, padding=1, count_include_pad=False),
            nn.Conv2d(6, 4, (1, 2), stride=(2, 1)), nn.AvgPool2d((2, 3), (1, 2), padding=(1, 1)), nn.MaxPool2d(2, 1),
            nn.AdaptiveAvgPool2d((1, None)), nn.Flatten(), nn.Linear(4, 5),
        )  # fmt: skip

    bench = Bench(make, (2, 13, 11))
    compare(bench, bench.job([16, 5]))


class Branches(nn.Module):
    """A tensor read three times, a sum with itself, a flattening of what a convolution reads as well."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.third = nn.Conv2d(4, 4, 5, padding=2, bias=False)
        self.fc1, self.fc2 = nn.Linear(4 * 36, 5), nn.Linear(4 * 36, 5)

    def forward(self, x):
        x = self.first(x)
        y = torch.relu(x + self.second(x.relu()))
        z = (y + y) + self.third(y)
        return self.fc1(z.view(z.size(0), -1)) + self.fc2(torch.flatten(y, 1))


def test_branches_add_their_gradients():
    bench = Bench(Branches, (1, 6, 6), optimizer=sgd(momentum=0.9))
    compare(bench, bench.job([16, 21, 1]))


# -- Forward passes, and what must not matter --------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mlp", "cnn_cifar", "cnn_fashion", "resnet_slim"])
def test_frozen_forward_passes_agree_with_torch_and_do_not_depend_on_company(name):
    shape, classes, options = NETWORKS[name]
    bench = Bench(network(name, shape, classes, **options), shape, samples=150)
    model, index = bench.job([8]).start, np.arange(150)[::-1].copy()
    found = bench.engine.outputs(model, index)
    exact = _outputs_by_torch(bench.model, bench.samples, model, index)
    assert (found - exact).abs().max() <= 1e-5 * exact.abs().max()
    assert torch.equal(found[40:57], bench.engine.outputs(model, index[40:57]))
    assert torch.equal(found[7:8], bench.engine.outputs(model, index[7:8]))


def test_a_job_gives_the_same_bits_alone_and_after_others():
    shape = NETWORKS["cnn_fashion"][0]
    first = Bench(network("cnn_fashion", shape, 5), shape, optimizer=sgd(momentum=0.9))
    job, other = first.job([16, 7, 16]), first.job([50, 33])
    alone = first.engine.train_one(job)
    again = Bench(network("cnn_fashion", shape, 5), shape, optimizer=sgd(momentum=0.9))
    again.engine.train_one(other)  # a larger arena, full of other numbers
    again.engine.outputs(other.start, np.arange(40))
    after = list(again.engine.train([other, job]))[1]
    assert np.array_equal(alone.model, after.model) and alone.objective == after.objective
    for key, value in alone.optimizer_state.items():
        assert np.array_equal(value, after.optimizer_state[key])


@pytest.mark.parametrize("raw", ["bytes", "floats", "doubles"])
def test_samples_are_normalised_to_the_bits_of_samples(raw):
    """Bytes and floats on the fly, other types by Samples; per batch and per actor, in both memory formats."""

    def make():
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 15, 5))

    outputs = []
    for options in ({}, {"channels_last": True}, {"normalise": "actor", "used": np.arange(3, 60)},
                    {"normalise": "actor", "used": np.arange(3, 60), "channels_last": True}):  # fmt: skip
        bench = Bench(make, (3, 7, 5), raw=raw, **options)
        outputs.append(bench.engine.outputs(bench.model.vector(), np.arange(10, 50)))
        arena, index = bench.engine.passes().arena(16), np.arange(20, 33)
        inputs = bench.engine.passes().inputs
        inputs.put(arena, index, inputs.rows(index))
        lanes = arena.values[arena.tensors[0].value :][: arena.group_floats(0)].reshape(-1, 16)
        assert np.array_equal(lanes[:, :13].T, bench.samples.batch(index)[0].reshape(13, -1).numpy())
        assert not lanes[:, 13:].any()
    assert all(torch.equal(outputs[0], each) for each in outputs[1:])


def test_the_optimizer_state_is_torchs_and_a_fresh_start_is_none():
    for optimizer in (sgd(), sgd(momentum=0.9), adam()):
        bench = Bench(network("mlp", (1, 8, 8), 5), (1, 8, 8), optimizer=optimizer)
        job = bench.job([8] * 4)
        whole = bench.engine.train_one(job)
        half = bench.engine.train_one(dataclasses.replace(job, batches=job.batches[:2]))
        rest = dataclasses.replace(
            job, start=half.model, batches=job.batches[2:], optimizer_state=half.optimizer_state
        )
        assert np.array_equal(bench.engine.train_one(rest).model, whole.model)
        loop = make_engine("loop", bench.model, bench.samples).train_one(job)
        assert {k: (v.shape, v.dtype) for k, v in loop.optimizer_state.items()} == {
            k: (v.shape, v.dtype) for k, v in whole.optimizer_state.items()
        }
        nothing = dataclasses.replace(job, batches=[])
        assert bench.engine.train_one(nothing).optimizer_state == {}


def test_divergence_is_seen():
    bench = Bench(network("cnn_digits", (1, 8, 8), 5), (1, 8, 8), optimizer=sgd(lr=1e30))
    result = bench.engine.train_one(bench.job([16] * 6))
    assert not np.isfinite(result.objective) or not np.isfinite(result.model).all()


# -- What it does not take ---------------------------------------------------------------------------------------


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(64, 64), nn.Linear(64, 5)

    def forward(self, x):
        return self.fc2(self.fc1(self.fc1(x.flatten(1))))


class Moody(Twice):
    def forward(self, x):
        return self.fc2(self.fc1(x.flatten(1)) if self.training else x.flatten(1))


def sequence(*layers):
    return lambda: nn.Sequential(*layers, nn.Flatten(), nn.Linear(64, 5))


NOT_COVERED = {
    "dropout": (sequence(nn.Dropout(0.5)), "Dropout"),
    "gelu": (sequence(nn.GELU()), "GELU"),
    "grouped": (
        sequence(nn.Conv2d(1, 2, 1), nn.Conv2d(2, 2, 3, padding=1, groups=2), nn.Conv2d(2, 1, 1)),
        "'1' has groups, dilation",
    ),
    "reflecting": (
        sequence(nn.Conv2d(1, 1, 3, padding=1, padding_mode="reflect")),
        "padding of another kind",
    ),
    "dilated": (sequence(nn.Conv2d(1, 1, 3, padding=2, dilation=2)), "'0' has groups, dilation"),
    "same": (sequence(nn.Conv2d(1, 1, 3, padding="same")), "'0' has groups, dilation"),
    "twice": (Twice, "'fc1' is used twice"),
    "moody": (Moody, "other things in training"),
    "ReLU6": (network("mobilenet_v2", (1, 8, 8), 5), "(ReLU6) has no kernel"),
    "softmax": (network("cnn_letters_published", (1, 8, 8), 5), "'softmax' has no kernel"),
}


@pytest.mark.parametrize("case", NOT_COVERED)
def test_what_is_not_covered_runs_in_the_loop_whole_and_says_which_layer(case):
    make, words = NOT_COVERED[case]
    bench = Bench(make, (1, 8, 8))
    (note,) = bench.engine.notes
    assert "falls back to loop" in note and words in note
    job = bench.job([8, 8])
    found = bench.engine.train_one(job)
    loop = make_engine("loop", bench.model, bench.samples)
    assert np.array_equal(found.model, loop.train_one(job).model)
    assert bench.model.forward_pass is None


def test_a_job_that_does_not_fit_is_left_to_the_loop_and_said():
    bench = Bench(network("mlp", (1, 8, 8), 5), (1, 8, 8), optimizer=sgd(momentum=0.9))
    job = bench.job([8, 8])
    foreign = dataclasses.replace(job, optimizer_state={"0.momentum_buffer": np.zeros((64, 64), np.float32)})
    bench.engine.train_one(foreign)
    assert "another optimizer" in bench.engine.notes[0]


def test_samples_and_classes_out_of_range_are_refused_before_a_kernel_runs():
    bench = Bench(network("mlp", (1, 8, 8), 5), (1, 8, 8))
    for index in (np.array([3, 60]), np.array([-1, 2])):
        with pytest.raises(IndexError):
            bench.engine.outputs(bench.model.vector(), index)
    bench = Bench(network("mlp", (1, 8, 8), 5), (1, 8, 8))
    bench.samples._y = bench.samples._y + 3
    with pytest.raises(IndexError, match="out of bounds"):
        bench.engine.train_one(TrainJob(0, bench.model.vector(), [np.arange(30)], 0))


def test_models_batches_and_rows_of_another_size_are_refused_before_a_kernel_runs():
    bench = Bench(network("mlp", (1, 8, 8), 5, hidden=[40]), (1, 8, 8), optimizer=sgd(momentum=0.9))
    job, passes = bench.job([8, 8]), bench.engine.passes()
    for wrong in (job.start[:-1], np.append(job.start, np.float32(0)), job.start[None]):
        with pytest.raises(ValueError, match=r"expected a model of shape \("):
            bench.engine.outputs(wrong, np.arange(5))
        with pytest.raises(ValueError, match=r"expected a model of shape \("):
            bench.engine.train_one(dataclasses.replace(job, start=wrong))
    arena = passes.arena(16)
    index = np.arange(arena.samples + 1)
    with pytest.raises(ValueError, match="expected 1 to 16 samples"):
        passes.inputs.put(arena, index, passes.inputs.rows(index))
    with pytest.raises(ValueError, match="expected 1 to 16 samples"):
        bench.engine._loss(arena, index, {})
    for odd in (torch.zeros(8, 1, 8, 7), torch.zeros(9, 1, 8, 8), torch.zeros(8, 64)):
        with pytest.raises(ValueError, match="expected inputs of shape"):
            passes.inputs.put_values(arena, odd, 8)
    with pytest.raises(ValueError, match="expected frozen of a batch of shape"):
        bench.engine._loss(arena, np.zeros(8, np.int64), {"frozen": torch.zeros(8, 4)})
    state = bench.engine.train_one(job).optimizer_state
    swapped = {**state, "0.momentum_buffer": state["0.momentum_buffer"].T}
    bench.engine.train_one(dataclasses.replace(job, optimizer_state=state))
    assert not bench.engine.notes
    with pytest.raises(RuntimeError):  # torch's, which it is left to
        bench.engine.train_one(dataclasses.replace(job, optimizer_state=swapped))
    (note,) = bench.engine.notes
    assert "another optimizer" in note


def test_weights_and_numbers_of_other_types_and_shapes_are_what_they_say():
    """Weights as float64 are no float32 memory, and a column of targets is a row of them."""
    make = network("linear_regression", (12,), None)
    results = []
    for dtype, shape in ((np.float32, (-1,)), (np.float64, (-1, 1))):
        bench = Bench(make, (12,), classes=None, raw="floats")
        bench.samples._y = bench.samples._y.reshape(shape)
        weights = np.random.default_rng(0).integers(1, 9, 60).astype(dtype)
        results.append(bench.engine.train_one(bench.job([8, 5], sample_weights=(np.arange(60), weights))))
        assert not bench.engine.notes
    assert np.array_equal(results[0].model, results[1].model)


def test_plans_that_do_not_fit_are_refused_before_a_kernel_runs():
    bench = Bench(network("cnn_fashion", (1, 28, 28), 5), (1, 28, 28))
    arena = bench.engine.passes().arena(32)
    check = arena.library.check
    assert check(arena.pointer) == 0
    plan, tensors, operations = arena.plan, arena.tensors, arena.operations
    size, model = plan.arena_size, plan.model_size
    wrong = [
        (plan, "groups", 5), (plan, "groups", 0), (plan, "arena_size", size // 2), (plan, "output", 99),
        (plan, "workspace", size), (plan, "model_size", model - 1), (tensors[0], "channels", 2),
        (tensors[0], "value", size),
        (tensors[0], "value", -1), (tensors[1], "height", 1 << 20), (tensors[1], "width", 0), (tensors[0], "halo_x", 0),
        (tensors[1], "gradient", size - 8), (operations[0], "kind", 77), (operations[0], "in_", -3),
        (operations[0], "out", 50), (operations[0], "kernel_y", 9), (operations[0], "stride_x", 0),
        (operations[0], "pad_y", -1), (operations[0], "weight", model), (operations[0], "bias", model - 3),
        (operations[1], "mean", -1), (operations[2], "kept_size", 3), (operations[2], "kernel_x", 0),
        (operations[0], "to_input", 1), (plan, "workspace_size", 4),
    ]  # fmt: skip
    for holder, name, value in wrong:
        right = getattr(holder, name)
        setattr(holder, name, value)
        refused = check(arena.pointer)
        setattr(holder, name, right)
        assert refused, (name, value)
    assert check(arena.pointer) == 0
