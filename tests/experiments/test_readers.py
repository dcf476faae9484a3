"""Settings that nobody reads are refused with the sentence that names who would read them."""

from __future__ import annotations

from pathlib import Path

import pytest

from archipelago.core.registry import REGISTRIES
from archipelago.core.schema import leaves
from archipelago.experiments.config import (
    check_network,
    config_from_yaml,
    config_to_yaml,
    full_schema,
    load_config,
)
from archipelago.experiments.readers import ALWAYS, CHOSEN_BY, OF_DATA_SETS, OF_METHODS, reader_of, unread
from archipelago.sweeps.config import load_sweep
from tests.support.errors import refused


@pytest.mark.parametrize(
    ("given", "reader"),
    [
        (["partition.alpha=0.01"], "dirichlet"),
        (["partition=dirichlet", "partition.groups=3"], "cluster_dirichlet"),
        (["model=cnn_digits", "model.hidden=[8]"], "model=mlp"),
        (["model.target=tests.support.modules.ForeignModule", "model.hidden=[8]"], "model=mlp"),
        (["method=fedavg", "aggregation.trim=0.3"], "aggregation=trimmed_mean"),
        (["aggregation=median", "aggregation.trim=0.3"], "aggregation=trimmed_mean"),
        (["local.optimizer=adam", "local.momentum=0.5"], "local.optimizer=sgd"),
        (["data.dimension=3"], "data=synthetic"),
        (["data=digits", "data.sources=7"], "data=synthetic"),
        (["data.noise_shift=0.4"], "data.noises > 1"),
        (["data.crossed=true"], "data.rotations > 1 or data.label_swaps > 1"),
        (["combine=vote"], "ensemble=[...]"),
        (["method=ifca", "ifca.noise=0.5"], "ifca.init=perturbed"),
        (["method=ifca", "ifca.init=perturbed", "ifca.balance=0.05"], "ifca.init=balanced"),
        (["method=robust", "robust.centre=median", "robust.centre_trim=0.1"], "robust.centre=trimmed_mean"),
        (["method=fesem", "trimmed_kmeans.trim=0.1"], "fesem.clustering=trimmed_kmeans"),
        (["records.rounds=0", "records.clients=30"], "records.rounds > 0"),
        (["records.rounds=0", "records.tsne=true"], "records.rounds > 0"),
        (["fleet.backend=in_process", "fleet.restarts=7"], "fleet.backend=ray"),
        (["fleet.backend=in_process", "fleet.copies=false"], "fleet.backend=ray"),
        (["method=fedsgd", "local.momentum=0.5"], "clients take steps"),
        (["method=fedsgd", "local.clip=1.0"], "clients take steps"),
        (["method=local", "participation.attackers=0.2"], "clients send models"),
        (["method=local", "weights=uniform"], "clients send models"),
        (["method=local", "aggregation.name=median"], "clients send models"),
        (["data=digits", "data.mapped=yes"], "image_folder"),
        (["data=digits", "data.cache=there"], "image_folder"),
        (["data=digits", "data.download=true"], "cifar10"),
        (["data=npz", "data.test_fraction=0.3"], "digits"),
    ],
)
def test_unread_setting_is_refused_with_its_readers(given: list[str], reader: str) -> None:
    with refused("unread") as caught:
        load_config(None, given)
    key, _, _ = given[-1].partition("=")
    assert f"beside {key}=" in str(caught.value) and reader in str(caught.value)


@pytest.mark.parametrize(
    "given",
    [
        ["partition=dirichlet", "partition.alpha=0.01"],
        ["model=mlp", "model.hidden=[8]"],
        ["aggregation=trimmed_mean", "aggregation.trim=0.3"],
        ["local.momentum=0.5"],
        ["local.optimizer=adam", "local.momentum=0.9"],  # its default says nothing
        ["model.target=tests.support.modules.ForeignModule", "local.optimizer=adam", "local.momentum=0.5"],
        ["data.noises=2", "data.noise_shift=0.4"],
        ["data.colours=2", "data.crossed=true"],
        ["ensemble=[fedavg,ifca]", "combine=vote"],
        ["method=ifca", "ifca.init=perturbed", "ifca.noise=0.5"],
        ["method=fesem", "fesem.clustering=trimmed_kmeans", "trimmed_kmeans.trim=0.1"],
        ["method=local", "attack=label_flip", "participation.attackers=0.2"],
        ["ensemble=[local,fedavg]", "weights=uniform"],
        ["data=cifar10", "data.mapped=yes", "data.download=true"],
        [
            "method=fedsgd",
            "local.batch=7",
            "participation.stragglers=0.5",
        ],  # costs are multiples of such a training
        ["model.hidden=[8]"],  # the data will say what model=auto means
    ],
)
def test_read_setting_is_taken_and_survives_its_yaml(given: list[str]) -> None:
    config = load_config(None, given)
    assert not list(unread(config))
    assert config_from_yaml(config_to_yaml(config)) == config


def test_unread_setting_of_a_network_that_the_data_chose_is_refused() -> None:
    config = load_config(None, ["model.hidden=[8]"])
    with refused("unread", setting="model.hidden", says="model=mlp"):
        check_network(config, (3, 32, 32), 10)


def test_unread_setting_of_a_file_goes_where_an_override_took_its_reader(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("partition: {name: dirichlet, alpha: 0.01}\n")
    assert load_config(file).partition.alpha == 0.01
    default = leaves(full_schema())["partition.alpha"].default
    assert load_config(file, ["partition=iid"]).partition.alpha == default
    with refused("unread", setting="partition.alpha", says="partition.alpha=0.2"):
        load_config(file, ["partition=iid", "partition.alpha=0.2"])
    file.write_text("partition: {name: iid, alpha: 0.01}\n")
    with refused("unread", setting="partition.alpha"):
        load_config(file)


def test_sweep_settings_need_one_reader_among_the_combinations() -> None:
    def sweep(*given: str):  # type: ignore[no-untyped-def]
        return load_sweep(None, [*given, "partition.alpha=0.01"])

    found = sweep("sweep.partitions=[iid,dirichlet]")
    assert {c.partition.name: c.partition.alpha for c in found.combinations.values()} == {
        "dirichlet": 0.01,
        "iid": leaves(full_schema())["partition.alpha"].default,
    }
    with refused("unread", setting="partition.alpha"):
        sweep("sweep.seeds=[0,1]")
    with refused("unread", setting="sweep.samples", says=("sweep.sampler=", "sweep.samples=7")):
        load_sweep(None, ["sweep.seeds=[0,1]", "sweep.samples=7"])


def test_every_setting_declares_who_reads_it() -> None:
    known = leaves(full_schema())
    assert [leaf.key for leaf in known.values() if reader_of(leaf) is None] == []
    assert {*ALWAYS, *OF_DATA_SETS} <= set(known)  # and no name there is one of a setting that is gone
    assert {key for key in OF_METHODS if "." in key} <= set(known)


def test_every_option_of_a_common_section_has_a_reader_that_can_be_chosen() -> None:
    full_schema()
    sections = {registry.section for registry in REGISTRIES.values() if registry.section is not None}
    common = {kind: key for kind, key in CHOSEN_BY.items() if REGISTRIES[kind].section is not None}
    assert sections == {key.partition(".")[0] for key in common.values()} | {"local"}
    known = leaves(full_schema())
    for leaf in known.values():
        for name in leaf.metadata.get("read_with", {}):
            assert name in known or f"{leaf.key.rpartition('.')[0]}.{name}" in known, leaf.key
