"""Update transforms, attacks and client-level privacy: by hand, by layout, by what they cost and whom they stop."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from archipelago.strategies.privacy import PrivacyBudget
from archipelago.strategies.update_compression import Quantise, QuantiseOptions, TopK, TopKOptions
from archipelago.strategies.update_privacy import Clip, ClipOptions, Gaussian, GaussianOptions
from archipelago.strategies.updates import TRANSFORMS, Message, Pipeline, Sender, Transform
from tests.support.errors import mistake
from tests.support.experiments import checkpoint_of, config_of, outcome, run, session_of

SCATTERED = [[7, 0, 3], [5, 1], [2, 6, 4]]


def sender(client: int = 0) -> Sender:
    return Sender(seed=1, client=client, round=2, slot="main")


def delivered(*transforms: Transform, update: list[float]) -> tuple[list[float], int]:
    values, sent = Pipeline(transforms).delivered(np.float32(update), sender())
    return values.tolist(), sent


def test_clip_by_hand() -> None:
    assert delivered(Clip(ClipOptions(1.0), 1), update=[3, 4]) == (pytest.approx([0.6, 0.8]), 8)
    assert delivered(Clip(ClipOptions(6.0), 1), update=[3, 4]) == ([3, 4], 8)


def test_topk_by_hand_with_its_bytes() -> None:
    assert delivered(TopK(TopKOptions(0.5), 1), update=[1, -4, 2, 2]) == ([0, -4, 2, 0], 2 * 4 + 2)


def test_topk_feedback_sends_later_what_it_left_out() -> None:
    pipeline, who = Pipeline((TopK(TopKOptions(0.5, feedback=True), 1),)), sender()
    assert pipeline.delivered(np.float32([3, 2]), who)[0].tolist() == [3, 0]
    assert pipeline.delivered(np.float32([1, 1]), who)[0].tolist() == [0, 3]


@pytest.mark.parametrize("bits", [1, 5, 8])
def test_quantise_is_within_a_step_and_right_on_average(bits: int) -> None:
    update = np.linspace(-1, 2, 50, dtype=np.float32)
    pipeline = Pipeline((Quantise(QuantiseOptions(bits, bucket=64), 1),))
    found = [pipeline.delivered(update, sender(client))[0] for client in range(300)]
    step = 3 / (2**bits - 1)
    assert max(np.abs(each - update).max() for each in found) <= step * 1.001
    assert np.abs(np.mean(found, axis=0) - update).max() < 0.3 * step
    assert pipeline.delivered(update, sender())[1] == -(-50 * bits // 8) + 8


def test_noise_of_all_participants_together_is_the_multiplier_times_the_clip() -> None:
    transform = Gaussian(GaussianOptions(clip=2.0, noise=1.5), participants=100)
    message = Message(np.zeros(400, np.float32))
    total = sum(transform.encode(message, sender(client)).values for client in range(100))
    assert np.std(total) == pytest.approx(3.0, rel=0.15)


def test_epsilon_of_one_gaussian_round_and_of_what_was_seen_alone() -> None:
    whole, alone = (PrivacyBudget(2.0, 1e-5, participants=10, sampling=0.5) for _ in range(2))
    assert whole.epsilon() == 0
    whole.spend([10.0])
    alone.spend([1.0])
    assert 0 < whole.epsilon() < 2.5 < alone.epsilon()
    again = PrivacyBudget(2.0, 1e-5, participants=10, sampling=0.5)
    again.load_state(whole.save_state())
    assert again.epsilon() == whole.epsilon()


def renyi(q: float, sigma: float, alpha: int) -> float:
    """Of the Gaussian mechanism on a Poisson sample, for a whole order: Mironov, Talwar, Zhang 2019, (9) with (8)."""
    terms = [
        math.log(math.comb(alpha, k)) + (alpha - k) * math.log1p(-q) + (k and k * math.log(q))
        + (k * k - k) / (2 * sigma**2)
        for k in range(alpha + 1)
    ]  # fmt: skip
    return float(np.logaddexp.reduce(terms)) / (alpha - 1)


def test_epsilon_is_the_published_value_of_the_moments_accountant() -> None:
    """Abadi et al., "Deep Learning with Differential Privacy", CCS 2016: q=0.01, sigma=4, T=10,000, delta=1e-5."""
    spent = {alpha: 10_000 * renyi(0.01, 4.0, alpha) for alpha in range(2, 64)}
    published = min(value + math.log(1e5) / (alpha - 1) for alpha, value in spent.items())
    assert round(published, 2) == 1.26  # their Section 3.2, with their conversion
    # The conversion of Canonne, Kamath, Steinke 2020 gives less for the same mechanisms.
    by_hand = min(
        value + math.log(1e5 / alpha) / (alpha - 1) + math.log1p(-1 / alpha) for alpha, value in spent.items()
    )
    budget = PrivacyBudget(4.0, 1e-5, participants=100, sampling=0.01)
    for _ in range(10_000):
        budget.spend([100.0])
    assert budget.epsilon() == pytest.approx(by_hand, rel=0.005)  # fractional orders, too
    assert budget.epsilon() <= by_hand


def test_epsilon_of_everybody_in_every_round_by_hand() -> None:
    """Without sampling the divergence of k rounds is k alpha / (2 sigma^2); 4 of 16 clients have half the noise."""
    for behind, sigma in ((16.0, 3.0), (4.0, 1.5)):
        budget = PrivacyBudget(3.0, 1e-3, participants=16, sampling=1.0)
        for _ in range(5):
            budget.spend([behind])
        orders = [1 + x / 10 for x in range(1, 100)] + list(range(12, 64))
        by_hand = min(
            5 * a / (2 * sigma**2) + math.log(1e3 / a) / (a - 1) + math.log1p(-1 / a) for a in orders
        )
        assert budget.epsilon() == pytest.approx(by_hand, rel=1e-9)


def test_cost_bytes_up_counts_what_transforms_left_and_descriptors() -> None:
    size = session_of("method=fesem").server.fleet.spec.size
    kept = math.ceil(size / 10)
    (report,) = run(session_of("method=fesem", "update=[topk]", "update.keep=0.1", "rounds=1"), 1)
    sparse = report.metrics["cost_bytes_up"]
    assert sparse == kept * (4 + 2)  # a number and where it stands, in two bytes
    assert report.metrics["cost_models_up"] == 1.0
    more = ("update=[topk]", "update.keep=0.1", "fesem.features=label_shares", "rounds=1")
    (report,) = run(session_of("method=fesem", *more), 1)
    assert report.metrics["cost_bytes_up"] == pytest.approx(sparse + 4 * 10)
    (report,) = run(session_of("method=fesem", "rounds=1"), 1)
    assert "cost_bytes_up" not in report.metrics


def commands_of(*sections: str) -> list[str]:
    """What the page on training says to type, in these sections."""
    page = (Path(__file__).parents[2] / "docs/training.md").read_text(encoding="utf-8")
    blocks = [page.split(f"## {section}\n")[1].split("\n## ")[0] for section in sections]
    return [line for block in blocks for line in block.splitlines() if line.startswith("archipelago ")]


COMMANDS = commands_of("What a client sends: compression", "Privacy", "Attacks", "How the server steps")


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_of_the_training_page_run_and_do_something(command: str) -> None:
    given = command.split()[1:]
    (report,) = run(session_of(*given, "rounds=1", "clients=6", "local.steps=2"), 1)
    assert np.isfinite(report.metrics["micro_loss"])
    names = {word.partition("=")[0].partition(".")[0] for word in given}
    assert ("cost_bytes_up" in report.metrics) == bool(names & {"update", "attack"})
    assert ("epsilon" in report.metrics) == ("gaussian" in command)
    assert ("honest_micro_accuracy" in report.metrics) == ("attack" in names)


HARD = ("participation.fraction=0.75", "rounds=3")
ALTERED = {
    "privacy": ("method=ifca", "update=[clip,gaussian]", "update.clip=0.5"),
    "compression": ("method=fedavg", "update=[topk,quantise]", "update.feedback=true"),
    "collusion": ("method=ifca", "participation.attackers=0.4", "attack=alie", "update=[clip,quantise]"),
    "gradients": ("method=fedsgd", "participation.attackers=0.4", "attack=ipm", "attack.epsilon=3"),
}


@pytest.mark.parametrize("kind", ALTERED)
@pytest.mark.parametrize("engine", ["loop", pytest.param("stacked", marks=pytest.mark.full)])
def test_what_leaves_clients_has_the_same_bits_on_any_layout_and_after_a_resume(
    kind: str, engine: str
) -> None:
    settings = (*ALTERED[kind], *HARD, f"local.engine={engine}")
    settings += ("determinism=exact",) if engine == "stacked" else ()
    whole = session_of(*settings)
    expected = outcome(whole, run(whole, 3))
    first = session_of(*settings, blocks=SCATTERED)
    reports = run(first, 2)
    second = session_of(*settings, blocks=[[c] for c in range(8)], checkpoint=checkpoint_of(first))
    assert outcome(second, reports + run(second, 1, first=3)) == expected


def test_every_option_of_what_leaves_clients_changes_the_numbers() -> None:
    attacked = "participation.attackers=0.4"
    changes: list[tuple[str, ...]] = [
        (), ("update=[clip]", "update.clip=0.3"), ("update=[clip]", "update.clip=0.2"),
        ("update=[clip,gaussian]", "update.noise=0.5"), ("update=[clip,gaussian]", "update.noise=0.6"),
        ("update=[topk]",), ("update=[topk]", "update.keep=0.2"), ("update=[topk]", "update.feedback=true"),
        ("update=[quantise]",), ("update=[quantise]", "update.bits=4"), ("update=[quantise]", "update.bucket=99"),
        (attacked, "attack=sign_flip"), (attacked, "attack.scale=3"), (attacked, "attack=label_flip"),
        (attacked, "attack=gaussian_attack"), (attacked, "attack=gaussian_attack", "attack.spread=2"),
        (attacked, "attack=free_rider"), (attacked, "attack=free_rider", "attack.disguise=0.1"),
        (attacked, "attack=alie"), (attacked, "attack=alie", "attack.z=3"), (attacked, "attack=ipm"),
        (attacked, "attack=ipm", "attack.epsilon=2"), ("participation.attackers=0.2",),
    ]  # fmt: skip
    found = set()
    for change in changes:
        session = session_of("method=fedavg", "rounds=2", *change)
        run(session, 2)
        found.add(session.server.method.models()["global"].tobytes())
    assert len(found) == len(changes)


@pytest.mark.parametrize("attack", ["attack.scale=20", "attack=gaussian_attack"])
def test_median_and_trimmed_mean_resist_attackers_where_the_mean_does_not(attack: str) -> None:
    settings = ("method=fedavg", "data.rotations=1", "model.hidden=[32]", "local.lr=0.1", "local.steps=5",
                "participation.attackers=0.25", attack, "rounds=6")  # fmt: skip
    accuracy = {}
    for rule in ("mean", "median", "trimmed_mean"):
        more = ("aggregation.trim=0.3",) if rule == "trimmed_mean" else ()
        session = session_of(*settings, f"aggregation={rule}", *more)
        accuracy[rule] = run(session, 6)[-1].metrics["honest_micro_accuracy"]
    assert min(accuracy["median"], accuracy["trimmed_mean"]) > accuracy["mean"] + 0.2


def test_attackers_are_drawn_with_the_seed_and_recorded() -> None:
    session = session_of("method=fedavg", "participation.attackers=0.25", "rounds=1")
    (report,) = run(session, 1)
    assert report.clients is not None
    assert np.flatnonzero(report.clients["attacker"]).tolist() == session.server.attackers.tolist()
    assert len(session.server.attackers) == 2 and "attack (sign_flip)" in report.events[-1]


def test_updates_that_make_no_sense_are_refused() -> None:
    attackers = "participation.attackers"
    for wrong, expected in (
        (("update=[gaussian]",), mistake("wrong-order", says="[clip,gaussian]", setting="update")),
        (
            ("update=[quantise,topk]",),
            mistake("wrong-order", says=("'quantise'", "'topk'"), setting="update"),
        ),
        (("update=[clip,clip]",), mistake("given-twice", setting="update", given="clip")),
        (("update=[clop]",), mistake("unknown-name", kind="update transform", name="clop", nearest="clip")),
        (("update.bits=4",), mistake("unread", says="quantise", setting="update.bits")),
        (("attack=alie",), mistake("unread", says=attackers, setting="attack.name")),
        (("attack.scale=2",), mistake("unread", says=attackers, setting="attack.scale")),
        (("method=local", "update=[clip]"), mistake("unread", says="local", setting="update.transforms")),
    ):
        with expected():
            config_of(*wrong)


def test_transform_of_ones_own() -> None:
    @TRANSFORMS.register("test_nothing", "sends nothing")
    class Nothing(Transform):
        def encode(self, message: Message, sender: Sender) -> Message:
            return message.with_values(message.values * 0)

    try:
        session = session_of("method=fedavg", "update=[test_nothing]", "rounds=1")
        before = session.server.method.models()["global"]
        run(session, 1)
        assert np.array_equal(session.server.method.models()["global"], before)
    finally:
        TRANSFORMS.remove("test_nothing")
