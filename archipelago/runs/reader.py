"""The way back from a run directory to data frames and models; imports neither Ray nor Lightning."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from archipelago.core.errors import UserError
from archipelago.core.own_files import numbered_files
from archipelago.core.registry import closest, nearest
from archipelago.core.vocabulary import of_run
from archipelago.runs.files import RunFiles
from archipelago.runs.growing_files import LongTable, read_csv
from archipelago.runs.status import Status, check_is_run
from archipelago.runs.trees import read_arrays, read_arrays_and_metadata
from archipelago.runs.written import is_model

if TYPE_CHECKING:  # pandas takes most of a second to import
    import pandas as pd
    from omegaconf import DictConfig


class Models(dict[str, npt.NDArray[Any]]):
    """The final models of a run by name: flat vectors (P,), or one row per cluster (K, P) or client.

    `spec` says which slice of a vector is which parameter.
    """

    spec: Any = None

    def tensors(self, name: str, row: int | None = None) -> dict[str, npt.NDArray[Any]]:
        """The parameters and buffers of one model by name, as a state dict holds them."""
        if name not in self:
            raise UserError(
                f"This run has no model '{name}'. {nearest(name, self)}",
                code="unknown-name", kind="model", name=name, nearest=closest(name, self),
            )  # fmt: skip
        values = self[name] if row is None else self[name][row]
        if values.ndim != 1:
            last = len(values) - 1
            raise UserError(
                f"'{name}' holds {len(values)} models; say which one with row=0 ... row={last}.",
                code="ambiguous", setting="row", name=name,
            )  # fmt: skip
        slices = {part["name"]: (part["start"], part["stop"], part["shape"]) for part in self.spec}
        return {key: values[start:stop].reshape(shape) for key, (start, stop, shape) in slices.items()}


class Run:
    """A run directory, read-only: every property reads its file when it is asked for.

    Works on a run that is still being written: what is there is whole rounds.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        check_is_run(self.path)
        _ = self._files.status  # a run of a newer format is refused at once

    @property
    def _files(self) -> RunFiles:
        return RunFiles(self.path)  # without memory: the run may be under way

    @property
    def status(self) -> Status:
        """How far the run has come."""
        return self._files.status

    @property
    def config(self) -> DictConfig:
        """The resolved config: `run.config.local.lr`."""
        from omegaconf import OmegaConf

        return OmegaConf.create(dict(self._files.config))

    @property
    def environment(self) -> dict[str, Any]:
        """Versions, processor, devices, commit and command."""
        return dict(self._files.environment)

    @property
    def metrics(self) -> pd.DataFrame:
        """One row a round; lists (cluster sizes) come back as lists."""
        return read_csv(self.path / "metrics.csv")

    @property
    def timings(self) -> pd.DataFrame:
        """Seconds by round and stage."""
        return read_csv(self.path / "timings.csv")

    @property
    def events(self) -> pd.DataFrame:
        """Columns `round` and `text`."""
        import pandas as pd

        return pd.DataFrame(self._files.events, columns=["round", "text"])

    @property
    def clients(self) -> pd.DataFrame:
        """One row per evaluated round and client."""
        return LongTable(self.path, "clients").read()

    @property
    def assignments(self) -> pd.DataFrame:
        """Columns `round`, `client`, `cluster` (-1: unknown)."""
        return LongTable(self.path, "assignments").read()

    @property
    def partition(self) -> dict[str, npt.NDArray[Any]]:
        """The arrays that say which client holds which samples."""
        return read_arrays(self.path / "partition.safetensors")

    @property
    def federation(self) -> pd.DataFrame:
        """One row a client: samples by part, ground-truth group and levels."""
        return self._federation("clients")

    @property
    def label_counts(self) -> pd.DataFrame:
        """Columns `client`, `part`, `source`, `label`, `samples`: what every client holds."""
        return self._federation("counts")

    def _federation(self, name: str) -> pd.DataFrame:
        import pandas as pd

        return pd.read_parquet(self.path / "federation" / f"{name}.parquet")

    @property
    def models(self) -> Models:
        """The final models by name: flat vectors, with their spec as `.models.spec`."""
        models = Models()
        for path in sorted((self.path / "models").glob("*.safetensors")):
            arrays, metadata = read_arrays_and_metadata(path)
            if not is_model(path, arrays, metadata):  # somebody's copy
                continue
            models.update(arrays)
            models.spec = json.loads(metadata.get("spec", "null"))
        return models

    @property
    def spec(self) -> Any:
        """The spec of the final models."""
        return self.models.spec

    def record(self, name: str) -> pd.DataFrame:
        """The table recorded as `name`, over all rounds in which it was recorded."""
        import pandas as pd

        files = [path for _, path in numbered_files(self.path / "records", name)]
        if not files:
            stems = {path.stem.rpartition("-")[0] for _, path in numbered_files(self.path / "records")}
            names = ", ".join(sorted(stems)) or "none"
            raise UserError(
                f"Run {self.path} has no record '{name}'; recorded: {names}.",
                code="unknown-name", kind="record", name=name, path=self.path,
            )  # fmt: skip
        return pd.concat([pd.read_parquet(path) for path in files], ignore_index=True)

    @property
    def summary(self) -> str:
        """The text of `summary.md`; empty while there is none."""
        path = self.path / "summary.md"
        return path.read_text(encoding="utf-8") if path.exists() else ""

    def __repr__(self) -> str:
        config = self.config
        what = f"{config.get('method', '?')} on {(config.get('data') or {}).get('name', '?')}"
        lines = [f"Run '{self.path}' ({what}, seed {config.get('seed', '?')}): {self.status}"]
        metrics = self.metrics
        known = of_run(self.path)
        shown = [n for n in (*known.progress(), *known.progress(over="clusters")) if n in metrics]
        measured = metrics.dropna(subset=shown[:1]) if shown else metrics[:0]
        if len(measured):
            last = measured.iloc[-1]
            values = ", ".join(f"{name} {last[name]:.4g}" for name in shown if last[name] == last[name])
            lines.append(f"  round {int(last['round'])}: {values}")
        lines.append(
            "  data frames: .metrics .clients .assignments .timings .events .federation .label_counts"
        )
        lines.append("  also: .models .config .environment .partition .summary .status .path")
        return "\n".join(lines)


def open_run(path: str | Path) -> Run:
    """Open a run directory for reading: data frames, models, config (imports neither Ray nor Lightning).

    One in an object store is copied to this machine first.
    """
    from archipelago.runs.storage import local_copy

    return Run(local_copy(path))
