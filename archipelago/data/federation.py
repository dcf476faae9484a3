"""A federation: one array of samples, and the positions each client trains, validates and tests on."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from archipelago.core.errors import UserError
from archipelago.core.settings import DataSettings, PartitionSettings
from archipelago.data.apportion import Integers
from archipelago.data.datasets import Array, Dataset, load_dataset
from archipelago.data.division import PARTS, ClientData, Division, Task
from archipelago.data.drift import Drift, drifted
from archipelago.data.partition_cache import address, divided
from archipelago.data.partitions import PARTITIONS, Labels
from archipelago.data.shifts import Shift, shift_of


@dataclass(frozen=True, eq=False, kw_only=True)
class Federation(Division):
    """Samples and who holds them; read-only, and cheap to send where `x` and `y` can be shared.

    `x` and `y` hold the data set's training samples, then its test samples, in the data set's order, and already
    shifted (rotated, relabelled, ...) where they are; `shift` says what was done to the samples of each variant.
    `address` is the content address of the division (`partition_cache.py`), empty for one that was not made from
    settings.
    """

    x: Array
    y: Array
    classes: int | None
    mean: tuple[float, ...]
    std: tuple[float, ...]
    name: str
    shift: Shift | None = None
    drift: Drift | None = (
        None  # what changes during a run; `clients` and `groups` are those of the first round
    )
    address: str = ""

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
    def one_class(self) -> NDArray[np.bool_] | None:
        """Whether all training samples of a client are of one class; None for a regression."""
        if self.classes is None:
            return None
        labels = np.asarray(self.y[np.concatenate([client.train for client in self.clients])])
        starts = np.cumsum(self.sizes) - self.sizes
        same: NDArray[np.bool_] = np.minimum.reduceat(labels, starts) == np.maximum.reduceat(labels, starts)
        return same

    def label_counts(
        self, most: int, clients: Sequence[ClientData] | None = None
    ) -> tuple[Integers, Integers] | None:
        """At most so many clients and their (n, classes) training samples by class; None for a regression.

        `clients`: what each holds in a later stage, where it is not that of the first round.
        """
        if self.classes is None:
            return None
        held = self.clients if clients is None else clients
        ids = np.unique(np.linspace(0, len(held) - 1, most).astype(np.int64))
        counts = [np.bincount(self.y[held[i].train], minlength=self.classes) for i in ids]
        return ids, np.stack(counts).astype(np.int64)

    @cached_property
    def test_sizes(self) -> Integers:
        """Test samples per client."""
        return np.array([len(client.test) for client in self.clients], dtype=np.int64)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of everything that can change a result: samples, labels, indices, groups, normalisation."""
        digest = hashlib.blake2b(digest_size=16)
        # Name and notes are left out: the same content under another name is the same federation.
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
        packed = np.concatenate([getattr(client, part) for client in self.clients for part in PARTS])
        packed = np.concatenate([packed, *self.holdout])
        whole = len(self.x) - (0 if self.drift is None else len(self.drift.source))
        if packed.min() < 0 or packed.max() >= len(self.x):
            raise ValueError(f"indices must lie in 0..{len(self.x) - 1}")
        if self.copy_of is None and np.bincount(packed).max() > 1:
            raise ValueError(f"sample {int(np.bincount(packed).argmax())} is used more than once")
        if len(self.y) != len(self.x):
            raise ValueError(f"{len(self.x)} samples, but {len(self.y)} labels")
        for name, length in {"groups": len(self.clients), "copy_of": len(self.clients),
                             "sources": whole, "variants": whole}.items():  # fmt: skip
            array = getattr(self, name)
            if array is not None and array.shape != (length,):
                raise ValueError(f"{name} must hold one number for each of {length}")
        if self.levels is not None and self.levels.shape[1:] != (len(self.clients),):
            raise ValueError(f"levels must hold a row of {len(self.clients)} numbers for each level")
        if self.variants is not None and (self.shift is None or self.variants.max() >= len(self.shift)):
            raise ValueError("there is a variant without a shift")

    def tables(self) -> dict[str, dict[str, NDArray[Any]]]:
        """Who holds what, as tables for figures: `clients` (a row each) and `counts` (of every class)."""
        from archipelago.data.describe import client_table, count_table

        return {"clients": client_table(self), "counts": count_table(self)}

    def facts(self) -> dict[str, Any]:
        """What else a reader of these tables must know: classes, sources, notes."""
        from archipelago.data.describe import facts

        return facts(self)

    def indices(self) -> dict[str, NDArray[Any]]:
        """The partition as plain arrays (for .npz or safetensors); `from_indices` is the way back."""
        fingerprint = np.frombuffer(bytes.fromhex(self.fingerprint), dtype=np.uint8)
        return {**self.arrays(), **self._packed(), "fingerprint": fingerprint.copy()}

    @classmethod
    def from_indices(cls, dataset: Dataset, arrays: Mapping[str, NDArray[Any]]) -> Federation:
        """The federation that `indices` was asked of, from the same data set; no draw is repeated."""
        wanted = {*PARTS, *(f"{part}_ends" for part in PARTS), "fingerprint"}
        if not wanted <= set(arrays):
            raise UserError(
                f"A stored partition must hold {', '.join(sorted(wanted))}, but this one holds "
                f"{', '.join(sorted(arrays)) or 'nothing'}: it is damaged or of another kind.",
                code="damaged",
            )
        changed = UserError(
            f"The stored partition was not made for data set '{dataset.name}' as it is now: bring back the "
            "data and settings of that run, or start a new one.",
            code="other-data", name=dataset.name,
        )  # fmt: skip
        try:
            federation = cls.made_of(
                dataset, Division.from_arrays(arrays), Shift.of(arrays), drift=Drift.of(arrays)
            )
        except (ValueError, IndexError) as error:
            raise changed from error
        if federation.fingerprint != bytes(arrays["fingerprint"]).hex():
            raise changed
        return federation

    @classmethod
    def made_of(
        cls,
        dataset: Dataset,
        division: Division,
        shift: Shift | None = None,
        address: str = "",
        drift: Drift | None = None,
        changes: Callable[[Division, Array], tuple[Division, Drift | None]] | None = None,
    ) -> Federation:
        """The samples of a data set, shifted as the division says, and who holds them.

        `changes` makes the drift of the division and its labels, where it is not known.
        """
        x, y = dataset.joined()
        # Each sample is in one place at most, so its shift can be done once, in place.
        if shift is not None and division.variants is not None:
            x = x if x.flags.writeable else np.array(x)  # memory-mapped: what is changed must be in memory
            shift.apply(x, y, division.variants)
        if changes is not None:
            division, drift = changes(division, y)
        if drift is not None:
            x, y = drift.apply(x, y)
        # As they will be in the object store: whoever writes to them fails here already.
        x.flags.writeable = y.flags.writeable = False
        return cls(
            x=x,
            y=y,
            classes=dataset.classes,
            mean=dataset.mean,
            std=dataset.std,
            name=dataset.name,
            shift=shift,
            drift=drift,
            address=address,
            **{field.name: getattr(division, field.name) for field in fields(Division)},
        )

    def only(self, kept: Integers) -> Federation:
        """The federation of some of the clients, as it is in the first round."""
        by_client = {
            name: value[..., kept]
            for name in ("groups", "levels", "copy_of")
            if (value := getattr(self, name)) is not None
        }
        x, y = self.x, self.y
        if self.drift is not None:
            whole = len(x) - len(self.drift.source)
            x, y = x[:whole], y[:whole]
        kept_clients = tuple(self.clients[i] for i in kept)
        return replace(self, x=x, y=y, drift=None, clients=kept_clients, **by_client)

    def _packed(self) -> dict[str, NDArray[Any]]:
        """The division and its shift, notes aside."""
        packed = {name: array for name, array in self.arrays().items() if name != "notes"}
        packed |= {} if self.drift is None else self.drift.arrays()
        return packed if self.shift is None else {**packed, **self.shift.arrays()}

    # Pickled as a handful of arrays rather than three per client: ten thousand clients travel as fast as ten.
    def __getstate__(self) -> dict[str, Any]:
        state = {name: value for name, value in self.__dict__.items() if name not in _DIVISION}
        return {**state, "division": self.arrays()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        division = Division.from_arrays(state["division"])
        self.__dict__.update({name: value for name, value in state.items() if name != "division"})
        self.__dict__.update({name: getattr(division, name) for name in _DIVISION})


_DIVISION = tuple(field.name for field in fields(Division))


def labels_of(dataset: Dataset) -> Labels:
    """What a partition may look at."""
    return Labels(
        dataset.name,
        dataset.y_train,
        dataset.y_test,
        dataset.classes,
        dataset.sources_train,
        dataset.sources_test,
        dataset.owners_train,
        dataset.owners_test,
    )


def partition_seed(partition: PartitionSettings, seed: int) -> int:
    """The seed of data and partition in an experiment of this seed: its own, or the same."""
    return seed if partition.seed is None else partition.seed


def build_federation(data: DataSettings, partition: PartitionSettings, clients: int, seed: int) -> Federation:
    """Load the data set, divide it among the clients, shift samples, keep validation samples aside."""
    PARTITIONS.find(partition.name)  # a wrong name is reported before a large data set is read
    seed = partition_seed(partition, seed)
    return federation_of(load_dataset(data, seed), data, partition, clients, seed)


def federation_of(
    dataset: Dataset, data: DataSettings, partition: PartitionSettings, clients: int, seed: int
) -> Federation:
    """`build_federation`, of a data set that is loaded already."""
    shift = shift_of(dataset, data, clients, seed)
    variants = 1 if shift is None else len(shift)
    task = Task(labels_of(dataset), partition, clients, seed, variants, data.crossed)
    changes = None
    if data.drift:
        shape = tuple(dataset.x_train.shape[1:])

        def changes(division: Division, y: Array) -> tuple[Division, Drift | None]:
            return drifted(division, data, y, dataset.classes, shape, seed)

    division = divided(PARTITIONS.find(partition.name), task)
    return Federation.made_of(dataset, division, shift, address(task), changes=changes)
