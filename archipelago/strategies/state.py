"""What of a method a checkpoint holds: named attributes as plain values, and rows for clients that come later."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from archipelago.strategies.references import Models


class WithState:
    """Something with named attributes that a checkpoint must hold."""

    state: ClassVar[tuple[str, ...]] = ()
    # Attributes with a row for each client, and what a new client's row holds.
    per_client: ClassVar[dict[str, float]] = {}

    def save_state(self) -> dict[str, Any]:
        """What a checkpoint must hold."""
        return {name: _plain(getattr(self, name)) for name in self.state}

    def load_state(self, tree: dict[str, Any]) -> None:
        """The inverse of `save_state`, after `setup`."""
        for name in self.state:
            if (
                name in tree
            ):  # one of an older version lacks what was added since: it stays as `setup` left it
                setattr(self, name, _revived(tree[name]))

    def extend(self, clients: int) -> None:
        """Add rows for clients that came after the state was saved: they have never been seen."""
        for name, fill in self.per_client.items():
            value = getattr(self, name)
            more = [_longer(rows, clients, fill) for rows in (value if isinstance(value, list) else [value])]
            setattr(self, name, more if isinstance(value, list) else more[0])


def _longer(rows: Any, clients: int, fill: float) -> Any:
    """`rows` with `fill` in every row beyond its last, up to `clients`."""
    if rows is None or len(rows) >= clients:
        return rows
    return np.concatenate([rows, np.full((clients - len(rows), *rows.shape[1:]), fill, rows.dtype)])


def _plain(value: Any) -> Any:
    if isinstance(value, Models):
        return {"models": value.values}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, np.ndarray) and value.flags.writeable:
        return value.copy()  # the next round may write to it, and be aborted
    return value


def _revived(value: Any) -> Any:
    if isinstance(value, dict) and value.keys() == {"models"}:
        values = np.asarray(value["models"])
        if values.flags.writeable:
            values.flags.writeable = False
        return Models(values)
    if isinstance(value, list):
        return [_revived(item) for item in value]
    return value
