"""Runs as pandas data frames: two methods compared client by client.

python examples/read_runs.py [RUN RUN]

Without two run directories, two small ones are made in runs/.
"""

from __future__ import annotations

import sys

import pandas as pd

import archipelago as ar


def make(method: str) -> str:
    """A small run, and where it is."""
    run = ar.run(
        method=method, clusters=4, clients=12, rounds=6, data={"name": "digits", "rotations": 4},
        fleet={"backend": "in_process"}, name=f"read-{method}", quiet=True,
    )  # fmt: skip
    return str(run.path)


def by_client(run: ar.Run) -> pd.Series:
    """The last accuracy of every client."""
    last = run.clients[run.clients["round"] == run.clients["round"].max()]
    return last.set_index("client")["accuracy"]


def compare(*paths: str) -> pd.DataFrame:
    """One row a client: ground-truth group, accuracy under each method, what the second gains."""
    runs = [ar.open_run(path) for path in paths]
    table = pd.DataFrame({run.config["method"]: by_client(run) for run in runs})
    table.insert(0, "group", runs[0].clients.groupby("client")["group"].first())
    table["gain"] = table.iloc[:, 2] - table.iloc[:, 1]
    return table


if __name__ == "__main__":
    given = sys.argv[1:] or [make("fedavg"), make("ifca")]
    found = compare(*given)
    print(found.round(3).to_string())
    print("\nmean gain by ground-truth group")
    print(found.groupby("group")["gain"].mean().round(3).to_string())
    first = ar.open_run(given[0])
    print("\nwhat else there is:", first.figures, list(first.models), sep="\n  ")
