"""A data set of CelebA's size class, larger than the memory that a run may take.

202,599 JPEGs in CelebA's own layout (few different ones, under as many names) are decoded once into a
memory-mapped copy of 4.3 GB, then a federated run trains on it. Both happen in a process whose memory for data
of its own is limited (RLIMIT_DATA): more than that and it fails. Pages of the mapped file are not its own; the
system takes them back whenever it needs them.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.tables import table

LIMIT = 1_500_000_000  # bytes of memory of its own that the process may take
IMAGES, PEOPLE, DIFFERENT = 202_599, 10_177, 64


def run(rounds: int | None, miniature: bool) -> dict[str, Any]:
    """Write the files, then decode and train in a limited process; everything is removed afterwards."""
    images = 400 if miniature else IMAGES
    with tempfile.TemporaryDirectory(prefix="archipelago-mapped-") as folder:
        root = Path(folder)
        started = time.perf_counter()
        write_celeba(root / "celeba", images, max(2, images * PEOPLE // IMAGES))
        written = time.perf_counter() - started
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.mapped", folder, str(rounds or 2)],
            cwd=Path(__file__).resolve().parents[1],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise RuntimeError(f"the limited process ended with {done.returncode}: {done.stderr[-2000:]}")
        return {
            "images": images,
            "limit": LIMIT,
            "write_seconds": written,
            **json.loads(done.stdout.splitlines()[-1]),
        }


def write_celeba(folder: Path, images: int, people: int) -> None:
    """CelebA's texts and photographs of 178x218; each of the few different ones has many names."""
    import io

    import numpy as np
    from PIL import Image

    from archipelago.core.randomness import generator

    place = folder / "img_align_celeba"
    place.mkdir(parents=True)
    draws = generator(0, "photographs")
    originals = []
    for number in range(DIFFERENT):
        coarse = draws.integers(0, 256, (16, 16, 3)).astype(np.uint8)
        content = io.BytesIO()
        Image.fromarray(coarse).resize((178, 218), Image.Resampling.BICUBIC).save(content, "JPEG", quality=90)
        originals.append(folder / f"original-{number}.jpg")
        originals[-1].write_bytes(content.getvalue())
    names = [f"{i + 1:06d}.jpg" for i in range(images)]
    for i, name in enumerate(names):
        os.link(originals[i % DIFFERENT], place / name)
    smiling = draws.integers(0, 2, images) * 2 - 1
    count = str(images)
    texts = {
        "list_attr_celeba.txt": [
            count,
            "Smiling",
            *(f"{n} {s}" for n, s in zip(names, smiling, strict=True)),
        ],
        "identity_CelebA.txt": [f"{n} {i % people}" for i, n in enumerate(names)],
        "list_bbox_celeba.txt": [count, "x", *(f"{n} 0" for n in names)],
        "list_landmarks_align_celeba.txt": [count, "x", *(f"{n} 0" for n in names)],
        "list_eval_partition.txt": [f"{n} 0" for n in names],
    }
    for name, lines in texts.items():
        (folder / name).write_text("\n".join(lines) + "\n")


def memory_of_its_own() -> int:
    """Bytes in memory that belong to no file."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no RssAnon")


class Peak(threading.Thread):
    """Looks at this process's own memory until it is stopped, and keeps the largest figure."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.largest = 0
        self._over = threading.Event()

    def run(self) -> None:
        """Look twenty times a second."""
        while not self._over.wait(0.05):
            self.largest = max(self.largest, memory_of_its_own())

    def stop(self) -> int:
        """End the thread; returns what it saw."""
        self._over.set()
        self.join()
        return self.largest


def limited(root: str, rounds: int) -> dict[str, Any]:
    """Decode and train, with memory limited; returns seconds and the largest memory seen.

    Tests go by 64 samples at a time: at the default of 512 the network's own activations (0.46 GB for the first
    layer alone) would be measured, not the data.
    """
    import archipelago.core.torchvision_operators  # noqa: F401  (before torchvision)

    # isort: split
    import torch
    from torchvision.datasets import CelebA

    from actors.session import InProcessSession
    from archipelago.data import build_federation
    from archipelago.data.files import md5_of
    from archipelago.experiments.config import load_config
    from archipelago.experiments.plan import make_plan

    torch.set_num_threads(1)
    folder = Path(root) / "celeba"
    # The checksums of these files instead of the real ones: they are checked all the same.
    CelebA.file_list = [
        (ident, md5_of(folder / name) if name.endswith(".txt") else sum_, name)
        for ident, sum_, name in CelebA.file_list
    ]
    config = load_config(
        None,
        ["method=fedavg", "data=celeba", f"data.root={root}", "data.mapped=yes", "clients=20", f"rounds={rounds}",
         "local.steps=5", "participation.fraction=0.5", "evaluation.every=1000", "evaluation.batch=64",
         "fleet.backend=in_process"],
    )  # fmt: skip
    base, peak = memory_of_its_own(), Peak()
    peak.start()
    resource.setrlimit(resource.RLIMIT_DATA, (LIMIT, LIMIT))
    started = time.perf_counter()
    federation = build_federation(config.data, config.partition, config.clients, config.seed)
    made = time.perf_counter() - started
    started = time.perf_counter()
    build_federation(config.data, config.partition, config.clients, config.seed)
    opened = time.perf_counter() - started
    session = InProcessSession(make_plan(config, federation))
    started = time.perf_counter()
    for round in range(1, rounds + 1):
        session.run_round(round)
    seconds = (time.perf_counter() - started) / rounds
    largest = peak.stop()
    return {
        "data_bytes": int(federation.x.nbytes),
        "decode_seconds": made,
        "open_seconds": opened,
        "round_seconds": seconds,
        "own_bytes_before": base,
        "peak_own_bytes": largest,
        "kept": largest <= LIMIT,
        "peak_bytes_with_mapped_pages": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def report(result: dict[str, Any]) -> str:
    """The size of the data beside the memory it took."""
    title = (
        f"{result['images']:,} images, {result['data_bytes'] / 1e9:.2f} GB mapped, in a process limited to "
        f"{result['limit'] / 1e9:.1f} GB of its own"
    )
    rows = [
        ["memory of its own, largest seen", f"{result['peak_own_bytes'] / 1e9:.2f} GB"],
        ["decoding into the mapped copy, once", f"{result['decode_seconds']:.1f} s"],
        ["opening the copy again", f"{result['open_seconds']:.1f} s"],
        [
            "a round of 10 clients with 5 steps each, the last with a test of all",
            f"{result['round_seconds']:.1f} s",
        ],
    ]
    return table(title, ["", ""], rows)


if __name__ == "__main__":
    print(json.dumps(limited(sys.argv[1], int(sys.argv[2]))))
