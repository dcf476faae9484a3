"""A run directory as plain values: files only, so a run of another machine will do."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from archipelago.core.errors import UserError
from archipelago.core.files import check_regular, complete_lines
from archipelago.core.own_files import numbered_files
from archipelago.core.vocabulary import read_vocabulary
from archipelago.runs import identity
from archipelago.runs.checksums import check_header, check_table, damaged
from archipelago.runs.format import format_of, upgraded_config
from archipelago.runs.growing_files import read_event, value_of
from archipelago.runs.status import Status, read_status

Row = dict[str, Any]


IDLE_ROUNDS = 3  # without an update, after which a run has no result


def is_idle(metrics: Mapping[str, Any]) -> bool:
    """Whether nobody delivered an update in the round of these metrics: all were dropped.

    >>> is_idle({"participants": 2, "dropped": 2}), is_idle({"participants": 2, "dropped": 1}), is_idle({})
    (True, False, False)
    """
    return metrics.get("participants", 0) > 0 and metrics.get("dropped", 0) >= metrics["participants"]


def are_facts(content: Any) -> bool:
    """Whether this is the content of `federation/facts.json`."""
    return isinstance(content, dict) and {"clients", "classes", "sources"} <= set(content)


class RunFiles:
    """One run directory; each file is read when it is first asked for, and what is read are whole lines."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """The resolved config as nested mappings."""
        content = read_yaml(self._text("config.yaml"), self.path / "config.yaml")
        if not isinstance(content, dict):
            found = type(content).__name__
            raise UserError(
                f"{self.path / 'config.yaml'} is damaged: expected settings, found {found}.",
                code="damaged", file=self.path / "config.yaml",
            )  # fmt: skip
        try:
            return upgraded_config(content, format_of(self._json("status.json"), self.path))
        except (AttributeError, ValueError) as error:
            raise UserError(
                f"{self.path / 'status.json'} is damaged: {error}.",
                code="damaged", file=self.path / "status.json",
            ) from error  # fmt: skip

    @cached_property
    def status(self) -> Status:
        """How far the run has come."""
        return read_status(self.path)

    @cached_property
    def edited(self) -> str | None:
        """What was changed in the run since it was made, in words; None if nothing was."""
        content = read_yaml(self._text("config.yaml"), self.path / "config.yaml")
        try:
            return identity.difference(self.path, content, self.status.identity) or identity.changed_table(
                self.path, "metrics.csv"
            )
        except UserError as error:
            return str(error)

    @cached_property
    def identity(self) -> str:
        """The hash that the run was made with; empty of one from before."""
        return identity.identity_of(self.path) or ""

    @cached_property
    def code(self) -> Mapping[str, str]:
        """{module or import path: digest} of the code of somebody's own that the run was made with."""
        return identity.code_digests(self.path)

    @cached_property
    def altered(self) -> str | None:
        """What was changed since that is no result, in words: the seconds that rounds took, the models."""
        return (
            identity.changed_table(self.path, "timings.csv")
            or identity.missing_model(self.path)
            or self._damaged_record
        )

    def check(self) -> None:
        """A `UserError` about the first file that cannot be read, or is not as it was written; reads all of them."""
        for name in ("partition.safetensors", "records/examples.safetensors"):
            check_regular(self.path / name)
        _ = self.config, self.status, self.edited, self.altered, self.environment, self.schedule
        _ = self.metrics, self.timings, self.events
        read_vocabulary(self.path)
        last = self.setting("evaluation.last")
        if not isinstance(last, int) or last < 1:
            raise damaged(self.path / "config.yaml", f"expected evaluation.last >= 1, found {last}")
        for path in sorted((self.path / "models").glob("*.safetensors")):
            check_header(path)
        tables = [self.path / f"{name}.parquet" for name in ("clients", "assignments")]
        if (self.path / "federation").is_dir():
            tables += [self.path / f"federation/{name}.parquet" for name in ("clients", "counts")]
            if gone := [path for path in tables[2:] if not path.exists()]:
                raise damaged(gone[0], "it is missing")
        tables += [path for _, path in numbered_files(self.path / "parts")]
        for path in tables:
            if path.exists():
                check_table(path)
        if (self.path / "federation/facts.json").exists():
            facts = self._json("federation/facts.json")
            if not are_facts(facts):
                raise damaged(self.path / "federation/facts.json", "it does not say what the clients hold")
        if not isinstance(self.environment, dict) or not isinstance(self.schedule, list):
            raise damaged(self.path / "environment.json", "it, or schedule.json, is not what was written")

    @cached_property
    def environment(self) -> Mapping[str, Any]:
        """Versions, processor, devices, commit and command; empty if there is none."""
        if not (self.path / "environment.json").exists():
            return {}
        content: Mapping[str, Any] = self._json("environment.json")
        return content

    @cached_property
    def metrics(self) -> list[Row]:
        """One row a round; empty cells are left out."""
        return read_numbers(self.path / "metrics.csv")

    @cached_property
    def timings(self) -> list[Row]:
        """Seconds by round and stage."""
        rows = read_numbers(self.path / "timings.csv")
        if any(isinstance(cell, list) for row in rows for cell in row.values()):
            raise damaged(self.path / "timings.csv", "its cells are no seconds")
        return rows

    @cached_property
    def events(self) -> list[Mapping[str, Any]]:
        """`round` and `text`."""
        path = self.path / "events.jsonl"
        return [read_event(path, line) for line in complete_lines(path).split("\n") if line]

    @cached_property
    def schedule(self) -> list[Mapping[str, Any]]:
        """`values` of settings that a member of a population took over, and after which `round`; empty elsewhere."""
        return self._json("schedule.json") if (self.path / "schedule.json").is_file() else []

    @property
    def chose_clusters(self) -> bool:
        """Whether `clusters` was chosen by the run itself (clusters=auto): its config has the choice alone."""
        chosen = f"clusters={self.setting('clusters')} was chosen"
        return any(event["round"] == 0 and event["text"].startswith(chosen) for event in self.events)

    @property
    def dropped_share(self) -> float:
        """The share of all updates that were not finite and were dropped."""
        asked = sum(row.get("participants", 0) for row in self.metrics)
        return float(sum(row.get("dropped", 0) for row in self.metrics) / asked) if asked else 0.0

    @property
    def ended_idle(self) -> bool:
        """Whether nobody trained in the last rounds: what was measured then is no result of the method."""
        last = self.metrics[-IDLE_ROUNDS:]
        return bool(last) and all(is_idle(row) for row in last)

    def setting(self, key: str) -> Any:
        """A setting by its dotted key; None if the config has none of that name."""
        value: Any = self.config
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value

    def table(
        self, name: str, columns: Sequence[str] | None = None, rounds: Iterable[int] | None = None
    ) -> dict[str, Any]:
        """Columns of `clients` or `assignments` as arrays, of some rounds only; empty if there is no table.

        A run under way has its table in parts.
        """
        import pyarrow.parquet as pq

        files = [self.path / f"{name}.parquet"]
        if not files[0].is_file():
            files = [path for _, path in numbered_files(self.path / "parts", name)]
        wanted = None if rounds is None else [("round", "in", list(rounds))]
        tables = []
        for file in files:
            there = set(pq.read_schema(file).names)
            chosen = None if columns is None else [column for column in columns if column in there]
            tables.append(pq.read_table(file, columns=chosen, filters=wanted, use_threads=False))
        return _joined(tables)

    def record_rounds(self, name: str) -> list[int]:
        """The rounds in which a table was recorded, as far as it can be read."""
        found = numbered_files(self.path / "records", name)
        return [round for round, path in found if path.name not in self._unreadable]

    @cached_property
    def _unreadable(self) -> dict[str, str]:
        """Records that cannot be read, and why: figures do without them."""
        found = {}
        for _, path in numbered_files(self.path / "records"):
            try:
                check_table(path)
            except (UserError, OSError) as error:
                found[path.name] = str(error)
        return found

    @property
    def _damaged_record(self) -> str | None:
        return f"records/{next(iter(self._unreadable))} is damaged" if self._unreadable else None

    def record(self, name: str, round: int) -> dict[str, Any]:
        """The columns of a recorded table, as arrays; empty if there is none."""
        import pyarrow.parquet as pq

        path = self.path / "records" / f"{name}-{round:06d}.parquet"
        if not path.is_file() or path.name in self._unreadable:
            return {}
        return _joined([pq.read_table(path, use_threads=False)])

    def arrays(self, file: str) -> dict[str, Any]:
        """The arrays of a safetensors file of the run; empty if it is not there."""
        from safetensors import SafetensorError
        from safetensors.numpy import load_file

        path = self.path / file
        check_regular(path)
        try:
            return dict(load_file(path)) if path.is_file() else {}
        except (SafetensorError, OSError, ValueError):  # figures do without it
            return {}

    def _text(self, name: str) -> str:
        check_regular(self.path / name)
        try:
            return (self.path / name).read_text(encoding="utf-8")
        except FileNotFoundError as error:
            raise UserError(
                f"{self.path} is not a run directory: expected one with config.yaml and status.json.",
                code="not-a-run", path=self.path,
            ) from error  # fmt: skip
        except (OSError, ValueError) as error:
            raise damaged(self.path / name, str(error)) from error

    def _json(self, name: str) -> Any:
        try:
            return json.loads(self._text(name))
        except (ValueError, RecursionError) as error:
            raise damaged(self.path / name, str(error)) from error


def _joined(tables: Sequence[Any]) -> dict[str, Any]:
    import numpy as np

    if not tables:
        return {}
    names = [name for name in tables[0].column_names if all(name in table.column_names for table in tables)]
    return {name: np.concatenate([table[name].to_numpy() for table in tables]) for name in names}


def read_yaml(text: str, path: Path) -> Any:
    """The content of a YAML text that stands in `path`."""
    import yaml  # type: ignore[import-untyped]  # PyYAML ships no types

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times faster, where it was compiled
    try:
        _refuse_depth(yaml.parse(text, Loader=loader), path)
        return yaml.load(text, Loader=loader)
    except yaml.YAMLError as error:
        raise damaged(path, " ".join(str(error).split())) from error


def _refuse_depth(events: Iterable[Any], path: Path) -> None:
    """The compiled reader of YAML follows nesting to the end of its stack, and takes the process with it."""
    depth = 0
    for event in events:
        name = type(event).__name__
        depth += name.endswith("StartEvent") - name.endswith("EndEvent")
        if depth > 100:
            raise damaged(path, "its values are nested too deeply")


def read_numbers(path: Path) -> list[Row]:
    """The rows of a CSV file of numbers and JSON lists; empty cells are left out."""
    return numbers_in(complete_lines(path), path)


def numbers_in(text: str, path: Path) -> list[Row]:
    """The same for the whole lines of a text that stands in `path`."""
    rows = csv.DictReader(io.StringIO(text[: text.rfind("\n") + 1]))
    try:
        return [{name: value_of(cell) for name, cell in row.items() if cell} for row in rows]
    except (AttributeError, ValueError, csv.Error) as error:  # too many cells, or one that is no number
        raise damaged(path, f"a line cannot be read: {error}") from error
