"""Who reads a setting, and the refusal of settings that nobody reads.

An option of entries in a common section (`partition.alpha`) is read by the entries that declare it, and by no other.
A setting that means something beside others only says so where it is declared: `setting(..., read_with=...)`; one
that only some methods or data sets read is named here with what they must declare; all others are in `ALWAYS`. What
has its default says nothing and is never refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from archipelago.core.errors import UserError
from archipelago.core.registry import REGISTRIES, Registry
from archipelago.core.schema import Leaf, leaves, quote
from archipelago.core.settings import ExperimentSettings

S = TypeVar("S", bound=Any)

# {kind of a registry with a common section: the setting that chooses one of its entries}
CHOSEN_BY = {
    "data set": "data.name",
    "partition": "partition.name",
    "model": "model.name",
    "aggregation rule": "aggregation.name",
    "attack": "attack.name",
    "update transform": "update.transforms",
    "server optimizer": "server.optimizer",
    "optimizer": "local.optimizer",
    "learning-rate schedule": "local.schedule",
    "augmentation": "local.augment",
    "drift": "data.drift",
    "adoption rule": "adoption",
    "sampler": "sweep.sampler",
    "scheduler": "sweep.scheduler",
}


# {setting, or a section of them: (a method that reads it, in words; how it declares that)}
_SENDS = ("a method whose clients send models", lambda base: base.aggregates)
_STEPS = ("a method whose clients take steps", lambda base: base.takes_steps)
OF_METHODS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    **dict.fromkeys(("server", "update", "aggregation", "attack", "participation.attackers", "weights"), _SENDS),
    **dict.fromkeys(
        ("local.keep_optimizer", "local.weight_decay", "local.momentum", "local.clip", "local.clip_by",
         "local.label_smoothing", "local.augment", "local.augment_options", "local.optimizer",
         "local.optimizer_options", "evaluation.personal"),
        _STEPS,
    ),
}  # fmt: skip
ATTACKED = ("attack", "participation.attackers")

OF_DATA_SETS = ("data.mapped", "data.cache", "data.test_fraction", "data.download")

# Read in every experiment, whatever else it says: the length of a training by costs, too, which count in those of
# FedAvg. But for `clusters`: one command line compares clustered methods with others, which go without.
ALWAYS = frozenset(
    ("plugins", "method", "ensemble", "clients", "clusters", "holdout_clients", "choose_clusters", "rounds", "seed",
     "precision",
     "determinism", "not_finite", "idle_rounds", "storage", "name", "callbacks", "loggers", "tensorboard", "data.name",
     "data.root", "data.mean", "data.std", "data.rotations", "data.label_swaps", "data.colours", "data.noises",
     "data.drift", "partition.name", "partition.test_share", "partition.holdout", "partition.compat",
     "partition.validation", "partition.seed", "partition.cache", "partition.min_size", "model.name", "model.target",
     "model.head", "model.init", "local.lr", "local.schedule", "local.warmup", "local.engine", "local.normalise",
     "local.steps", "local.epochs", "local.batch", "participation.stragglers", "participation.fraction",
     "participation.dropouts", "evaluation.every", "evaluation.batch", "evaluation.train",
     "evaluation.weights", "evaluation.last", "evaluation.clients", "evaluation.metrics", "evaluation.clusterability",
     "fleet.backend", "fleet.actors", "fleet.clients_per_actor", "fleet.gpus", "checkpoint.every", "checkpoint.minutes",
     "checkpoint.keep", "records.rounds",
     "records.images")
)  # fmt: skip
# Read by what they are arguments of, which refuses them where it is not named.
ARGUMENTS = ("local.schedule_options", "evaluation.metric_options")


@dataclasses.dataclass(frozen=True)
class Unread:
    """A setting that nobody reads in this config: what would have to be said for it to be read, and what is."""

    key: str
    wanted: str
    given: str
    choosers: tuple[str, ...]  # the settings that decide

    def sentence(self, value: Any) -> str:
        """Expected, given, what to do."""
        return (
            f"Expected {self.wanted} beside {self.key}={quote(value)}, got {self.given}, with which nobody reads it: "
            f"leave {self.key} out, or add what reads it."
        )


def unread(config: Any, network: str | None = None) -> Iterator[tuple[Unread, Any, Any]]:
    """(setting, its value, its default) of every setting that says something and that nobody reads.

    `network` is what `model=auto` stands for, as soon as the data says that.
    """
    known = leaves(type(config))
    for leaf in known.values():
        value = value_of(config, leaf.key)
        if value == leaf.default:
            continue
        found = (
            _of_an_entry(config, leaf, network)
            or _of_a_clustering_rule(config, leaf)
            or _of_a_method(config, leaf)
            or _of_a_data_set(config, leaf)
            or _beside_others(config, leaf, known)
        )
        if found is not None:
            yield found, value, leaf.default


def without_unread(config: S, settled: Callable[[Unread], bool], network: str | None = None) -> S:
    """The config with the defaults of unread settings of which `settled` says that they may be forgotten."""
    for found, _, default in list(unread(config, network)):
        if settled(found):
            config = replaced(config, found.key, default)
    return config


def only_read(configs: Mapping[str, S]) -> dict[str, S]:
    """Configs that share settings, each without those that only others of them read; one that nobody reads stays."""
    idle = {label: {found.key for found, _, _ in unread(config)} for label, config in configs.items()}
    nobody = set.intersection(*idle.values()) if idle else set()
    return {
        label: without_unread(config, lambda found: found.key not in nobody)
        if idle[label] - nobody
        else config
        for label, config in configs.items()
    }


def refuse_unread(config: Any, network: str | None = None) -> None:
    """A sentence about the first setting that nobody reads."""
    for found, value, _ in unread(config, network):
        raise UserError(found.sentence(value), code="unread", setting=found.key)


def replaced(section: Any, key: str, value: Any) -> Any:
    """The settings with another value at a dotted key.

    >>> replaced(ExperimentSettings(), "local.lr", 0.5).local.lr
    0.5
    """
    name, _, rest = key.partition(".")
    return dataclasses.replace(
        section, **{name: replaced(getattr(section, name), rest, value) if rest else value}
    )


def value_of(config: Any, key: str) -> Any:
    """The value of a setting by its dotted key."""
    for part in key.split("."):
        config = getattr(config, part)
    return config


def reader_of(leaf: Leaf) -> str | None:
    """Where it is declared who reads a setting; None if nowhere."""
    section, _, name = leaf.key.rpartition(".")
    first = leaf.key.partition(".")[0]
    kinds = [kind for kind, key in CHOSEN_BY.items() if key.startswith(f"{section}.")]
    if any(_declares(entry, name) for kind in kinds for entry in REGISTRIES[kind].values()):
        return "the entries that declare it as an option"
    owners = {entry.section for registry in REGISTRIES.values() for entry in registry.values()}
    if first in owners:
        return f"the entry whose section is '{first}'"
    if "read_with" in leaf.metadata:
        return "read_with"
    if leaf.key in OF_METHODS or first in OF_METHODS:
        return "OF_METHODS"
    if leaf.key in OF_DATA_SETS:
        return "OF_DATA_SETS"
    return "ALWAYS" if leaf.key in ALWAYS or leaf.key in ARGUMENTS else None


def _of_an_entry(config: Any, leaf: Leaf, network: str | None) -> Unread | None:
    """An option of entries of which none is chosen; None if it is read, or is no such option."""
    section, _, name = leaf.key.rpartition(".")
    kinds = [kind for kind, key in CHOSEN_BY.items() if key.startswith(f"{section}.") and kind in REGISTRIES]
    readers: dict[str, list[str]] = {}
    for kind in kinds:
        chooser = CHOSEN_BY[kind]
        entries = [entry.name for entry in REGISTRIES[kind].values() if _declares(entry, name)]
        if not entries:
            continue
        readers[chooser] = sorted(entries)
        chosen = _chosen(REGISTRIES[kind], config, chooser, network)
        if chosen is None or not chosen.isdisjoint(entries):
            return None
    if not readers:
        return None
    wanted = " or ".join(f"{_short(chooser)}={_listed(names)}" for chooser, names in readers.items())
    if section == "model" and config.model.target is not None:
        return Unread(leaf.key, wanted, f"model.target={config.model.target}", ("model.target",))
    given = ", ".join(f"{_short(chooser)}={_said(value_of(config, chooser))}" for chooser in readers)
    return Unread(leaf.key, wanted, given, tuple(readers))


def _declares(entry: Any, option: str) -> bool:
    return option in {field.name for field in dataclasses.fields(entry.options)}


def _chosen(registry: Registry[Any], config: Any, chooser: str, network: str | None) -> set[str] | None:
    """The names of the chosen entries; None while they are not known."""
    value = value_of(config, chooser)
    if isinstance(value, list):
        return {registry.entry(str(name)).name for name in value}
    name = str(value)
    if chooser == "model.name" and config.model.target is not None:
        return set()
    if chooser == "model.name" and name == "auto":
        return None if network is None else {network}
    return {registry.entry(name).name}


def _said(value: Any) -> str:
    return quote(value) if isinstance(value, list) else str(value)


def _of_a_clustering_rule(config: Any, leaf: Leaf) -> Unread | None:
    """An option of a clustering rule that no method of this config uses."""
    section = leaf.key.partition(".")[0]
    rules = REGISTRIES.get("clustering rule")
    if rules is None:
        return None
    owner = next((entry.name for entry in rules.values() if entry.section == section), None)
    if owner is None or not isinstance(config, ExperimentSettings):
        return None
    from archipelago.experiments.config import method_parts

    uses = {
        f"{part}.clustering": getattr(config, part).clustering
        for part in sorted(method_parts(config.ensemble or config.method))
        if hasattr(getattr(config, part, None), "clustering")
    }
    if owner in {rules.entry(name).name for name in uses.values()}:  # an import path is as good as a name
        return None
    wanted = " or ".join(f"{key}={owner}" for key in uses) or f"a method with clustering={owner}"
    given = ", ".join(f"{key}={value}" for key, value in uses.items()) or f"method={config.method}"
    return Unread(leaf.key, wanted, given, ("method", "ensemble", *uses))


def _of_a_method(config: Any, leaf: Leaf) -> Unread | None:
    """A setting that only methods read which declare something that none of these does."""
    if not isinstance(config, ExperimentSettings):
        return None
    section = leaf.key.partition(".")[0]
    if section == "attack" and not config.participation.attackers:
        key = "participation.attackers"
        return Unread(leaf.key, f"{key} > 0", f"{key}=0", (key,))
    if leaf.key not in OF_METHODS and section not in OF_METHODS:
        return None
    wanted, reads = OF_METHODS.get(leaf.key) or OF_METHODS[section]
    from archipelago.strategies import METHODS, expand, parse_method

    members = expand(config.ensemble) or [config.method]
    if any(reads(METHODS.find(parse_method(member)[0])) for member in members):
        return None
    if leaf.key in ATTACKED or section in ATTACKED:
        from archipelago.strategies.attacks import ATTACKS

        if ATTACKS.find(config.attack.name).relabels:  # whatever is sent, they train on other labels
            return None
    given = f"method={config.method}" if not config.ensemble else f"ensemble={quote(config.ensemble)}"
    return Unread(leaf.key, wanted, given, ("method", "ensemble"))


def _of_a_data_set(config: Any, leaf: Leaf) -> Unread | None:
    """A setting that only some data sets read, beside another one."""
    name = leaf.key.rpartition(".")[2]
    if leaf.key not in OF_DATA_SETS or not isinstance(config, ExperimentSettings):
        return None
    from archipelago.data import DATASETS

    if DATASETS.find(config.data.name).may_read(name):
        return None
    readers = [each for each, entry in DATASETS.items() if entry.value.may_read(name)]
    return Unread(leaf.key, f"data={_listed(readers)}", f"data={config.data.name}", ("data.name",))


def _beside_others(config: Any, leaf: Leaf, known: Mapping[str, Leaf]) -> Unread | None:
    """A setting that is read only beside certain values of others (`read_with`), none of which is there."""
    conditions: Mapping[str, Any] = leaf.metadata.get("read_with", {})
    if not conditions or (leaf.key.startswith("local.") and config.model.target is not None):
        return None  # a module of the user's own may read what it likes
    section = leaf.key.rpartition(".")[0]
    wanted, given, keys = [], [], []
    for name, needed in conditions.items():
        key = f"{section}.{name}" if f"{section}.{name}" in known else name
        value = value_of(config, key)
        if _holds(value, needed):
            return None
        wanted.append(
            f"{_short(key)}={_listed(needed)}" if isinstance(needed, tuple) else _more(key, value, needed)
        )
        given.append(f"{_short(key)}={quote(value)}")
        keys.append(key)
    return Unread(leaf.key, " or ".join(wanted), ", ".join(given), tuple(keys))


def _holds(value: Any, needed: Any) -> bool:
    if isinstance(needed, tuple):
        return value in needed
    if value is None:
        return False
    return (len(value) if isinstance(value, list) else value) > needed


def _more(key: str, value: Any, needed: Any) -> str:
    return f"{key}=[...]" if isinstance(value, list) else f"{key} > {needed}"


def _short(key: str) -> str:
    """`partition.name` is written `partition`."""
    return key.removesuffix(".name").removesuffix(".transforms")


def _listed(names: Iterable[Any]) -> str:
    *others, last = [str(name) for name in names]
    return f"{', '.join(others)} or {last}" if others else last
