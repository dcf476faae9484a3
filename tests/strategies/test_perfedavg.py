"""Per-FedAvg, by hand in both forms, by alpha = 0, and in every engine."""

import numpy as np
import pytest

from archipelago.strategies.perfedavg import PerFedAvgOptions
from tests.support.equality import assert_same_bits_everywhere
from tests.support.errors import refused
from tests.support.experiments import checkpoint_of, config_of, run, session_of
from tests.support.ruled import TWO, assert_engine_agrees, rounds
from tests.support.scalar import method_of, scalar_fleet

SKEWED = ("data.rotations=1", "partition=n_class", "partition.classes=2", "clusters=1")


def after_one_round(steps=1, **options):
    fleet = scalar_fleet(TWO, lr=0.1, steps=steps)
    made = method_of("perfedavg", fleet, options={"perfedavg": PerFedAvgOptions(**options)}, lr=0.1).base
    made.model = np.float32([1.0])
    rounds(made, fleet, 1)
    return made, fleet


def test_perfedavg_first_order_by_hand():
    # Client 0: -2, w~ = 1.2, there -1.6: 1.16; then -1.68, 1.328, -1.344: 1.2944.
    # Client 1: 6, w~ = 0.4, there 4.8: 0.52; then 5.04, 0.016, 4.032: 0.1168.
    one, _ = after_one_round(alpha=0.1)
    assert one.model.tolist() == pytest.approx([(1.16 + 3 * 0.52) / 4], rel=1e-5)
    two, _ = after_one_round(steps=2, alpha=0.1)
    assert two.model.tolist() == pytest.approx([(1.2944 + 3 * 0.1168) / 4], rel=1e-5)


def test_perfedavg_hessian_by_hand():
    # The Hessian is 2 everywhere: (1 - 0.05 * 2) of the gradient at w~ = 1.1, -1.8, and at 0.7, 5.4.
    made, _ = after_one_round(form="hf", alpha=0.05)
    ends = [1 + 0.1 * 0.9 * 1.8, 1 - 0.1 * 0.9 * 5.4]
    assert made.model.tolist() == pytest.approx(
        [(ends[0] + 3 * ends[1]) / 4], rel=1e-3
    )  # differences in float32
    first, _ = after_one_round(form="fo", alpha=0.05)
    assert first.model.tolist() == pytest.approx([(1.18 + 3 * 0.46) / 4], rel=1e-5)


def test_perfedavg_clients_predict_one_step_from_the_global_model():
    made, fleet = after_one_round(alpha=0.1)
    w = float(made.model[0])
    found = fleet.derive(made.prediction(fleet).models[0], slot="look").gather()[:, 0]
    assert found.tolist() == pytest.approx([w - 0.1 * 2 * (w - 2), w - 0.1 * 2 * (w + 2)], rel=1e-5)


def test_perfedavg_alpha_is_the_learning_rate_but_at_most_the_papers():
    fleet = scalar_fleet(TWO, lr=0.1)
    for lr, alpha in ((0.004, 0.004), (0.1, 0.01)):
        assert method_of("perfedavg", fleet, lr=lr).base.alpha == pytest.approx(alpha)


@pytest.mark.parametrize("form", ["fo", "hf"])
def test_perfedavg_without_alpha_is_fedavg(form):
    # On full batches: a step takes several mini-batches, FedAvg's one.
    same = (*SKEWED, "local.batch=2000", "local.momentum=0.5")
    meta = session_of("method=perfedavg", "perfedavg.alpha=0", f"perfedavg.form={form}", *same)
    fedavg = session_of("method=fedavg", *same)
    one, two = run(meta, 2)[-1], run(fedavg, 2)[-1]
    assert np.allclose(meta.server.method.base.model, fedavg.server.method.base.model, rtol=0, atol=1e-6)
    assert one.clients["loss"].tolist() == pytest.approx(two.clients["loss"].tolist(), rel=1e-5)


def test_perfedavg_knobs_change_the_numbers():
    ends = []
    for more in (
        (),
        ("perfedavg.alpha=0.5",),
        ("perfedavg.form=hf",),
        ("perfedavg.form=hf", "perfedavg.delta=1"),
    ):
        session = session_of("method=perfedavg", *SKEWED, *more)
        run(session, 1)
        ends.append(session.server.method.base.model)
    assert not any(np.array_equal(a, b) for i, a in enumerate(ends) for b in ends[:i])


def test_perfedavg_a_step_helps_skewed_clients_more_than_it_helps_fedavg():
    # Both take the same step of their own before they predict: the meta-model was made for it.
    more = (
        "local.steps=10",
        "local.lr=0.1",
        "model.hidden=[32]",
        "local.momentum=0.5",
        "perfedavg.alpha=0.5",
    )
    losses = {}
    for name in ("perfedavg", "fedavg"):
        session = session_of(f"method={name}", *SKEWED, *(more if name == "perfedavg" else more[:-1]))
        run(session, 4)
        session.fleet.begin(5)
        model, everyone = session.server.method.base.model, session.fleet.everyone
        meta = method_of("perfedavg", session.fleet, options={"perfedavg": PerFedAvgOptions(alpha=0.5)}).base
        meta.model = model
        losses[name] = everyone.evaluate(meta.prediction(everyone))["loss"].mean()
    assert losses["perfedavg"] < losses["fedavg"]


def test_perfedavg_takes_prox_and_refuses_finetune():
    run(session_of("method=perfedavg+prox", "rounds=1"), 1)
    with refused("add-on", addon="finetune", base="perfedavg"):
        config_of("method=perfedavg+finetune")


@pytest.mark.parametrize("form", ["fo", "hf"])
def test_perfedavg_costs_its_gradients(form):
    session = session_of("method=perfedavg", f"perfedavg.form={form}", "local.batch=16")
    report = session.run_round(1)
    assert report.metrics["cost_computation"] == {"fo": 2.0, "hf": 4.0}[form]
    assert not [name for name in checkpoint_of(session).clients[0] if name.startswith("model/")]


@pytest.mark.parametrize("engine", ["stacked", pytest.param("trainer", marks=pytest.mark.full), "compiled"])
def test_perfedavg_in_every_engine(engine):
    assert_engine_agrees(engine, "method=perfedavg", "local.momentum=0.5")


def test_perfedavg_the_same_bits_everywhere():
    assert_same_bits_everywhere("method=perfedavg", "perfedavg.form=hf", "participation.stragglers=0.5")
