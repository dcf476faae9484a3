"""The block whose clients are computed together: the numbers of one that goes client by client."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from actors.session import InProcessSession
from actors.stacked_block import StackedBlock
from actors.stacking import row_sums
from archipelago.core.errors import ClientFailure
from archipelago.strategies.penalties import Proximal
from archipelago.strategies.references import Prediction, Private
from lightning_modules.engines.stacked import STACKED_TOLERANCE
from lightning_modules.engines.stacked import samples as device_samples
from lightning_modules.engines.stacked.training import StackedTraining
from tests.support.errors import refused
from tests.support.experiments import checkpoint_of, digest, outcome, plan_of, run, session_of
from tests.support.methods import matrix
from tests.support.shadow_session import shadow_session

# Short batches in the middle of a training, clients with fewer steps, clients that are absent.
RAGGED = ("partition=dirichlet", "partition.alpha=0.3", "local.batch=48", "local.steps=5",
          "participation.stragglers=0.4")  # fmt: skip
PARTIAL = ("participation.fraction=0.75", "participation.dropouts=0.2")

METHODS = [*matrix(), "ensemble=[local,ifca+cam]"]


def seeded(*settings: str) -> InProcessSession:
    """A session with the engine `stacked`, under the tier that takes all clients of a block at once."""
    plan = plan_of(*settings, "local.engine=stacked")
    return InProcessSession(
        dataclasses.replace(plan, block=dataclasses.replace(plan.block, determinism="seeded"))
    )


def both(
    *settings: str, rounds: int = 4, stacked: tuple[str, ...] = ()
) -> tuple[Any, Any, list[Any], list[Any]]:
    loop = session_of(*settings, "local.engine=loop")
    together = seeded(*settings, *stacked)
    return loop, together, run(loop, rounds), run(together, rounds)


def close(a: Any, b: Any, tolerance: float = STACKED_TOLERANCE) -> bool:
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return a.shape == b.shape and float(np.abs(a - b).max(initial=0)) <= tolerance * max(
        np.abs(a).max(initial=0), 1e-6
    )


def assert_alike(loop: Any, together: Any, first: list[Any], second: list[Any]) -> None:
    """The same models, states, assignments, costs and metrics, to the tolerance."""
    assert isinstance(together.fleet.blocks[0], StackedBlock) and together.fleet.blocks[0].batched
    assert not [event for report in second for event in report.events if "client by client" in event]
    models, others = loop.models()["models"], together.models()["models"]
    assert models.keys() == others.keys() and all(close(models[name], others[name]) for name in models)
    for a, b in zip(first, second, strict=True):
        assert digest(a.assignment) == digest(b.assignment)
        assert a.metrics.keys() == b.metrics.keys()
        for name, value in a.metrics.items():
            if name.startswith("cost_"):
                assert value == b.metrics[name], name
            elif isinstance(value, float) and "macro_f1" not in name:
                assert b.metrics[name] == pytest.approx(value, rel=1e-3, abs=0.02), name
    states, other_states = checkpoint_of(loop).clients, checkpoint_of(together).clients
    for client, state in states.items():
        assert state.keys() == other_states[client].keys()
        for name, value in state.items():
            other = other_states[client][name]
            if isinstance(value, dict):
                assert value.keys() == other.keys()
                largest = max((float(np.abs(part).max()) for part in value.values()), default=0.0)
                for part in value:
                    assert value[part].shape == other[part].shape
                    assert np.abs(value[part] - other[part]).max() <= STACKED_TOLERANCE * max(largest, 1e-6)
            elif isinstance(value, np.ndarray) and value.dtype == np.float32:
                assert close(value, other)


@pytest.mark.parametrize("method", METHODS)
def test_stacked_equals_loop_for_every_method(method: str) -> None:
    assert_alike(*both(method, *RAGGED, *PARTIAL))


@pytest.mark.parametrize(
    "settings",
    [
        ("model=cnn_fashion",),
        ("model=cnn_digits", "local.weight_decay=0.01"),
        ("model=mlp", "local.optimizer=adam", "local.lr=0.003"),
        ("model=mlp", "local.keep_optimizer=false", "local.normalise=actor"),
    ],
    ids=lambda settings: " ".join(settings),
)
def test_stacked_equals_loop_for_networks_and_optimizers(settings: tuple[str, ...]) -> None:
    assert_alike(*both("method=ifca+cam", *settings, *RAGGED, rounds=3))


def test_stacked_equals_loop_for_regressions() -> None:
    settings = (
        "data=synthetic",
        "data.rotations=1",
        "partition=quantity",
        "model=linear_regression",
        "local.lr=0.001",
    )
    assert_alike(*both("method=fedsoft", *settings, "local.batch=48", "local.steps=5", rounds=3))


@pytest.mark.parametrize("network", ["cnn_digits", "cnn_fashion"])
def test_stacked_convolutions_grouped_and_unfolded_agree(network: str) -> None:
    settings = ("method=fedavg", f"model={network}", *RAGGED)
    assert_alike(*both(*settings, rounds=2, stacked=("local.convolution=unfold",)))
    assert_alike(*both(*settings, rounds=2, stacked=("local.convolution=grouped",)))


def test_stacked_bf16_changes_the_numbers_and_not_the_story() -> None:
    settings = ("method=ifca", "local.engine=stacked", "model=cnn_digits", *RAGGED)
    single, half = session_of(*settings), session_of(*settings, "precision=bf16")
    a, b = run(single, 3)[-1].metrics, run(half, 3)[-1].metrics
    models, others = (session.models()["models"]["clusters"] for session in (single, half))
    assert not close(models, others, 1e-6) and close(models, others, 0.1)
    assert a["micro_accuracy"] == pytest.approx(b["micro_accuracy"], abs=0.05)


def test_stacked_takes_epochs_of_very_different_lengths() -> None:
    settings = (
        "method=wecfl+con+prox",
        "con.form=rep",
        "partition=dirichlet",
        "partition.alpha=0.3",
        "local.batch=16",
    )
    assert_alike(*both(*settings, "local.epochs=1", rounds=2))


def test_stacked_chunks_of_any_size_agree() -> None:
    settings = ("method=ditto", "local.engine=stacked", *RAGGED)
    whole, pieces = seeded(*settings), seeded(*settings, "local.chunk=3")
    run(whole, 3), run(pieces, 3)
    for name, models in whole.models()["models"].items():
        assert close(models, pieces.models()["models"][name])


def test_stacked_halves_the_chunk_when_memory_runs_out_and_remembers(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ("method=ditto", "local.engine=stacked", *RAGGED)
    small = seeded(*settings, "local.chunk=2")
    expected = digest([run(small, 3), small.models()["models"]])
    tried, original = [], StackedTraining._chunk

    def limited(self: Any, work: Any, at: Any, into: Any) -> Any:
        tried.append(len(at))
        if len(at) > 2:
            raise torch.OutOfMemoryError("no room")
        return original(self, work, at, into)

    monkeypatch.setattr(StackedTraining, "_chunk", limited)
    session = seeded(*settings)
    reports = run(session, 3)
    assert tried[:4] == [8, 4, 2, 2] and max(tried[3:]) == 2  # halved until it fits, never tried again
    said = [event for report in reports for event in report.events if "Out of device memory" in event]
    assert len(said) == 2 and "local.chunk=2" in "".join(said)
    for report in reports:
        report.events.clear()
    assert (
        digest([reports, session.models()["models"]]) == expected
    )  # the same bits as chunks of 2 from the start


def test_stacked_other_errors_surface_with_round_and_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Any, work: Any, at: Any, into: Any) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    session = session_of("method=fedavg", "local.engine=stacked")
    monkeypatch.setattr(StackedTraining, "_chunk", broken)
    with pytest.raises(Exception, match=r"round 1.*local training.*with 7 others.*illegal memory access"):
        session.run_round(1)


@pytest.mark.parametrize("method", ["ditto", "fedper", "fesem+cam", "ifca+cam"])
def test_stacked_continues_from_a_checkpoint_to_the_same_bits(method: str) -> None:
    settings = (f"method={method}", "local.engine=stacked", *RAGGED, *PARTIAL)
    whole = session_of(*settings)
    reports = run(whole, 4)
    first = session_of(*settings)
    before = run(first, 2)
    second = session_of(*settings, checkpoint=checkpoint_of(first))
    assert outcome(second, [*before, *run(second, 2, first=3)]) == outcome(whole, reports)


def test_stacked_takes_over_from_loop_and_back() -> None:
    settings = ("method=fedprox", "local.optimizer=adam", *RAGGED)
    loop = session_of(*settings, "local.engine=loop")
    run(loop, 2)
    middle = session_of(*settings, "local.engine=stacked", checkpoint=checkpoint_of(loop))
    run(middle, 2, first=3)
    last = session_of(*settings, "local.engine=loop", checkpoint=checkpoint_of(middle))
    run(last, 1, first=5)
    run(loop, 3, first=3)
    assert close(loop.models()["models"]["global"], last.models()["models"]["global"])


def test_stacked_round_that_is_aborted_leaves_no_trace() -> None:
    settings = ("method=ditto", "local.engine=stacked", *RAGGED, *PARTIAL)
    plain, disturbed = session_of(*settings), session_of(*settings)
    reports, others = run(plain, 2), run(disturbed, 2)
    state = disturbed.server.state()
    commit, disturbed.fleet.commit = disturbed.fleet.commit, lambda: (_ for _ in ()).throw(KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        disturbed.run_round(3)
    disturbed.fleet.commit = commit
    disturbed.server.method.load_state(state)
    assert outcome(disturbed, [*others, *run(disturbed, 2, first=3)]) == outcome(
        plain, [*reports, *run(plain, 2, first=3)]
    )


def test_stacked_samples_that_do_not_fit_the_device_stay_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ("method=ifca+cam", "local.engine=stacked", *RAGGED)
    inside = session_of(*settings)
    expected = outcome(inside, run(inside, 2))
    original = device_samples.DeviceSamples.__init__

    def crowded(self: Any, *args: Any, **options: Any) -> None:
        original(self, *args, **{**options, "room": 10.0})

    monkeypatch.setattr(device_samples.DeviceSamples, "__init__", crowded)
    outside = session_of(*settings)
    assert not outside.fleet.blocks[0].parts.model.samples.on_device
    assert outcome(outside, run(outside, 2)) == expected


@pytest.mark.parametrize("method", ["ditto", "ifca+cam", "fedem", "cfl"])
def test_stacked_samples_on_the_host_are_copied_without_waiting(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainings, train = [], StackedBlock.train

    def counted(self: StackedBlock, request: Any, *arrays: Any) -> Any:
        trainings.append(request.round)
        return train(self, request, *arrays)

    monkeypatch.setattr(StackedBlock, "train", counted)
    monkeypatch.setattr(device_samples, "SHARE", 0.0)
    plan = plan_of(f"method={method}", "local.engine=stacked", "determinism=seeded", *RAGGED, *PARTIAL)
    with shadow_session(plan) as shadow:
        shadow.run_round(1)
        counts = shadow.run_round(2)
        assert not shadow.session.fleet.blocks[0].parts.model.samples.on_device
    assert not shadow.device.mixed
    assert counts["train"].synchronisations <= trainings.count(2)
    assert any(copy.pinned for copy in shadow.device.copies)


def test_stacked_states_of_absent_clients_survive_and_slabs_do_not_grow() -> None:
    session = session_of("method=local", "local.engine=stacked", *RAGGED, "participation.fraction=0.5")
    loop = session_of("method=local", "local.engine=loop", *RAGGED, "participation.fraction=0.5")
    run(session, 4), run(loop, 4)
    states = session.fleet.blocks[0].states
    for slab in states._slabs.values():
        assert not slab.pending and all(len(rows) == 8 for rows in slab.parts.values())
    for client, state in checkpoint_of(loop).clients.items():
        assert checkpoint_of(session).clients[client].keys() == state.keys()


def test_stacked_snapshots_are_values_that_no_later_round_writes_to() -> None:
    session = seeded("method=ditto", *RAGGED, "participation.fraction=0.5")
    run(session, 2)
    taken = checkpoint_of(session).clients
    before = digest(taken)
    run(session, 3, first=3)
    assert digest(taken) == before


def test_stacked_exact_tier_never_changes_its_shapes_for_want_of_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(self: Any, work: Any, at: Any, into: Any) -> Any:
        raise torch.OutOfMemoryError("no room")

    session = session_of("method=fedavg", "local.engine=stacked", "determinism=exact")
    monkeypatch.setattr(StackedTraining, "_chunk", full)
    with refused("too-little-memory", setting="local.chunk", says=("local.chunk=4", "determinism=seeded")):
        session.run_round(1)


def test_stacked_evaluation_ignores_models_of_no_weight_whatever_they_say() -> None:
    for name in ("loop", "stacked"):
        session = session_of("method=fedavg", f"local.engine={name}", *RAGGED)
        fleet = session.fleet
        fleet.begin(1)
        good, bad = fleet.initial(2).values
        bad = np.full_like(bad, np.inf)
        weights = np.zeros((8, 2))
        weights[:, 0] = 1.0
        weights[:5, 1] = 0.0
        weights[5:, 1] = 1.0  # some use it, so that it is computed
        columns = fleet.evaluate(Prediction([good, bad], weights))
        assert np.isfinite(columns["loss"][:5]).all()


def test_stacked_refuses_a_penalty_whose_model_is_missing() -> None:
    for name in ("loop", "stacked"):
        session = session_of("method=fedavg", f"local.engine={name}")
        session.fleet.begin(1)
        start = session.fleet.initial(1)[0]
        with pytest.raises(ClientFailure):
            session.fleet.train(start, penalties=[Proximal(0.1, Private("nowhere"))])


def test_stacked_counts_forward_passes_of_models_that_are_there() -> None:
    found = []
    for name in ("loop", "stacked"):
        fleet = session_of("method=fedavg", f"local.engine={name}", *RAGGED).fleet
        fleet.begin(1)
        models = fleet.initial(2)
        fleet.train(models[0], on_top_of=models[np.array([0, -1, 1, -1, -1, 0, 0, 1])])
        found.append(fleet.ledger.forwards)
    assert found[0] == found[1] > 0


@dataclasses.dataclass(frozen=True)
class Odd:
    """A penalty of outputs that looks at the batch as a whole."""

    models: Any

    @property
    def anchors(self) -> dict[str, Any]:
        return {}

    @property
    def outputs(self) -> dict[str, Any]:
        return {"models": self.models}

    def value(self, parameters: torch.Tensor, anchors: dict[str, torch.Tensor]) -> torch.Tensor:
        return 0.1 * (anchors["own_outputs"] - anchors["models"]).std()


def test_stacked_leaves_penalties_of_whole_batches_to_the_loop_and_says_so() -> None:
    loop, together = (
        session_of("method=fedavg", f"local.engine={name}", *RAGGED) for name in ("loop", "stacked")
    )
    found = []
    for session in (loop, together):
        fleet = session.fleet
        fleet.begin(1)
        start = fleet.initial(1)[0]
        trained = fleet.train(start, penalties=[Odd(start)])
        again = fleet.train(trained, slot="again")  # what went client by client can be started from
        found.append([trained.average(), again.average()])
        notes = fleet.commit()
    assert any("Odd is a penalty of outputs" in note for note in notes)
    assert np.array_equal(found[0][0], found[1][0]) and close(found[0][1], found[1][1])


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*")  # of torch's own code generator
@pytest.mark.parametrize("network", ["cnn_digits", "cnn_fashion"])
def test_stacked_compiled_gradients_agree(network: str) -> None:
    settings = ("method=ifca+cam", f"model={network}", *RAGGED)
    loop, together, first, second = both(*settings, rounds=2, stacked=("local.compile=true",))
    assert together.fleet.blocks[0].parts.model._compiled
    assert_alike(loop, together, first, second)


LAYOUTS = [[[0, 1, 2, 3], [4, 5, 6, 7]], [[5], [0, 1, 2, 3, 4, 6, 7]], [[client] for client in range(8)]]


@pytest.mark.parametrize(
    "settings", [("method=ifca+cam",), ("method=ditto",), ("method=fedsgd",), ("model=cnn_fashion",)]
)
def test_stacked_exact_tier_has_the_same_bits_for_every_packing(settings: tuple[str, ...]) -> None:
    """Chunk shapes come from the config alone."""
    plan = plan_of(*settings, "local.engine=stacked", "local.chunk=4", *RAGGED, *PARTIAL)
    shapes: set[tuple[int, ...]] = set()
    found = set()
    for layout in [None, *LAYOUTS]:
        session = InProcessSession(plan, None, layout)
        for block in session.fleet.blocks:
            model: Any = block.parts.model  # type: ignore[attr-defined]
            original = model.samples.inputs
            model.samples.inputs = lambda rows, original=original: (
                shapes.add(tuple(rows.shape)),
                original(rows),
            )[1]
        found.add(outcome(session, run(session, 2)))
    assert len(found) == 1
    assert shapes <= {(4, 48), (512,), (4, 512)}


def test_stacked_uses_no_more_of_a_plan_than_any_block() -> None:
    """A block without clients of a split, or with held-out sets, works as well."""
    settings = ("method=fedsoft", "partition.holdout=0.3", "partition.validation=0.1", *RAGGED)
    _, _, first, second = both(*settings, rounds=2)
    assert first[-1].metrics.keys() == second[-1].metrics.keys()
    for name in ("centre_accuracy", "validation_micro_accuracy"):
        assert np.allclose(first[-1].metrics[name], second[-1].metrics[name], atol=0.02)


def test_stacked_session_reads_the_plan_as_it_is() -> None:
    plan = plan_of("method=fedavg", "local.engine=stacked")
    session = InProcessSession(plan, None, [[0, 1, 2], [3, 4, 5, 6, 7]])
    assert [block.batched for block in session.fleet.blocks] == [True, True]


def test_row_sums_of_a_row_do_not_depend_on_its_neighbours() -> None:
    table = torch.from_numpy(np.random.default_rng(0).normal(size=(7, 4099)))
    together = row_sums(table)
    assert torch.equal(together, torch.cat([row_sums(row[None]) for row in table]))
    assert together.numpy() == pytest.approx(table.numpy().sum(axis=1), abs=1e-9)
