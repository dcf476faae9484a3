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
from archipelago.experiments.given import core_sections
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
    _check_recipe(config)
    _check_evaluation(config)
    from lightning_modules.checks import check_target

    check_target(config)
    _check_listeners(config)
    refuse_unread(config)


def _check_run_name(name: str | None) -> None:
    if name is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._+=@-]{0,199}", name):
        raise UserError(
            f"Expected name to be up to 200 letters, digits and . _ + = @ - (no folders, no spaces), got "
            f"{quote(name)}: say where with storage=FOLDER, and only the last part with name=NAME.",
            code="wrong-name", name=name,
        )  # fmt: skip


MOST_SAMPLES = 200_000_000  # of one client in one round


def _check_engine(config: ExperimentSettings) -> None:
    from lightning_modules.engines import ENGINES

    chosen = config.local.engine
    if config.local.epochs is None and config.local.steps * config.local.batch > MOST_SAMPLES:
        raise UserError(
            f"Expected local.steps x local.batch <= {MOST_SAMPLES}, got {config.local.steps} x {config.local.batch}: a "
            "client's batches of a round are drawn at once; train fewer steps in more rounds.",
            code="too-large", setting="local.steps",
        )  # fmt: skip
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
                f"local.engine={chosen}: add it, or leave local.{each.name} out.",
                code="unread", setting=f"local.{each.name}",
            )  # fmt: skip
    if entry is not None:
        entry.value.check(entry.options_from(config.local))


def _check_fleet(config: ExperimentSettings, env: Mapping[str, str]) -> None:
    fleet = config.fleet
    if fleet.actors is not None and fleet.clients_per_actor is not None:
        raise UserError(
            f"Expected fleet.actors or fleet.clients_per_actor, got both ({fleet.actors} and "
            f"{fleet.clients_per_actor}): leave one of them out.",
            code="either-or", settings=("fleet.actors", "fleet.clients_per_actor"),
        )  # fmt: skip
    if fleet.actors is not None and fleet.actors > config.clients:
        raise UserError(
            f"Expected fleet.actors <= clients, got fleet.actors={fleet.actors} and "
            f"clients={config.clients}: an actor without clients would do nothing.",
            code="too-many", setting="fleet.actors", given=fleet.actors, most=config.clients,
        )  # fmt: skip
    gpus = fleet.gpus or 0.0  # auto asks for nothing that may be missing
    if gpus > 1:
        raise UserError(
            f"Expected fleet.gpus <= 1, got {gpus:g}: a client actor computes on one device or a share of "
            "one (as 0.25); start more actors to use more devices.",
            code="out-of-range", setting="fleet.gpus", given=gpus,
        )  # fmt: skip
    for key, share in (("fleet.gpus", gpus), ("fleet.cpus", fleet.cpus)):
        if 0 < share < _SMALLEST_SHARE:
            raise UserError(
                f"Expected {key} >= {_SMALLEST_SHARE:g}, got {share:g}: Ray counts no smaller shares.",
                code="out-of-range", setting=key, given=share,
            )  # fmt: skip
    address = _address(config, env)
    if address.startswith("ray://") and fleet.backend == "ray":
        source = "fleet.address" if fleet.address else "RAY_ADDRESS"
        raise UserError(
            f"Expected {source} as host:port, got '{address}': Ray Client is not supported, as it sends every "
            "model through one connection; write `ray job submit --address http://HOST:8265 -- ...`, or run on a "
            "node of the cluster.",
            code="wrong-address", source=source, address=address,
        )  # fmt: skip
    if fleet.address is not None and not re.fullmatch(r"auto|local|[^\s:/]+:\d{1,5}", fleet.address):
        raise UserError(
            f"Expected fleet.address as host:port, auto or local, got '{fleet.address}': "
            "`ray status` on the cluster's head shows its address.",
            code="wrong-address", address=fleet.address,
        )  # fmt: skip
    if gpus > 0 and _is_here(config, env) and gpu_count() == 0:
        raise UserError(
            f"Expected fleet.gpus=0 on a machine without a GPU, got {gpus:g}: leave it out, or name a "
            "cluster that has GPUs with fleet.address=HOST:PORT or RAY_ADDRESS.",
            code="no-gpu", setting="fleet.gpus", given=gpus,
        )  # fmt: skip


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
            "directory, which Ray deletes: give a full path, as in storage=~/archipelago-runs.",
            code="not-kept", storage=storage,
        )  # fmt: skip
    existing = folder
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir():
        raise UserError(
            f"Expected storage to be a folder, got '{storage}', where '{existing}' is a file.",
            code="not-a-folder", storage=storage, existing=existing,
        )  # fmt: skip
    if not os.access(existing, os.W_OK | os.X_OK):
        raise UserError(
            f"Expected storage to be a folder one can write to, got '{storage}': '{existing}' is not.",
            code="unwritable", path=storage,
        )  # fmt: skip


def _check_method(config: ExperimentSettings) -> None:
    from archipelago.strategies import METHODS, check_members, expand, parse_method

    members = expand(config.ensemble) or [config.method]
    check_members(config.ensemble, config.combine, config.clusters)
    bases = [METHODS.find(parse_method(member, config.clusters)[0]) for member in members]
    if config.choose_clusters and (config.ensemble or not bases[0].clustered):
        raise UserError(
            f"Expected a clustered method with clusters=auto, got {quote(config.ensemble or config.method)}: "
            f"use {', '.join(name for name, each in METHODS.items() if each.value.clustered)}, or set clusters "
            "yourself.",
            code="needs-clusters", setting="clusters=auto",
        )  # fmt: skip
    if any(base.clustered for base in bases) and config.clusters > config.clients:
        raise UserError(
            f"Expected clusters <= clients, got clusters={config.clusters} and clients={config.clients}: "
            f"give more clients or fewer clusters.",
            code="too-many", setting="clusters", given=config.clusters, most=config.clients,
        )  # fmt: skip
    check_adoption(config, config.adoption)
    check_settings_of_methods(config, [])


def check_adoption(config: ExperimentSettings, rule: str, finetune: bool = False) -> None:
    """Refuse a rule for new clients that this method has no use for, or that takes labels away which it needs."""
    from archipelago.strategies import Addon, expand, parts_of
    from archipelago.strategies.adoption import ADOPTION

    if ADOPTION.find(rule).needs_labels:
        return
    parts = [parts_of(member) for member in expand(config.ensemble) or [config.method]]
    if not all(base.value.clustered for base, *_ in parts):
        raise UserError(
            f"Expected a method that gives each client one of its cluster models beside adoption={rule}, got "
            f"{quote(config.ensemble or config.method)}: leave adoption out.",
            code="needs-clusters", setting="adoption",
        )  # fmt: skip
    if finetune or any(addon.value.tunes is not Addon.tunes for _, *addons in parts for addon in addons):
        raise UserError(
            f"Expected no fine-tuning beside adoption={rule}, got one: a new client without labels has nothing to tune "
            "on.",
            code="incompatible", settings=("adoption", "finetune"),
        )  # fmt: skip


def check_settings_of_methods(config: ExperimentSettings, groups: Any, outputs: int | None = None) -> None:
    """Refuse what a method cannot be run with; `groups` are the ground truth's, empty before the data is there."""
    from archipelago.strategies import Context, check_options, expand
    from archipelago.strategies.local_steps import optimizer_of

    optimizer, momentum = optimizer_of(config.local)
    context = Context(
        clients=config.clients,
        clusters=config.clusters,
        groups=groups,
        outputs=outputs,
        lr=config.local.lr,
        optimizer=optimizer,
        momentum=momentum,
        aggregation=config.aggregation,
        server=config.server,
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
                f"{quote(getattr(config, setting))}: add it, or leave them out.",
                code="unread", setting=section,
            )  # fmt: skip


def _check_names(config: ExperimentSettings) -> None:
    from archipelago.data import DATASETS, PARTITIONS
    from archipelago.strategies import AGGREGATION
    from archipelago.strategies.attacks import ATTACKS
    from archipelago.strategies.server_optimizers import SERVER_OPTIMIZERS
    from archipelago.strategies.updates import check_pipeline

    AGGREGATION.find(config.aggregation.name)
    SERVER_OPTIMIZERS.find(config.server.optimizer)
    ATTACKS.find(config.attack.name)
    check_pipeline(config.update)
    DATASETS.find(config.data.name)
    PARTITIONS.find(config.partition.name)
    if config.model.name != "auto":
        from lightning_modules.networks import NETWORKS

        NETWORKS.find(config.model.name)


def _check_recipe(config: ExperimentSettings) -> None:
    """What a client's steps are made of: optimizer, learning rate over rounds, augmentation, clipping."""
    from archipelago.strategies.schedules import check_schedule
    from lightning_modules.augmentations import check_augmentations
    from lightning_modules.engines import ENGINES
    from lightning_modules.optimizers import check_optimizer
    from lightning_modules.recipe import asked_of_engines

    local = config.local
    if config.model.target is None:  # a module of the user's own makes its optimizer as it likes
        check_optimizer(local)
    check_schedule(local, config.rounds)
    check_augmentations(local)
    does = ("augment", "clip") if local.engine == "auto" else ENGINES.find(local.engine).recipe
    for part, key in asked_of_engines(local).items():
        if part not in does:
            raise UserError(
                f"Expected an engine that does {key}, got local.engine={local.engine}, which does not declare it "
                f"(recipe = ('{part}',)): leave {key} out, or choose another engine.",
                code="incompatible", settings=(key, "local.engine"),
            )  # fmt: skip
    trainer = getattr(local, "trainer", {})
    if local.clip is not None and "gradient_clip_val" in trainer:
        raise UserError(
            "Expected local.clip or local.trainer.gradient_clip_val, got both: leave one of them out.",
            code="either-or", settings=("local.clip", "local.trainer.gradient_clip_val"),
        )  # fmt: skip


def _check_evaluation(config: ExperimentSettings) -> None:
    """Who is visited, and which metrics are named."""
    from archipelago.core.metrics import METRICS
    from archipelago.core.torch_metrics import TorchMetric
    from archipelago.data.drift import events_of

    for event in events_of(config.data):
        if event.round > config.rounds:
            raise UserError(
                f"Expected the events of data.drift by round {config.rounds} (rounds), got '{event.kind}' before round "
                f"{event.round}: it would never happen.",
                code="never-happens", setting="data.drift", kind=event.kind, round=event.round,
            )  # fmt: skip
    wanted = config.evaluation.clients
    if wanted is not None and wanted >= 1 and (wanted != int(wanted) or wanted > config.clients):
        raise UserError(
            f"Expected evaluation.clients to be a share below 1 or a number of clients up to clients={config.clients}, "
            f"got {wanted:g}.",
            code="out-of-range", setting="evaluation.clients", given=wanted,
        )  # fmt: skip
    entries = METRICS.listed(config.evaluation.metrics, "evaluation.metrics")
    classes = {each.value.name for each in entries if isinstance(each.value, TorchMetric)}
    for name in config.evaluation.metric_options:
        if name not in classes:
            raise UserError(
                f"Expected a class of that name in evaluation.metrics beside evaluation.metric_options.{name}, got "
                f"evaluation.metrics=[{','.join(config.evaluation.metrics)}], with which nobody reads it: omit it.",
                code="unread", setting=f"evaluation.metric_options.{name}",
            )  # fmt: skip


def _check_metrics(config: ExperimentSettings, classes: int | None) -> None:
    """Whether the metrics that are named give a number for this data."""
    from archipelago.core.metrics import METRICS
    from archipelago.core.torch_metrics import TorchMetric

    for name in config.evaluation.metrics:
        metric = METRICS.find(name)
        if isinstance(metric, TorchMetric):
            metric.check(classes, config.evaluation.metric_options.get(metric.name, {}))


def check_network(config: ExperimentSettings, input_shape: tuple[int, ...], classes: int | None) -> None:
    """Refuse a network that cannot take the data's samples, before anything is started or written."""
    from lightning_modules.augmentations import check_augmentations
    from lightning_modules.checks import check_module, check_size

    check_settings_of_methods(config, [], outputs=classes or 1)
    check_augmentations(config.local, input_shape)
    _check_metrics(config, classes)
    if config.local.label_smoothing and classes is None:
        raise UserError(
            f"Expected data with classes for local.label_smoothing={config.local.label_smoothing:g}, got a regression: "
            "leave it out.",
            code="needs-classes", setting="local.label_smoothing",
        )  # fmt: skip
    if config.model.target is not None:
        check_module(config, input_shape, classes)
        return
    import torch

    from lightning_modules.networks import build_network
    from lightning_modules.networks_base import default_network

    if config.model.name == "auto":
        refuse_unread(config, default_network(input_shape, classes))
    with torch.device("meta"):  # shapes alone: no memory, no random draw
        network = build_network(config.model, input_shape, classes)
    check_size(sum(each.numel() for each in network.parameters()))
    if config.model.head:
        from lightning_modules.base import checked_head

        checked_head(network, config.model.head)
