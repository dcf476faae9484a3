"""The schema of an experiment: every setting, its default, its range and one line about it.

This is the only place of defaults (options of a method, data set or partition stand beside it, and `core/schema.py`
adds them to the same schema). Ranges are data: `experiments/config.py`
checks every value against its `within` or `choices` and says what was expected, given, and what to do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from archipelago.core.declaring import section as section  # others find both here
from archipelago.core.declaring import setting as setting

PRECISIONS = ("32", "tf32", "bf16")
TIERS = ("exact", "seeded", "fast")  # of determinism, the strongest promise first


# OmegaConf reads these annotations at run time, so they are written as it understands them (Optional[...]).
@dataclass
class DataSettings:
    """`data=NAME data.root=...`: where the samples come from; beside these, the options that data sets declare."""

    name: str = setting("digits", "data set (see `list`)")
    root: str = setting("~/.cache/archipelago", "folder with the data sets")
    download: bool = setting(False, "fetch the data set into `data.root` if it is missing")
    mean: list[float] = setting(
        [], "normalise by this mean per channel, or one for all (default: the data set's)"
    )
    std: list[float] = setting([], "normalise by this deviation per channel, or one for all (default: the data set's)",
                               above=0)  # fmt: skip
    mapped: str = setting("auto", "sets that are decoded once into a file: read it by memory map (yes), into memory "
                          "(no), or by its size (auto: mapped above 1 GB)", choices=("auto", "yes", "no"))  # fmt: skip
    cache: str | None = setting(None, "folder of these files (default: in `data.root`)")
    rotations: int = setting(1, "rotate images by 0/90/180/270 degrees in this many groups of clients",
                             at_least=1, at_most=4)  # fmt: skip
    label_swaps: int = setting(
        1, "permute the labels, differently in this many groups of clients", at_least=1
    )
    colours: int = setting(1, "change colours (order of channels; tone, if grey) in this many groups of clients",
                           at_least=1, at_most=6)  # fmt: skip
    noises: int = setting(
        1, "add noise, from none to `data.noise_shift`, in this many groups of clients", at_least=1
    )
    noise_shift: float = setting(0.2, "standard deviation of the strongest noise, as part of the pixel range",
                                 above=0, read_with={"noises": 1})  # fmt: skip
    crossed: bool = setting(
        False,
        "divide each ground-truth group of the partition among these shifts, instead of shifting whole groups",
        read_with={"rotations": 1, "label_swaps": 1, "colours": 1, "noises": 1},
    )
    drift: list[str] = setting(
        [], "what changes during the run, NAME@ROUND:SHARE (see `list`), as in [label_swap@10:0.5,move@20]"
    )
    drift_share: float = setting(0.5, "share of the clients that an event without one happens to", above=0, at_most=1,
                                 read_with={"drift": 0})  # fmt: skip
    test_fraction: float = setting(0.2, "share of samples held out for testing where there is no official split",
                                   above=0, below=1)  # fmt: skip


@dataclass
class PartitionSettings:
    """`partition=NAME partition.alpha=...`: who holds which samples; beside these, the options of partitions."""

    name: str = setting("iid", "partition (see `list`)")
    test_share: float | None = setting(
        None, "share of a client's samples for testing, of both parts pooled (default: the official split)",
        above=0, below=1,
    )  # fmt: skip
    holdout: float | None = setting(
        None, "share of the test samples that no client gets, one set per ground-truth distribution, to measure every "
        "cluster model on (default: half for mixtures, else none)", at_least=0, below=1,
    )  # fmt: skip
    compat: str = setting(
        "none", "fedbase: the protocol of published tables, which drops and copies clients; fedbase-0.6.8: that of "
        "their older rows", choices=("none", "fedbase", "fedbase-0.6.8"),
    )  # fmt: skip
    validation: float = setting(0.0, "share of each client's training samples kept for validation",
                                at_least=0, below=1)  # fmt: skip
    seed: int | None = setting(
        None, "seed of the data set, its division and the clients held out (default: `seed`), so that runs of several "
        "starts can share one partition", at_least=0,
    )  # fmt: skip
    cache: str = setting(
        "auto", "folder that keeps partitions for equal experiments; auto: the user's; off: none"
    )
    min_size: int = setting(4, "smallest number of training samples a client may hold", at_least=1)


MODEL_STARTS = ("default", "xavier_normal", "xavier_uniform", "kaiming_normal", "kaiming_uniform",
                "xavier_normal+kaiming_uniform")  # fmt: skip


@dataclass
class ModelSettings:
    """`model=NAME`: the network every client trains."""

    name: str = setting("auto", "network (see `list`); auto picks the paper's network for the data set")
    target: str | None = setting(None, "import path of your own LightningModule, as package.module.Class")
    head: list[str] = setting(
        [], "submodules that are the head, the last one the classifier (default: what the module says, else its "
        "fully-connected layers at the end)"
    )  # fmt: skip
    init: str = setting(
        "default", "how weights of linear and convolutional layers are drawn: as the network does itself, or so; with "
        "a +: the first for linear layers, the second for convolutions", choices=MODEL_STARTS
    )  # fmt: skip


@dataclass
class LocalSettings:
    """`local.steps=...`: what a client does in a round."""

    steps: int = setting(10, "mini-batch steps per round", at_least=1, largest=1_000_000)
    epochs: int | None = setting(
        None, "passes over the client's data per round, instead of steps", at_least=1, largest=100_000
    )
    batch: int = setting(32, "mini-batch size", at_least=1, largest=10_000_000)
    optimizer: str = setting("sgd", "optimizer: any of torch's (see `list`), or package.module.Class")
    optimizer_options: dict[str, Any] = section(
        "more arguments of the optimizer, as in local.optimizer_options.eps=1e-6"
    )
    lr: float = setting(0.05, "learning rate", above=0)
    schedule: str = setting(
        "constant", "learning rate over rounds (see `list`), or a scheduler of torch as package.module.Class"
    )
    schedule_options: dict[str, Any] = section("arguments of a scheduler of torch")
    warmup: int = setting(
        0, "rounds in which the learning rate grows linearly to the whole of it", at_least=0
    )
    momentum: float = setting(
        0.9, "SGD momentum", at_least=0, below=1, read_with={"local.optimizer": ("sgd", "torch.optim.SGD")}
    )
    weight_decay: float = setting(0.0, "weight decay", at_least=0)
    clip: float | None = setting(None, "limit of the gradient of a step (default: none)", above=0)
    clip_by: str = setting("norm", "what local.clip limits: the norm of the whole gradient, or every number of it",
                           choices=("norm", "value"), read_with={"clip": 0})  # fmt: skip
    label_smoothing: float = setting(0.0, "share of every label that goes to all classes evenly, in training alone",
                                     at_least=0, below=1)  # fmt: skip
    augment: list[str] = setting(
        [], "what becomes of the inputs of a training batch, in order (see `list`), or import paths"
    )
    augment_options: dict[str, Any] = section(
        "arguments of transforms by import path, as in local.augment_options.RandomRotation.degrees=15"
    )
    keep_optimizer: bool = setting(
        True, "keep a client's optimizer state across rounds (False: start afresh)"
    )
    engine: str = setting(
        "auto", "engine that runs the steps (see `list`), or yours as package.module.Class; auto: by device"
    )
    normalise: str = setting("batch", "normalise inputs batch by batch, or once per actor (faster, more memory)",
                             choices=("batch", "actor"))  # fmt: skip


@dataclass
class ParticipationSettings:
    """`participation.fraction=0.1`: who takes part in a round; the same stream for every method."""

    fraction: float = setting(1.0, "share of the clients that is selected each round", above=0, at_most=1)
    stragglers: float = setting(0.0, "share of the selected that only manages a random part of its steps",
                                at_least=0, at_most=1)  # fmt: skip
    dropouts: float = setting(0.0, "share of the selected whose result never arrives", at_least=0, below=1)
    attackers: float = setting(0.0, "share of the clients that attack, in every round that they take part in",
                               at_least=0, below=1)  # fmt: skip


@dataclass
class UpdateSettings:
    """`update=[clip,gaussian]`: what becomes of an update on its way; options of the transforms stand beside it."""

    transforms: list[str] = setting(
        [], "ordered transforms of what leaves a client (see `list`), or import paths"
    )


@dataclass
class AttackSettings:
    """`attack=NAME participation.attackers=0.2`: what attackers do; options of the attacks stand beside it."""

    name: str = setting("sign_flip", "attack (see `list`), or package.module.Class")


@dataclass
class AggregationSettings:
    """`aggregation=NAME`: how the models of a cluster become one; options of a rule stand beside it."""

    name: str = setting("mean", "the mean, or a rule that survives odd clients (see `list`)")


@dataclass
class ServerSettings:
    """`server.optimizer=adam server.lr=0.1`: how the server steps; options of an optimizer stand beside these."""

    optimizer: str = setting("sgd", "optimizer of the server's models (see `list`), or package.module.Class")
    lr: float = setting(1.0, "learning rate of the server's steps; 1 with sgd: the aggregate itself", above=0)


@dataclass
class EvaluationSettings:
    """`evaluation.every=5`: when and how models are measured."""

    every: int = setting(1, "evaluate every this many rounds (the last round always)", at_least=1)
    batch: int = setting(512, "samples per forward pass", at_least=1)
    train: bool = setting(False, "measure on training data too")
    weights: str = setting("train", "what `micro` means are weighted by", choices=("train", "test"))
    last: int = setting(3, "the final value is the mean of this many last evaluations", at_least=1)
    clients: float | None = setting(
        None, "clients that an evaluation visits, drawn with the seed: below 1 a share, else a number (default: all)",
        above=0,
    )  # fmt: skip
    redraw: bool = setting(False, "draw other clients for every evaluation", read_with={"clients": 0})
    full_last: bool = setting(
        True, "the evaluation of the last round visits everyone", read_with={"clients": 0}
    )
    recovery: float = setting(
        0.95, "a metric has recovered from a drift at this part of what it was before", above=0,
        read_with={"data.drift": 0},
    )  # fmt: skip
    personal: bool = setting(
        False, "measure each participant's own model too, after its local training and before averaging"
    )
    metrics: list[str] = setting(
        [], "more metrics: import paths of torchmetrics classes, or of functions of `Evaluated`"
    )
    metric_options: dict[str, Any] = section(
        "arguments of these classes, as in evaluation.metric_options.MulticlassAUROC.average=macro"
    )
    clusterability: bool = setting(False, "measure the thesis's clusterability B (3.18) at every evaluation")


ON_RAY: Mapping[str, Any] = {"read_with": {"backend": ("ray",)}}


@dataclass
class FleetSettings:
    """`fleet.actors=4 fleet.gpus=0.25`: where clients live."""

    backend: str = setting("ray", "ray actors, or everything in this process", choices=("ray", "in_process"))
    address: str | None = setting(
        None, "Ray cluster to join (default: RAY_ADDRESS, else a local one)", **ON_RAY
    )
    actors: int | None = setting(
        None, "number of client actors, in one process of blocks (default: what the cluster serves best; one block)",
        at_least=1,
    )  # fmt: skip
    clients_per_actor: int | None = setting(
        None, "clients hosted by one actor, instead of `fleet.actors`", at_least=1
    )
    cpus: float = setting(1.0, "CPUs per client actor", above=0, **ON_RAY)
    gpus: float | None = setting(
        None, "GPUs per client actor: a fraction shares a device, 0 means CPUs; auto: one whole GPU where the cluster "
        "has any (shared evenly if `fleet.actors` asks for more actors), else 0", at_least=0, auto=True,
    )  # fmt: skip
    dashboard: bool = setting(True, "start the Ray dashboard with a local cluster", **ON_RAY)
    restarts: int = setting(
        10, "how many lost actors or nodes a run survives before it stops", at_least=0, **ON_RAY
    )
    patience: float = setting(
        60.0, "seconds after which an actor is late (at least: five times what its stage usually takes); after as "
        "much again it is ended and rebuilt", above=0, **ON_RAY,
    )  # fmt: skip
    start_patience: float = setting(
        600.0, "seconds before which no actor is ended that starts, or reads or passes on samples and states: disks "
        "and networks may be slow", above=0, **ON_RAY,
    )  # fmt: skip
    copies: bool = setting(
        True, "keep a copy of each actor's states in another actor, so that a loss costs the running round alone "
        "(False: less memory, and back to the last checkpoint)", **ON_RAY,
    )  # fmt: skip
    wait: float | None = setting(
        None, "seconds that a cluster may take to have capacity for the actors; auto: 60, or 900 where an autoscaler "
        "starts nodes", at_least=0, auto=True, **ON_RAY,
    )  # fmt: skip


@dataclass
class CheckpointSettings:
    """`checkpoint.every=10`: how much work a crash can cost."""

    every: int = setting(10, "write a checkpoint every this many rounds (and after the last)", at_least=1)
    minutes: float = setting(
        5.0, "and whenever the last one is older than this many minutes; 0: never for that", at_least=0
    )
    keep: int = setting(2, "checkpoints kept on disk", at_least=1)


@dataclass
class RecordSettings:
    """`records.tsne=true`: what a run writes down for the figures of its report."""

    rounds: int = setting(4, "rounds whose client models are compared: the first, the last, and some between",
                          at_least=0)  # fmt: skip
    clients: int = setting(200, "clients that are compared at most", at_least=2, read_with={"rounds": 0})
    images: int = setting(4, "example images kept of each client", at_least=0)
    tsne: bool = setting(
        False, "t-SNE of the compared models too, at the end of the run", read_with={"rounds": 0}
    )


@dataclass
class ExperimentSettings:
    """One experiment."""

    plugins: list[str] = setting([], "modules of your own to import first, as [package.module]")
    method: str = setting("ifca", "base, or base+addon+addon (see `list`)")
    ensemble: list[str] = setting(
        [], "methods that predict together, e.g. [fedavg,ifca] or [fedavg*5], instead of one"
    )
    combine: str = setting("logit_sum", "how the members of an ensemble predict together",
                           choices=("logit_sum", "logit_mean", "probability_mean", "vote"),
                           read_with={"ensemble": 0})  # fmt: skip
    clients: int = setting(20, "number of clients", at_least=1)
    holdout_clients: float = setting(0.0, "share of the clients that never trains and is adopted afterwards",
                                     at_least=0, below=1)  # fmt: skip
    adoption: str = setting(
        "labels", "how these find their cluster, with labels or without (see `list`), or package.module.Class",
        read_with={"holdout_clients": 0},
    )  # fmt: skip
    clusters: int = setting(
        4, "number of cluster models K, for clustered methods; auto chooses it", at_least=1
    )
    choose_clusters: bool = setting(
        False, "choose `clusters` by a few rounds on validation data (clusters=auto)"
    )
    rounds: int = setting(20, "communication rounds", at_least=1, largest=10_000_000)
    seed: int = setting(0, "seed of every random draw", at_least=0)
    precision: str = setting("32", "arithmetic of the networks on a GPU: 32-bit, tf32 products, or bf16 autocast",
                             choices=PRECISIONS)  # fmt: skip
    determinism: str = setting(
        "auto", "which results are equal bit for bit (see docs/promises.md); auto: exact on CPUs, seeded on GPUs",
        choices=("auto", *TIERS),
    )  # fmt: skip
    weights: str = setting("size", "aggregation weights: by training samples, or uniform",
                           choices=("size", "uniform"))  # fmt: skip
    not_finite: str = setting("drop", "a client whose loss or model is not finite: drop it this round, or stop",
                              choices=("drop", "stop"))  # fmt: skip
    idle_rounds: int = setting(
        3,
        "stop after this many rounds in a row in which no client delivered a finite update; 0: never",
        at_least=0,
    )
    storage: str = setting(
        "runs", "folder or object-store address (s3://...) under which runs and sweeps are made"
    )
    name: str | None = setting(None, "name of the run directory (default: method, data, seed and a stamp)")
    callbacks: list[str] = setting(
        [], "what listens to the run (see `list`), or import paths of your own callbacks"
    )
    loggers: list[str] = setting([], "tensorboard, csv, mlflow, wandb, or import paths of Lightning loggers")
    tensorboard: bool = setting(
        False, "short for loggers=[tensorboard]: TensorBoard logs in the run directory"
    )
    data: DataSettings = field(default_factory=DataSettings)
    partition: PartitionSettings = field(default_factory=PartitionSettings)
    model: ModelSettings = field(default_factory=ModelSettings)
    local: LocalSettings = field(default_factory=LocalSettings)
    participation: ParticipationSettings = field(default_factory=ParticipationSettings)
    attack: AttackSettings = field(default_factory=AttackSettings)
    update: UpdateSettings = field(default_factory=UpdateSettings)
    aggregation: AggregationSettings = field(default_factory=AggregationSettings)
    server: ServerSettings = field(default_factory=ServerSettings)
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)
    fleet: FleetSettings = field(default_factory=FleetSettings)
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    records: RecordSettings = field(default_factory=RecordSettings)


@dataclass
class SweepSettings:
    """`sweep.sampler=optuna`: how trials are chosen and run (what varies: `archipelago/sweeps/axes.py`)."""

    sampler: str = setting("grid", "how the points of `sweep.sample` are drawn; grid draws none")
    scheduler: str = setting(
        "none", "stop bad trials early, or let them take over good ones' models (see `list`)"
    )
    metric: str = setting("validation_micro_accuracy", "what tuning looks at: a metric on validation data")
    choose: bool = setting(
        False,
        "choose among what the sweep compares by `sweep.metric`, as tuning does, instead of ranking on test data",
    )
    mode: str = setting("auto", "whether more is better; auto: not of a loss, a squared error or a std",
                        choices=("auto", "max", "min"))  # fmt: skip
    fleet: str = setting("auto", "a trial's clients in its own process, or in actors of its placement group",
                         choices=("auto", "in_process", "actors"))  # fmt: skip
    concurrent: int | None = setting(
        None, "trials at a time (default: as many as the cluster holds)", at_least=1
    )
    table: str = setting("", "published table that the report compares with, as in thesis-2023:6.3")


@dataclass
class SweepSection:
    """The section `sweep:` of a file, beside the settings of an experiment."""

    sweep: SweepSettings = field(default_factory=SweepSettings)
