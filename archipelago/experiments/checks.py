"""What no single setting shows: names, combinations, and what this machine lacks; each one sentence."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from archipelago.core.errors import UserError
from archipelago.core.registry import REGISTRIES
from archipelago.core.schema import quote
from archipelago.core.settings import ExperimentSettings
from archipelago.experiments.given import core_sections, one_line
from archipelago.experiments.readers import refuse_unread
from archipelago.runs.storage import check_address, is_address

_SMALLEST_SHARE = 1e-4  # Ray counts resources in ten-thousandths


def options(config: ExperimentSettings) -> dict[str, Any]:
    """The option sections of a config, by the name of their method or add-on."""
    names = [field.name for field in dataclasses.fields(config) if field.name not in core_sections()]
    return {name: getattr(config, name) for name in names}


def check(config: ExperimentSettings, env: Mapping[str, str] | None = None) -> None:
    """Refuse, with a sentence, what no single value shows: names, combinations, what this machine lacks."""
    env = os.environ if env is None else env
    _check_run_name(config.name)
    _check_engine(config)
    _check_fleet(config, env)
    _check_precision(config, env)
    _check_storage(config.storage)
    _check_method(config)
    _check_names(config)
    _check_target(config)
    _check_listeners(config)
    refuse_unread(config)


def _check_run_name(name: str | None) -> None:
    if name is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._+=@-]{0,199}", name):
        raise UserError(
            f"Expected name to be up to 200 letters, digits and . _ + = @ - (no folders, no spaces), got "
            f"{quote(name)}: say where with storage=FOLDER, and only the last part with name=NAME."
        )


def _check_engine(config: ExperimentSettings) -> None:
    from lightning_modules.engines import ENGINES

    chosen = config.local.engine
    entry = None if chosen == "auto" else ENGINES.entry(chosen)
    own = set() if entry is None else {each.name for each in dataclasses.fields(entry.options)}
    for other in ENGINES.values():
        plain = other.options()
        for each in dataclasses.fields(other.options):
            value = getattr(config.local, each.name)
            if each.name in own or value == getattr(plain, each.name):
                continue
            inside = f".{next(iter(value))}" if isinstance(value, dict) else ""
            raise UserError(
                f"Expected local.engine={other.name} beside local.{each.name}{inside}, got "
                f"local.engine={chosen}: add it, or leave local.{each.name} out."
            )


def _check_fleet(config: ExperimentSettings, env: Mapping[str, str]) -> None:
    fleet = config.fleet
    if fleet.actors is not None and fleet.clients_per_actor is not None:
        raise UserError(
            f"Expected fleet.actors or fleet.clients_per_actor, got both ({fleet.actors} and "
            f"{fleet.clients_per_actor}): leave one of them out."
        )
    if fleet.actors is not None and fleet.actors > config.clients:
        raise UserError(
            f"Expected fleet.actors <= clients, got fleet.actors={fleet.actors} and "
            f"clients={config.clients}: an actor without clients would do nothing."
        )
    gpus = fleet.gpus or 0.0  # auto asks for nothing that may be missing
    if gpus > 1:
        raise UserError(
            f"Expected fleet.gpus <= 1, got {gpus:g}: a client actor computes on one device or a share of "
            "one (as 0.25); start more actors to use more devices."
        )
    for key, share in (("fleet.gpus", gpus), ("fleet.cpus", fleet.cpus)):
        if 0 < share < _SMALLEST_SHARE:
            raise UserError(
                f"Expected {key} >= {_SMALLEST_SHARE:g}, got {share:g}: Ray counts no smaller shares."
            )
    address = _address(config, env)
    if address.startswith("ray://") and fleet.backend == "ray":
        source = "fleet.address" if fleet.address else "RAY_ADDRESS"
        raise UserError(
            f"Expected {source} as host:port, got '{address}': Ray Client is not supported, as it sends every "
            "model through one connection; write `ray job submit --address http://HOST:8265 -- ...`, or run on a "
            "node of the cluster."
        )
    if fleet.address is not None and not re.fullmatch(r"auto|local|[^\s:/]+:\d{1,5}", fleet.address):
        raise UserError(
            f"Expected fleet.address as host:port, auto or local, got '{fleet.address}': "
            "`ray status` on the cluster's head shows its address."
        )
    if gpus > 0 and _is_here(config, env) and gpu_count() == 0:
        raise UserError(
            f"Expected fleet.gpus=0 on a machine without a GPU, got {gpus:g}: leave it out, or name a "
            "cluster that has GPUs with fleet.address=HOST:PORT or RAY_ADDRESS."
        )


def _address(config: ExperimentSettings, env: Mapping[str, str]) -> str:
    return config.fleet.address or env.get("RAY_ADDRESS") or "local"


def _is_here(config: ExperimentSettings, env: Mapping[str, str]) -> bool:
    """Whether clients live on this machine; what another cluster has is seen when it is joined."""
    return config.fleet.backend == "in_process" or _address(config, env) == "local"


def _check_precision(config: ExperimentSettings, env: Mapping[str, str]) -> None:
    if config.precision == "32":
        return
    from lightning_modules.engines import check_precision

    if config.fleet.gpus == 0 or (_is_here(config, env) and gpu_count() == 0):
        check_precision(config.precision, config.local.engine, "cpu")


def gpu_count() -> int:
    """How many GPUs this machine has that torch can use."""
    import torch

    return torch.cuda.device_count()


def _check_storage(storage: str) -> None:
    if is_address(storage):
        check_address(storage)
        return
    folder = Path(storage).expanduser().resolve()
    if "runtime_resources" in folder.parts:  # where Ray unpacks the working directory of a job
        raise UserError(
            f"Expected storage to be a folder that stays, got '{storage}' inside the job's working "
            "directory, which Ray deletes: give a full path, as in storage=~/archipelago-runs."
        )
    existing = folder
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir():
        raise UserError(f"Expected storage to be a folder, got '{storage}', where '{existing}' is a file.")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise UserError(
            f"Expected storage to be a folder one can write to, got '{storage}': '{existing}' is not."
        )


def _check_method(config: ExperimentSettings) -> None:
    from archipelago.strategies import METHODS, check_members, expand, parse_method

    members = expand(config.ensemble) or [config.method]
    check_members(config.ensemble, config.combine, config.clusters)
    bases = [METHODS.find(parse_method(member, config.clusters)[0]) for member in members]
    if config.choose_clusters and (config.ensemble or not bases[0].clustered):
        raise UserError(
            f"Expected a clustered method with clusters=auto, got {quote(config.ensemble or config.method)}: "
            f"use {', '.join(name for name, each in METHODS.items() if each.value.clustered)}, or set clusters "
            "yourself."
        )
    if any(base.clustered for base in bases) and config.clusters > config.clients:
        raise UserError(
            f"Expected clusters <= clients, got clusters={config.clusters} and clients={config.clients}: "
            f"give more clients or fewer clusters."
        )
    check_settings_of_methods(config, [])


def check_settings_of_methods(config: ExperimentSettings, groups: Any, outputs: int | None = None) -> None:
    """Refuse what a method cannot be run with; `groups` are the ground truth's, empty before the data is there."""
    from archipelago.strategies import Context, check_options, expand

    context = Context(
        clients=config.clients,
        clusters=config.clusters,
        groups=groups,
        outputs=outputs,
        aggregation=config.aggregation,
    )
    for member in expand(config.ensemble) or [config.method]:
        check_options(member, options(config), context)


def listener_sections() -> dict[str, tuple[str, str]]:
    """{section: (setting that must name its owner, its owner)} of the options of callbacks and loggers."""
    from archipelago.experiments.callbacks import CALLBACKS
    from archipelago.experiments.loggers import LOGGERS

    return {
        entry.section: (setting, entry.name)
        for setting, registry in (("callbacks", CALLBACKS), ("loggers", LOGGERS))
        for entry in registry.values()
    }


def _check_listeners(config: ExperimentSettings) -> None:
    from archipelago.experiments.callbacks.base import check_callbacks
    from archipelago.experiments.loggers import check_loggers

    check_callbacks(config)
    check_loggers(config)
    given = options(config)
    for section, (setting, owner) in listener_sections().items():
        registry = REGISTRIES["callback" if setting == "callbacks" else "logger"]
        named = [registry.entry(each).section for each in getattr(config, setting)]
        if section in given and section not in named and given[section] != type(given[section])():
            raise UserError(
                f"Expected {setting}=[{owner}] beside options of '{section}', got {setting}="
                f"{quote(getattr(config, setting))}: add it, or leave them out."
            )


def _check_names(config: ExperimentSettings) -> None:
    from archipelago.data import DATASETS, PARTITIONS
    from archipelago.strategies import AGGREGATION

    AGGREGATION.find(config.aggregation.name)
    DATASETS.find(config.data.name)
    PARTITIONS.find(config.partition.name)
    if config.model.name != "auto":
        from lightning_modules.networks import NETWORKS

        NETWORKS.find(config.model.name)


def _check_target(config: ExperimentSettings) -> None:
    """A module of the user's own must be importable here, before anything is started elsewhere."""
    target = config.model.target
    if target is None:
        return
    if config.model.name != "auto":
        raise UserError(
            f"Expected model.name or model.target, got both ('{config.model.name}' and '{target}'): "
            "leave one of them out."
        )
    if not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)+", target):
        raise UserError(
            f"Expected model.target as package.module.Class, got '{target}': write where it is defined."
        )
    import archipelago.core.torchvision_operators  # noqa: F401  (before the first lightning import)
    from lightning_modules.base import load_target

    try:
        load_target(target)
    except UserError:
        raise
    except Exception as error:  # whatever the user's own module raises while it is imported
        cause = f"{type(error).__name__}: {one_line(error)}"
        raise UserError(f"Expected model.target to be importable, got '{target}': {cause}.") from error


def check_network(config: ExperimentSettings, input_shape: tuple[int, ...], classes: int | None) -> None:
    """Refuse a network that cannot take the data's samples, before anything is started or written."""
    check_settings_of_methods(config, [], outputs=classes or 1)
    if config.model.target is not None:
        from lightning_modules.base import build_module

        # Whether it can be made, and has what model.head names, only the module itself can say; what it does with
        # the samples is its own affair.
        build_module(config.model, config.local, input_shape, classes, config.seed)
        return
    import torch

    from lightning_modules.networks import build_network
    from lightning_modules.networks_base import default_network

    if config.model.name == "auto":
        refuse_unread(config, default_network(input_shape, classes))
    with torch.device("meta"):  # shapes alone: no memory, no random draw
        network = build_network(config.model, input_shape, classes)
    if config.model.head:
        from lightning_modules.base import checked_head

        checked_head(network, config.model.head)
