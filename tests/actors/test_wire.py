"""References on the wire: every kind of reference has one class, and each part of a block is small."""

from __future__ import annotations

import pickle
import typing

import numpy as np
import pytest

from actors import wire
from actors.requests import TrainRequest
from actors.rounds import Count
from actors.trained import Trained
from actors.wire import ClientSide, Encoded, Wire
from archipelago.strategies import references
from archipelago.strategies.penalties import Proximal, ProximalToMixture
from archipelago.strategies.references import Merged, Mixture, Models, PerClient, Private, Rows
from tests.support.scalar import scalar_fleet

CLIENTS = [[(1.0, 2.0)], [(1.0, -2.0)], [(1.0, 4.0)]]
MODELS = Models(np.float32([[1.0], [2.0]]))


def resolved(reference, client, fleet=None, state=None, results=None):
    """What a reference means for a client after the journey there."""
    sending = Wire(fleet or scalar_fleet(CLIENTS))
    encoded = pickle.loads(pickle.dumps(sending.encode(reference).part([client])))
    side = ClientSide(sending.arrays, lambda _: state or {}, results or {})
    return encoded.resolve(client, side)


def test_wire_has_a_class_for_every_kind_of_reference():
    kinds = {
        kind
        for kind in vars(references).values()
        if isinstance(kind, type) and kind.__module__ == references.__name__
    }
    pointing = kinds - {references.Prediction, references.SampleWeights}  # made of references, or of names
    assert pointing | {np.ndarray, Trained} == set(wire._KINDS)


@pytest.mark.parametrize(
    ("reference", "expected"),
    [
        (np.float32([7.0]), [7.0]),
        (MODELS, [[1.0], [2.0]]),
        (MODELS[np.array([0, 1, -1])], [2.0]),
        (PerClient(np.array([5, 6, 7])), 6),
        (Private("own", default=np.float32([3.0])), [3.0]),
        (Mixture(MODELS, np.array([[1.0, 0.0], [1.0, 3.0], [0.0, 1.0]])), [1.75]),
        (Merged(np.float32([1.0]), MODELS[np.array([0, 1, 1])], np.array([0])), [2.0]),
    ],
)
def test_reference_resolves_for_a_client_to_what_it_points_at(reference, expected):
    assert np.array_equal(resolved(reference, 1), np.asarray(expected))


def test_reference_to_nothing_is_none():
    assert resolved(MODELS[np.array([0, 1, -1])], 2) is None
    assert resolved(Private("own"), 0) is None


def test_private_reference_is_the_clients_own_model_where_there_is_one():
    own = np.float32([9.0])
    assert resolved(Private("own", default=np.float32([3.0])), 0, state={"model/own": own}) is own


def test_handle_is_what_the_client_made_or_what_it_started_from():
    fleet = scalar_fleet(CLIENTS)
    handle = fleet.train(start=np.float32([1.0]))
    made = np.float32([8.0])
    assert resolved(handle, 0, fleet, results={handle.handle: {0: made}}) is made
    assert resolved(handle, 0, fleet).tolist() == [1.0]


def test_values_of_another_number_of_clients_are_refused():
    with pytest.raises(ValueError, match="rows for the 3 clients of this view, got 2"):
        Wire(scalar_fleet(CLIENTS)).encode(Rows(MODELS.values, np.array([0, 1])))


def test_array_is_placed_once_in_a_round_and_a_part_holds_its_clients_alone():
    fleet = scalar_fleet(CLIENTS)
    sending = Wire(fleet)
    encoded = typing.cast(wire.EncodedRows, sending.encode(MODELS[np.array([0, 1, 1])]))
    sending.encode(MODELS)
    assert sending.arrays[0] is sending.arrays[1] is MODELS.values
    assert typing.cast(wire.EncodedRows, encoded.part([2])).rows == {2: 1}


def test_penalty_travels_as_itself_with_its_references_encoded():
    sending = Wire(scalar_fleet(CLIENTS))
    penalty = ProximalToMixture(0.5, MODELS, PerClient(np.array([[0.1, 0.9]] * 3)))
    sent = sending.encode_penalty(penalty)
    assert type(sent) is ProximalToMixture and sent.lam == 0.5
    assert all(isinstance(reference, Encoded) for reference in sent.anchors.values())
    request = TrainRequest(
        round=1, clients=[0, 1, 2], handle="1:main", start=sending.encode(np.float32([0.0])), on_top_of=[],
        penalties=[sent, sending.encode_penalty(Proximal(1.0, np.float32([0.0])))], sample_weights=None, scale=None,
        slot="main", keep=None, fresh=False, step_share=None,
    )  # fmt: skip
    part = request.part([1])
    assert part.clients == [1] and part.penalties[0].importance.values == {1: [0.1, 0.9]}


@pytest.mark.parametrize(
    ("count", "stored", "down"), [(Count.SENT, 2, 2), (Count.HELD, 2, 0), (Count.NOT, 0, 0)]
)
def test_ledger_counts_models_as_sent_held_or_not(count, stored, down):
    fleet = scalar_fleet(CLIENTS)
    Wire(fleet).encode(MODELS, count)
    Wire(fleet).encode(MODELS, count)  # a second time costs nothing
    costs = fleet.cost(3, 1.0)
    assert (costs["cost_models_stored"], costs["cost_models_down"]) == (stored, down)
