"""`python -m benchmarks [NAME] [--rounds N] [--json FILE]`: each benchmark in a process of its own.

Exits with 1 if a limit was missed. A miniature has no limits, nor have those of `NO_LIMIT`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.cost_model import GPUS

NAMES = (
    "workload_w",
    "methods",
    "memory",
    "start",
    "scale",
    "visits",
    "fleet_memory",
    "memory_slope",
    "loss",
    "layout",
    "partition",
    "mapped",
    "claims",
    "collapse",
    "cam_study",
    "aliasing",
    "mixtures",
    "clustered",
    "attacks",
    "privacy",
    "sweep",
    "report",
    "small_tables",
    "frames",
    "gpu",
    "host",
    "compiled",
    "behaviour",
    "chaos",
)
# These compare methods, or predict what is measured elsewhere: they have no limit to keep.
NO_LIMIT = (
    "claims", "collapse", "cam_study", "aliasing", "mixtures", "clustered", "attacks", "privacy", "gpu", "host",
)  # fmt: skip
# What only some benchmarks can be asked for.
OPTIONS = {
    "workload_w": ("ragged",),
    "visits": ("clients",),
    "gpu": ("counts", "engines", "gpu"),
    "host": ("engines",),
    "chaos": ("minutes", "seed"),
    "behaviour": (
        "reduced",
        "finished",
        "update",
        "minutes",
        "processes",
        "methods",
        "situations",
        "plugins",
        "out",
    ),
}
RESULTS = Path(__file__).resolve().parent / "results"


def main() -> int:
    """Run one benchmark here, or all of them one after the other; print tables, write JSON."""
    parser = _parser()
    arguments = parser.parse_intermixed_args()  # settings may stand behind options
    if arguments.settings and arguments.name not in ("aliasing", "cam_study"):
        parser.error(f"{arguments.name} takes no settings of an experiment, got '{arguments.settings[0]}'")
    for option in sorted({option for options in OPTIONS.values() for option in options}):
        if getattr(arguments, option) and option not in OPTIONS.get(arguments.name, ()):
            takers = " and ".join(name for name, options in OPTIONS.items() if option in options)
            parser.error(f"--{option} is for {takers}, not for {arguments.name}")
    everything = arguments.name == "all"
    result = {name: _elsewhere(name, arguments) for name in NAMES} if everything else _here(arguments)
    path = arguments.json or RESULTS / f"{arguments.name}-{time.strftime('%Y%m%d-%H%M%S')}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    if arguments.json is None:
        print(f"All numbers: {path}")
    missed = [] if arguments.miniature else _missed(result.values() if everything else [result])
    if missed:
        print(f"Limits missed: {', '.join(missed)}.", file=sys.stderr)
    return 1 if missed else 0


def _missed(results: Iterable[dict[str, Any]]) -> list[str]:
    """The benchmarks that have a limit and did not keep it."""
    return [each["benchmark"] for each in results if not each["result"].get("kept", True)]


def _here(arguments: argparse.Namespace) -> dict[str, Any]:
    from benchmarks.machine import facts

    benchmark = importlib.import_module(f"benchmarks.{arguments.name}")
    machine = facts()
    more = [arguments.settings] if arguments.settings else []
    given = {name: getattr(arguments, name) for name in OPTIONS.get(arguments.name, ())}
    options = {name: value for name, value in given.items() if value}
    result = benchmark.run(arguments.rounds, arguments.miniature, *more, **options)
    print(benchmark.report(result), flush=True)
    return {"benchmark": arguments.name, "machine": machine, "result": result}


def _elsewhere(name: str, arguments: argparse.Namespace) -> Any:
    """A benchmark must not feel what another one left behind in its process."""
    with tempfile.TemporaryDirectory(prefix="archipelago-benchmark-") as folder:
        path = Path(folder) / "result.json"
        command = [sys.executable, "-m", "benchmarks", name, "--json", str(path)]
        command += ["--rounds", str(arguments.rounds)] if arguments.rounds else []
        command += ["--miniature"] if arguments.miniature else []
        return _result_of(command, path)


def _result_of(command: list[str], path: Path) -> Any:
    """What the command wrote there: it does so, too, if a limit was missed."""
    done = subprocess.run(command, check=False)
    if not path.is_file():
        raise subprocess.CalledProcessError(done.returncode, command)
    return json.loads(path.read_text())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Speed, memory, start, scale and reports against their limits. Run it on a machine with nothing "
        "else to do: the comparisons are made to bear noise, the seconds are not.",
    )
    parser.add_argument(
        "name", nargs="?", default="all", choices=("all", *NAMES), help="default: all of them"
    )
    parser.add_argument(
        "settings", nargs="*", help="of an experiment, as in data=cifar10: for aliasing and cam_study alone"
    )
    parser.add_argument(
        "--rounds", type=_count, help="measurements of each kind (default: the benchmark's own)"
    )
    parser.add_argument("--json", type=Path, help="where to write the numbers (default: benchmarks/results/)")
    parser.add_argument(
        "--ragged", action="store_true", help="workload_w: unequal clients (cluster-wise Dirichlet)"
    )
    parser.add_argument(
        "--counts", action="store_true", help="gpu: count on the shadow device, even with a GPU"
    )
    parser.add_argument("--gpu", choices=sorted(GPUS), help="gpu: whose cost model (default: A100)")
    parser.add_argument("--engines", nargs="+", metavar="NAME", help="gpu, host: default loop and stacked")
    parser.add_argument("--reduced", action="store_true", help="behaviour: the part that CI runs")
    parser.add_argument(
        "--finished", action="store_true", help="behaviour: the page of the cells that are kept, run nothing"
    )
    parser.add_argument(
        "--update",
        action="store_true",
        help="behaviour: cells that are not run stay as results/behaviour.csv has them",
    )
    parser.add_argument("--situations", nargs="+", metavar="SITUATION", help="behaviour: these alone")
    parser.add_argument("--processes", type=_count, help="behaviour: runs at a time (default: 1)")
    parser.add_argument(
        "--methods", nargs="+", metavar="METHOD", help="behaviour: these alone, as in ifca+cam"
    )
    parser.add_argument(
        "--plugins", nargs="+", metavar="MODULE", help="behaviour: modules with methods of your own"
    )
    parser.add_argument("--clients", type=_count, help="visits: of the federation (default: 2,000)")
    parser.add_argument(
        "--minutes", type=float, help="chaos: of faults (default: 3); behaviour: begin no more runs then"
    )
    parser.add_argument("--seed", type=int, help="chaos: of the faults (default: 0)")
    parser.add_argument("--out", type=Path, help="behaviour: folder of the page (default: results/)")
    parser.add_argument("--miniature", action="store_true", help="a tiny workload, to see that it runs")
    return parser


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a number of at least 1, got {text}")
    return value


# Processes of the bare loop import this file again, under another name.
if __name__ == "__main__":
    sys.exit(main())
