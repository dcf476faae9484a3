"""What a `sweep:` section means, and what is refused before anything is started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from archipelago.core.errors import UserError
from archipelago.experiments.config import layered, load_config, read_layers
from archipelago.sweeps.config import Sweep, load_sweep, sweep_from
from archipelago.sweeps.distributions import draw
from tests.support.errors import refused


def sweep_of(folder: Path, text: str, *overrides: str) -> Sweep:
    file = folder / "sweep.yaml"
    file.write_text(text)
    found = load_sweep(file, [f"storage={folder}", *overrides], env={})
    assert found is not None
    return found


def test_every_combination_of_every_axis_and_seed(tmp_path: Path) -> None:
    sweep = sweep_of(
        tmp_path, "sweep: {methods: [fedavg, ifca], partitions: [iid, dirichlet], seeds: [3, 5]}"
    )
    trials = sweep.trials()
    assert [(t.config.method, t.config.partition.name, t.seed) for t in trials] == [
        (method, partition, seed)
        for method in ("fedavg", "ifca")
        for partition in ("iid", "dirichlet")
        for seed in (3, 5)
    ]
    assert all(trial.config.seed == trial.seed for trial in trials)
    assert trials[2].group == "fedavg | dirichlet" and trials[2].name == "fedavg-dirichlet-seed3"
    assert len({trial.name for trial in trials}) == 8 and sweep.planned == 8


def test_seeds_are_trials_of_one_group(tmp_path: Path) -> None:
    trials = sweep_of(tmp_path, "sweep: {methods: [fedavg], grid: {local.lr: [0.1, 0.2]}, seeds: 3}").trials()
    groups: dict[str, list[int]] = {}
    for trial in trials:
        groups.setdefault(trial.group, []).append(trial.seed)
    assert groups == {"fedavg | local.lr=0.1": [0, 1, 2], "fedavg | local.lr=0.2": [0, 1, 2]}


def test_method_without_clusters_is_not_run_for_each_number_of_them(tmp_path: Path) -> None:
    text = """
    sweep:
      methods: [fedavg, ifca, {label: FedAvg+, ensemble: ["fedavg*{clusters}"]}]
      clusters: [5, 10]
    """
    trials = sweep_of(tmp_path, text).trials()
    assert [trial.group for trial in trials] == [
        "fedavg",
        "ifca | K=5",
        "ifca | K=10",
        "FedAvg+ | K=5",
        "FedAvg+ | K=10",
    ]
    assert [trial.config.ensemble for trial in trials[3:]] == [["fedavg*5"], ["fedavg*10"]]
    assert [trial.config.clusters for trial in trials[1:3]] == [5, 10]


@pytest.mark.parametrize(
    ("text", "overrides", "groups"),
    [
        ("method: fedavg", ["method=ifca"], ["K=2", "K=4"]),
        ("method: ifca", ["method=fedavg"], ["fedavg"]),
        ("", ["method=fedavg"], ["fedavg"]),
        ("", [], ["K=2", "K=4"]),
        ("ensemble: [fedavg*2]", [], ["[fedavg*2]"]),
        ('ensemble: ["fedavg*{clusters}"]', [], ["K=2", "K=4"]),
        ("method: ifca", ["ensemble=[fedavg*2]"], ["[fedavg*2]"]),
        ("ensemble: [fedavg*2]", ["method=ifca"], ["K=2", "K=4"]),
    ],
)
def test_whether_clusters_are_used_is_asked_of_the_methods_that_are_run(
    text: str, overrides: list[str], groups: list[str], tmp_path: Path
) -> None:
    trials = sweep_of(
        tmp_path, f"{text}\nclusters: 3\nclients: 20", "sweep.clusters=[2,4]", *overrides
    ).trials()
    assert [trial.group for trial in trials] == groups
    if len(groups) > 1:
        assert [trial.config.clusters for trial in trials] == [2, 4]


def test_settings_that_go_together(tmp_path: Path) -> None:
    text = """
    local: {lr: 0.5}
    sweep:
      data: [{data: digits, local.lr: 0.1}, {data: synthetic, model: linear}]
      methods: [{method: fedprox, fedprox.mu: 0.9}, fedavg]
    """
    trials = {trial.group: trial.config for trial in sweep_of(tmp_path, text).trials()}
    assert list(trials) == [
        f"{method} | {data}"
        for method in ("fedprox fedprox.mu=0.9", "fedavg")
        for data in ("digits local.lr=0.1", "synthetic model=linear")
    ]
    config: Any = trials["fedprox fedprox.mu=0.9 | synthetic model=linear"]
    assert (config.local.lr, config.model.name, config.fedprox.mu) == (0.5, "linear", 0.9)
    assert trials["fedavg | digits local.lr=0.1"].local.lr == 0.1


def test_options_in_the_file_reach_the_trials_of_their_method(tmp_path: Path) -> None:
    text = "fedprox: {mu: 0.7}\nsweep: {methods: [fedavg, fedprox]}"
    configs: list[Any] = [trial.config for trial in sweep_of(tmp_path, text).trials()]
    assert configs[1].fedprox.mu == 0.7
    with refused("unknown-setting", setting="ditto.weight", nearest="weights"):
        sweep_of(tmp_path, "ditto: {weight: 0.7}\nsweep: {methods: [fedavg, fedprox]}")


def test_options_of_methods_that_the_command_line_replaces_go_with_them(tmp_path: Path) -> None:
    methods = "[fedavg, fesem+cam, {ensemble: ['ifca+cam*{clusters}']}]"
    text = f"cam: {{lam: 0.5}}\nfesem: {{starts: 3}}\nsweep: {{methods: {methods}}}"
    assert sweep_of(tmp_path, text, "sweep.methods=[fedavg]").planned == 1
    config: Any = sweep_of(tmp_path, text, "sweep.methods=[fesem]").trials()[0].config
    assert config.fesem.starts == 3 and getattr(config.cam, "lam", None) != 0.5
    with refused("unread", setting="fesem.starts"):  # the command line says both
        sweep_of(tmp_path, text, "sweep.methods=[fedavg]", "fesem.starts=4")


def test_settings_of_local_training_are_not_options_of_the_method_local(tmp_path: Path) -> None:
    text = "local: {lr: 0.25, epochs: 3}\nsweep: {methods: [local, fedavg]}"
    found = {t.group: (t.config.local.lr, t.config.local.epochs) for t in sweep_of(tmp_path, text).trials()}
    assert found == {"local": (0.25, 3), "fedavg": (0.25, 3)}


def test_command_line_wins_and_can_be_all_there_is(tmp_path: Path) -> None:
    text = "rounds: 9\nsweep: {methods: [fedavg, ifca], seeds: [0, 1]}"
    sweep = sweep_of(tmp_path, text, "rounds=3", "sweep.seeds=[7]", "sweep.grid.local.lr=[0.1,0.2]")
    assert [(t.config.rounds, t.seed) for t in sweep.trials()] == [(3, 7)] * 4
    alone = load_sweep(None, ["method=fedavg", "sweep.seeds=2", f"storage={tmp_path}"], env={})
    assert alone is not None and [trial.name for trial in alone.trials()] == ["fedavg-seed0", "fedavg-seed1"]
    assert load_sweep(None, ["method=fedavg"], env={}) is None


def test_points_drawn_at_random_are_the_same_every_time(tmp_path: Path) -> None:
    text = """
    partition: {validation: 0.2}
    sweep: {methods: [fedavg, ifca], sampler: random, samples: 4, seeds: 2,
            sample: {local.lr: "loguniform(0.001, 1)", local.batch: "choice([16, 32])"}}
    """
    sweep, again = sweep_of(tmp_path, text), sweep_of(tmp_path, text)
    assert [trial.values for trial in sweep.trials()] == [trial.values for trial in again.trials()]
    assert all(0.001 <= trial.config.local.lr <= 1 for trial in sweep.trials())
    assert {trial.config.local.batch for trial in sweep.trials()} == {16, 32}
    assert len({trial.group for trial in sweep.trials()}) == 8  # every method has points of its own
    first, other = draw(sweep.space, 3, 0, 0), draw(sweep.space, 3, 1, 0)
    assert first != other


def test_sweep_comes_back_from_its_document(tmp_path: Path) -> None:
    text = "rounds: 4\nsweep: {methods: [fedavg, {label: x, method: ifca, clusters: 2}], seeds: 2}"
    sweep = sweep_of(tmp_path, text, "local.lr=0.3")
    again = sweep_from(sweep.document, "sweep.yaml")
    assert again.trials() == sweep.trials() and again.settings == sweep.settings


def test_many_configs_are_made_as_one_is(tmp_path: Path) -> None:
    """The fast way from settings to a config gives what the general one gives."""
    given = ["method=fedprox+finetune", "fedprox.mu=1", "local.epochs=2", "model.hidden=[8,4]", "local.lr=1", "name=x",
             "fleet.clients_per_actor=2", "storage=here", "local.engine=trainer", "data=synthetic"]  # fmt: skip
    layers = read_layers(None, given)[1]
    assert layered([layers]) == load_config(None, [*given], env={})
    trainer = [*given, "local.trainer.max_time=00:00:01:00"]
    assert layered([read_layers(None, trainer)[1]]) == load_config(None, trainer, env={})
    steps = [read_layers(None, [text])[1] for text in ("local.epochs=3", "local.steps=4")]
    assert layered(steps).local.epochs is None and layered(steps[::-1]).local.epochs == 3


VALID = "partition: {validation: 0.1}\n"
SAMPLE = "sampler: random, sample: {local.lr: 'uniform(0.1, 0.2)'}"
MISTAKES = {
    "Unknown setting 'sweep.seed' in": "sweep: {seed: [1]}",
    "Expected sweep.seeds to be a list of different whole numbers": "sweep: {seeds: [1, 1]}",
    "Expected sweep.methods to be a list": "sweep: {methods: ifca}",
    "Expected every entry of sweep.methods once": "sweep: {methods: [ifca, ifca]}",
    "Unknown method 'ifcaa'": "sweep: {methods: [fedavg, ifcaa]}",
    "In the sweep's combination 'ifca | K=50'": "clients: 20\nsweep: {methods: [ifca], clusters: [5, 50]}",
    "Unknown sampler 'gird'. Did you mean 'grid'?": "sweep: {sampler: gird}",
    "Expected clusters in one axis": "sweep: {methods: [ifca], clusters: [2, 3], grid: {clusters: [2]}}",
    "Expected sweep.sampler=random or optuna beside": VALID + "sweep: {sample: {local.lr: 'uniform(0, 1)'}}",
    "Expected sweep.sample beside sweep.sampler=random": VALID + "sweep: {sampler: random}",
    "Expected a distribution for sweep.sample.local.lr": VALID + "sweep: {sampler: random, sample: {local.lr: 'n(0)'}}",
    "Expected low < high": VALID + "sweep: {sampler: random, sample: {local.lr: 'uniform(1, 0.5)'}}",
    "Expected local.lr > 0": VALID + "sweep: {sampler: random, sample: {local.lr: 'uniform(0, 1)'}}",
    "Expected partition.validation > 0 to tune on": f"sweep: {{{SAMPLE}}}",
    "Expected partition.validation > 0 to tune on, got 0 in 'ifca'": "sweep: {choose: true, methods: [ifca]}",
    "Expected sweep.metric on validation data": VALID + f"sweep: {{{SAMPLE}, metric: micro_accuracy}}",
    "Expected fleet.backend=ray beside": VALID + "fleet: {backend: in_process}\nsweep: {scheduler: asha}",
    "beside sweep.scheduler=pbt": VALID + "sweep: {scheduler: pbt, methods: [fedavg]}",
    "got 'quniform(0.05, 1, 0.1)': Your lower variable bound 0.05 is not divisible":
        VALID + 'sweep: {sampler: random, sample: {local.lr: "quniform(0.05, 1, 0.1)"}}',
    "got 'loguniform(0, 0.9)': LogUniform requires a lower bound":
        VALID + 'sweep: {sampler: random, sample: {local.momentum: "loguniform(0, 0.9)"}}',
    "Expected a distribution of whole numbers for sweep.sample.local.batch, got 'loguniform(8, 128)': use lograndint":
        VALID + 'sweep: {sampler: random, sample: {local.batch: "loguniform(8, 128)"}}',
    "Expected a distribution of whole numbers for sweep.sample.local.epochs":
        VALID + 'sweep: {sampler: random, sample: {local.epochs: "quniform(1, 5, 0.5)"}}',
    "Expected seeds in sweep.seeds": VALID + "sweep: {sampler: random, sample: {seed: 'randint(0, 9)'}}",
    "Expected settings inside 'sweep'": "sweep: 3",
    "Expected at most 20000 trials": "sweep: {seeds: 20001}",
    "Expected an entry of sweep.cases to be settings": "sweep: {cases: [3]}",
}  # fmt: skip


@pytest.mark.parametrize("sentence", MISTAKES)
def test_mistake_is_one_sentence(sentence: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        sweep_of(tmp_path, MISTAKES[sentence])
    assert sentence in str(caught.value)


def test_override_of_what_the_sweep_varies_is_refused(tmp_path: Path) -> None:
    with refused("varied", says="sweep.methods=[...]", setting="method"):
        sweep_of(tmp_path, "sweep: {methods: [fedavg, ifca]}", "method=ifca")
    with refused("not-a-setting", says="sweep.seeds=[", word="sweep.seeds"):
        sweep_of(tmp_path, "sweep: {methods: [fedavg]}", "sweep.seeds")


def test_partitions_and_starts_are_swept_apart_or_together(tmp_path: Path) -> None:
    text = "sweep: {methods: [fedavg, ifca], seeds: [3, 5], partition_seeds: [0, 1]}"
    sweep = sweep_of(tmp_path, text)
    trials = sweep.trials()
    assert [(t.config.partition.seed, t.config.seed) for t in trials[:4]] == [(0, 3), (0, 5), (1, 3), (1, 5)]
    assert {t.group for t in trials} == {"fedavg", "ifca"} and len(
        {t.name for t in trials}
    ) == 8 == sweep.planned
    assert trials[0].name == "fedavg-partition0-seed3"
    again = sweep_from(sweep.document, "again").trials()
    assert [t.name for t in again] == [t.name for t in trials]
    # Starts on one partition; and, as ever, a partition of its own for each seed.
    starts = sweep_of(tmp_path, "partition: {seed: 7}\nsweep: {methods: [fedavg], seeds: 2}").trials()
    assert [(t.config.partition.seed, t.config.seed) for t in starts] == [(7, 0), (7, 1)]
    both = sweep_of(tmp_path, "sweep: {methods: [fedavg], seeds: 2}").trials()
    assert [(t.config.partition.seed, t.config.seed) for t in both] == [(None, 0), (None, 1)]
    with refused("varied", says="sweep.partition_seeds=[...]", setting="partition.seed"):
        sweep_of(tmp_path, text, "partition.seed=3")
