"""From a config and its federation to what the actors need to know."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np

from actors.records import compared_rounds
from actors.requests import BlockSetup, ClientSamples
from actors.server import ServerSetup
from actors.session import Plan
from archipelago.core.errors import UserError
from archipelago.core.settings import ExperimentSettings
from archipelago.data import Federation
from archipelago.experiments.checks import listener_sections, options
from archipelago.runs.storage import is_address, join
from archipelago.strategies import expand, parts_of


def make_plan(config: ExperimentSettings, federation: Federation) -> Plan:
    """What the actors need to know of an experiment."""
    server = ServerSetup(
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
        levels=federation.levels,
        distributions=len(federation.holdout),
        has_validation=any(len(client.validation) for client in federation.clients),
        not_finite=config.not_finite,
        local=config.local,
        aggregation=config.aggregation,
        compared_rounds=compared_rounds(config.rounds, config.records.rounds),
        compared_clients=config.records.clients,
        plugins=tuple(config.plugins),
    )
    block = BlockSetup(
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
    )
    clients = [
        ClientSamples(np.asarray(c.train), np.asarray(c.validation), np.asarray(c.test))
        for c in federation.clients
    ]
    members = expand(list(config.ensemble)) if config.ensemble else [config.method]
    passes = config.clusters * sum(parts_of(name)[0].value.compares_models for name in members)
    return Plan(server, block, config.fleet, clients, federation.x, federation.y, run_title(config), passes)


def _options_of_algorithms(config: ExperimentSettings) -> dict[str, Any]:
    """Callbacks and loggers live in the driver: their options, of classes that actors may not have, stay there."""
    listeners = listener_sections()
    return {name: section for name, section in options(config).items() if name not in listeners}


def method_name(config: ExperimentSettings) -> str:
    """The method, or the members of an ensemble, as a name that a folder can have."""
    return "-and-".join(config.ensemble).replace("*", "x") if config.ensemble else config.method


def run_title(config: ExperimentSettings) -> str:
    """What a run is called where somebody watches many: `ifca-digits-seed0`."""
    return f"{method_name(config)}-{config.data.name}-seed{config.seed}"


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
            "addresses, and run_experiment to the folder that it is given."
        )
    return Path(run_address(config))
