"""CON, CKS and their combination: values by hand, gradients by finite differences, reductions to the base."""

import numpy as np
import pytest
import torch

from archipelago.core.schema import composed
from archipelago.core.settings import ModelSettings
from archipelago.experiments.config import check_network
from archipelago.strategies import parse_method
from archipelago.strategies.cks import CKSOptions, PairwisePull, SharedPull, cluster_shares
from archipelago.strategies.con import CONOptions, ContrastOfOutputs, ContrastOfParameters, contrast
from archipelago.strategies.prox import ProxOptions
from archipelago.strategies.references import Models, PerClient
from lightning_modules.engines import Term
from lightning_modules.engines.objective import LocalObjective
from tests.support.errors import refused
from tests.support.experiments import config_of, run, session_of
from tests.support.scalar import method_of, scalar_fleet

NOTHING = Models(np.zeros((1, 1), np.float32))
NOBODY = PerClient(np.zeros(1))


def test_contrast_by_hand():
    # Scores 1 and 0 with the first one ours: -log(e / (e + 1)).
    assert float(contrast(torch.tensor([1.0, 0.0]), torch.tensor(0))) == pytest.approx(
        np.log1p(np.exp(-1)), rel=1e-6
    )
    batch = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    expected = (np.log1p(np.exp(-1)) + np.log1p(np.exp(1))) / 2
    assert float(contrast(batch, torch.tensor(0))) == pytest.approx(expected, rel=1e-6)


def test_parameter_form_by_hand():
    # Head columns 1 and 2: theta (3, 0) against (1, 0) and (0, 1): cosines 1 and 0; tau 0.5 doubles them.
    term = ContrastOfParameters(2.0, 0.5, np.array([1, 2]), NOTHING, NOBODY)
    anchors = {"models": torch.tensor([[9.0, 1.0, 0.0], [9.0, 0.0, 1.0]]), "own": torch.tensor(1)}
    value = term.value(torch.tensor([5.0, 3.0, 0.0]), anchors)
    assert float(value) == pytest.approx(2 * np.log(np.exp(2) + 1), rel=1e-6)  # -log(1 / (e^2 + 1))


def test_shared_pull_by_hand():
    term = SharedPull(0.5, np.array([0, 2]), np.zeros(3, np.float32))
    value = term.value(torch.tensor([1.0, 7.0, -1.0]), {"mean": torch.tensor([0.0, 0.0, 2.0])})
    assert float(value) == pytest.approx(0.25 * (1 + 9))


def test_pairwise_pull_by_hand():
    term = PairwisePull(1.0, np.array([0, 1]), NOTHING, NOBODY)
    anchors = {
        "models": torch.tensor([[0.0, 0.0], [1.0, 1.0], [5.0, 5.0]]),
        "weights": torch.tensor([0.5, 0.5, 0.0]),
    }
    assert float(term.value(torch.tensor([1.0, 1.0]), anchors)) == pytest.approx(0.5 * (0.5 * 2 + 0.5 * 0))


TERMS = {
    "para": lambda s: (
        ContrastOfParameters(s, 0.7, np.array([1, 2, 3]), NOTHING, NOBODY),
        {"models": torch.linspace(-1, 1, 15, dtype=torch.float64).reshape(3, 5), "own": torch.tensor(1)},
    ),
    "global": lambda s: (
        SharedPull(s, np.array([0, 4]), np.zeros(5, np.float32)),
        {"mean": torch.linspace(0, 1, 5, dtype=torch.float64)},
    ),
    "pairwise": lambda s: (
        PairwisePull(s, np.array([0, 1, 2]), NOTHING, NOBODY),
        {
            "models": torch.linspace(-2, 1, 15, dtype=torch.float64).reshape(3, 5),
            "weights": torch.tensor([0.2, 0.0, 0.8], dtype=torch.float64),
        },
    ),
}


@pytest.mark.parametrize("name", TERMS)
def test_coefficients_change_the_gradient_which_is_the_finite_difference(name):
    theta = torch.tensor([0.3, -1.2, 0.8, 2.0, -0.4], dtype=torch.float64)
    gradients = []
    for strength in (0.5, 2.0):
        term, anchors = TERMS[name](strength)
        live = theta.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(term.value(live, anchors), live)
        for i in range(5):
            move = torch.zeros(5, dtype=torch.float64)
            move[i] = 1e-6
            slope = float(term.value(theta + move, anchors) - term.value(theta - move, anchors)) / 2e-6
            assert slope == pytest.approx(float(gradient[i]), rel=1e-5, abs=1e-8)
        gradients.append(gradient)
    assert float(gradients[0].abs().sum()) > 0
    assert torch.allclose(gradients[1], 4 * gradients[0])


def test_representation_form_changes_the_gradient_too():
    own = torch.linspace(-1, 1, 6, dtype=torch.float64).reshape(2, 3).requires_grad_()
    term = ContrastOfOutputs(0.5, 1.0, NOTHING, NOBODY)
    anchors = {"own": torch.tensor(0), "own_outputs": own,
               "models": torch.linspace(-3, 2, 12, dtype=torch.float64).reshape(2, 2, 3)}  # fmt: skip
    (gradient,) = torch.autograd.grad(term.value(torch.zeros(1), anchors), own)
    assert float(gradient.abs().sum()) > 0


@pytest.mark.parametrize("base", ["ifca", "fesem", "wecfl"])
@pytest.mark.parametrize(
    "off",
    [
        "con con.mu=0",
        "con con.form=rep con.mu=0",
        "cks cks.lam=0",
        "prox prox.mu=0",
        "con+cks con.mu=0 cks.lam=0",
    ],
)
def test_coefficient_of_zero_is_the_base(base, off):
    addons, *options = off.split()
    model = "model=cnn_digits" if "con+cks" in off else "model=mlp"
    plain, other = session_of(f"method={base}", model), session_of(f"method={base}+{addons}", model, *options)
    run(plain, 2)
    run(other, 2)
    assert np.array_equal(plain.server.method.base.clusters.values, other.server.method.base.clusters.values)


KNOBS = [
    "con con.mu=0.5", "con con.mu=2", "con con.mu=0.5 con.tau=0.1", "con con.form=rep con.mu=0.5",
    "con con.form=rep con.mu=0.5 con.tau=0.1", "cks cks.lam=0.1", "cks cks.lam=1", "cks cks.lam=0.1 cks.form=pairwise",
    "con+cks con.mu=0.5 cks.lam=0.1", "prox prox.mu=0.5", "prox prox.mu=2",
]  # fmt: skip


def test_every_knob_changes_the_numbers():
    seen = {}
    for knob in ["", *KNOBS]:
        addons, *options = knob.split() or [""]
        session = session_of("method=wecfl" + (f"+{addons}" if addons else ""), "model=cnn_digits", *options)
        run(session, 3)
        seen.setdefault(session.server.method.base.clusters.values.tobytes(), []).append(knob)
    assert len(seen) == len(KNOBS) + 1, [same for same in seen.values() if len(same) > 1]


def test_con_and_cks_together_act_on_head_and_backbone():
    session = session_of("method=wecfl+con+cks", "model=cnn_digits")
    session.run_round(1)
    strategy, fleet = session.server.method, session.fleet
    contrast_term, pull = strategy.base.penalties(fleet, strategy.labels(fleet))
    head = set(fleet.spec.columns("head").tolist())
    assert set(contrast_term.columns.tolist()) == head
    assert set(pull.columns.tolist()) == set(fleet.spec.columns("parameters").tolist()) - head
    alone = session_of("method=wecfl+cks", "model=cnn_digits")
    (whole,) = alone.server.method.base.penalties(alone.fleet, np.zeros(8, np.int64))
    assert len(whole.columns) == fleet.spec.parameters


def test_cks_pulls_to_the_mean_of_all_clients():
    session = session_of("method=wecfl+cks", "clusters=3")
    session.run_round(1)
    strategy, fleet = session.server.method, session.fleet
    shares = cluster_shares(strategy.base, fleet)
    by_hand = [fleet.sizes[strategy.base.assignment == k].sum() / fleet.sizes.sum() for k in range(3)]
    assert shares.tolist() == pytest.approx(by_hand)
    (pull,) = strategy.base.penalties(fleet, strategy.labels(fleet))
    assert np.allclose(pull.mean, shares @ strategy.base.clusters.values.astype(np.float64), rtol=1e-6)


def test_sharing_draws_clusters_together_and_contrast_pushes_them_apart():
    def spread(*setting):
        session = session_of(*setting, "clusters=2", "local.steps=10", "local.momentum=0")
        run(session, 5)
        first, second = session.server.method.base.clusters.values.astype(np.float64)
        head = session.fleet.spec.columns("head")
        cosine = first[head] @ second[head] / np.linalg.norm(first[head]) / np.linalg.norm(second[head])
        return float(np.linalg.norm(first - second)), cosine

    plain, shared = spread("method=oracle"), spread("method=oracle+cks", "cks.lam=1")
    contrasted = spread("method=oracle+con", "con.mu=2", "con.tau=0.1")
    assert shared[0] < plain[0]
    assert contrasted[1] < plain[1]


def test_bad_pairs_are_refused_with_a_reason():
    for method in (
        "fedavg+con",
        "local+cks",
        "fedavg+few_shots",
        "oracle+few_shots",
        "local+prox",
        "fedprox+prox",
    ):
        with refused("add-on", base=method.split("+")[0]):
            parse_method(method)
    with refused("add-on", says="clusters=1", addon="con", base="ifca"):
        parse_method("ifca+con", clusters=1)
    with refused("given-twice", setting="method", given="con"):
        parse_method("ifca+con+con")
    with refused("add-on", says="ensemble=[ifca,fedavg]", addon="fedavg", base="ifca"):
        parse_method("ifca+fedavg")


def test_few_shots_hold_the_assignment_still():
    session = session_of("method=fesem+few_shots", "few_shots.rounds=2", "partition=dirichlet", "clusters=3")
    assignments = [report.assignment for report in run(session, 5)]
    assert all(np.array_equal(assignments[1], later) for later in assignments[2:])
    assert all("clustering_objective" not in report.metrics for report in run(session, 1, first=6))
    # IFCA moves clients in this setting from round to round, and not when it is held still.
    setting = ("clusters=4", "data.rotations=4", "local.lr=0.2")
    free = session_of("method=ifca", *setting)
    held = session_of("method=ifca+few_shots", "few_shots.rounds=1", *setting)
    assert len({report.assignment.tobytes() for report in run(free, 4)}) > 1
    assert len({report.assignment.tobytes() for report in run(held, 4)}) == 1


def test_pairwise_weights_leave_the_own_cluster_out():
    session = session_of("method=wecfl+cks", "cks.form=pairwise", "clusters=3")
    session.run_round(1)
    strategy, fleet = session.server.method, session.fleet
    c = strategy.labels(fleet)
    (pull,) = strategy.base.penalties(fleet, c)
    expected = np.repeat(cluster_shares(strategy.base, fleet)[None], 8, axis=0)
    expected[np.arange(8), c] = 0.0
    assert np.array_equal(pull.weights.values, expected)


def test_prox_pulls_to_the_cluster_a_client_came_from():
    session = session_of("method=oracle+prox", "prox.mu=0.5")
    strategy, fleet = session.server.method, session.fleet
    session.run_round(1)
    (pull,) = strategy.base.penalties(fleet, strategy.labels(fleet))
    assert pull.mu == 0.5 and np.array_equal(pull.anchor.rows, strategy.base.assignment)


@pytest.mark.parametrize("form", ["para", "rep"])
def test_contrast_is_batched_by_stacked_and_gives_the_same_numbers(form):
    final = []
    for executor in ("loop", "stacked"):
        session = session_of("method=ifca+con", f"con.form={form}", f"local.engine={executor}")
        assert not any("falls back" in event for report in run(session, 2) for event in report.events)
        final.append(session.server.method.base.clusters.values)
    assert np.allclose(final[0], final[1], rtol=1e-4, atol=1e-5)


def test_sharing_the_backbone_needs_one():
    with refused("needs-backbone", says="cks", setting="method"):
        session_of("method=wecfl+con+cks", "model=mlp")


def test_two_steps_of_prox_by_hand():
    fleet = scalar_fleet([[(1.0, 2.0)], [(1.0, 2.0)]], lr=0.1, steps=2)
    strategy = method_of("ifca+prox", fleet, clusters=1, options={"prox": ProxOptions(mu=1.0)})
    strategy.base.clusters = Models(np.float32([[1.0]]))
    strategy.round(fleet, 1)
    # 1 - 0.2 (1 - 2) = 1.2, then 1.2 - 0.1 (2 (1.2 - 2) + 1 (1.2 - 1)) = 1.34
    assert strategy.base.clusters.values.ravel().tolist() == pytest.approx([1.34], rel=1e-6)


def test_contrast_of_representations_needs_several_outputs():
    config = config_of("method=wecfl+con", "con.form=rep", "clusters=2")
    with refused("needs-classes", says="con.form=rep", setting="con.form"):
        check_network(config, (1,), None)
    check_network(config, (1, 8, 8), 10)


@pytest.mark.parametrize("form", ["global", "pairwise"])
def test_one_round_of_cks_by_hand(form):
    fleet = scalar_fleet([[(1.0, 0.0)], [(1.0, 4.0)]], lr=0.1)
    options = {"cks": CKSOptions(form=form, lam=1.0)}
    strategy = method_of("fesem+cks", fleet, clusters=2, rounds=4, options=options)
    strategy.base.clusters, strategy.base.assignment = Models(np.float32([[0.0], [4.0]])), np.array([0, 1])
    strategy.round(fleet, 1)
    # Both fit their data: only the pull is left, to the mean 2 (5.6) or half way to the other one (5.5).
    assert strategy.base.clusters.values.ravel().tolist() == pytest.approx([0.2, 3.8], rel=1e-6)


def test_one_round_of_con_by_hand():
    # y = w x + b, all of it head. Both fit their data: only the contrast between (1, 0) and (0, 1) is left.
    fleet = scalar_fleet([[(1.0, 1.0)], [(1.0, 1.0)]], lr=0.1, model=ModelSettings(name="linear"))
    options = {"con": CONOptions(form="para", mu=2.0, tau=1.0)}
    strategy = method_of("fesem+con", fleet, clusters=2, rounds=4, options=options)
    strategy.base.clusters, strategy.base.assignment = (
        Models(np.float32([[1.0, 0.0], [0.0, 1.0]])),
        np.array([0, 1]),
    )
    strategy.round(fleet, 1)
    # Cosines 1 (own) and 0: log(1 + e^(0 - 1)) has the slope 1 / (1 + e) along the other one's cosine, whose gradient
    # is that model itself, at a right angle; the own cosine is at its largest. Step: 0.1 * 2 / (1 + e).
    step = 0.2 / (1 + np.e)
    assert strategy.base.clusters.values.tolist() == [
        pytest.approx([1.0, -step], rel=1e-5),
        pytest.approx([-step, 1.0], rel=1e-5),
    ]


def test_one_round_of_contrasted_representations_by_hand():
    # Logits are W x + b for two classes. At x = 1 cluster 0 says (1, 0) and cluster 1 says (0, 1), as the labels do.
    fleet = scalar_fleet([[(1.0, 0)], [(1.0, 1)]], lr=0.1, model=ModelSettings(name="linear"), classes=2)
    options = {"con": CONOptions(form="rep", mu=2.0, tau=1.0)}
    strategy = method_of("fesem+con", fleet, clusters=2, rounds=4, options=options)
    strategy.base.clusters = Models(np.float32([[1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0]]))
    strategy.base.assignment = np.array([0, 1])
    strategy.round(fleet, 1)
    # Cross-entropy of client 0: (-1, 1) / (1 + e) on its logits. Contrast: cosines 1 (own, at its largest) and 0, whose
    # gradient is the other one's logits; log(1 + e^(0 - 1)) has the slope 1 / (1 + e) along it: 2 (0, 1) / (1 + e).
    # Together (-1, 3) / (1 + e), on W and on b alike.
    q = 0.1 / (1 + np.e)
    assert strategy.base.assignment.tolist() == [0, 1]
    assert strategy.base.clusters.values.tolist() == [
        pytest.approx([1 + q, -3 * q, q, -3 * q], rel=1e-5),
        pytest.approx([-3 * q, 1 + q, -3 * q, q], rel=1e-5),
    ]


def test_one_round_of_con_and_cks_together_by_hand():
    # y = w2 ReLU(w1 x + b1) + b2: the first layer is the backbone, the second the head. Both fit their data.
    model = composed(ModelSettings)(name="mlp", hidden=[1], head=["fc2"])
    fleet = scalar_fleet([[(1.0, 1.0)], [(1.0, 1.0)]], lr=0.1, model=model)
    options = {"con": CONOptions(form="para", mu=2.0, tau=1.0), "cks": CKSOptions(lam=0.5)}
    strategy = method_of("fesem+con+cks", fleet, clusters=2, rounds=4, options=options)
    strategy.base.clusters = Models(np.float32([[1.0, 0.0, 1.0, 0.0], [3.0, 0.0, 0.0, 1.0]]))
    strategy.base.assignment = np.array([0, 1])
    strategy.round(fleet, 1)
    # Backbone: to the mean (2, 0) by 0.1 * 0.5 of the way. Head: pushed off as in `test_one_round_of_con_by_hand`,
    # and not pulled to its mean.
    step = 0.2 / (1 + np.e)
    assert strategy.base.assignment.tolist() == [0, 1]
    assert strategy.base.clusters.values.tolist() == [
        pytest.approx([1.05, 0.0, 1.0, -step], rel=1e-5),
        pytest.approx([2.95, 0.0, -step, 1.0], rel=1e-5),
    ]


def test_local_objective_has_the_gradient_that_finite_differences_say():
    torch.manual_seed(0)
    x, y = torch.randn(5, 3, dtype=torch.float64), torch.tensor([0, 1, 2, 1, 0])
    net = torch.nn.Linear(3, 3, dtype=torch.float64)
    net.loss = lambda outputs, y, reduction: torch.nn.functional.cross_entropy(
        outputs, y, reduction=reduction
    )
    frozen = torch.randn(5, 3, dtype=torch.float64)
    theirs = torch.randn(5, 2, 3, dtype=torch.float64)

    def objective(vector, scale=0.5, weight=2.0, under=1.0, mu=3.0):
        torch.nn.utils.vector_to_parameters(vector, net.parameters())
        rows = {
            "frozen": under * frozen,
            "weights": weight * torch.linspace(0, 1, 5, dtype=torch.float64),
            "0.models": theirs,
        }
        term = ContrastOfOutputs(mu, 0.7, NOTHING, NOBODY)
        terms = [Term(term, {"own": torch.tensor(1)})]
        whole = LocalObjective(terms, rows, [torch.arange(5)], torch.tensor(scale, dtype=torch.float64))
        return whole(net, (x, y), 0)

    def slopes(**change):
        start = torch.linspace(-1, 1, 12, dtype=torch.float64)
        found = torch.autograd.grad(objective(start, **change), list(net.parameters()))
        return torch.cat([each.reshape(-1) for each in found])

    point, h = torch.linspace(-1, 1, 12, dtype=torch.float64), 1e-6
    numeric = [
        float((objective(point + h * unit) - objective(point - h * unit)).detach()) / (2 * h)
        for unit in torch.eye(12, dtype=torch.float64)
    ]
    plain = slopes()
    assert plain.tolist() == pytest.approx(numeric, rel=1e-6, abs=1e-8)
    for change in ({"scale": 1.0}, {"weight": 1.0}, {"under": 0.0}, {"mu": 0.0}):
        assert (slopes(**change) - plain).abs().max() > 1e-3, change
