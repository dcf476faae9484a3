"""The schema, how sources merge into it, and how it goes to YAML and back."""

from __future__ import annotations

import dataclasses
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from archipelago.core.errors import UserError
from archipelago.core.settings import ExperimentSettings
from archipelago.experiments import checks
from archipelago.experiments import config as module
from archipelago.experiments.config import (
    check,
    check_network,
    config_from_yaml,
    config_to_yaml,
    full_schema,
    leaves,
    load_config,
    options,
)
from archipelago.strategies import METHODS
from lightning_modules.engines import default_engine
from tests.support.errors import refused


def sentence(*overrides: str, file: Path | None = None, env: dict[str, str] | None = None) -> str:
    with pytest.raises(UserError) as caught:
        load_config(file, overrides, env={} if env is None else env)
    text = str(caught.value)
    assert "\n" not in text
    assert "omegaconf" not in text.lower()
    return text


def yaml_file(folder: Path, text: str) -> Path:
    path = folder / "experiment.yaml"
    path.write_text(text)
    return path


# The schema


def test_defaults_are_the_schema_and_nothing_else() -> None:
    config = load_config(env={})
    assert config == full_schema()()
    core, whole = leaves(ExperimentSettings), leaves(full_schema())
    assert set(core) < set(whole)  # entries add options
    assert all(whole[key].default == leaf.default for key, leaf in core.items())


def test_setting_of_an_earlier_version_is_taken_by_its_new_name(tmp_path: Path) -> None:
    assert load_config(overrides=["local.executor=trainer"], env={}).local.engine == "trainer"
    assert load_config(yaml_file(tmp_path, "local: {executor: trainer}"), env={}).local.engine == "trainer"


def test_every_default_lies_in_its_own_range_and_is_explained() -> None:
    for leaf in leaves(full_schema()).values():
        assert leaf.allows(leaf.default), leaf.key
        assert leaf.about, leaf.key


def test_methods_with_options_have_a_section_of_their_own_type() -> None:
    config = load_config(overrides=["method=fedprox", "fedprox.mu=0.25"], env={})
    section = options(config)["fedprox"]
    assert type(section) is METHODS.find("fedprox").Options
    assert section.mu == 0.25
    assert "fedavg" not in options(config)  # no options, no section


def test_method_registered_later_gets_its_section(monkeypatch: pytest.MonkeyPatch) -> None:
    from archipelago.core.settings import setting

    @dataclasses.dataclass
    class Options:
        depth: int = setting(2, "levels", at_least=1)

    class Later(METHODS.find("fedavg")):  # type: ignore[misc]  # the base is known at run time only
        pass

    Later.Options = Options
    monkeypatch.setattr(METHODS, "_entries", dict(METHODS._entries))
    METHODS.register("later", "registered in a test")(Later)
    assert options(load_config(overrides=["method=later", "later.depth=3"], env={}))["later"].depth == 3
    assert "Expected later.depth >= 1, got 0" in sentence("method=later", "later.depth=0")


def test_section_may_not_take_the_name_of_a_core_section(monkeypatch: pytest.MonkeyPatch) -> None:
    class Clash(METHODS.find("fedprox")):  # type: ignore[misc]  # the base is known at run time only
        pass

    monkeypatch.setattr(METHODS, "_entries", {})
    METHODS.register("local", "a clash")(Clash)
    with pytest.raises(ValueError, match="section of every experiment"):
        full_schema()


def test_config_can_be_pickled() -> None:
    config = load_config(overrides=["method=fedprox", "fedprox.mu=0.5"], env={})
    copy = pickle.loads(pickle.dumps(config))
    assert copy == config
    assert type(copy) is type(config) is module.full_schema()
    assert pickle.loads(pickle.dumps(config.data)) == config.data


# Merging


def test_overrides_win_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    path = yaml_file(tmp_path, "rounds: 7\nlocal:\n  lr: 1e-3\n  batch: 8\n")
    config = load_config(path, ["local.batch=16"], env={})
    assert (config.rounds, config.local.lr, config.local.batch, config.clients) == (7, 1e-3, 16, 20)


@pytest.mark.parametrize("section", ["data: synthetic", "data: {name: synthetic}", "data.name: synthetic"])
def test_name_alone_is_short_for_its_section(section: str, tmp_path: Path) -> None:
    assert load_config(yaml_file(tmp_path, section), env={}).data.name == "synthetic"
    assert load_config(overrides=["data=synthetic", "data.samples=50"], env={}).data.samples == 50


def test_text_is_taken_as_it_was_typed() -> None:
    config = load_config(overrides=["name=1e3", "storage=on"], env={})
    assert (config.name, config.storage) == ("1e3", "on")
    assert load_config(overrides=["name=null"], env={}).name is None


def test_lists_optional_numbers_and_truth_values() -> None:
    config = load_config(
        overrides=["model.hidden=[32,16]", "local.epochs=2", "evaluation.train=yes", "local.lr=1e-2"], env={}
    )
    assert config.model.hidden == [32, 16]
    assert config.local.epochs == 2
    assert config.evaluation.train is True
    assert config.local.lr == 0.01
    assert load_config(overrides=["model.hidden=[]"], env={}).model.hidden == []


TIMER = "lightning.pytorch.callbacks.Timer"


def test_free_section_takes_any_name(tmp_path: Path) -> None:
    path = yaml_file(
        tmp_path,
        "local:\n  executor: trainer\n"
        f"  trainer: {{precision: 64, callbacks: [{TIMER}], max_time: {{hours: 1}}}}\n",
    )
    more = ["local.trainer.precision=bf16-mixed", "local.trainer.limit_train_batches=0.5"]
    config = load_config(path, more, env={})
    assert config.local.trainer == {
        "precision": "bf16-mixed", "callbacks": [TIMER], "max_time": {"hours": 1}, "limit_train_batches": 0.5
    }  # fmt: skip
    assert config_from_yaml(config_to_yaml(config)) == config
    assert "Expected local.trainer to be a section of its own" in sentence("local.trainer=5")
    assert "Expected local.engine=trainer" in sentence("local.trainer.precision=64")


def test_same_override_twice_is_no_mistake() -> None:
    assert load_config(overrides=["rounds=3", "rounds=3"], env={}).rounds == 3


def test_override_replaces_the_files_other_way_of_saying_it(tmp_path: Path) -> None:
    path = yaml_file(tmp_path, "local: {steps: 20}\nfleet: {actors: 3}\n")
    config = load_config(path, ["local.epochs=2", "fleet.clients_per_actor=1"], env={})
    assert (config.local.epochs, config.local.steps) == (2, 10)
    assert (config.fleet.actors, config.fleet.clients_per_actor) == (None, 1)
    path = yaml_file(tmp_path, "local: {epochs: 2}\n")
    assert load_config(path, ["local.steps=5"], env={}).local.epochs is None


def test_override_of_the_method_leaves_the_files_options_behind(tmp_path: Path) -> None:
    path = yaml_file(tmp_path, "method: fedprox\nfedprox: {mu: 0.1}\n")
    assert load_config(path, env={}).fedprox.mu == 0.1  # type: ignore[attr-defined]  # a section made at run time
    assert load_config(path, ["method=ifca"], env={}).fedprox.mu == 0.95  # type: ignore[attr-defined]  # as above
    assert "got fedprox.mu=1" in sentence("method=ifca", "fedprox.mu=1", file=path)
    path = yaml_file(tmp_path, "method: ifca\nfedprox: {mu: 0.1}\n")
    assert "options of the method 'ifca'" in sentence(file=path)
    assert "options of the method 'fedavg'" in sentence("method=fedavg", file=path)
    assert load_config(path, ["method=fedprox"], env={}).fedprox.mu == 0.1  # type: ignore[attr-defined]  # as above


def test_ensemble_stands_for_the_method(tmp_path: Path) -> None:
    with refused("either-or", settings=("method", "ensemble")):
        load_config(overrides=["method=ifca", "ensemble=[fedavg,ifca]"], env={})
    with refused("wrong-type", setting="ensemble", given="fedavg"):
        load_config(overrides=["ensemble=fedavg"], env={})
    with refused("unknown-name", kind="method", name="fedvag", nearest="fedavg"):
        load_config(overrides=["ensemble=[fedvag,ifca]"], env={})
    path = yaml_file(tmp_path, "ensemble: [fedavg, fedprox]\nfedprox: {mu: 0.1}\n")
    assert load_config(path, env={}).ensemble == ["fedavg", "fedprox"]
    config = load_config(path, ["method=fedavg"], env={})
    assert (config.method, config.ensemble) == ("fedavg", [])


def test_values_may_refer_to_settings_and_to_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RESULTS", str(tmp_path))
    config = load_config(
        overrides=["clients=6", "fleet.actors=${clients}", "storage=${oc.env:RESULTS}/runs"], env={}
    )
    assert config.fleet.actors == 6
    assert config.storage == f"{tmp_path}/runs"
    assert "rounds='${nope}'" in sentence("rounds=${nope}")
    assert "rounds='${oc.env:NOT_SET_ANYWHERE}'" in sentence("rounds=${oc.env:NOT_SET_ANYWHERE}")
    assert "rounds='${method}'" in sentence("rounds=${method}")
    assert "Expected local.steps >= 1" in sentence("local.steps=${seed}")
    assert "'${'" in sentence(r"storage=\${a}")


# Sentences


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("lr=0.1", "local.lr"), ("local.learning_rate=0.1", "local.lr"), ("learning_rate=0.1", "local.lr"),
        ("local.btach=3", "local.batch"), ("batch_size=8", "local.batch"), ("epochs=2", "local.epochs"),
        ("alpha=1", "partition.alpha"), ("round=3", "rounds"), ("num_clients=3", "clients"),
        ("balance=1", "ifca.balance"), ("gpus=1", "fleet.gpus"), ("data.rotation=4", "data.rotations"),
        ("K=3", "clusters"), ("n_clusters=4", "clusters"), ("momentum=0", "local.momentum"),
        ("Rounds=3", "rounds"),
    ],
)  # fmt: skip
def test_nearest_key_is_named_in_full(given: str, meant: str) -> None:
    with refused("unknown-setting", setting=given.partition("=")[0], nearest=meant):
        load_config(overrides=[given], env={})


def test_key_like_nothing_else_is_sent_to_the_list() -> None:
    with refused("unknown-setting", nearest=None):
        load_config(overrides=["qqqqqqqq=1"], env={})
    assert "list settings" in sentence("qqqqqqqq=1")


def test_both_values_and_the_meaning_are_in_the_sentence() -> None:
    assert sentence("local.lr=-1") == "Expected local.lr > 0, got -1 (learning rate; default 0.05)."
    assert "Expected 0 < participation.fraction <= 1, got 1.5" in sentence("participation.fraction=1.5")
    assert "Expected every number of model.hidden >= 1, got [8,0]" in sentence("model.hidden=[8,0]")


def test_mistake_in_a_file_names_the_file(tmp_path: Path) -> None:
    path = yaml_file(tmp_path, "local: {lr: -1}\n")
    assert f"got -1 in '{path}'" in sentence(file=path)
    path = yaml_file(tmp_path, "local: {lrr: 1}\n")
    assert f"'local.lrr' in '{path}'. Did you mean 'local.lr'?" in sentence(file=path)
    path = yaml_file(tmp_path, "a: 1\nb: [\n")
    assert "line 3" in sentence(file=path)


def leaf_mistakes() -> list[tuple[str, str]]:
    """For every setting of the schema: a value of another type, and one beyond each end of its range."""
    found = []
    for leaf in leaves(full_schema()).values():
        prefix = (
            [f"method={leaf.key.split('.')[0]}"]
            if leaf.key.split(".")[0] in METHODS.keys() - {"local"}
            else []
        )
        if leaf.many:
            wrong: list[Any] = [
                "seven",
                *([] if leaf.key == "model.head" else ["[x]"]),
            ]  # any name may be one
        elif leaf.type in (int, float):
            wrong = ["seven", "[1]", "true", ".nan", ".inf", "{a: 1}"]
        else:
            wrong = ["7"] if leaf.type is bool else []
        limits = leaf.metadata
        if not leaf.many:
            step = 1 if leaf.type is int else 1e-3
            wrong += [limits[name] for name in ("above", "below") if name in limits]
            wrong += [limits["at_least"] - step] if "at_least" in limits else []
            wrong += [limits["at_most"] + step] if "at_most" in limits else []
            wrong += ["none-of-these"] if "choices" in limits else []
        found += [(" ".join([*prefix, f"{leaf.key}={value}"]), leaf.key) for value in wrong]
    return [(text, key) for text, key in found if "." in key or key not in ("storage", "name", "method")]


def test_every_setting_refuses_what_it_cannot_be() -> None:
    mistakes = leaf_mistakes()
    assert len(mistakes) > 150
    for text, key in mistakes:
        overrides = text.split(" ", 1) if text.startswith("method=") else [text]
        assert key in sentence(*overrides), text


# YAML


def test_yaml_round_trip_and_the_file_is_a_valid_config(tmp_path: Path) -> None:
    for overrides in (
        [],
        ["method=fedprox", "fedprox.mu=1e-5", "local.epochs=3"],
        ["method=fedprox", "fleet.clients_per_actor=1", "name=1e3", "model.hidden=[]", "storage=off"],
        ["ensemble=[fedavg,fedprox]", "fedprox.mu=0.5", "combine=vote"],
        ["ensemble=[fedavg*3]"],
    ):
        config = load_config(overrides=overrides, env={})
        text = config_to_yaml(config)
        assert config_from_yaml(text) == config
        assert load_config(yaml_file(tmp_path, text), env={}) == config


def test_yaml_shows_every_setting_in_force_and_no_section_of_other_methods() -> None:
    text = config_to_yaml(load_config(overrides=["method=ifca", "local.epochs=2"], env={}))
    assert "fedprox" not in text
    assert "steps" not in text
    assert "momentum: 0.9" in text


def test_yaml_keeps_what_only_code_can_ask_for() -> None:
    config = load_config(env={})
    config.local.epochs, config.local.steps = 2, 7
    config.fedprox.mu = 0.5  # type: ignore[attr-defined]  # a section made at run time
    assert config_from_yaml(config_to_yaml(config)) == config


@settings(max_examples=25, deadline=None)
@given(
    name=st.none() | st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._+=@-]{0,20}", fullmatch=True),
    storage=st.text(
        st.characters(codec="utf-8", exclude_categories=("Cc", "Cs", "Zl", "Zp")), min_size=1, max_size=12
    ),
    lr=st.floats(min_value=1e-300, max_value=1e300, exclude_min=True),
    seed=st.integers(min_value=0, max_value=2**80),
    epochs=st.none() | st.integers(1, 9),
    hidden=st.lists(st.integers(1, 999), max_size=3),
)
def test_yaml_round_trip_is_exact(
    name: str | None, storage: str, lr: float, seed: int, epochs: int | None, hidden: list[int]
) -> None:
    if "${" in storage or storage == "???":
        return  # refused by load_config, so no config holds it
    config = full_schema()()
    config.name, config.storage, config.seed = name, storage, seed
    config.local.lr, config.local.epochs, config.model.hidden = lr, epochs, hidden
    copy = config_from_yaml(config_to_yaml(config))
    assert copy == config
    assert math.copysign(1, copy.local.lr) == 1


def test_damaged_config_file_is_a_sentence() -> None:
    damaged = {
        "": "empty-file", "- 1": "not-settings", "a: [": "not-yaml", "rounds: -1": "out-of-range",
        "what: 1": "unknown-setting", "!!python/object/apply:os.system ['true']": "not-settings",
    }  # fmt: skip
    for text, code in damaged.items():
        with refused(code, says="config.yaml"):
            config_from_yaml(text)


# fleet.gpus=auto, precision


def test_gpus_auto_is_the_default_and_is_written_as_auto(tmp_path: Path) -> None:
    for overrides in ([], ["fleet.gpus=auto"], {"fleet": {"gpus": "auto"}}, {"fleet": {"gpus": None}}):
        config = load_config(overrides=overrides, env={})
        assert config.fleet.gpus is None
        assert "gpus: auto" in config_to_yaml(config)
        assert config_from_yaml(config_to_yaml(config)) == config
    file = tmp_path / "file.yaml"
    file.write_text("fleet:\n  gpus: auto\n")
    assert load_config(file, env={}).fleet.gpus is None
    assert leaves(ExperimentSettings)["fleet.gpus"].shown_default == "auto"


def test_gpus_as_a_number_keep_their_meaning(tmp_path: Path) -> None:
    cluster = {"RAY_ADDRESS": "head:6379"}
    file = tmp_path / "file.yaml"
    file.write_text("fleet:\n  gpus: 0.25\n")
    assert load_config(file, env=cluster).fleet.gpus == 0.25
    assert load_config(file, ["fleet.gpus=auto"], env=cluster).fleet.gpus is None
    assert load_config(overrides={"fleet": {"gpus": 0.25}}, env=cluster).fleet.gpus == 0.25
    found = load_config(overrides={"fleet": {"gpus": 1}}, env=cluster).fleet.gpus
    assert found == 1.0 and isinstance(found, float)


def test_config_of_an_earlier_version_stays_on_the_cpu_and_has_32_bits() -> None:
    lines = config_to_yaml(load_config(overrides=["fleet.gpus=0"], env={})).splitlines()
    assert "  gpus: 0.0" in lines
    old = "\n".join(line for line in lines if not line.startswith(("precision", "determinism")))
    config = config_from_yaml(old)
    assert config.fleet.gpus == 0.0
    assert (config.precision, config.determinism) == ("32", "auto")


def test_precision_may_be_a_number_where_the_source_has_numbers(tmp_path: Path) -> None:
    file = tmp_path / "file.yaml"
    file.write_text("precision: 32\n")
    assert load_config(file, env={}).precision == "32"
    assert load_config(overrides={"precision": 32}, env={}).precision == "32"
    assert load_config(overrides=["precision=32"], env={}).precision == "32"
    assert config_from_yaml(config_to_yaml(load_config(file, env={}))).precision == "32"


def test_precision_needs_a_gpu_or_an_engine_made_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "gpu_count", lambda: 0)
    assert "got tf32, which needs a GPU" in sentence("precision=tf32")
    assert "got bf16, which needs a GPU" in sentence(
        "precision=bf16", "fleet.gpus=0", env={"RAY_ADDRESS": "a:1"}
    )
    assert load_config(overrides=["precision=bf16"], env={"RAY_ADDRESS": "a:1"}).precision == "bf16"
    engine = default_engine("cuda")
    assert load_config(overrides=["precision=bf16", f"local.engine={engine}"], env={}).precision == "bf16"
    assert "got tf32" in sentence("precision=tf32", f"local.engine={engine}")
    monkeypatch.setattr(checks, "gpu_count", lambda: 1)
    assert load_config(overrides=["precision=tf32"], env={}).precision == "tf32"


# Combinations that depend on the machine


def test_gpus_are_refused_only_where_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "gpu_count", lambda: 0)
    assert "machine without a GPU, got 0.25" in sentence("fleet.gpus=0.25")
    assert "machine without a GPU" in sentence("fleet.gpus=0.25", env={"RAY_ADDRESS": "local"})
    assert "machine without a GPU" in sentence(
        "fleet.gpus=1", "fleet.backend=in_process", env={"RAY_ADDRESS": "head:6379"}
    )
    for overrides, env in (([], {"RAY_ADDRESS": "auto"}), (["fleet.address=head:6379"], {})):
        assert load_config(overrides=["fleet.gpus=0.25", *overrides], env=env).fleet.gpus == 0.25
    monkeypatch.setattr(checks, "gpu_count", lambda: 1)
    assert load_config(overrides=["fleet.gpus=1"], env={}).fleet.gpus == 1
    assert "Expected fleet.gpus <= 1, got 2" in sentence("fleet.gpus=2")


def test_ray_client_is_refused_before_anything_connects() -> None:
    for overrides, env in (
        (["fleet.address=ray://head:10001"], {}),
        ([], {"RAY_ADDRESS": "ray://head:10001"}),
    ):
        said = sentence(*overrides, env=env)
        assert "as host:port, got 'ray://head:10001'" in said and "ray job submit" in said
    env = {"RAY_ADDRESS": "ray://head:10001"}
    assert load_config(overrides=["fleet.backend=in_process"], env=env).fleet.backend == "in_process"


def test_clusters_count_only_for_clustered_methods() -> None:
    assert "got clusters=5 and clients=4" in sentence("method=ifca", "clients=4", "clusters=5")
    assert load_config(overrides=["method=fedavg", "clients=2", "clusters=5"], env={}).clients == 2


def test_storage_of_a_ray_job_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work = tmp_path / "session" / "runtime_resources" / "working_dir_files" / "_ray_pkg_1"
    work.mkdir(parents=True)
    monkeypatch.chdir(work)
    assert "which Ray deletes" in sentence()
    stays = tmp_path / "stays"
    assert load_config(overrides=[f"storage={stays}"], env={}).storage == str(stays)
    (work / "runs").symlink_to(tmp_path, target_is_directory=True)  # leads out of the copy
    assert load_config(env={}).storage == "runs"


def test_check_needs_no_source(tmp_path: Path) -> None:
    config = full_schema()()
    config.storage = str(tmp_path)
    check(config, env={})
    config.fleet.actors, config.fleet.clients_per_actor = 2, 3
    with refused("either-or"):
        check(config, env={})


def test_target_is_imported_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_modules.py").write_text(
        "import lightning\n\nclass Mine(lightning.LightningModule):\n    pass\n\nvalue = 3\n"
    )
    (tmp_path / "my_broken_module.py").write_text("raise RuntimeError('no licence')\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert load_config(overrides=["model.target=my_modules.Mine"], env={}).model.target == "my_modules.Mine"
    assert "my_modules.Yours" in sentence("model.target=my_modules.Yours")
    assert "my_modules.value" in sentence("model.target=my_modules.value")
    assert "RuntimeError: no licence" in sentence("model.target=my_broken_module.Mine")
    assert "package.module.Class" in sentence("model.target=Mine")
    assert "got both" in sentence("model=mlp", "model.target=my_modules.Mine")


def test_network_that_does_not_fit_the_samples_is_a_sentence() -> None:
    import torch

    from lightning_modules.networks import NETWORKS

    before = torch.get_rng_state()
    for name in NETWORKS:
        config = load_config(overrides=[f"model={name}"], env={})
        shape, classes = ((10,), None) if name == "linear_regression" else ((3, 84, 84), 10)
        check_network(config, shape, classes)
    check_network(load_config(env={}), (1, 8, 8), 10)
    with refused("unfit-data", model="cnn_cifar"):
        check_network(load_config(overrides=["model=cnn_cifar"], env={}), (10,), 4)
    assert torch.equal(torch.get_rng_state(), before)
