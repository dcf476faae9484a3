"""Clients with equal batch shapes trained as one batched model.

The same numbers as `loop` to VMAP_TOLERANCE (relative, per round of local training), because batched kernels add up
in another order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_modules.engines.base import ENGINES, Engine
from lightning_modules.engines.loop import LoopEngine
from lightning_modules.engines.objective import (
    LocalObjective,
    Rows,
    Term,
    TrainJob,
    TrainResult,
    follows_contract,
    objective_of,
    prepare,
)
from lightning_modules.flat import FlatModel, OptimizerState, tensor_of
from lightning_modules.samples import Samples

VMAP_TOLERANCE = 1e-4
GROUP = 32  # clients that are trained together at most


@ENGINES.register("vmap", "clients with equal batch shapes as one batched model", default_on="cuda")
class VmapEngine(Engine):
    """Clients with equal batch shapes as one batched model; the rest falls back to the loop, and says so."""

    ELEMENTWISE = (torch.optim.SGD, torch.optim.Adam)

    def __init__(self, model: FlatModel, samples: Samples, options: Any = None) -> None:
        super().__init__(model, samples, options)
        self.loop = LoopEngine(model, samples)
        self._why_not = self._reason_against()
        if self._why_not:
            self.notes.append(f"local.engine=vmap falls back to loop: {self._why_not}.")

    def _reason_against(self) -> str:
        module, optimizer = self.model.module, self.model.optimizer
        if not follows_contract(module):
            return f"{type(module).__name__} has no per-sample loss"
        if type(optimizer) not in self.ELEMENTWISE or len(optimizer.param_groups) != 1:
            return f"{type(optimizer).__name__} is not a plain SGD or Adam over one group"
        parameters = list(module.parameters())
        optimized = optimizer.param_groups[0]["params"]
        same = len(parameters) == len(optimized) and all(
            a is b for a, b in zip(parameters, optimized, strict=True)
        )
        if not same or not all(parameter.requires_grad for parameter in parameters):
            return "some parameters are frozen or left out of the optimizer"
        for name, part in module.named_modules():
            if isinstance(part, torch.nn.modules.dropout._DropoutNd):
                return f"'{name}' draws random numbers (Dropout)"
        return ""

    def train(self, jobs: Sequence[TrainJob]) -> Iterator[TrainResult]:
        """Run the jobs; results come in the order of the jobs."""
        if self._why_not:
            yield from self.loop.train(jobs)
            return
        groups: dict[tuple[Any, ...], list[int]] = {}
        for position, job in enumerate(jobs):
            groups.setdefault(_signature(job), []).append(position)
        done: dict[int, TrainResult] = {}
        for positions in groups.values():
            for start in range(0, len(positions), GROUP):
                chosen = positions[start : start + GROUP]
                if len(chosen) == 1:
                    done[chosen[0]] = self.loop.train_one(jobs[chosen[0]])
                else:
                    done.update(zip(chosen, self._train_together([jobs[p] for p in chosen]), strict=True))
        for position in range(len(jobs)):
            yield done.pop(position)

    def _train_together(self, jobs: list[TrainJob]) -> list[TrainResult]:
        """A group as one model; what torch cannot batch (random draws in `forward`, odd layers) in the loop."""
        try:
            with torch.no_grad():  # gradients come from torch.func; a second graph would only cost
                return self._train_group(jobs)
        except torch.OutOfMemoryError:
            raise  # is a RuntimeError, and no reason to train one by one in silence
        except RuntimeError as error:
            self._why_not = f"torch cannot batch this module ({str(error).strip().splitlines()[0][:120]})"
            self.notes.append(f"local.engine=vmap falls back to loop: {self._why_not}.")
            return list(self.loop.train(jobs))

    def _train_group(self, jobs: list[TrainJob]) -> list[TrainResult]:
        model, module = self.model, self.model.module
        objectives = [prepare(job, model, self.samples) for job in jobs]
        model.touch()
        module.train()
        stacked = torch.stack([tensor_of(job.start) for job in jobs]).to(model.device)
        parameters, buffers = self._unstack(stacked, len(jobs))
        leaves = [Parameter(tensor) for tensor in parameters.values()]
        optimizer = self._stacked_optimizer(leaves, jobs)
        gradient = torch.func.vmap(torch.func.grad_and_value(self._objective(objectives[0].terms)))
        anchors = _stack_anchors(objectives)
        total = torch.zeros(len(jobs), dtype=torch.float64, device=model.device)
        for step in range(len(jobs[0].batches)):
            batches = [self.samples.batch(job.batches[step]) for job in jobs]
            x = torch.stack([x for x, _ in batches])
            y = torch.stack([y for _, y in batches])
            rows = [objective.rows(step) for objective in objectives]
            stacked_rows = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
            live = dict(zip(parameters, leaves, strict=True))
            gradients, losses = gradient(live, buffers, x, y, stacked_rows, anchors)
            for name, leaf in live.items():
                leaf.grad = gradients[name]
            optimizer.step()
            total += losses.detach()
        return self._collect(jobs, leaves, buffers, optimizer, total)

    def _objective(self, terms: list[Term]) -> Any:
        """The objective of one client as a function of stacked values; `terms` say which penalties there are."""
        module = self.model.module

        def objective(
            parameters: dict[str, Tensor],
            buffers: dict[str, Tensor],
            x: Tensor,
            y: Tensor,
            rows: Rows,
            anchors: list[dict[str, Tensor]],
        ) -> Tensor:
            own = torch.func.functional_call(module, (parameters, buffers), (x,))
            live = torch.cat([p.reshape(-1) for p in parameters.values()]) if terms else None
            own_terms = [
                Term(term.penalty, own_anchors) for term, own_anchors in zip(terms, anchors, strict=True)
            ]
            return objective_of(module, own, y, live, own_terms, rows)

        return objective

    def _unstack(self, stacked: Tensor, count: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        parameters: dict[str, Tensor] = {}
        buffers: dict[str, Tensor] = {}
        for entry in self.model.spec.entries:
            part = stacked[:, entry.start : entry.stop].reshape(count, *entry.shape).clone()
            (parameters if entry.kind == "parameter" else buffers)[entry.name] = part
        for name, buffer in self.model.module.named_buffers():
            if not buffer.is_floating_point():
                buffers[name] = buffer.expand(count, *buffer.shape).clone()
        return parameters, buffers

    def _stacked_optimizer(self, leaves: list[Parameter], jobs: list[TrainJob]) -> torch.optim.Optimizer:
        """The module's optimizer over stacked parameters: its updates are element by element."""
        own = self.model.optimizer
        settings = {name: value for name, value in own.param_groups[0].items() if name in own.defaults}
        optimizer = type(own)(leaves, **settings)
        for index, leaf in enumerate(leaves):
            states = [job.optimizer_state or {} for job in jobs]
            for key in [k for k in states[0] if k.partition(".")[0] == str(index)]:
                values = [torch.from_numpy(state[key].copy()) for state in states]
                name = key.partition(".")[2]
                # A step counter is one number for the group: jobs of a group agree on it (see _signature).
                stacked = values[0] if name == "step" else torch.stack(values).to(leaf.device)
                optimizer.state[leaf][name] = stacked
        return optimizer

    def _collect(
        self,
        jobs: list[TrainJob],
        leaves: list[Parameter],
        buffers: dict[str, Tensor],
        optimizer: torch.optim.Optimizer,
        total: Tensor,
    ) -> list[TrainResult]:
        floats = [
            buffers[entry.name].reshape(len(jobs), -1)
            for entry in self.model.spec.entries
            if entry.kind == "buffer"
        ]
        flat = (
            torch.cat([leaf.detach().reshape(len(jobs), -1) for leaf in leaves] + floats, dim=1).cpu().numpy()
        )
        results = []
        for row, job in enumerate(jobs):
            state: OptimizerState = {}
            for index, leaf in enumerate(leaves):
                for name, value in optimizer.state[leaf].items():
                    if value is not None:
                        one = value if name == "step" else value[row]
                        state[f"{index}.{name}"] = one.detach().cpu().numpy().copy()
            model = flat[row].copy()
            model.flags.writeable = False
            results.append(TrainResult(job.client, model, state, float(total[row]) / len(job.batches)))
        return results


def _signature(job: TrainJob) -> tuple[Any, ...]:
    """What must agree for clients to be trained as one batched model."""
    state = job.optimizer_state or {}
    counters = tuple((key, float(value)) for key, value in state.items() if key.endswith(".step"))
    shapes = tuple(len(batch) for batch in job.batches)
    extras = (bool(job.on_top_of), len(job.penalties), job.sample_weights is not None, job.scale == 1.0)
    return (shapes, tuple(state), counters, extras)


def _stack_anchors(objectives: list[LocalObjective]) -> list[dict[str, Tensor]]:
    return [
        {
            name: torch.stack([objective.terms[i].anchors[name] for objective in objectives])
            for name in term.anchors
        }
        for i, term in enumerate(objectives[0].terms)
    ]
