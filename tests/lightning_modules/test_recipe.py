"""The training recipe: learning rate over rounds, optimizers, clipping, smoothing, augmentation, in every engine."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from archipelago.core.errors import UserError
from archipelago.core.settings import LocalSettings
from archipelago.experiments.config import load_config
from archipelago.strategies.schedules import SCHEDULES, Rates, Schedule, check_schedule
from lightning_modules.augmentations import AUGMENTATIONS, Augmentation, Augmentations
from lightning_modules.engines.loop import LoopEngine
from lightning_modules.engines.stacked import STACKED_TOLERANCE
from lightning_modules.optimizers import OPTIMIZERS
from tests.support.errors import refused
from tests.support.experiments import checkpoint_of, config_of, outcome, run
from tests.support.experiments import session_of as make_session
from tests.support.scalar import method_of, scalar_fleet

SMALL = ("method=fedavg", "clients=4", "rounds=3", "local.steps=2", "data.rotations=1")


def session_of(*overrides: str, **where: Any) -> Any:
    """A session of which the last of several values of a setting counts."""
    last = {each.partition("=")[0]: each for each in overrides}
    return make_session(*last.values(), **where)


def rates(rounds: int, **local: Any) -> list[float]:
    """The factors of all rounds."""
    entry = SCHEDULES.entry(local.get("schedule", "constant"))
    settings = LocalSettings(**{k: v for k, v in local.items() if hasattr(LocalSettings(), k)})
    for name, value in local.items():  # options of entries, which the composed schema has
        setattr(settings, name, value)
    assert entry.name
    return [Rates(settings, rounds)(t) for t in range(1, rounds + 1)]


# Learning rate over rounds


def test_schedules_by_hand() -> None:
    assert rates(3) == [1, 1, 1]
    assert rates(5, schedule="step", step_every=2, step_factor=0.5) == [1, 1, 0.5, 0.5, 0.25]
    assert rates(3, schedule="exponential", decay=0.5) == [1, 0.5, 0.25]
    assert rates(2, schedule="cosine", floor=0.0) == pytest.approx([1, 0.5])  # cos(0), cos(pi / 2)
    assert rates(4, warmup=2) == pytest.approx([1 / 3, 2 / 3, 1, 1])
    # After a warm-up of one round the step is taken two rounds later.
    assert rates(4, warmup=1, schedule="step", step_every=2, step_factor=0.1) == [0.5, 1, 1, 0.1]


@pytest.mark.parametrize(
    ("ours", "theirs", "options"),
    [
        ({"schedule": "cosine", "floor": 0.0}, "CosineAnnealingLR", {"T_max": 7}),
        ({"schedule": "step", "step_every": 3, "step_factor": 0.1}, "StepLR", {"step_size": 3}),
        ({"schedule": "exponential", "decay": 0.9}, "ExponentialLR", {"gamma": 0.9}),
    ],
)
def test_schedules_are_those_of_torch_which_work_by_import_path(
    ours: dict[str, Any], theirs: str, options: dict[str, Any]
) -> None:
    path = f"torch.optim.lr_scheduler.{theirs}"
    assert rates(7, **ours) == pytest.approx(rates(7, schedule=path, schedule_options=options), abs=1e-12)


def test_learning_rate_of_a_round_by_hand() -> None:
    # y = w x with one sample (1, 2), from w = 0: a step of rate r gives w - 2 r (w - 2).
    fleet = scalar_fleet([[(1.0, 2.0)]], lr=0.1)
    fedavg = method_of("fedavg", fleet)
    fedavg.base.model = np.float32([0.0])
    fleet.begin(1, rate=0.5)
    fedavg.round(fleet, 1)
    assert float(fedavg.base.model[0]) == pytest.approx(0.2)  # 2 * 0.05 * 2
    fleet.commit()
    fleet.begin(2)
    fedavg.round(fleet, 2)
    assert float(fedavg.base.model[0]) == pytest.approx(0.2 + 0.2 * 1.8)


@pytest.mark.parametrize("method", ["fedavg", "fedsgd"])
def test_schedule_halves_what_the_second_round_moves(method: str) -> None:
    plainly = ("local.momentum=0",) if method == "fedavg" else ()  # which nobody reads beside fedsgd

    def models(*more: str) -> list[Any]:
        session = session_of(*SMALL, f"method={method}", *plainly, "rounds=2", *more)
        found = [session.models()["models"]["global"].copy()]
        for number in (1, 2):
            session.run_round(number)
            found.append(session.models()["models"]["global"].copy())
        return found

    plain = models()
    halved = models("local.schedule=exponential", "local.decay=0.5")
    assert np.array_equal(plain[1], halved[1])
    moved, less = (np.linalg.norm(each[2] - each[1]) for each in (plain, halved))
    assert moved > 0 and less == pytest.approx(moved / 2, rel=0.1 if method == "fedavg" else 1e-4)


class OwnEngine(LoopEngine):
    """Of a user's own, which takes its batches from elsewhere."""

    recipe = ()


class Halves(Schedule):
    """A schedule of a user's own."""

    def factor(self, round: int) -> float:
        return 0.5**round


def test_schedule_of_ones_own_by_import_path() -> None:
    local = config_of(*SMALL, f"local.schedule={__name__}.Halves").local
    assert [Rates(local, 3)(t) for t in (1, 2)] == [0.5, 0.25]


class Falls(Schedule):
    """Below 0 in its last round."""

    asked: ClassVar[list[int]] = []

    def factor(self, round: int) -> float:
        self.asked.append(round)
        return -1.0 if round == self.rounds else 1.0


def test_schedule_of_many_rounds_is_looked_at_here_and_there_and_at_its_end() -> None:
    settings = config_of(*SMALL).local
    settings.schedule = f"{__name__}.Falls"
    with refused("out-of-range", says="10000000", setting="local.schedule", given=-1.0):
        check_schedule(settings, 10**7)
    assert 5_000 < len(Falls.asked) < 50_000


# Optimizers


# Adagrad has a state before its first step, Adafactor one of other shapes than the parameters', NAdam a scalar.
ODD = ("adagrad", "adafactor", "nadam")


@pytest.mark.parametrize(
    "name",
    [
        name if name in ODD else pytest.param(name, marks=pytest.mark.full)
        for name in sorted(set(OPTIMIZERS) - {"muon"})
    ],
)
def test_optimizers_of_torch_train_and_keep_their_state(name: str) -> None:
    more = (*SMALL, f"local.optimizer={name}", "local.lr=0.01", "clients=2", "model.hidden=[3]", "rounds=2")
    whole = session_of(*more)
    reports = run(whole, 2)
    first = session_of(*more)
    run(first, 1)
    resumed = session_of(*more, checkpoint=checkpoint_of(first), blocks=[[0], [1]])
    assert outcome(resumed, run(resumed, 1, first=2)) == outcome(whole, reports[1:])


def test_optimizer_options_reach_the_optimizer_and_change_the_numbers() -> None:
    def digest(*more: str) -> str:
        session = session_of(*SMALL, "local.optimizer=adam", "local.lr=0.01", *more)
        return outcome(session, run(session, 2))

    plain = digest()
    assert digest("local.optimizer_options.betas=[0.5,0.9]") != plain
    assert digest("local.optimizer_options.betas=[0.9,0.999]") == plain  # torch's defaults
    assert digest("local.optimizer=torch.optim.Adam") == plain


# Clipping, smoothing


def test_clipping_by_hand() -> None:
    # The gradient at w = 0 of (w - 2)^2 is -4: clipped to norm 1, a step of 0.1 goes to 0.1.
    for by in ("norm", "value"):
        fleet = scalar_fleet([[(1.0, 2.0)]], lr=0.1, clip=1.0, clip_by=by)
        fedavg = method_of("fedavg", fleet)
        fedavg.base.model = np.float32([0.0])
        fedavg.round(fleet, 1)
        assert float(fedavg.base.model[0]) == pytest.approx(0.1, rel=1e-5)


def test_label_smoothing_is_in_training_and_not_in_evaluation() -> None:
    plain, smoothed = (session_of(*SMALL, f"local.label_smoothing={value}") for value in (0, 0.2))
    before, after = (run(each, 1)[0].metrics for each in (plain, smoothed))
    # The objective has 0.8 CE + 0.2 mean_c(-log p_c), and is the larger one near the start of training.
    assert after["federated_objective"] != before["federated_objective"]
    model = smoothed.models()["models"]["global"]
    logits = torch.log(torch.tensor([[0.5, 0.25, 0.25]]))
    from lightning_modules.engines.objective import default_losses

    by_hand = -(0.8 * math.log(0.5) + 0.2 * (math.log(0.5) + 2 * math.log(0.25)) / 3)
    assert float(default_losses(logits, torch.tensor([0]), 3, smoothing=0.2)) == pytest.approx(by_hand)
    # Evaluated losses are plain cross-entropy: of the same model they are the same with and without it.
    values = []
    for session in (plain, smoothed):
        fleet = session.fleet
        fleet.begin(5)
        from archipelago.strategies.references import Models

        values.append(fleet.losses(Models(np.stack([model]))))
    assert np.array_equal(*values)


# Augmentation


def pictures(count: int = 6, channels: int = 2) -> torch.Tensor:
    return torch.arange(count * channels * 16, dtype=torch.float32).reshape(count, channels, 4, 4) + 1


def augmentations(names: list[str], mean: Any = 0.0, std: Any = 1.0, **local: Any) -> Augmentations:
    settings = LocalSettings(augment=names)
    for name, value in local.items():
        setattr(settings, name, value)
    return Augmentations(settings, mean, std)


def test_crop_by_hand_pads_with_black_and_cuts_a_window() -> None:
    augment = augmentations(["crop"], mean=[1.0, 2.0], std=[2.0, 4.0], crop_padding=1)
    x = pictures(2)
    offset = torch.tensor([[0, 0], [1, 2]])  # up and to the left of the image; one to the right of it
    found = augment.apply(x, {"0.offset": offset})
    assert torch.equal(found[0, :, 1:, 1:], x[0, :, :3, :3])
    black = torch.tensor([-0.5, -0.5])  # (0 - mean) / std
    assert torch.equal(found[0, :, 0, 0], black)
    assert torch.equal(found[1, :, :, :3], x[1, :, :, 1:])
    assert torch.equal(found[1, :, 2, 3], black)


def test_flip_by_hand() -> None:
    augment = augmentations(["flip"], flip_chance=0.5)
    x = pictures(2)
    found = augment.apply(x, {"0.flip": torch.tensor([True, False])})
    assert torch.equal(found[0], x[0].flip(-1)) and torch.equal(found[1], x[1])


def test_augmentations_draw_with_the_clients_key_and_every_step_anew() -> None:
    augment = augmentations(["crop", "flip"], crop_padding=2, flip_chance=0.5)
    x = pictures()
    same = [augment.of_step(x, seed=3, step=1) for _ in range(2)]
    assert torch.equal(*same)
    assert not torch.equal(same[0], augment.of_step(x, seed=3, step=2))
    assert not torch.equal(same[0], augment.of_step(x, seed=4, step=1))


def test_augmentation_by_a_module_of_torchvision_sees_pixels_and_leaves_no_trace() -> None:
    path = "torchvision.transforms.v2.RandomInvert"  # 1 - x, if x is in [0, 1]
    augment = augmentations([path], mean=0.25, std=0.5, augment_options={"RandomInvert": {"p": 1.0}})
    x = torch.rand(3, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    state = torch.random.get_rng_state()
    found = augment.of_step((x - 0.25) / 0.5, seed=1, step=0)
    assert torch.allclose(found * 0.5 + 0.25, 1 - x, atol=1e-6)
    assert torch.equal(state, torch.random.get_rng_state())


class Brighter(Augmentation):
    """Of a user's own: adds a number to every sample."""

    images = False

    def draw(self, rng: np.random.Generator, count: int) -> dict[str, Any]:
        return {"more": rng.random(count, np.float32)}

    def apply(self, x: torch.Tensor, drawn: Any, black: torch.Tensor) -> torch.Tensor:
        return x + drawn["more"].reshape(-1, *([1] * (x.ndim - 1)))


def test_frozen_models_see_the_augmented_inputs() -> None:
    """A model trained on top of itself frozen: its objective is that of the doubled outputs of one batch."""
    fleet = scalar_fleet([[(1.0, 2.0)]], lr=0.1, augment=[f"{__name__}.Brighter"])
    drawn = Augmentations(LocalSettings(augment=[f"{__name__}.Brighter"]))
    block = fleet.blocks[0]
    start = np.float32([1.0])
    start.flags.writeable = False
    fleet.begin(1)
    job_seed = {}
    own = block._job

    def spying(*given: Any) -> Any:
        job = own(*given)
        job_seed["seed"] = job.seed
        return job

    block._job = spying  # type: ignore[method-assign]
    trained = fleet.train(start, on_top_of=start)
    x = float(drawn.of_step(torch.ones(1, 1), job_seed["seed"], 0))
    assert x > 1
    expected = 1.0 - 0.1 * 2 * x * (2 * x - 2)  # d/dw (w x + 1 x - 2)^2 at w = 1
    assert float(trained.gather()[0, 0]) == pytest.approx(expected, rel=1e-5)


# All of it, in all engines

RECIPE = (
    "local.schedule=cosine", "local.warmup=1", "local.clip=0.5", "local.label_smoothing=0.1",
    "local.augment=[crop,flip]", "local.crop_padding=1", "local.weight_decay=0.001",
)  # fmt: skip
KNOBS = [
    ("local.schedule=cosine",), ("local.warmup=1",), ("local.clip=0.1",), ("local.clip=0.01", "local.clip_by=value"),
    ("local.label_smoothing=0.1",), ("local.augment=[flip]",), ("local.augment=[flip]", "local.flip_chance=0.9"),
    ("local.augment=[crop]", "local.crop_padding=1"), ("local.augment=[crop]", "local.crop_padding=2"),
    ("local.optimizer=rmsprop", "local.lr=0.01"),
]  # fmt: skip


def models_of(*more: str, rounds: int = 2, **where: Any) -> np.ndarray:
    session = session_of(*SMALL, *more, **where)
    run(session, rounds)
    found: np.ndarray = session.models()["models"]["global"]
    return found


def test_every_knob_of_the_recipe_changes_the_numbers() -> None:
    small = ("model=mlp", "model.hidden=[4]", "clients=2")
    known = [models_of(*small, *more) for more in [(), *KNOBS]]
    for i, one in enumerate(known):
        for j, other in enumerate(known[:i]):
            assert not np.array_equal(one, other), (KNOBS[i - 1], j)


def test_recipe_gives_equal_bits_on_every_layout_after_resume_and_in_both_exact_engines() -> None:
    more = (*SMALL, "method=ifca+cam", "model=mlp", "model.hidden=[4]", "local.steps=1", *RECIPE)
    whole = session_of(*more)
    expected = outcome(whole, run(whole, 3))
    for other in (
        session_of(*more, blocks=[[0], [3, 1], [2]]),
        session_of(*more, "local.normalise=actor"),
        session_of(*more, "local.engine=trainer", "clients=4"),
    ):
        assert outcome(other, run(other, 3)) == expected
    first = session_of(*more)
    earlier = run(first, 1)
    resumed = session_of(*more, checkpoint=checkpoint_of(first), blocks=[[2, 0], [1, 3]])
    assert outcome(resumed, [*earlier, *run(resumed, 2, first=2)]) == expected


@pytest.mark.parametrize("engine", ["stacked", "compiled"])
@pytest.mark.parametrize("optimizer", ["sgd", pytest.param("adam", marks=pytest.mark.full)])
def test_other_engines_do_the_recipe_to_rounding(engine: str, optimizer: str) -> None:
    rate = () if optimizer == "sgd" else ("local.optimizer=adam", "local.lr=0.005")
    recipe = [each for each in RECIPE if engine == "stacked" or "smoothing" not in each]
    loop = models_of("model=mlp", "model.hidden=[8]", *rate, *recipe)
    session = session_of(*SMALL, "model=mlp", "model.hidden=[8]", f"local.engine={engine}", *rate, *recipe)
    reports = run(session, 2)
    assert not [event for report in reports for event in report.events if "local.engine" in event]
    found = session.models()["models"]["global"]
    assert np.abs(found - loop).max() <= STACKED_TOLERANCE * np.abs(loop).max()
    moved = models_of("model=mlp", "model.hidden=[8]", *rate)
    assert np.abs(found - moved).max() > 10 * STACKED_TOLERANCE * np.abs(loop).max()


@pytest.mark.parametrize(
    ("engine", "more", "said"),
    [
        ("stacked", ["local.optimizer=rmsprop"], "RMSprop"),
        (
            "stacked",
            [
                "local.augment=[torchvision.transforms.v2.RandomRotation]",
                "local.augment_options.RandomRotation.degrees=9",
            ],
            "RandomRotation",
        ),
        ("stacked", ["method=ifca+cam", "local.augment=[flip]"], "local.augment"),
        ("compiled", ["local.label_smoothing=0.1"], "local.label_smoothing"),
        ("compiled", ["local.optimizer=rmsprop"], "RMSprop"),
    ],
)
def test_engines_say_once_what_they_leave_to_loop(engine: str, more: list[str], said: str) -> None:
    small = ("model=mlp", "model.hidden=[4]", "rounds=2", *more)
    session = session_of(*SMALL, f"local.engine={engine}", *small)
    reports = run(session, 2)
    events = [event for report in reports for event in report.events if "loop" in event]
    assert len(events) == 1 and said in events[0]
    loop = session_of(*SMALL, *small)
    run(loop, 2)
    mine, theirs = (each.models()["models"] for each in (session, loop))
    for name, model in mine.items():
        assert np.abs(model - theirs[name]).max() <= STACKED_TOLERANCE * max(np.abs(model).max(), 1)


# Mistakes


def sentence(*overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        load_config(overrides=list(overrides), env={})
    return str(caught.value)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["local.optimizer=sdg"], "sgd"),
        (["local.optimizer=torch.optim.LBFGS"], "LBFGS"),
        (["local.optimizer=adam", "local.optimizer_options.beta=1"], "optimizer_options"),
        (["local.optimizer=adam", "local.momentum=0.5"], "local.optimizer=sgd"),
        (["local.optimizer_options.lr=1"], "local.lr"),
        (["local.schedule=cosin"], "cosine"),
        (["local.floor=0.5"], "local.schedule=cosine"),
        (["local.step_every=3", "local.schedule=cosine"], "local.schedule=step"),
        (["local.schedule_options.gamma=1"], "local.schedule_options"),
        (["local.schedule=torch.optim.lr_scheduler.StepLR"], "step_size"),
        (["local.schedule=torch.optim.lr_scheduler.ReduceLROnPlateau"], "metric"),
        (["local.schedule=collections.OrderedDict"], "LRScheduler"),
        (["local.warmup=20"], "rounds=20"),
        (["local.clip_by=value"], "local.clip > 0"),
        (["local.augment=[crop,crop]"], "twice"),
        (["local.crop_padding=2"], "local.augment=crop"),
        (["local.augment_options.RandomRotation.degrees=3"], "RandomRotation"),
        (["local.augment=[torchvision.transforms.v2.RandomRotation]"], "degrees"),
        (["method=fedsgd", "local.clip=1"], "method=fedsgd"),
        (["local.engine=trainer", "local.clip=1", "local.trainer.gradient_clip_val=1"], "both"),
        (["local.engine=tests.lightning_modules.test_recipe.OwnEngine", "local.clip=1"], "local.clip"),
    ],
)
def test_recipe_mistakes_are_one_sentence(given: list[str], expected: str) -> None:
    said = sentence(*given)
    assert expected in said and "\n" not in said


def test_augmentation_of_what_is_no_image_and_smoothing_of_what_has_no_classes_are_refused() -> None:
    from archipelago.experiments.config import check_network

    config = config_of("local.augment=[flip]")
    with refused("unfit-data", setting="local.augment", given="flip"):
        check_network(config, (10,), 3)
    check_network(config, (1, 8, 8), 3)
    with refused("needs-classes", setting="local.label_smoothing"):
        check_network(config_of("local.label_smoothing=0.1"), (1, 8, 8), None)
    mix = config_of("local.augment=[torchvision.transforms.v2.RandomZoomOut]")
    with refused("wrong-result", name="torchvision.transforms.v2.RandomZoomOut"):
        check_network(mix, (1, 8, 8), 3)


def test_recipe_entries_are_registered() -> None:
    assert {"constant", "step", "cosine", "exponential"} <= set(SCHEDULES)
    assert {"crop", "flip"} <= set(AUGMENTATIONS)
    assert {"sgd", "adam", "adamw", "rmsprop", "adagrad"} <= set(OPTIMIZERS)
