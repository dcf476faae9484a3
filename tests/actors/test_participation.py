"""Who takes part: the same stream for every method, with stragglers and drop-outs."""

import numpy as np
import pytest

from actors.participation import participants
from archipelago.core.settings import ParticipationSettings
from tests.support.experiments import outcome, run, session_of


def test_stream_depends_on_seed_and_round_alone():
    half = ParticipationSettings(fraction=0.5)
    streams = [
        [participants(half, np.arange(20), seed, r).ids.tolist() for r in range(1, 30)] for seed in (0, 0, 1)
    ]
    assert streams[0] == streams[1] != streams[2]
    assert all(len(ids) == 10 and ids == sorted(set(ids)) for ids in streams[0])
    assert len({tuple(ids) for ids in streams[0]}) > 25
    assert set(np.concatenate(streams[0])) == set(range(20))


def test_every_method_sees_the_same_clients():
    seen = []
    for method in ("fedavg", "fedprox", "ifca", "local"):
        session = session_of(f"method={method}", "participation.fraction=0.5")
        run(session, 2)
        kept = [c for c, state in session.fleet.snapshot()[0].items() if state]
        seen.append(sorted(kept))
    assert seen[0] == seen[1] == seen[2] == seen[3] and len(seen[0]) < 8


def test_dropouts_never_deliver_and_one_client_always_does():
    chosen = participants(ParticipationSettings(dropouts=0.3), np.arange(10), 0, 1)
    assert len(chosen.ids) == 7 and len(chosen.missing) == 3
    assert not set(chosen.ids.tolist()) & set(chosen.missing.tolist())
    assert len(participants(ParticipationSettings(dropouts=0.99), np.arange(2), 0, 1).ids) == 1
    assert len(participants(ParticipationSettings(fraction=0.01), np.arange(5), 0, 1).ids) == 1


def test_stragglers_do_fewer_steps():
    chosen = participants(ParticipationSettings(stragglers=0.5), np.arange(10), 0, 1)
    assert len(chosen.step_share) == 5 and all(0 <= share < 1 for share in chosen.step_share.values())
    session = session_of(
        "method=fedavg", "participation.stragglers=0.5", "local.steps=50", "local.momentum=0"
    )
    start = session.server.method.base.model
    session.fleet.begin(1, {0: 0.1})
    away = session.fleet.train(start=start).distances(start)
    assert away[0] < away[1:].min()


@pytest.mark.parametrize(
    "change",
    [
        "participation.fraction=0.5",
        "participation.dropouts=0.4",
        "participation.stragglers=0.5",
        "weights=uniform",
        "local.keep_optimizer=false",
        "local.lr=0.01",
        "local.momentum=0.5",
        "local.weight_decay=0.1",
        "local.steps=4",
        "local.epochs=1",
        "local.batch=8",
        "local.optimizer=adam",
        "model.hidden=[9]",
        "seed=1",
        "clusters=3",
        "data.rotations=4",
        "data.test_fraction=0.3",
        "partition=dirichlet",
    ],
)
def test_every_knob_changes_the_numbers(change):
    plain, changed = session_of("method=ifca"), session_of("method=ifca", change)
    assert outcome(plain, run(plain, 2)) != outcome(changed, run(changed, 2))
