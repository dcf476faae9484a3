"""Composition: a base with its add-ons, what either declares, and what is read of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from archipelago.core.errors import UserError
from archipelago.strategies import (
    ADDONS,
    METHODS,
    Addon,
    ClusteredModels,
    Context,
    Strategy,
    build,
    label_of,
    parse_method,
)
from archipelago.strategies.local import Local
from archipelago.strategies.method import first_late_round, with_late_addons, without_late_addons
from archipelago.strategies.penalties import Proximal
from tests.support.errors import refused
from tests.support.experiments import checkpoint_of, config_of, outcome, run, session_of
from tests.support.scalar import method_of, scalar_fleet

TWO = [[(1.0, 2.0)], [(1.0, -2.0)]]


@pytest.fixture
def register():
    """Methods and add-ons for one test."""
    made = []

    def add(registry, name):
        made.append((registry, name))
        return registry.register(name, "for a test", label=name.title())

    yield add
    for registry, name in made:
        registry.remove(name)


def test_method_calls_base_and_addons_under_the_names_of_a_strategy(register):
    @register(ADDONS, "counting")
    class Counting(Addon[Strategy]):
        state = ("rounds",)
        rounds = 0

        def after_round(self, base, fleet):
            self.rounds += 1

        def models(self):
            return {"extra": np.zeros(1, np.float32)}

    fleet = scalar_fleet(TWO)
    method = method_of("fedavg+counting", fleet)
    for number in (1, 2):
        fleet.begin(number)
        method.round(fleet, number)
    assert method.base.number == 2 and method.addons[0].rounds == 2
    assert set(method.models()) == {"global", "extra"}
    again = method_of("fedavg+counting", fleet)
    again.load_state(method.save_state())
    assert again.addons[0].rounds == 2 and np.array_equal(again.base.model, method.base.model)
    assert np.array_equal(again.prediction(fleet).models[0], method.base.model)


def test_strategy_without_a_method_has_no_terms_and_freezes_nothing():
    fleet = scalar_fleet(TWO)
    base = METHODS.find("ifca")(None, Context(clients=2, clusters=2))
    base.setup(fleet)
    assert base.penalties(fleet) == [] and not base.frozen
    base.round(fleet)
    assert (base.assignment >= 0).all()


def test_method_gives_terms_of_addons_to_the_base_in_their_order():
    fleet = scalar_fleet(TWO)
    method = method_of("ifca+prox+cks", fleet, clusters=2)
    terms = method.base.penalties(fleet, np.array([0, 1]))
    assert [type(term).__name__ for term in terms] == ["Proximal", "SharedPull"]
    assert isinstance(terms[0], Proximal) and method.terms(fleet, np.array([0, 1]))[0].mu == terms[0].mu


def test_finetune_reads_what_a_base_declares(register):
    @register(METHODS, "secluded")
    class Secluded(Local):
        private = True

    @register(METHODS, "blended")
    class Blended(METHODS.find("fedavg")):
        mixes = True

    @register(METHODS, "plain")
    class Plain(METHODS.find("fedavg")):
        pass

    for name in ("secluded", "blended"):
        with refused("add-on", addon="finetune", base=name) as caught:
            parse_method(f"{name}+finetune")
        assert "models of their own" in str(caught.value)
    assert parse_method("plain+finetune") == ("plain", ["finetune"])
    alone = [name for name, entry in METHODS.items() if entry.value.private or entry.value.mixes]
    assert {"local", "ditto", "fedper", "femam", "fedsoft", "fedem"} <= set(alone)
    for name in METHODS:
        if name in alone:
            with refused("add-on", addon="finetune", base=name):
                parse_method(f"{name}+finetune")
        else:
            parse_method(f"{name}+finetune")


def test_addons_read_what_a_base_declares(register):
    @register(METHODS, "stepless")
    class Stepless(METHODS.find("fedavg")):
        takes_steps = False

    @register(METHODS, "pulled")
    class Pulled(METHODS.find("fedavg")):
        proximal = True

    @register(METHODS, "settled")
    class Settled(METHODS.find("ifca")):
        fixed = True

    for method, fact in (
        ("stepless+prox", "no local steps"),
        ("pulled+prox", "mu"),  # its own, to be set instead
        ("settled+few_shots", "never change"),
        ("pulled+cam", "settled"),  # the sentence names what there is, a third party's too
    ):
        base, _, addon = method.partition("+")
        with refused("add-on", says=fact, base=base, addon=addon):
            parse_method(method)


def test_cks_shares_the_backbone_beside_anything_that_claims_the_head(register):
    @register(ADDONS, "on_heads")
    class OnHeads(Addon[ClusteredModels]):
        claims = "head"

    with refused("needs-backbone", says="on_heads", setting="method"):
        method_of("ifca+on_heads+cks", scalar_fleet(TWO), clusters=2)


def test_check_of_an_addon_sees_the_networks_outputs(register):
    @register(ADDONS, "many_outputs")
    class ManyOutputs(Addon[Strategy]):
        @classmethod
        def check(cls, options, context):
            if context.outputs == 1:
                raise UserError("Expected several outputs, got 1: take other data.")

    from archipelago.experiments.config import check_network

    config = config_of("method=fedavg+many_outputs")
    check_network(config, (1, 8, 8), 10)
    with pytest.raises(UserError, match="Expected several outputs"):
        check_network(config_of("method=fedavg+many_outputs", "model=auto"), (3,), None)


def test_labels_are_those_of_the_entries(register):
    @register(METHODS, "mine")
    class Mine(METHODS.find("fedavg")):
        pass

    assert [label_of(text) for text in ("mine+prox", "fesem+cam+finetune", "fedavg*3")] == [
        "Mine+Prox",
        "FeSEM+CAM+fine-tuning",
        "FedAvg*3",
    ]


def test_late_addons_share_the_rounds_before_them(register):
    @register(ADDONS, "at_the_end")
    class AtTheEnd(Addon[Strategy]):
        late = True

        @classmethod
        def first_round(cls, context):
            return context.rounds

    context = Context(clients=2, rounds=9, evaluate_last=3)
    assert without_late_addons("ifca+cam+at_the_end") == "ifca+cam"
    assert first_late_round("ifca+at_the_end", context) == 9
    assert first_late_round("ifca+finetune", context) == 7
    assert first_late_round("ifca", context) == 7  # of any there are
    plain, tuned = build("ifca+cam", {}, context), "ifca+cam+at_the_end"
    plain.setup(scalar_fleet(TWO))
    state = with_late_addons(plain.save_state(), tuned)
    made = build(tuned, {}, context)
    made.setup(scalar_fleet(TWO))
    made.load_state(state)
    assert np.array_equal(made.addons[0].shared, plain.addons[0].shared)


def test_checkpoint_of_a_method_has_the_keys_it_always_had():
    """CAM's `ended` and `found` came with `cam.warmup=auto`; a checkpoint without them leaves what `setup` made."""
    session = session_of("method=ifca+cam")
    run(session, 2)
    state = checkpoint_of(session).server
    assert set(state) == {"clusters", "assignment", "number", "addons"}
    assert set(state["addons"][0]) == {"shared", "ended", "found"}
    again = session_of("method=ifca+cam", checkpoint=checkpoint_of(session))
    assert outcome(again, run(again, 2, first=3)) == outcome(session, run(session, 2, first=3))


def test_no_addon_takes_a_base_of_type_any():
    """What an add-on may ask of its base is typed."""
    folder = Path(__file__).parents[2] / "archipelago" / "strategies"
    found = [path.name for path in folder.glob("*.py") if "base: Any" in path.read_text(encoding="utf-8")]
    assert not found
