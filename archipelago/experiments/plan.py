"""From a config and its federation to what the actors need to know."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np

from actors.participation import attackers, held_out, selected
from actors.plan import Plan
from actors.records import compared_rounds
from actors.requests import BlockSetup, ClientSamples
from actors.server import JUDGED
from actors.server_setup import ServerSetup, ServerStage
from archipelago.core.errors import UserError
from archipelago.core.settings import ExperimentSettings
from archipelago.data import Federation
from archipelago.data.division import ClientData
from archipelago.experiments.checks import listener_sections, options
from archipelago.runs.storage import is_address, join
from archipelago.strategies import expand, parts_of
from archipelago.strategies.attacks import ATTACKS


def make_plan(config: ExperimentSettings, federation: Federation) -> Plan:
    """What the actors need to know of an experiment."""
    held = held_out(config.clients, config.holdout_clients, config.seed)
    population = np.setdiff1d(np.arange(config.clients), held)
    attacking = attackers(population, config.participation.attackers, config.seed)
    _check_attack(config, federation, attacking)
    server = _server(config, federation, attacking)
    block = _block(config, federation, len(population), attacking)
    clients = [_samples_of(federation, number) for number in range(len(federation.clients))]
    members = expand(list(config.ensemble)) if config.ensemble else [config.method]
    passes = config.clusters * sum(parts_of(name)[0].value.compares_models for name in members)
    return Plan(server, block, config.fleet, clients, federation.x, federation.y, run_title(config), passes)


def _server(config: ExperimentSettings, federation: Federation, attacking: Any) -> ServerSetup:
    """What the server needs to know."""
    return ServerSetup(
        method=config.method,
        ensemble=list(config.ensemble),
        combine=config.combine,
        options=_options_of_algorithms(config),
        clients=config.clients,
        holdout_clients=config.holdout_clients,
        clusters=config.clusters,
        rounds=config.rounds,
        seed=config.seed,
        weights=config.weights,
        participation=config.participation,
        evaluation=config.evaluation,
        sizes=np.asarray(federation.sizes, np.int64),
        groups=federation.groups,
        one_class=federation.one_class,
        label_counts=federation.label_counts(JUDGED),
        levels=federation.levels if federation.drift is None else None,  # which are of the first round
        distributions=len(federation.holdout),
        has_validation=any(len(client.validation) for client in federation.clients),
        not_finite=config.not_finite,
        local=config.local,
        aggregation=config.aggregation,
        server=config.server,
        update=config.update,
        attack=config.attack,
        attackers=tuple(attacking.tolist()),
        compared_rounds=compared_rounds(config.rounds, config.records.rounds),
        compared_clients=config.records.clients,
        plugins=tuple(config.plugins),
        partition_seed=config.partition.seed,
        stages=_stages_of(federation),
        adoption=config.adoption,
    )


def _block(config: ExperimentSettings, federation: Federation, population: int, attacking: Any) -> BlockSetup:
    """What every block of clients needs to know."""
    return BlockSetup(
        seed=config.seed,
        model=config.model,
        local=config.local,
        evaluation=config.evaluation,
        input_shape=federation.input_shape,
        classes=federation.classes,
        mean=np.asarray(federation.mean, np.float32),
        std=np.asarray(federation.std, np.float32),
        precision=config.precision,
        determinism=config.determinism,
        holdout=federation.holdout,
        plugins=tuple(config.plugins),
        update=config.update,
        attack=config.attack,
        attackers=tuple(attacking.tolist()),
        participants=selected(config.participation, population),
    )


def _samples_of(federation: Federation, client: int) -> ClientSamples:
    """The samples of a client, and those of later rounds where they are others."""

    def of(held: ClientData, later: Any = ()) -> ClientSamples:
        return ClientSamples(
            np.asarray(held.train), np.asarray(held.validation), np.asarray(held.test), later
        )

    stages = () if federation.drift is None else federation.drift.stages[1:]
    later = tuple((stage.round, of(stage.clients[client])) for stage in stages)
    return of(federation.clients[client], later)


def _stages_of(federation: Federation) -> tuple[ServerStage, ...]:
    """What the server knows of data that changes."""
    stages = () if federation.drift is None else federation.drift.stages
    return tuple(
        ServerStage(
            each.round, each.sizes, each.groups, each.present, federation.label_counts(JUDGED, each.clients)
        )
        for each in stages
    )


def _check_attack(config: ExperimentSettings, federation: Federation, attacking: Any) -> None:
    """Refuse other labels where there are none, or where honest clients hold the same samples."""
    if not len(attacking) or not ATTACKS.find(config.attack.name).relabels:
        return
    if federation.classes is None:
        raise UserError(
            f"Expected data with classes for attack={config.attack.name}, got a regression: choose another attack.",
            code="needs-classes", setting="attack",
        )  # fmt: skip
    held = np.zeros(len(federation.y), np.int64)
    for client in federation.clients:
        for part in (client.train, client.validation, client.test):
            held[part] += 1
    if any((held[federation.clients[i].train] > 1).any() for i in attacking):
        raise UserError(
            f"Expected attackers with samples of their own for attack={config.attack.name}, got "
            f"partition={config.partition.name}, which gives some samples to several clients: choose another one.",
            code="shared-samples", setting="attack",
        )  # fmt: skip


def _options_of_algorithms(config: ExperimentSettings) -> dict[str, Any]:
    """Callbacks and loggers live in the driver: their options, of classes that actors may not have, stay there."""
    listeners = listener_sections()
    return {name: section for name, section in options(config).items() if name not in listeners}


def method_name(config: ExperimentSettings) -> str:
    """The method, or the members of an ensemble, as a name that a folder can have."""
    return "-and-".join(config.ensemble).replace("*", "x") if config.ensemble else config.method


def run_title(config: ExperimentSettings) -> str:
    """What a run is called where somebody watches many: `ifca-digits-seed0`."""
    drawn_by = "" if config.partition.seed is None else f"-partition{config.partition.seed}"
    return f"{method_name(config)}-{config.data.name}{drawn_by}-seed{config.seed}"


def run_address(config: ExperimentSettings) -> str:
    """Where a new run goes: `storage/name`, with a name made up from the config if none was given."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    name = config.name or f"{run_title(config)}-{stamp}"
    return join(config.storage, name)


def run_path(config: ExperimentSettings) -> Path:
    """The folder of a new run; an object store has none."""
    if is_address(config.storage):
        raise UserError(
            f"Expected storage to be a folder, got the address '{config.storage}': the command line writes runs to "
            "addresses, and run_experiment to the folder that it is given.",
            code="not-a-folder", storage=config.storage,
        )  # fmt: skip
    return Path(run_address(config))
