"""The contract of an engine, and how one is chosen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

from torch import Tensor

from archipelago.core.errors import UserError
from archipelago.core.registry import Entry, NoOptions, Registry
from lightning_modules.engines.objective import (
    LocalObjective,
    TrainJob,
    TrainResult,
    follows_contract,
    prepare,
)
from lightning_modules.engines.rules import RuledObjective
from lightning_modules.flat import FlatModel
from lightning_modules.recipe import Recipe
from lightning_modules.samples import Samples


class Engine:
    """Runs the local training of a block of clients.

    A subclass gives `train_one`, or `train` if it does several jobs at a time:

        class MyEngine(Engine):
            def train_one(self, job):
                with self.ready(job):  # the client's model, optimizer state and random draws are in place
                    total = 0.0
                    for step in range(len(job.batches)):
                        batch = self.batch(job, step)
                        loss = loss_of(self.model.module.training_step(batch, step))
                        ...  # your step; `self.clip()` limits its gradients
                        total += float(loss)
                    return self.result(job, total)

    The promises: one result for each job, in the order of the jobs; a job's result depends on the job alone, not on
    the jobs beside it; models of results are values of their own. `model` is the one live module of the process,
    `samples` has the data of all clients, `options` are the engine's own settings (its dataclass `Options`), and
    `notes` is what the user should know, reported with the round. An engine with forward passes of its own
    sets `model.forward_pass`. What `@ENGINES.register` may declare:

    - `exact=True`: the same bits as `loop` on CPU;
    - `default_on="cpu"` or `"cuda"`: what `auto` means there; with `opt_in=True` not yet.

    `recipe` says which parts of the training recipe it does: "augment" (it takes its batches from `batch`) and "clip"
    (it calls `clip`); settings that ask an engine for a part that it does not do are refused.
    """

    Options: type = NoOptions
    recipe: ClassVar[tuple[str, ...]] = ()

    def __init__(self, model: FlatModel, samples: Samples, options: Any = None) -> None:
        self.model, self.samples = model, samples
        self.options = self.Options() if options is None else options
        self.notes: list[str] = []
        self.name = ""  # that it is registered by; `make_engine` says it
        model.forward_pass = None  # torch's own, unless this engine says otherwise

    @classmethod
    def check(cls, options: Any) -> None:
        """A `UserError` about options that it cannot work with, before anything is started."""

    @classmethod
    def begin(cls) -> None:
        """Start in the background what takes long and needs no data; the driver calls it before it does anything."""

    def ran(self) -> set[str]:
        """Names of the engines that trained here so far: its own, unless it leaves jobs to another one.

        A run records them, so that an engine that falls back must say so: then it is empty until something is trained.
        """
        return {self.name}

    def train(self, jobs: Sequence[TrainJob]) -> Iterator[TrainResult]:
        """Run the jobs, in order."""
        for job in jobs:
            yield self.train_one(job)

    def train_one(self, job: TrainJob) -> TrainResult:
        """One client's steps."""
        raise NotImplementedError(f"{type(self).__name__} has neither train_one nor train")

    @contextmanager
    def ready(self, job: TrainJob) -> Iterator[None]:
        """Everything a client's steps need in place, and everything put back afterwards."""
        model = self.model
        module: Any = model.module
        with model.seeded(job.seed), model.training_only(job.only):
            if follows_contract(module):
                module.local_objective = _objective(job, model, self.samples)
            elif not job.is_plain:
                raise UserError(
                    f"This method adds to the local objective, and {type(module).__name__} has only a "
                    "training_step: give it forward(x), loss(outputs, y, reduction) and the attribute "
                    "local_objective (see lightning_modules/base.py), or choose another method.",
                    code="incomplete-module", lacks="loss",
                )  # fmt: skip
            try:
                model.load(job.start)
                model.touch()
                model.set_optimizer_state(job.optimizer_state)
                module.train()
                with model.rate(job.rate):
                    yield
            finally:
                if follows_contract(module):
                    module.local_objective = None

    def batch(self, job: TrainJob, step: int) -> tuple[Tensor, Tensor]:
        """The inputs, augmented, and targets of a step."""
        return batch_of(self.model, self.samples, job, step)

    def clip(self) -> None:
        """Limit the gradients of a step, if the recipe says so."""
        self.model.clip()

    def result(self, job: TrainJob, total: float) -> TrainResult:
        """The live model and optimizer as the job's result; `total` is the objective summed over its steps."""
        steps = max(len(job.batches), 1)
        ruled = getattr(self.model.module, "local_objective", None)
        kept = ruled.kept() if isinstance(ruled, RuledObjective) else {}
        return TrainResult(job.client, self.model.vector(), self.model.optimizer_state(), total / steps, kept)


def _objective(job: TrainJob, model: FlatModel, samples: Samples) -> LocalObjective | RuledObjective:
    """What the module's training step computes for a job."""
    objective = prepare(job, model, samples)
    if job.rule is None:
        return objective
    memory = {name: value.to(model.device) for name, value in job.memory.items()}

    def batch(step: int, number: int) -> tuple[Tensor, Tensor]:
        return batch_of(model, samples, job, step, number)

    return RuledObjective(job.rule, objective, model, batch, job.several, len(job.batches), memory)


def batch_of(
    model: FlatModel, samples: Samples, job: TrainJob, step: int, number: int = 0
) -> tuple[Tensor, Tensor]:
    """The inputs, augmented, and targets of one of a step's mini-batches."""
    index = job.more[step][number - 1] if number else job.batches[step]
    augment, place = model.recipe.augment, step * job.several + number
    if not augment:
        return samples.batch(index)
    return samples.changed(index, lambda x: augment.of_step(x, job.seed, place))


ENGINES: Registry[type[Engine]] = Registry("engine", section="local", base=Engine)


def loss_of(returned: Any) -> Tensor:
    """The loss in what a `training_step` returned."""
    loss: Tensor = returned["loss"] if isinstance(returned, dict) else returned
    return loss


def default_engine(device: str) -> str:
    """What `auto` means on a type of device: the engine that declares it, else the one for CPU.

    Where several do, the reference (`exact`) is what the others fall back to, and comes last.
    """
    declared = [entry for entry in ENGINES.values() if not entry.capabilities.get("opt_in")]
    found = [entry for entry in declared if entry.capabilities.get("default_on") == device]
    if not found:
        return default_engine("cpu")
    return min(found, key=lambda entry: bool(entry.capabilities.get("exact"))).name


def engine_entry(name: str, device: str) -> Entry[type[Engine]]:
    """The registered engine that `name` (which may be `auto`) means on a type of device."""
    return ENGINES.entry(default_engine(device) if name == "auto" else name)


def check_precision(precision: str, engine: str, device: str) -> None:
    """Refuse what a CPU has no use for; an engine made for GPUs computes in bf16 on a CPU, too, for tests."""
    if precision == "32" or device != "cpu":
        return
    gpu_engine = engine_entry(engine, device).capabilities.get("default_on") == "cuda"
    if not (precision == "bf16" and gpu_engine):
        raise UserError(
            f"Expected precision=32 where clients compute on CPUs, got {precision}, which needs a GPU: leave it out, "
            "or run where torch sees one (`doctor` says what is here) and fleet.gpus is not 0.",
            code="no-gpu", setting="precision", given=precision,
        )  # fmt: skip


def make_engine(name: str, model: FlatModel, samples: Samples, settings: Any = None) -> Engine:
    """The engine called `name`, at that import path, or `auto`, with its options from `settings`."""
    entry = engine_entry(name, model.device.type)
    if settings is not None:
        model.recipe = Recipe.of(settings, samples.given.mean, samples.given.std)
    engine = entry.value(model, samples, entry.options_from(settings))
    engine.name = entry.name
    return engine
