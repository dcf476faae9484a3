"""Run in processes that pass for other machines: digests of what the compiled engine trains, as JSON.

What a processor without AVX-512 would do is asked for by environment variables: of the kernels, of torch (whose
penalties, losses and assignments are used) and of NumPy.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import archipelago.core.torchvision_operators  # isort: skip  # noqa: F401  (must come before lightning)
import numpy as np
import pandas as pd
import torch

from archipelago import open_run
from archipelago.experiments.callbacks import CallbackFailure
from archipelago.experiments.runner import resume, run_experiment
from archipelago.strategies.cks import PairwisePull, SharedPull
from archipelago.strategies.con import ContrastOfOutputs, ContrastOfParameters
from archipelago.strategies.penalties import Linear, Proximal, ProximalToMixture
from lightning_modules.engines import Term
from tests.support.callbacks import StopAfter
from tests.support.compiled import Bench, network
from tests.support.experiments import config_of

NARROW = {  # such a machine
    "ARCHIPELAGO_KERNELS": "avx2",
    "ATEN_CPU_CAPABILITY": "avx2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "NPY_DISABLE_CPU_FEATURES": "AVX512F AVX512CD AVX512_SKX AVX512_CLX AVX512_CNL AVX512_ICL AVX512_SPR",
}
WIDE = {"ARCHIPELAGO_KERNELS": "avx512", "ATEN_CPU_CAPABILITY": "avx512"}
METHODS = ("ifca+cam", "wecfl+con+cks")
KINDS = ("Proximal", "ProximalToMixture", "Linear", "SharedPull", "PairwisePull", "ContrastOfParameters",
         "ContrastOfOutputs")  # fmt: skip


def drawn(*shape: int) -> np.ndarray:
    """Numbers of the size of parameters."""
    return (0.1 * np.random.default_rng(5).standard_normal(shape)).astype(np.float32)


def penalties(parameters: int, size: int, head: Any) -> dict[str, Term]:
    """One of each kind."""
    one, few, whole = drawn(parameters), drawn(3, parameters), drawn(3, size)
    tensors = {name: torch.from_numpy(each) for name, each in (("one", one), ("few", few))}
    shares, own = np.float32([0.2, 0.5, 0.3]), torch.tensor(1)
    weights = torch.from_numpy(shares)
    return {
        "Proximal": Term(Proximal(0.3, one), {"anchor": tensors["one"]}),
        "ProximalToMixture": Term(
            ProximalToMixture(0.3, few, shares), {"centres": tensors["few"], "importance": weights}
        ),
        "Linear": Term(Linear(0.1, one, one), {"slope": tensors["one"], "origin": tensors["one"]}),
        "SharedPull": Term(SharedPull(0.3, head, one), {"mean": tensors["one"]}),
        "PairwisePull": Term(
            PairwisePull(0.3, head, few, shares), {"models": tensors["few"], "weights": weights}
        ),
        "ContrastOfParameters": Term(
            ContrastOfParameters(0.5, 1.0, head, whole, own), {"models": tensors["few"], "own": own}
        ),
        "ContrastOfOutputs": Term(ContrastOfOutputs(0.5, 1.0, whole, own), {"own": own}, {"models": whole}),
    }


def digests() -> dict[str, str]:
    """Of models that were trained under each penalty, and the objectives, in which its value is."""
    found = {}
    for name in (*KINDS, "no penalty"):
        bench = Bench(network("cnn_digits", (1, 8, 8), 5), (1, 8, 8))
        spec = bench.model.spec
        terms = penalties(spec.parameters, spec.size, spec.columns("head"))
        job = bench.job([32, 17, 20], penalties=[terms[name]] if name in terms else [])
        result = bench.engine.train_one(dataclasses.replace(job, start=drawn(spec.size)))
        assert not bench.engine.notes
        found[name] = f"{hashlib.sha256(result.model.tobytes()).hexdigest()[:16]} {result.objective.hex()}"
    return found


def config(storage: str, name: str, method: str) -> Any:
    """A run with losses under K models, frozen logits and penalties."""
    more = ("con.form=rep",) if "con" in method else ()
    return config_of(
        f"method={method}", *more, "local.engine=compiled", "model=cnn_digits", "checkpoint.every=1",
        f"storage={storage}", f"name={name}",
    )  # fmt: skip


def assert_equal_models(one: Path, other: Path) -> None:
    """Equal bytes but for losses of evaluations, which are torch's: they may differ in the last digits."""
    left, right = open_run(one), open_run(other)
    for name, values in left.models.items():
        assert np.array_equal(values, right.models[name]), name
    pd.testing.assert_frame_equal(left.assignments, right.assignments, check_exact=True)
    ours, theirs = (pd.read_csv(path / "metrics.csv") for path in (one, other))
    losses = [name for name in ours.columns if name.endswith("_loss")]
    assert len(ours) == 4 and losses
    pd.testing.assert_frame_equal(ours[losses], theirs[losses], rtol=1e-6)
    pd.testing.assert_frame_equal(ours.drop(columns=losses), theirs.drop(columns=losses), check_exact=True)


def main(storage: str, part: str) -> None:
    """`begin`: runs that stop after two rounds. `end`: they are resumed, and compared with whole ones."""
    torch.set_num_threads(1)
    for method in METHODS:
        name = method.replace("+", "-")
        if part == "begin":
            with contextlib.suppress(CallbackFailure):
                run_experiment(config(storage, name, method), quiet=True, callbacks=[StopAfter(2)])
        else:
            resume(Path(storage) / name, quiet=True)
            whole = run_experiment(config(storage, f"{name}-whole", method), quiet=True)
            assert_equal_models(whole, Path(storage) / name)
    print(json.dumps({"torch": torch.backends.cpu.get_cpu_capability(), **digests()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
