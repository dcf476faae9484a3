"""Bad inputs of the trial: files of settings."""

from __future__ import annotations

import os
from pathlib import Path

from tests.trial.case import TINY, Case, Make

_BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [{','.join([f'*{chr(97 + i)}'] * 9)}]\n" for i in range(9)
)

# {name: (content of c.yaml, part of the sentence)}
TEXTS: dict[str, tuple[bytes | str, str]] = {
    "nothing": (b"", "/c.yaml', got an empty file: write e.g. `method: ifca` in it"),
    "blanks": ("   \n\n", "/c.yaml', got an empty file: write e.g. `method: ifca` in it"),
    "tabs": ("\trounds: 3\n", "found character '\\t' that cannot start any token"),
    "null": ("null\n", "Expected lines such as `method: ifca` in"),
    "number": ("3\n", "Expected lines such as `method: ifca` in"),
    "text": ("rounds\n", "Expected lines such as `method: ifca` in"),
    "two documents": ("rounds: 3\n---\nrounds: 4\n", "/c.yaml', got a mistake in"),
    "nul bytes": (b"rounds: 3\x00\n", "/c.yaml', got a mistake: unacceptable character #x0000: special"),
    "latin-1": ("name: caf\xe9\n".encode("latin-1"), "Expected a YAML file after --config, got"),
    "utf-16": ("rounds: 3\n".encode("utf-16"), "Expected a YAML file after --config, got"),
    "control characters": ("rounds: 3\x07\n", "/c.yaml', got a mistake: unacceptable character #x0007: special"),
    "lone surrogate": ('name: "\\ud800"\n', "found invalid Unicode character escape code"),
    "unclosed quote": ('name: "abc\n', "found unexpected end of stream"),
    "unclosed bracket": ("ensemble: [fedavg\n", "expected ',' or ']', but got '<stream end>"),
    "bad indent": ("local:\n  lr: 0.1\n steps: 3\n", "expected <block end>, but found '<block mapping start>"),
    "unknown anchor": ("rounds: *nowhere\n", "found undefined alias 'nowhere"),
    "own anchor": ("local: &a\n  lr: *a\n", "YAML recursive aliases are not supported"),
    "alias bomb": (_BOMB, "YAML node expansion exceeds the configured limit of 10000. See"),
    "deep lists": ("ensemble: " + "[" * 5000 + "]" * 5000 + "\n", "Expected settings and their sections in"),
    "deeper lists": ("ensemble: " + "[" * 200000 + "]" * 200000 + "\n", "Expected settings and their sections in"),
    "deep mappings": ("local: " + "{a: " * 5000 + "1" + "}" * 5000 + "\n", "Expected settings and their sections in"),
    "deep blocks": ("".join(f"{' ' * i}a:\n" for i in range(900)) + " " * 900 + "a: 1\n", "Expected settings and their sections in"),
    "huge key": ("k" * 2_000_000 + ": 3\n", "Expected a YAML file after --config, got"),
    "huge value": ("name: " + "v" * 2_000_000 + "\n", "Expected a YAML file after --config, got"),
    "huge number": ("rounds: " + "9" * 100_000 + "\n", "/c.yaml', got a mistake: Exceeds the limit (4300 digits) for integer"),
    "many keys": ("".join(f"k{i}: 1\n" for i in range(20_000)), "YAML node expansion exceeds the configured limit of 10000. See"),
    "numeric key": ("3: 4\n", "/c.yaml'. Did you mean 'evaluation.clusterability'? `list settings`"),
    "null key": ("null: 4\n", "/c.yaml', got a mistake: Incompatible key type 'NoneType' full_key:"),
    "list as key": ("[1, 2]: 4\n", "/c.yaml', got a mistake in"),
    "mapping as key": ("? {a: 1}\n: 4\n", "/c.yaml', got a mistake in"),
    "python object": ("name: !!python/object/apply:os.system ['touch hacked']\n", "could not determine a constructor for the tag"),
    "own tag": ("rounds: !mine 3\n", "could not determine a constructor for the tag '!mine"),
    "binary tag": ("name: !!binary aGVsbG8=\n", "Expected name to be text or null, got b'hello' in"),
    "set": ("ensemble: !!set {fedavg, ifca}\n", "/c.yaml', got a mistake: Value 'set' is not a supported primitive"),
    "merge key": ("<<: 3\nrounds: 2\n", "expected a mapping or list of mappings for merging, but found scalar"),
    "percent directive": ("%YAML 9.9\n---\nrounds: 3\n", "found incompatible YAML document (version 1.* is required)"),
    "interpolation loop": ("rounds: ${seed}\nseed: ${rounds}\n", "Expected rounds='${seed}' in"),
    "interpolation of nothing": ("rounds: ${nothing.at.all}\n", "Expected rounds='${nothing.at.all}' in"),
    "unknown resolver": ("rounds: ${own:3}\n", "Expected rounds='${own:3}' in"),
    "include of itself": ("include: c.yaml\n", "Expected files that do not include themselves, got c.yaml -> c.yaml:"),
    "include of nothing": ("include: missing.yaml\n", "Expected a YAML file in 'include' of"),
    "include of a number": ("include: 3\n", "/c.yaml' to be a file or a list of files, got 3: as in include:"),
    "include of an empty list": ("include: []\n", "/c.yaml' to be a file or a list of files, got []: as in include:"),
    "include of a device": ("include: /dev/zero\n", "Expected a YAML file in 'include' of"),
    "include of a folder": ("include: .\n", "Expected a YAML file in 'include' of"),
    "small of a number": ("small: 3\n", "Expected settings inside 'small' in"),
    "small without --small": ("small: {nothing: 3}\nrounds: many\n", "Expected rounds to be a whole number, got 'many' in"),
    "section as value": ("rounds: {a: 1}\n", "Expected rounds to be a whole number, got a section in"),
    "value as section": ("local: 3\n", "Expected settings inside 'local' in"),
    "section as list": ("local: [1]\n", "Expected settings inside 'local' in"),
    "dotted and nested": ("local.lr: 0.1\nlocal: {lr: 0.2}\nrounds: x\n", "Expected local.lr once, got both 0.1 in"),
    "sweep of nothing": ("sweep: {}\nrounds: x\n", "Expected rounds to be a whole number, got 'x' in"),
    "sweep as list": ("sweep: [1]\n", "Expected settings inside 'sweep' in"),
    "sweep in a sweep": ("sweep: {grid: {sweep.seeds: [1, 2]}}\n", "Unknown setting 'sweep.seeds' in"),
    "sweep of a billion": ("sweep: {seeds: 1000000000}\n", "Expected at most 20000 trials, got sweep.seeds=1000000000 in"),
    "sweep of a large grid": (
        "sweep:\n  grid:\n" + "".join(f"    {key}: {list(range(1, 41))}\n" for key in ("rounds", "seed", "clients", "local.steps", "local.batch")),
        "Expected sweep.grid.clients=[...] on the command line, got clients=4:",
    ),
    "cases as mapping": ("sweep: {cases: {rounds: 3}}\n", "Expected sweep.cases to be a list with an entry at least, got"),
    "plugins as text": ("plugins: mine\n", "Expected plugins to be a list of texts in brackets, got 'mine' in"),
    "plugins as mapping": ("plugins: {a: b}\n", "Expected plugins to be a list of texts in brackets, got a section in"),
    "method as list": ("method: [fedavg]\n", "Expected method to be text, got ['fedavg'] in"),
    "method as number": ("method: 3\n", "Expected method to be text, got 3 in"),
    "storage as number": ("storage: 3\n", "Expected storage to be text, got 3 in"),
    "seed as text": ("seed: zero\n", "Expected seed to be a whole number, got 'zero' in"),
    "seed as float": ("seed: 0.5\n", "Expected seed to be a whole number, got 0.5 in"),
    "infinite rounds": ("rounds: .inf\n", "Expected rounds to be a whole number, got inf in"),
    "nan rounds": ("rounds: .nan\n", "Expected rounds to be a whole number, got nan in"),
}  # fmt: skip


def _written(content: bytes | str) -> Make:
    def make(folder: Path, runs: Path) -> None:
        (folder / "c.yaml").write_bytes(content.encode() if isinstance(content, str) else content)

    return make


def _fifo(folder: Path, runs: Path) -> None:
    os.mkfifo(folder / "c.yaml")


def _socket(folder: Path, runs: Path) -> None:
    os.mknod(folder / "c.yaml", 0o140600)


def _loop(folder: Path, runs: Path) -> None:
    (folder / "c.yaml").symlink_to("c.yaml")


def _dangling(folder: Path, runs: Path) -> None:
    (folder / "c.yaml").symlink_to("gone.yaml")


def _large(folder: Path, runs: Path) -> None:
    with (folder / "c.yaml").open("wb") as file:
        file.truncate(3 << 30)  # takes no room on the disk


def _including_fifo(folder: Path, runs: Path) -> None:
    (folder / "c.yaml").write_text("include: pipe.yaml\n")
    os.mkfifo(folder / "pipe.yaml")


def _many_includes(folder: Path, runs: Path) -> None:
    """Each file includes the next one twice: 2^40 readings."""
    for i in range(40):
        (folder / f"f{i}.yaml").write_text(f"include: [f{i + 1}.yaml, f{i + 1}.yaml]\n")
    (folder / "f40.yaml").write_text("rounds: 3\n")
    (folder / "c.yaml").write_text("include: f0.yaml\n")


def _long_chain(folder: Path, runs: Path) -> None:
    for i in range(3000):
        (folder / f"f{i}.yaml").write_text(f"include: f{i + 1}.yaml\n")
    (folder / "f3000.yaml").write_text("rounds: 3\n")
    (folder / "c.yaml").write_text("include: f0.yaml\n")


_FILES: dict[str, tuple[Make, str]] = {
    "a FIFO": (_fifo, "a pipe or a device"),
    "a socket": (_socket, "a pipe or a device"),
    "a link to itself": (_loop, "Too many levels of symbolic links"),
    "a link to nothing": (_dangling, "which does not exist"),
    "three gigabytes": (_large, "of 3221225472 bytes"),
    "a FIFO included": (_including_fifo, "a pipe or a device"),
    "includes that double": (_many_includes, "Expected at most 100 files, 20 deep, to be included by"),
    "a long chain of includes": (_long_chain, "Expected at most 100 files, 20 deep, to be included by"),
}
_WORDS = (
    f"--config {{folder}}/c.yaml {TINY}".replace(" rounds=2", "")
    .replace(" local.steps=1", "")
    .replace("name=x", "")
)

CASES = [
    *(Case(f"yaml: {name}", _WORDS, says, make=_written(content)) for name, (content, says) in TEXTS.items()),
    *(Case(f"yaml: {name}", _WORDS, says, make=make) for name, (make, says) in _FILES.items()),
]
