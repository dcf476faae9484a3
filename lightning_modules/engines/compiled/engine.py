"""The engine `compiled`: the papers' networks on CPU by kernels in C (docs/speed.md has their times beside PyTorch's).

The same mathematics as `loop`, in another order of summation: results agree to rounding, not to the bit. They depend on
the job alone, not on the jobs beside it, and what the kernels compute (models, optimizer states, outputs) not on the
machine: any x86-64 processor with FMA gives the same bits. Torch evaluates penalties, and the losses that models are
compared by: those are as equal as torch's own arithmetic is. Between torch's AVX2 and its AVX-512 kernels the gradients
of all penalties had the same bits, and losses differed in the last digits (`tests/support/compiled_machines.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from archipelago.strategies.parameters import Vector
from archipelago.strategies.penalties import knows_gradient
from lightning_modules.engines.base import ENGINES, Engine
from lightning_modules.engines.compiled import structures as c
from lightning_modules.engines.compiled.build import CannotBuild, build_in_background, library
from lightning_modules.engines.compiled.memory import Arena
from lightning_modules.engines.compiled.network import plan_of
from lightning_modules.engines.compiled.operations import NetworkPlan, NotCovered
from lightning_modules.engines.compiled.steps import Floats, Inputs, Passes, Update, address, floats
from lightning_modules.engines.loop import LoopEngine
from lightning_modules.engines.objective import LocalObjective, Rows, TrainJob, TrainResult, prepare
from lightning_modules.flat import FlatModel
from lightning_modules.samples import Samples


@ENGINES.register(
    "compiled",
    "kernels in C for small networks on CPU: the fastest there, not the bits of loop",
    default_on="cpu",
    opt_in=True,  # until 0.5.0 (DECISIONS.md, B4): without this line `auto` takes it wherever it covers the network
)
class CompiledEngine(Engine):
    """Steps in C where it covers the network, the loss and the optimizer; else the loop, and says so."""

    recipe = ("augment", "clip")

    def __init__(self, model: FlatModel, samples: Samples, options: Any = None) -> None:
        super().__init__(model, samples, options)
        self.loop = LoopEngine(model, samples)
        self.network: NetworkPlan | None = None
        self._passes: Passes | None = None
        self._ran: set[str] = set()
        try:
            self._shape = tuple(samples.raw().x.shape[1:])
            self.network = covered(model, self._shape)
        except NotCovered as reason:
            self._leave_to_loop(str(reason))
            return
        self.begin()
        model.forward_pass = self.outputs

    @classmethod
    def begin(cls) -> None:
        """Compile the kernels where they are not there yet."""
        build_in_background()

    def ran(self) -> set[str]:
        """Its own name, "loop", both, or (nothing was trained yet) neither."""
        return set(self._ran)

    def _leave_to_loop(self, reason: str) -> None:
        self.network = None
        self._ran.add("loop")
        self.model.forward_pass = None
        self.notes.append(f"local.engine=compiled falls back to loop: {reason}.")

    def passes(self) -> Passes | None:
        """The kernels with this network; None if there are none here."""
        if self._passes is None and self.network is not None:
            try:
                kernels = library()
            except CannotBuild as reason:
                self._leave_to_loop(str(reason))
                return None
            self._passes = Passes(kernels, self.network, Inputs(kernels, self.samples, self._shape))
        return self._passes

    def outputs(self, vector: Vector, index: npt.NDArray[np.int64]) -> Tensor | None:
        """A frozen model's outputs, in evaluation mode; None: torch shall do it."""
        passes = self.passes()
        return None if passes is None else passes.outputs(vector, index)

    def train_one(self, job: TrainJob) -> TrainResult:
        """One client's steps."""
        passes = self.passes()
        if passes is None:
            return self.loop.train_one(job)
        kind, options = _optimizer(self.model)
        options = {**options, "lr": options["lr"] * job.rate}
        update = Update(passes.library, kind, options, _shapes(self.model))
        reason = self._reason_against(job, update)
        if reason:
            note = f"local.engine=compiled left a client to loop: {reason}."
            self.notes += [] if note in self.notes else [note]
            self._ran.add("loop")
            return self.loop.train_one(job)
        self._ran.add(self.name)
        update.begin(job.optimizer_state)
        model = passes.model(job.start).copy()
        total = self._steps(job, passes, update, model)
        model.flags.writeable = False
        return TrainResult(job.client, model, update.state(), total / max(len(job.batches), 1))

    def _reason_against(self, job: TrainJob, update: Update) -> str:
        """What of this job the kernels do not do."""
        if job.rule is not None:
            return f"its steps follow a rule of their own ({type(job.rule).__name__})"
        if job.only is not None:
            return "only some of its tensors are trained"
        if odd := [term for term in job.penalties if term.features]:
            return f"{type(odd[0].penalty).__name__} is a penalty of features"
        if not update.fits(job.optimizer_state):
            return "its optimizer's state is of another optimizer"
        assert self.network is not None
        single = any(
            layer.kind == c.BATCH_NORM
            and self.network.shapes[layer.out].height * self.network.shapes[layer.out].width == 1
            for layer in self.network.layers
        )
        if any(len(batch) < (2 if single else 1) for batch in job.batches):
            return "a batch is too small for its layers"
        if self.model.recipe.augment and (job.on_top_of or any(term.outputs for term in job.penalties)):
            return "frozen models see the augmented inputs of every step (local.augment)"
        return ""

    def _steps(self, job: TrainJob, passes: Passes, update: Update, model: Floats) -> float:
        """Train `model` in place; the sum of the objective over the steps."""
        objective = prepare(job, self.model, self.samples)
        arena = passes.arena(max((len(batch) for batch in job.batches), default=1))
        everything = np.concatenate(job.batches) if len(job.batches) else np.zeros(0, np.int64)
        rows, targets = passes.inputs.rows(everything), self._targets(everything)
        at, total = 0, 0.0
        for step, index in enumerate(job.batches):
            stop = at + len(index)
            if self.model.recipe.augment:
                passes.inputs.put_values(arena, self.batch(job, step)[0], len(index))
            else:
                passes.inputs.put(arena, index, rows[at:stop])
            passes.library.forward(arena.pointer, model.ctypes.data, len(index), True)
            extras = objective.rows(step)
            value = self._loss(arena, targets[at:stop], extras)
            pull = None
            if objective.terms:
                added, pull = penalties(objective, extras, arena, len(index), model[: len(passes.gradient)])
                value += added
            passes.library.backward(arena.pointer, model.ctypes.data, passes.gradient.ctypes.data, len(index))
            if pull is not None:
                passes.gradient += pull
            self._limit(passes.gradient)
            update.step(model, passes.gradient)
            at, total = stop, total + value
        return total

    def _limit(self, gradient: Floats) -> None:
        """Clip a gradient in place, as torch's clip_grad_norm_ and clip_grad_value_ do."""
        recipe = self.model.recipe
        if recipe.clip is None:
            return
        if recipe.clip_by == "value":
            np.clip(gradient, -recipe.clip, recipe.clip, out=gradient)
            return
        wide = gradient.astype(np.float64)
        norm = float(np.sqrt(np.add.reduce(wide * wide)))
        gradient *= np.float32(min(1.0, recipe.clip / (norm + 1e-6)))

    def _targets(self, index: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        """Classes or numbers; a class that is none is refused before a kernel looks for it."""
        targets = self.samples.targets(index).numpy()
        assert self.network is not None
        module: Any = self.model.module
        if module.classes is None:
            return floats(targets.reshape(-1), (len(index),), "numbers to predict")
        if len(targets) and (targets.min() < 0 or targets.max() >= self.network.outputs):
            odd = targets.min() if targets.min() < 0 else targets.max()
            raise IndexError(
                f"Target {odd} is out of bounds: the network has {self.network.outputs} outputs."
            )
        return np.ascontiguousarray(targets, np.int64)

    def _loss(self, arena: Arena, targets: npt.NDArray[Any], extras: Rows) -> float:
        """The mean loss of a batch; its gradient stays in the arena."""
        batch = arena.holds(len(targets))
        shapes = {"frozen": (batch, arena.network.outputs), "weights": (batch,)}
        frozen, weights = (
            floats(extras[name].numpy(), shape, f"{name} of a batch") if name in extras else None
            for name, shape in shapes.items()
        )
        scale = float(extras["scale"]) if "scale" in extras else 1.0
        module: Any = self.model.module
        loss = arena.library.squared_error if module.classes is None else arena.library.cross_entropy
        return float(
            loss(arena.pointer, batch, targets.ctypes.data, address(frozen), address(weights), scale)
        )


def penalties(
    objective: LocalObjective, extras: Rows, arena: Arena, batch: int, parameters: Floats
) -> tuple[float, Floats | None]:
    """(penalties' value, their gradient of the parameters), by torch; that of the outputs is added in the arena."""
    if all(knows_gradient(term.penalty) for term in objective.terms):
        return closed_forms(objective, torch.from_numpy(parameters))
    live = torch.from_numpy(parameters).requires_grad_()
    outputs = np.empty((batch, arena.network.outputs), np.float32)
    arena.library.outputs(arena.pointer, batch, outputs.ctypes.data)
    own = torch.from_numpy(outputs).requires_grad_()
    value = torch.zeros(())
    for number, term in enumerate(objective.terms):
        seen = {name: extras[f"{number}.{name}"] for name in term.penalty.outputs}
        value = value + term.penalty.value(live, {**term.anchors, **seen, "own_outputs": own})
    if value.requires_grad:
        value.backward()
    if own.grad is not None:
        slopes = np.ascontiguousarray(own.grad.numpy())
        arena.library.add_to_outputs(arena.pointer, batch, slopes.ctypes.data)
    return float(value.detach()), None if live.grad is None else live.grad.numpy()


@torch.no_grad()
def closed_forms(objective: LocalObjective, parameters: Tensor) -> tuple[float, Floats]:
    """The same of penalties that know their gradients."""
    penalties: list[Any] = [term.penalty for term in objective.terms]
    found = [
        each.gradient(parameters, term.anchors) for each, term in zip(penalties, objective.terms, strict=True)
    ]
    value, total = found[0]
    for more, gradient in found[1:]:
        value, total = value + more, total + gradient
    return float(value), total.numpy()


# -- What is covered ----------------------------------------------------------------------------------------------


def covered(model: FlatModel, input_shape: tuple[int, ...]) -> NetworkPlan:
    """The plan of the live module; raises NotCovered with the reason why there is none."""
    from lightning_modules.base import FederatedModule  # not above: it imports Lightning

    module: Any = model.module
    if model.device.type != "cpu":
        raise NotCovered(f"the model is on {model.device.type}")
    own = [
        name
        for name in (
            "forward",
            "loss",
            "training_loss",
            "training_step",
            "on_before_optimizer_step",
            "on_after_backward",
        )
        if getattr(type(module), name, None) is not getattr(FederatedModule, name, None)
    ]
    if not isinstance(module, FederatedModule) or own:
        which = f"{type(module).__name__}.{own[0]}" if own else type(module).__name__
        raise NotCovered(f"{which} is not the platform's")
    if getattr(module, "network", None) is None:
        raise NotCovered(f"{type(module).__name__} has no network")
    if module.classes is not None and module.local.label_smoothing:
        raise NotCovered("its loss has no local.label_smoothing")
    _optimizer(model)
    plan = plan_of(module.network, "network.", model.spec, input_shape)
    if module.classes is None and plan.outputs != 1:
        raise NotCovered(f"its squared error is over {plan.outputs} outputs")
    return plan


def _optimizer(model: FlatModel) -> tuple[str, dict[str, Any]]:
    """(kind, numbers) of a plain SGD or Adam over all parameters; raises NotCovered."""
    optimizer = model.optimizer
    kinds: dict[type, str] = {torch.optim.SGD: "sgd", torch.optim.Adam: "adam"}
    kind = kinds.get(type(optimizer))
    if kind is None or len(optimizer.param_groups) != 1:
        raise NotCovered(f"{type(optimizer).__name__} is not a plain SGD or Adam over one group")
    options = optimizer.param_groups[0]
    odd = [
        name
        for name in ("maximize", "amsgrad", "differentiable", "decoupled_weight_decay")
        if options.get(name)
    ]
    if odd or not isinstance(options["lr"], float | int):
        raise NotCovered(
            f"{type(optimizer).__name__} with {odd[0] if odd else 'a learning rate as a tensor'}"
        )
    parameters: list[nn.Parameter] = list(model.module.parameters())
    given: Sequence[Any] = options["params"]
    same = len(parameters) == len(given) and all(a is b for a, b in zip(parameters, given, strict=True))
    if not same or not all(parameter.requires_grad for parameter in parameters):
        raise NotCovered("some parameters are frozen or left out of the optimizer")
    return kind, options


def _shapes(model: FlatModel) -> list[tuple[int, ...]]:
    return [tuple(entry.shape) for entry in model.spec.entries if entry.kind == "parameter"]
