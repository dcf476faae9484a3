"""Three engines, the same numbers: loop and trainer to the bit, stacked to its stated tolerance."""

import numpy as np
import pytest
import torch

from archipelago.core.randomness import generator
from archipelago.core.schema import composed
from archipelago.core.settings import LocalSettings, ModelSettings
from archipelago.strategies.penalties import Proximal
from lightning_modules.base import build_module
from lightning_modules.engines import Term, TrainJob, make_engine, objective
from lightning_modules.engines.stacked import STACKED_TOLERANCE
from lightning_modules.flat import FlatModel, is_value, value_of
from lightning_modules.samples import Samples
from tests.support.errors import refused

SHAPES = {"mlp": (1, 8, 8), "cnn_cifar": (3, 32, 32), "cnn_fashion": (1, 28, 28)}


def setup(name="mlp", target=None, samples=70, **local):
    settings = LocalSettings(**({"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01} | local))
    shape = SHAPES[name]
    rng = generator(0, "test samples")
    x = rng.integers(0, 256, (samples, *shape)).astype(np.uint8)
    y = rng.integers(0, 10, samples)
    model = composed(ModelSettings)(name=name, target=target, hidden=[16])
    made = FlatModel(build_module(model, settings, shape, 10, seed=1))
    return made, Samples(x, y, mean=[0.5] * shape[0], std=[0.5] * shape[0], classes=10)


def jobs_for(model, count=3, steps=4, batch=8, ragged=False, **extra):
    rng = generator(1, "test jobs")
    made = []
    for client in range(count):
        start = (model.vector() + 0.01 * rng.standard_normal(model.spec.size)).astype(np.float32)
        start[model.spec.columns("buffers")] = np.abs(start[model.spec.columns("buffers")]) + 0.5
        sizes = [batch - (client if ragged and step == 1 else 0) for step in range(steps)]
        batches = [rng.choice(70, size, replace=False) for size in sizes]
        job = TrainJob(client, start, batches, seed=client, **{k: v(model, rng) for k, v in extra.items()})
        made.append(job)
    return made


def results(name, model, samples, jobs):
    return list(make_engine(name, model, samples).train(jobs))


def on_top_of(model, rng):
    return [(model.vector() * np.float32(0.5)), model.vector()]


def penalties(model, rng):
    anchor = rng.standard_normal(model.spec.parameters).astype(np.float32)
    return [Term(Proximal(0.3, anchor), {"anchor": torch.from_numpy(anchor)})]


CASES = {
    "momentum and weight decay": ("mlp", {}, {}),
    "adam": ("mlp", {"optimizer": "adam", "lr": 0.003}, {}),
    "convolutions": ("cnn_cifar", {}, {}),
    "batch norm": ("cnn_fashion", {}, {}),
    "on top of two models": ("mlp", {}, {"on_top_of": on_top_of}),
    "batch norm on top of others": ("cnn_fashion", {}, {"on_top_of": on_top_of}),
    "a penalty": ("mlp", {}, {"penalties": penalties}),
    "both": ("cnn_cifar", {}, {"on_top_of": on_top_of, "penalties": penalties}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("ragged", [False, True], ids=["equal batches", "ragged batches"])
def test_engines_agree(case, ragged):
    network, local, extra = CASES[case]
    model, samples = setup(network, **local)
    jobs = jobs_for(model, ragged=ragged, **extra)
    loop, trainer, stacked = (results(name, model, samples, jobs) for name in ("loop", "trainer", "stacked"))
    for a, b, c in zip(loop, trainer, stacked, strict=True):
        assert np.array_equal(a.model, b.model) and a.objective == b.objective
        assert a.optimizer_state.keys() == b.optimizer_state.keys() == c.optimizer_state.keys()
        assert all(
            np.array_equal(a.optimizer_state[key], b.optimizer_state[key]) for key in a.optimizer_state
        )
        scale = float(np.abs(a.model).max())
        assert np.abs(a.model - c.model).max() <= STACKED_TOLERANCE * scale
        assert c.objective == pytest.approx(a.objective, rel=STACKED_TOLERANCE)
        # Relative to the whole state: a bias before BatchNorm has a gradient of rounding noise alone.
        largest = max(float(np.abs(value).max()) for value in a.optimizer_state.values())
        for key, value in a.optimizer_state.items():
            assert np.abs(value - c.optimizer_state[key]).max() <= STACKED_TOLERANCE * largest
    assert len({result.model.tobytes() for result in loop}) == len(jobs)


@pytest.mark.parametrize("name", ["loop", "trainer", "stacked"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_optimizer_state_enters_and_leaves(name, optimizer):
    model, samples = setup(optimizer=optimizer, lr=0.01)
    jobs = jobs_for(model, steps=6)
    whole = results("loop", model, samples, jobs)
    halves = []
    for job in jobs:
        halves.append(TrainJob(job.client, job.start, job.batches[:3], seed=0))
    first = results(name, model, samples, halves)
    second = results(
        name,
        model,
        samples,
        [
            TrainJob(job.client, half.model, job.batches[3:], seed=0, optimizer_state=half.optimizer_state)
            for job, half in zip(jobs, first, strict=True)
        ],
    )
    for a, b in zip(whole, second, strict=True):
        assert np.allclose(a.model, b.model, rtol=STACKED_TOLERANCE, atol=1e-6)
        if name != "stacked":
            assert np.array_equal(a.model, b.model)
    fresh = results(name, model, samples, [TrainJob(j.client, h.model, j.batches[3:], seed=0)
                                           for j, h in zip(jobs, first, strict=True)])  # fmt: skip
    assert not np.allclose(fresh[0].model, second[0].model, rtol=STACKED_TOLERANCE, atol=1e-6)


def test_loop_is_plain_pytorch():
    model, samples = setup("cnn_fashion")
    (job,) = jobs_for(model, count=1)
    (result,) = results("loop", model, samples, [job])
    settings = LocalSettings(lr=0.05, momentum=0.9, weight_decay=0.01)
    plain = build_module(ModelSettings(name="cnn_fashion"), settings, (1, 28, 28), 10, seed=1)
    state = plain.state_dict()
    for entry in model.spec.entries:
        state[entry.name] = torch.from_numpy(job.start[entry.start : entry.stop].copy()).reshape(entry.shape)
    plain.load_state_dict(state)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
    plain.train()
    for index in job.batches:
        x, y = samples.batch(index)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(plain.network(x), y).backward()
        optimizer.step()
    flat = np.concatenate([plain.state_dict()[e.name].numpy().ravel() for e in model.spec.entries])
    assert np.allclose(result.model, flat, rtol=1e-5, atol=1e-6)
    assert not np.allclose(
        result.model[model.spec.columns("buffers")], job.start[model.spec.columns("buffers")]
    )


def test_frozen_model_is_evaluated_once_per_distinct_sample(monkeypatch):
    model, samples = setup()
    (job,) = jobs_for(model, count=1, steps=10, on_top_of=on_top_of)
    seen = []
    original = objective.outputs_of
    monkeypatch.setattr(objective, "outputs_of", lambda *a: (seen.append(len(a[3])), original(*a))[1])
    results("loop", model, samples, [job])
    distinct = len(np.unique(np.concatenate(job.batches)))
    assert seen == [distinct, distinct] and distinct < 80


def test_training_on_top_of_a_model_is_training_the_sum():
    model, samples = setup()
    below = jobs_for(model, count=2)[1].start
    (job,) = jobs_for(model, count=1, on_top_of=lambda m, r: [below])
    (result,) = results("loop", model, samples, [job])
    (alone,) = results("loop", model, samples, [TrainJob(0, job.start, job.batches, seed=0)])
    assert not np.allclose(result.model, alone.model)
    x, y = samples.batch(job.batches[0])
    model.load(job.start)
    own = model.module(x).detach()
    model.load(below)
    together = torch.nn.functional.cross_entropy(own + model.module(x).detach(), y)
    (one,) = results(
        "loop", model, samples, [TrainJob(0, job.start, job.batches[:1], seed=0, on_top_of=[below])]
    )
    assert one.objective == pytest.approx(float(together), rel=1e-6)


@pytest.mark.parametrize("name", ["loop", "trainer", "stacked", "compiled"])
def test_module_with_only_a_training_step_runs_and_is_refused_where_it_cannot(name):
    model, samples = setup(target="tests.support.modules.ForeignModule")
    jobs = jobs_for(model, count=2)
    trained = results(name, model, samples, jobs)
    assert not np.array_equal(trained[0].model, jobs[0].start) and trained[0].optimizer_state
    with refused("incomplete-module", says="ForeignModule", lacks="loss"):
        results(name, model, samples, jobs_for(model, count=2, penalties=penalties))


def test_stacked_names_the_layer_that_it_cannot_batch_and_then_has_the_bits_of_the_loop():
    model, samples = setup(target="tests.support.modules.AlphaDropoutModule")
    engine = make_engine("stacked", model, samples)
    jobs = jobs_for(model)
    for a, b in zip(engine.train(jobs), results("loop", model, samples, jobs), strict=True):
        assert np.array_equal(a.model, b.model)
    assert len(engine.notes) == 1 and "'network.drop' (AlphaDropout)" in engine.notes[0]
    list(engine.train(jobs))
    assert len(engine.notes) == 1  # once


def test_stacked_finds_out_what_torch_cannot_batch():
    model, samples = setup(target="tests.support.modules.DataDependentModule")
    engine = make_engine("stacked", model, samples)
    jobs = jobs_for(model)
    for a, b in zip(engine.train(jobs), results("loop", model, samples, jobs), strict=True):
        assert np.array_equal(a.model, b.model)
    assert "torch cannot batch layer 'network.gate'" in engine.notes[0]


def test_stacked_finds_out_that_rows_of_a_batch_meet():
    model, samples = setup(target="tests.support.modules.CentredModule")
    engine = make_engine("stacked", model, samples)
    list(engine.train(jobs_for(model, ragged=True)))
    assert "change each other" in engine.notes[0]


@pytest.mark.parametrize("odd", ["OwnTrainingStep", "OwnConvolution", "OwnBatchNorm", "LearnedLoss", "OwnBuffer",
                                 "UnusedParameter", "NoStatistics", "NotCopied"])  # fmt: skip
@pytest.mark.parametrize("convolution", ["grouped", "unfold"])
def test_stacked_leaves_what_it_does_not_know_to_the_loop_and_says_so(odd, convolution):
    model, samples = setup("cnn_cifar", target=f"tests.support.odd_modules.{odd}")
    options = composed(LocalSettings)(convolution=convolution)
    engine = make_engine("stacked", model, samples, options)
    jobs = jobs_for(model, ragged=True)
    batched = list(engine.train(jobs))
    for a, b in zip(results("loop", model, samples, jobs), batched, strict=True):
        assert np.allclose(a.model, b.model, rtol=STACKED_TOLERANCE, atol=1e-6)
    if odd != "OwnConvolution":  # its weights are batched as they are, and its forward with them
        assert engine.notes


@pytest.mark.parametrize("odd", ["SharedBatchNorm", "SharedDropout"])
def test_stacked_layers_that_are_used_twice_are_batched(odd):
    model, samples = setup("cnn_cifar", target=f"tests.support.odd_modules.{odd}")
    engine = make_engine("stacked", model, samples)
    jobs = jobs_for(model, ragged=True)
    batched = list(engine.train(jobs))
    assert not engine.notes
    if odd == "SharedBatchNorm":
        for a, b in zip(results("loop", model, samples, jobs), batched, strict=True):
            assert np.allclose(a.model, b.model, rtol=STACKED_TOLERANCE, atol=1e-5)
    else:  # the product of both masks of a half is a quarter: with one mask twice it would be a half
        kept = model.module.network.kept
        assert 0.15 < float(np.mean(kept)) < 0.35


@pytest.mark.parametrize("name", ["loop", "stacked"])
def test_dropout_draws_from_the_clients_own_seed_and_leaves_the_global_generator_alone(name):
    model, samples = setup(target="tests.support.modules.DropoutModule")
    (job,) = jobs_for(model, count=1)
    before = torch.random.get_rng_state()
    first, again = (results(name, model, samples, [job])[0].model for _ in range(2))
    other = results(name, model, samples, [TrainJob(0, job.start, job.batches, seed=99)])[0].model
    assert np.array_equal(first, again) and not np.array_equal(first, other)
    many = results(name, model, samples, [*jobs_for(model, count=3)[1:], job])[-1].model
    assert np.allclose(many, first, rtol=1e-5, atol=1e-6)  # whoever is beside it: the same draws
    assert torch.equal(before, torch.random.get_rng_state())


def test_two_optimizers_are_refused_with_a_sentence():
    with refused("wrong-result", says="TwoOptimizers", name="configure_optimizers"):
        setup(target="tests.support.modules.TwoOptimizers")


def test_trainer_options_reach_the_trainer():
    model, samples = setup(lr=5.0)
    jobs = jobs_for(model, count=1)
    free = results("trainer", model, samples, jobs)[0]
    clipped = next(
        make_engine(
            "trainer", model, samples, composed(LocalSettings)(trainer={"gradient_clip_val": 1e-6})
        ).train(jobs)
    )
    assert np.abs(clipped.model - jobs[0].start).max() < np.abs(free.model - jobs[0].start).max()


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("channels_last", [False, True])
def test_normalising_per_batch_and_per_actor_give_the_same_bits(channels_last, channels):
    rng = generator(0, "pixels")
    x, y = rng.integers(0, 256, (40, channels, 4, 6)).astype(np.uint8), rng.integers(0, 3, 40)
    mean, std = [0.1, 0.2, 0.3][:channels], [0.5, 0.6, 0.7][:channels]
    options = {"mean": mean, "std": std, "classes": 3, "channels_last": channels_last}
    used = np.arange(5, 30)
    batch = Samples(x, y, **options)
    actor = Samples(x, y, normalise="actor", used=used, **options)
    index = np.array([7, 29, 5, 7])
    assert torch.equal(batch.batch(index)[0], actor.batch(index)[0])
    # By their strides: with one channel, `is_contiguous` says yes to both formats.
    strides = (24 * channels, 1, 6 * channels, channels) if channels_last else (24 * channels, 24, 6, 1)
    for samples in (batch, actor):
        (chunk,) = samples.inputs(index)
        for found in (samples.batch(index)[0], samples.changed(index, torch.clone)[0], chunk):
            assert found.stride() == strides
    mean, std = (np.float32(each)[:, None, None] for each in (mean, std))
    expected = (x[index].astype(np.float32) / 255 - mean) / std
    assert np.allclose(batch.batch(index)[0].numpy(), expected, rtol=1e-6)
    assert batch.batch(index)[1].tolist() == y[index].tolist()


def test_convolutions_see_images_of_one_channel_in_the_faster_memory_format():
    """PyTorch chooses its kernels by the strides of the input: its output has the format that it computed in."""
    samples = Samples(
        np.zeros((8, 1, 12, 12), np.uint8), np.zeros(8), mean=[0.1], std=[0.5], classes=2, channels_last=True
    )
    found = torch.nn.Conv2d(1, 4, 3)(samples.batch(np.arange(8))[0])
    assert found.is_contiguous(memory_format=torch.channels_last)


def test_read_only_memory_is_used_without_copy_or_warning():
    x = np.arange(12, dtype=np.float32).reshape(4, 3)
    x.flags.writeable = False
    samples = Samples(x, np.zeros(4, np.int64), mean=[0.0], std=[1.0], classes=2)
    assert samples._x.data_ptr() == x.ctypes.data


def test_model_value_is_its_own_and_cannot_be_written_to():
    model, _ = setup()
    first = model.vector()
    model.load(np.zeros(model.spec.size, np.float32))
    assert np.abs(first).max() > 0 and np.abs(model.vector()).max() == 0
    with pytest.raises(ValueError, match="read-only"):
        first[0] = 1


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_stacked_leaves_frozen_parameters_as_they_are(optimizer):
    model, samples = setup(optimizer=optimizer, lr=0.01)
    frozen = next(iter(model.module.parameters()))
    frozen.requires_grad_(False)
    jobs = jobs_for(model, ragged=True)
    loop, stacked = (results(name, model, samples, jobs) for name in ("loop", "stacked"))
    for job, a, b in zip(jobs, loop, stacked, strict=True):
        assert np.array_equal(b.model[: frozen.numel()], job.start[: frozen.numel()])
        assert np.allclose(a.model, b.model, rtol=STACKED_TOLERANCE, atol=1e-6)
        assert a.optimizer_state.keys() == b.optimizer_state.keys()


@pytest.mark.parametrize(
    "options", [{"nesterov": True, "momentum": 0.9}, {"momentum": 0.0}, {"decoupled": True}], ids=str
)
def test_stacked_steps_as_torch_does(options):
    model, samples = setup()
    group = model.optimizer.param_groups[0]
    if options.pop("decoupled", False):
        model.optimizer = torch.optim.AdamW(group["params"], lr=0.01, weight_decay=0.1)
        model.module.configure_optimizers = lambda: model.optimizer
    group = model.optimizer.param_groups[0]
    group.update(options)
    jobs = jobs_for(model, ragged=True)
    for a, b in zip(*(results(name, model, samples, jobs) for name in ("loop", "stacked")), strict=True):
        assert np.allclose(a.model, b.model, rtol=STACKED_TOLERANCE, atol=1e-6)
        assert a.optimizer_state.keys() == b.optimizer_state.keys()


def test_loop_and_trainer_draw_the_same_dropout():
    model, samples = setup(target="tests.support.modules.DropoutModule")
    jobs = jobs_for(model)
    for a, b in zip(
        results("loop", model, samples, jobs), results("trainer", model, samples, jobs), strict=True
    ):
        assert np.array_equal(a.model, b.model)


def test_buffers_that_somebody_replaced_come_back_into_the_model():
    model, samples = setup("cnn_fashion")
    model.module.double().float()  # what moving a module to a device and back does to its buffers
    jobs = jobs_for(model, count=2)
    again, _ = setup("cnn_fashion")
    for a, b in zip(
        results("loop", model, samples, jobs), results("loop", again, samples, jobs), strict=True
    ):
        assert np.array_equal(a.model, b.model)


def test_trainer_callbacks_must_be_callbacks():
    model, samples = setup()
    with refused("wrong-kind", says="local.trainer.callbacks", kind="Callback", name="os.getcwd"):
        next(
            make_engine(
                "trainer", model, samples, composed(LocalSettings)(trainer={"callbacks": ["os.getcwd"]})
            ).train(jobs_for(model, count=1))
        )


def test_outputs_of_a_frozen_model_are_computed_once_in_a_round():
    model, samples = setup("mlp")
    index, vector = np.arange(20), model.vector()
    first = objective.outputs_of(model, samples, vector, index)
    assert objective.outputs_of(model, samples, vector[:], index.copy()) is first  # the same memory
    assert objective.outputs_of(model, samples, vector, index[:10]) is not first
    rows = value_of(np.stack([vector, vector + 1]))
    again = objective.outputs_of(model, samples, rows[0], index)
    assert again is not first and torch.equal(again, first)
    assert objective.outputs_of(model, samples, rows[0], index) is again
    assert not torch.equal(objective.outputs_of(model, samples, rows[1], index), first)
    samples.forget()
    again = objective.outputs_of(model, samples, vector, index)
    assert again is not first and torch.equal(again, first)


def test_outputs_of_memory_that_can_change_are_never_remembered():
    model, samples = setup("mlp")
    index = np.arange(20)
    written = np.stack([model.vector(), model.vector()])
    hidden = written[0]  # read-only itself, on top of memory that is not
    hidden.flags.writeable = False
    tensor = torch.from_numpy(model.vector().copy())
    held = tensor.numpy()
    held.flags.writeable = False
    for vector, memory in ((written[1], written[1]), (hidden, written[0]), (held, tensor)):
        assert not is_value(vector)
        before = objective.outputs_of(model, samples, vector, index)
        memory[0] += 1.0
        again = objective.outputs_of(model, samples, vector, index)
        expected = objective.outputs_of(model, samples, value_of(vector), index)
        assert torch.equal(again, expected)
        assert torch.equal(objective.outputs_of(model, samples, vector, index), expected)
        assert not torch.equal(before, expected)


def test_outputs_remembered_keep_their_model_so_that_no_other_gets_its_address():
    model, samples = setup("mlp")
    index, addresses = np.arange(20), set()
    for number in range(50):  # freed memory of this size is handed out again at once
        vector = model.vector().copy()
        vector[0] += number
        vector.flags.writeable = False
        addresses.add(vector.ctypes.data)
        found = objective.outputs_of(model, samples, vector, index)
        model.touch()
        expected = model.module(next(iter(samples.inputs(index))))
        assert torch.equal(found, expected)
        del vector
    assert len(addresses) == 50


def test_inputs_that_several_models_see_in_turn_are_prepared_once():
    _, samples = setup("mlp")
    samples.chunk, index = 8, np.arange(20)
    expected = [samples.batch(index[at : at + 8])[0] for at in (0, 8, 16)]
    first = list(samples.inputs(index))
    assert all(torch.equal(a, b) for a, b in zip(first, expected, strict=True))
    assert all(a is b for a, b in zip(samples.inputs(index.copy()), first, strict=True))
    other, *_ = samples.inputs(index[::2])
    assert torch.equal(other, samples.batch(index[::2][:8])[0]) and not torch.equal(other, expected[0])
    first = list(samples.inputs(index))
    first[1].zero_()  # a module that works in place
    again = list(samples.inputs(index))
    assert again[0] is first[0] and again[1] is not first[1] and torch.equal(again[1], expected[1])
    samples.forget()
    assert next(samples.inputs(index)) is not first[0]


def test_where_there_is_no_room_to_remember_the_bits_are_the_same(monkeypatch):
    from tests.support.experiments import outcome, run, session_of

    found = []
    for capacity in (64e6, 0, 5000):  # all, nothing, some of it
        session = session_of("method=ifca+cam", "cam.warmup=0", "clusters=3")
        for block in session.fleet.blocks:
            monkeypatch.setattr(block.samples.remembered, "capacity", capacity)
        found.append(outcome(session, run(session, 2)))
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("name", ["loop", "trainer"])
def test_bf16_rounds_the_forward_passes_and_keeps_values_in_float32(name):
    """The step is the same to the precision of bf16 (8 bits), and not to that of float32."""
    model, samples = setup()
    jobs = jobs_for(model, on_top_of=on_top_of, penalties=penalties)
    plain = results(name, model, samples, jobs)
    model.precision = "bf16"
    samples.forget()
    rounded = results(name, model, samples, jobs)
    for a, b, job in zip(plain, rounded, jobs, strict=True):
        assert b.model.dtype == np.float32 and all(
            value.dtype == np.float32 for value in b.optimizer_state.values()
        )
        assert not np.array_equal(a.model, b.model)
        moved = np.linalg.norm(a.model - job.start)
        assert np.linalg.norm(a.model - b.model) < 0.05 * moved
        assert b.objective == pytest.approx(a.objective, rel=0.02)


def test_bf16_outputs_of_frozen_models_are_float32():
    model, samples = setup("cnn_cifar")
    index, vector = np.arange(20), model.vector()
    plain = objective.outputs_of(model, samples, vector, index)
    model.precision = "bf16"
    samples.forget()
    rounded = objective.outputs_of(model, samples, vector, index)
    assert rounded.dtype == torch.float32
    assert not torch.equal(plain, rounded)
    torch.testing.assert_close(plain, rounded, rtol=0.05, atol=0.02)


@pytest.mark.parametrize("precision", ["32", "tf32"])
def test_precision_of_32_bits_or_tf32_leaves_the_forward_passes_alone(precision):
    model, samples = setup()
    jobs = jobs_for(model)
    plain = results("loop", model, samples, jobs)
    model.precision = precision  # tf32 is a flag of a GPU's products
    for a, b in zip(plain, results("loop", model, samples, jobs), strict=True):
        assert np.array_equal(a.model, b.model)


def test_bf16_trainer_takes_the_users_own_precision_first():
    model, samples = setup()
    jobs = jobs_for(model, count=1)
    plain = results("trainer", model, samples, jobs)
    model.precision = "bf16"
    engine = make_engine("trainer", model, samples, composed(LocalSettings)(trainer={"precision": "32-true"}))
    assert np.array_equal(next(iter(engine.train(jobs))).model, plain[0].model)
