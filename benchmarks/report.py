"""The report of a large sweep: 500 runs of 100 rounds and 200 clients, within a minute and 2 GB.

The runs are written here, with the files and the columns that real ones have; what is measured is the command
`python -m platform.launch report SWEEP` in a process of its own, figures as PNG and SVG included.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.machine import watched
from benchmarks.tables import table, verdict

SECONDS, BYTES = 60.0, 2e9
METHODS = (
    "fedavg",
    "fedprox",
    "ifca",
    "fesem",
    "wecfl",
    "ifca+cam",
    "fesem+cam",
    "wecfl+cam",
    "wecfl+con",
    "wecfl+cks",
)
PROBLEMS = tuple(
    (data, split) for data in ("fashion_mnist", "cifar10") for split in ("cluster_dirichlet", "dirichlet")
)


def run(rounds: int | None = None, miniature: bool = False) -> dict[str, Any]:
    """Write a sweep and report on it `rounds` times (default: once)."""
    runs, length, clients = (8, 5, 10) if miniature else (500, 100, 200)
    with tempfile.TemporaryDirectory(prefix="archipelago-report-") as folder:
        sweep = Path(folder) / "sweep"
        write_sweep(sweep, runs, length, clients)
        measured = [_measure(sweep) for _ in range(rounds or 1)]
        size = (sweep / "report" / "report.html").stat().st_size
        files = len(list((sweep / "report" / "figures").iterdir()))
    slowest, largest = max(each[0] for each in measured), max(each[1] for each in measured)
    kept = slowest <= SECONDS and largest <= BYTES and size < 5e6
    found = {"seconds": slowest, "bytes": largest, "page_bytes": size, "figure_files": files, "kept": kept}
    return {"runs": runs, "rounds": length, "clients": clients, **found}


def report(result: dict[str, Any]) -> str:
    """The result as a table."""
    rows = [
        ["seconds", f"{result['seconds']:.1f}", f"{SECONDS:.0f}", verdict(result["seconds"], SECONDS)],
        [
            "all processes, GB",
            f"{result['bytes'] / 1e9:.2f}",
            f"{BYTES / 1e9:.0f}",
            verdict(result["bytes"], BYTES),
        ],
        ["report.html, MB", f"{result['page_bytes'] / 1e6:.2f}", "5", verdict(result["page_bytes"], 5e6)],
    ]
    title = (
        f"Report of {result['runs']} runs x {result['rounds']} rounds x {result['clients']} clients, with "
        f"{result['figure_files']} figure files"
    )
    return table(title, ["", "measured", "limit", ""], rows)


def _measure(sweep: Path) -> tuple[float, int]:
    """(seconds of the command, bytes of all its processes together; it has one for each CPU, four at most)."""
    seconds, memory = watched([sys.executable, "-m", "platform.launch", "report", str(sweep)])
    return seconds, sum(memory.values())


# A sweep ----------------------------------------------------------------------------------------------------


def write_sweep(folder: Path, runs: int, rounds: int, clients: int) -> None:
    """Run directories in groups of five seeds, methods x K on four problems, and the files of a sweep."""
    (folder / "runs").mkdir(parents=True)
    from archipelago.runs.sweeps import Row, write_rows
    from archipelago.runs.sweeps import write_sweep as write_document

    write_document(str(folder), {"sweep": {}})
    shared = folder / "shared"
    _shared_files(shared, rounds, clients)
    rows = []
    for number in range(runs):
        group, seed = divmod(number, 5)
        data, split = PROBLEMS[group % len(PROBLEMS)]
        method = METHODS[group // len(PROBLEMS) % len(METHODS)]
        clusters = 5 * (1 + group // (len(PROBLEMS) * len(METHODS)))
        config = {"method": method, "ensemble": [], "clients": clients, "clusters": clusters, "rounds": rounds,
                  "seed": seed, "data": {"name": data}, "evaluation": {"last": 3, "every": 1},
                  "partition": {"name": split, "alpha": 0.1, "alpha_within": 10.0},
                  "local": {"steps": 10, "lr": 0.001, "batch": 32}}  # fmt: skip
        _write_run(folder / "runs" / f"t{number}", config, shared, number)
        name = f"{method} {data} {split} {clusters}"
        rows.append(Row(f"t{number}", name, seed, "finished", run=f"runs/t{number}"))
    write_rows(str(folder), rows)


def _write_run(path: Path, config: dict[str, Any], shared: Path, number: int) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rng = np.random.Generator(np.random.PCG64(number))
    rounds, clients, clusters = config["rounds"], config["clients"], config["clusters"]
    path.mkdir()
    (path / "config.yaml").write_text(json.dumps(config))  # JSON is YAML
    (path / "status.json").write_text(
        json.dumps({"state": "finished", "rounds_done": rounds, "rounds": rounds})
    )
    (path / "environment.json").write_text(json.dumps({"python": "3.11", "packages": {"torch": "2.13"}}))
    cluster = rng.integers(0, clusters, clients)
    level = 0.3 + 0.1 * rng.random() + 0.5 * (1 - np.exp(-np.arange(1, rounds + 1) / 20))
    accuracy = np.clip(level[:, None] + 0.08 * rng.normal(size=(rounds, clients)), 0, 1)
    columns = {
        "round": np.arange(1, rounds + 1),
        "federated_objective": 1 - level,
        "ari": level,
        "nmi": level,
    }
    columns |= {
        f"cost_{name}": np.full(rounds, 1.5) for name in ("models_down", "models_up", "gradients", "forwards")
    }
    for kind in ("micro", "macro", "worst10", "std"):
        for name in ("loss", "accuracy", "macro_f1"):
            columns[f"{kind}_{name}"] = accuracy.mean(axis=1) * (0.8 if name == "macro_f1" else 1.0)
    sizes = json.dumps(np.bincount(cluster, minlength=clusters).tolist()).replace(" ", "")
    clustered = not config["method"].startswith("fed")
    text = [",".join([*columns, *(["cluster_sizes"] if clustered else [])])]
    for at in range(rounds):
        cells = [repr(column[at].item()) for column in columns.values()]
        text.append(",".join([*cells, *([f'"{sizes}"'] if clustered else [])]))
    (path / "metrics.csv").write_text("\n".join(text) + "\n")
    seconds = ["round,train,evaluate,total", *(f"{at},0.51,0.1,0.65" for at in range(1, rounds + 1))]
    (path / "timings.csv").write_text("\n".join(seconds) + "\n")
    number_of = np.repeat(np.arange(1, rounds + 1, dtype=np.int32), clients)
    client = np.tile(np.arange(clients, dtype=np.int32), rounds)
    group, held = np.tile(np.arange(clients) % 10, rounds), np.tile(cluster, rounds)
    table = {"round": number_of, "client": client, "group": group, "cluster": held, "accuracy": accuracy.ravel(),
             "macro_f1": 0.8 * accuracy.ravel(), "loss": 1 - accuracy.ravel()}  # fmt: skip
    pq.write_table(pa.table(table), path / "clients.parquet")
    pq.write_table(
        pa.table({"round": number_of, "client": client, "cluster": held}), path / "assignments.parquet"
    )
    for file in shared.rglob("*"):
        if file.is_file():
            target = path / file.relative_to(shared)
            target.parent.mkdir(exist_ok=True)
            os.link(file, target)


def _shared_files(folder: Path, rounds: int, clients: int) -> None:
    """What is as large in every run, but may be the same: compared models, examples, cluster models, the data."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    from safetensors.numpy import save_file

    rng = np.random.Generator(np.random.PCG64(0))
    (folder / "records").mkdir(parents=True)
    (folder / "models").mkdir()
    ids = np.arange(clients)
    for at in sorted({1, max(rounds // 20, 1), max(rounds // 5, 1), rounds}):
        columns = {
            "client": ids,
            **{f"pc_{k}": rng.normal(size=clients).astype(np.float32) for k in range(20)},
        }
        pq.write_table(pa.table(columns), folder / "records" / f"models-{at:06d}.parquet")
        pairs = {"client": np.repeat(ids, clients), "other": np.tile(ids, clients),
                 "cosine": rng.random(clients * clients).astype(np.float32)}  # fmt: skip
        pq.write_table(pa.table(pairs), folder / "records" / f"cosine-{at:06d}.parquet")
    _federation(folder / "federation", clients, rng)
    images = rng.integers(0, 256, (4 * min(clients, 48), 3, 32, 32)).astype(np.uint8)
    owners = np.repeat(np.arange(min(clients, 48)), 4)
    save_file({"images": images, "client": owners}, folder / "records" / "examples.safetensors")
    save_file(
        {"clusters": rng.normal(size=(10, 62_006)).astype(np.float32)},
        folder / "models" / "clusters.safetensors",
    )


def _federation(folder: Path, clients: int, rng: np.random.Generator) -> None:
    """Who holds what: ten classes at every client, in ten groups."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir()
    ids = np.arange(clients, dtype=np.int32)
    counts = rng.integers(0, 60, (clients, 2, 10)).astype(np.int32)  # client, training or test, class
    sums = counts.sum(axis=2)
    held = {
        "client": ids,
        "train": sums[:, 0],
        "validation": np.zeros_like(ids),
        "test": sums[:, 1],
        "group": ids % 10,
    }
    pq.write_table(pa.table(held), folder / "clients.parquet")
    rows = {"client": np.repeat(ids, 20), "part": np.tile(np.repeat(["train", "test"], 10), clients),
            "source": np.zeros(clients * 20, np.int32), "label": np.tile(np.arange(10, dtype=np.int32), clients * 2),
            "samples": counts.ravel()}  # fmt: skip
    pq.write_table(pa.table(rows), folder / "counts.parquet")
    facts = {"data": "cifar10", "classes": 10, "clients": clients, "samples": int(counts.sum()), "sources": 1,
             "groups": 10, "levels": 0, "holdout": [], "published_protocol": False, "notes": []}  # fmt: skip
    (folder / "facts.json").write_text(json.dumps(facts))
