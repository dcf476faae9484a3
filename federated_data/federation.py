"""A federation: one array of samples, and the positions each client trains, validates and tests on."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from federated_data.apportion import Integers
from federated_data.datasets import Array, Dataset, load_dataset
from federated_data.partitions import PARTITIONS, Labels, Partition, blocks
from foundation.errors import UserError
from foundation.randomness import generator
from foundation.settings import DataSettings, PartitionSettings

_PARTS = ("train", "validation", "test")


@dataclass(frozen=True, eq=False)
class ClientData:
    """Positions in the federation's array; no two clients share one."""

    train: Integers
    validation: Integers
    test: Integers


@dataclass(frozen=True, eq=False)
class Federation:
    """Samples and who holds them; read-only, and cheap to send where `x` and `y` can be shared.

    `x` holds the data set's training samples, then its test samples, in the data set's order, and already
    rotated where their client is. `groups` is the planted group of each client (None: nothing is planted),
    `quarter_turns` how often its images were turned by 90 degrees, counter-clockwise (None: not at all).
    `notes` are sentences about what had to give way in the partition.
    """

    x: Array
    y: Array
    clients: tuple[ClientData, ...]
    groups: Integers | None
    classes: int | None
    mean: tuple[float, ...]
    std: tuple[float, ...]
    name: str
    quarter_turns: Integers | None = None
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self.checks()

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one sample."""
        return tuple(self.x.shape[1:])

    @cached_property
    def sizes(self) -> Integers:
        """Training samples per client, those kept for validation excluded."""
        return np.array([len(client.train) for client in self.clients], dtype=np.int64)

    @cached_property
    def test_sizes(self) -> Integers:
        """Test samples per client."""
        return np.array([len(client.test) for client in self.clients], dtype=np.int64)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of everything that can change a result: samples, labels, indices, groups, normalisation."""
        digest = hashlib.blake2b(digest_size=16)
        # The name is left out: the same content under another name is the same federation.
        digest.update(repr((self.classes, self.mean, self.std)).encode())
        for name, array in {"x": self.x, "y": self.y, **self._packed()}.items():
            digest.update(f"{name} {array.dtype.str} {array.shape}".encode())
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()

    def checks(self) -> None:
        """What holds of every federation: nobody without data, no sample twice, all of one length."""
        if not self.clients:
            raise ValueError("a federation needs a client")
        for number, client in enumerate(self.clients):
            if not (len(client.train) and len(client.test)):
                raise ValueError(f"client {number} has no training or no test sample")
        packed = np.concatenate([getattr(client, part) for client in self.clients for part in _PARTS])
        if packed.min() < 0 or packed.max() >= len(self.x):
            raise ValueError(f"indices must lie in 0..{len(self.x) - 1}")
        if np.bincount(packed).max() > 1:
            raise ValueError(f"sample {int(np.bincount(packed).argmax())} is used more than once")
        if len(self.y) != len(self.x):
            raise ValueError(f"{len(self.x)} samples, but {len(self.y)} labels")
        for name, array in (("groups", self.groups), ("quarter_turns", self.quarter_turns)):
            if array is not None and array.shape != (len(self.clients),):
                raise ValueError(f"{name} must hold one number for each of {len(self.clients)} clients")

    def indices(self) -> dict[str, NDArray[Any]]:
        """The partition as plain arrays (for .npz or safetensors); `from_indices` is the way back.

        Per part, all positions one client after the other, and where each client ends.
        """
        fingerprint = np.frombuffer(bytes.fromhex(self.fingerprint), dtype=np.uint8)
        return {**self._packed(), "fingerprint": fingerprint.copy()}

    @classmethod
    def from_indices(cls, dataset: Dataset, arrays: Mapping[str, NDArray[Any]]) -> Federation:
        """The federation that `indices` was asked of, from the same data set; no draw is repeated."""
        wanted = {*_PARTS, *(f"{part}_ends" for part in _PARTS), "fingerprint"}
        if not wanted <= set(arrays):
            raise UserError(
                f"A stored partition must hold {', '.join(sorted(wanted))}, but this one holds "
                f"{', '.join(sorted(arrays)) or 'nothing'}: it is damaged or of another kind."
            )
        changed = UserError(
            f"The stored partition was not made for data set '{dataset.name}' as it is now: bring back the "
            "data and settings of that run, or start a new one."
        )
        groups, turns = (
            np.asarray(arrays[name], dtype=np.int64) if name in arrays else None
            for name in ("groups", "quarter_turns")
        )
        try:
            federation = cls._of(dataset, _unpack(arrays), groups, turns)
        except (ValueError, IndexError) as error:
            raise changed from error
        if federation.fingerprint != bytes(arrays["fingerprint"]).hex():
            raise changed
        return federation

    @classmethod
    def _of(
        cls,
        dataset: Dataset,
        clients: tuple[ClientData, ...],
        groups: Integers | None,
        quarter_turns: Integers | None,
        notes: tuple[str, ...] = (),
    ) -> Federation:
        x = np.concatenate([dataset.x_train, dataset.x_test])
        y = np.concatenate([dataset.y_train, dataset.y_test])
        # Each sample belongs to one client at most, so its rotation can be done once, in place.
        if quarter_turns is not None:
            for turns in np.unique(quarter_turns[quarter_turns % 4 != 0]):
                holders = [clients[i] for i in np.flatnonzero(quarter_turns == turns)]
                held = np.concatenate([getattr(client, part) for client in holders for part in _PARTS])
                x[held] = np.rot90(x[held], int(turns), axes=(2, 3))
        # As they will be in the object store: whoever writes to them is told so here already.
        x.flags.writeable = y.flags.writeable = False
        return cls(
            x=x,
            y=y,
            clients=clients,
            groups=groups,
            classes=dataset.classes,
            mean=dataset.mean,
            std=dataset.std,
            name=dataset.name,
            quarter_turns=quarter_turns,
            notes=notes,
        )

    def _packed(self) -> dict[str, NDArray[Any]]:
        packed: dict[str, NDArray[Any]] = {}
        for part in _PARTS:
            pieces = [getattr(client, part) for client in self.clients]
            packed[part] = np.concatenate(pieces)
            packed[f"{part}_ends"] = np.cumsum([len(piece) for piece in pieces], dtype=np.int64)
        for name in ("groups", "quarter_turns"):
            if getattr(self, name) is not None:
                packed[name] = getattr(self, name)
        return packed

    # Pickled as a handful of arrays rather than three per client: ten thousand clients travel as fast as ten.
    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "clients": self._packed()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update({**state, "clients": _unpack(state["clients"])})


def _unpack(arrays: Mapping[str, NDArray[Any]]) -> tuple[ClientData, ...]:
    parts = []
    for part in _PARTS:
        ends = np.asarray(arrays[f"{part}_ends"], dtype=np.int64)
        flat = np.asarray(arrays[part], dtype=np.int64)
        if len(ends) == 0 or ends[-1] != len(flat) or (np.diff(ends, prepend=0) < 0).any():
            raise ValueError(f"the ends of the '{part}' indices do not fit them")
        parts.append([flat[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)])
    return tuple(ClientData(*pieces) for pieces in zip(*parts, strict=True))


def build_federation(data: DataSettings, partition: PartitionSettings, clients: int, seed: int) -> Federation:
    """Load the data set, divide it among the clients, plant rotations, keep validation samples aside."""
    split = PARTITIONS.find(partition.name)  # a wrong name is told before a large data set is read
    dataset = load_dataset(data, seed)
    _refuse_rotations(dataset, data.rotations, clients)
    labels = Labels(
        dataset.name,
        dataset.y_train,
        dataset.y_test,
        dataset.classes,
        dataset.sources_train,
        dataset.sources_test,
    )
    divided = split(labels, partition, clients, generator(seed, "partition"))
    groups, quarter_turns = _rotations(divided, data.rotations, clients)
    held = _client_data(divided, partition, len(dataset.x_train), seed)
    return Federation._of(dataset, held, groups, quarter_turns, divided.notes)


def _refuse_rotations(dataset: Dataset, rotations: int, clients: int) -> None:
    shape = dataset.x_train.shape[1:]
    if rotations == 1:
        return
    if len(shape) != 3 or shape[1] != shape[2]:
        what = f"images of {shape[1]}x{shape[2]}" if len(shape) == 3 else f"vectors of {shape[0]} features"
        raise UserError(
            f"data.rotations={rotations} turns square images by 90 degrees, but '{dataset.name}' holds "
            f"{what}: set data.rotations=1."
        )
    if rotations > clients:
        raise UserError(
            f"data.rotations={rotations} is more than clients={clients}: every rotation needs a client."
        )


def _rotations(divided: Partition, rotations: int, clients: int) -> tuple[Integers | None, Integers | None]:
    """The planted groups and the quarter turns of every client.

    Where the partition plants groups, they stay the planted ones and are turned group by group; where it
    plants none, the rotations are the groups.
    """
    if rotations == 1:
        return divided.groups, None
    if divided.groups is not None:
        return divided.groups, divided.groups % rotations
    turns = blocks(clients, rotations)
    return turns, turns


def _client_data(
    divided: Partition, settings: PartitionSettings, training_samples: int, seed: int
) -> tuple[ClientData, ...]:
    """Positions in the joint array; with `validation`, one training sample at least goes there, one stays."""
    clients = []
    for number, (train, test) in enumerate(zip(divided.train, divided.test, strict=True)):
        validation = train[:0]
        if settings.validation > 0:
            if len(train) < 2:
                raise UserError(
                    f"partition.validation={settings.validation} needs two training samples of every client, "
                    f"but client {number} has {len(train)}: set partition.min_size=2, or no validation."
                )
            kept = min(max(round(settings.validation * len(train)), 1), len(train) - 1)
            shuffled = generator(seed, "validation", client=number).permutation(train)
            validation, train = np.sort(shuffled[:kept]), np.sort(shuffled[kept:])
        clients.append(ClientData(train, validation, test + training_samples))
    return tuple(clients)
