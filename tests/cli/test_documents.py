"""Every command in the documents is run: they say what the code does today."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from PIL import Image

import archipelago
import archipelago.cli.main
import benchmarks.__main__
from archipelago.cli.run import Run
from archipelago.core.registry import REGISTRIES
from archipelago.data import DATASETS
from archipelago.experiments.callbacks import CallbackFailure
from archipelago.experiments.config import load_config
from archipelago.experiments.runner import run_experiment
from archipelago.runs.sweeps import read_rows
from archipelago.sweeps.config import load_sweep
from docs.hooks import pictures, small_runs
from docs.hooks.entries import KINDS, documentation, entries, parts_of, split_readings
from tests.support.callbacks import StopAfter
from tests.support.documents import DOCUMENTS, DOOR, ROOT, blocks, commands, indented, inline, python

BENCHMARKS = "python -m benchmarks"
STANDARD = "python -m platform"  # the module of that name that Python has
QUICK = ("partition",)  # benchmarks whose miniature takes a second; tests/benchmarks/ runs the others
# Small enough for a test; everything else of a documented command stays as it is written.
SMALLER = ["rounds=2", "local.steps=1", "model=mlp", "fleet.backend=in_process"]
IN_PROCESS = 'rounds=1, fleet={"backend": "in_process"}'
CLUSTERED = {"ifca", "fesem", "wecfl", "cfl", "robust", "stocfl", "feddrift", "flhc", "fedgroup", "fedclust", "pacfl",
             "flux", "fedsoft", "fedem", "fedrc", "femam", "fedgwc"}  # fmt: skip  # that README counts
ROTATIONS = ROOT / "docs/data/pictures/shifts/rotations.png"
RUNS = "docs/runs.md"  # opens the run of its own command
PARTS = "docs/extending.md"  # a file with one part of every kind
# Several commands in one process, which saves the seconds that starting one takes.
SEVERAL = """
import sys
from archipelago.cli.main import main

words = [[]]
for word in sys.argv[1:]:
    words.append([]) if word == "then" else words[-1].append(word)
sys.exit(max(main(each) for each in words))
"""


def of(start: str, folder: str = ".") -> list[str]:
    found = [line for where, line in commands() if where == folder]
    return sorted({line for line in found if line == start or line.startswith(f"{start} ")})


def smaller(arguments: list[str], storage: Path) -> list[str]:
    """The same command on less work, with its results under `storage`."""
    changed = [*SMALLER, f"storage={storage}"]
    keys = {argument.partition("=")[0] for argument in arguments}
    if (
        any("con+cks" in argument for argument in arguments)
        or keys & {"model.target"}
        or "model=tanh_layers" in arguments
    ):
        changed = [
            change for change in changed if change != "model=mlp"
        ]  # it needs a backbone, or brings its own
    keys = {change.partition("=")[0] for change in changed}
    return [argument for argument in arguments if argument.partition("=")[0] not in keys] + changed


def several(folder: Path, lines: list[list[str]], **env: str) -> str:
    """Commands typed one after the other in a folder; what they print."""
    words = [word for line in lines for word in ["then", *line]][1:]
    done = subprocess.run(
        [sys.executable, "-c", SEVERAL, *words], cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT), **env},
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_no_kind_of_command_is_left_out():
    """Each is run by a test below, or by the one that is named here, or its block says why not."""
    known = (DOOR, STANDARD, BENCHMARKS, "make", "ray job submit", "ray start --head", "ray get-auth-token",
             "export RAY_AUTH_MODE", "python -m pytest", "python -m docs.hooks", "cd ")  # fmt: skip
    elsewhere = {"examples/own_method": "archipelago plugins=[my_method]",
                 "examples/own_module": "archipelago model.target=my_module.",
                 "examples/paper_table": "archipelago "}  # fmt: skip  # tests/test_examples.py runs this
    unknown = [(folder, line) for folder, line in commands()
               if not line.startswith(known) and not line.startswith(elsewhere.get(folder, "nothing"))]  # fmt: skip
    assert unknown == []
    assert (".", f"{BENCHMARKS} partition") in commands()  # which stands in a sentence
    assert {line for _, line in commands() if line.startswith("make")} >= {"make run", "make test"}
    assert {block.kind for block in blocks()} <= {
        "sh",
        "python",
        "yaml",
        "text",
        "",
    }  # no block hides behind a name


def test_blocks_that_are_not_run_say_why():
    marked = [block for block in blocks() if block.why]
    assert marked
    for block in marked:
        assert len(block.why) > 20, block
        named = re.findall(r"(?:tests|examples|docs)/[\w/.]+\w", block.why)
        assert all((ROOT / name).exists() for name in named), f"{block.document}: {block.why}"
    text = "".join((ROOT / document).read_text(encoding="utf-8") for document in DOCUMENTS)
    assert text.count("<!-- not run:") == len(marked), "a mark must stand right above its block"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_no_command_hides_in_an_indented_block(document):
    assert indented(document) == []


def whole(line):
    """Whether a command can be typed as it stands."""
    return "..." not in line and not re.search(r"\b[A-Z]{3,}\b", line)


def test_commands_that_are_not_run_are_understood():
    """What is left to a cluster, to data or to patience still names files, settings and values that there are."""
    understood = 0
    for block in blocks():
        for line in block.lines if block.kind == "sh" and block.why else []:
            line = line.replace("sbatch recipes/slurm/archipelago.sbatch", DOOR)
            words = shlex.split(line.replace("s3://bucket", "runs"))  # a bucket would be looked for
            if words[:3] == DOOR.split() and whole(line) and block.document != PARTS:
                request = archipelago.cli.main.parse(words[3:])
                if isinstance(request, Run):
                    asked = parts(words[3:])
                    assert load_sweep(*asked) or load_config(request.file, request.overrides), line
                understood += 1
    assert understood > 15


def test_commands_in_sentences_are_understood():
    found = [line for document in DOCUMENTS for line in inline(document) if line.startswith("archipelago ")]
    assert len(found) >= 3
    for line in filter(whole, found):
        words = shlex.split(line)[1:]
        assert words[0] in (
            "report",
            "resume",
            "doctor",
            "list",
            "--install-completion",
            "--version",
        ) or load_config(None, words), line


def test_commands_of_method_pages_are_understood():
    """Made with the page, of a run that is kept beside its figure."""
    known = small_runs.kept()
    assert len(known) > 40
    for name, found in known.items():
        assert found is None or name in load_config(None, found["words"]).method, name


def test_method_pages_have_a_paper_and_its_equations():
    """All but the references that no paper defines."""
    without = set()
    for kind in KINDS:
        for entry in entries(kind):
            parts = parts_of(split_readings(documentation(entry))[0])
            if "paper" not in parts or not re.search(r"^    \S", parts.get("map", ""), re.M):
                without.add(entry.name)
    assert without == {"local", "oracle", "random"}


def test_figures_of_small_runs_are_all_there_and_pictures_can_be_made(tmp_path, monkeypatch):
    """`python -m docs.hooks.small_runs` makes what is missing: nothing is. `pictures` draws them again, here one."""
    before = {path: path.read_bytes() for path in small_runs.FOLDER.iterdir()}
    small_runs.main([])
    assert {path: path.read_bytes() for path in small_runs.FOLDER.iterdir()} == before
    named = {line for _, line in commands() if "docs.hooks" in line}
    assert named == {
        "python -m docs.hooks.pictures",
        "python -m docs.hooks.notebooks",
    }  # the latter is run in test_notebooks.py
    monkeypatch.setattr(pictures, "FOLDER", tmp_path)
    pictures.shift("rotations")
    assert Image.open(tmp_path / "shifts/rotations.png").size == Image.open(ROTATIONS).size


def test_every_python_block_is_run():
    """Those of a document are one program; here is which test runs it."""
    found = {block.document for block in blocks() if block.kind == "python" and not block.why}
    assert found == {*PROGRAMS, RUNS, PARTS, "docs/api.md", "docs/data/own.md"}


def test_every_cell_of_the_readme_s_comparison_is_linked_and_a_dash_to_its_evidence():
    """What others do leads to their pages, what was not found to the place where it was looked for."""
    text = (ROOT / "README.md").read_text(encoding="utf-8").partition("## What only this does")[2]
    head, _, *rows = [line for line in text.partition("## ")[0].splitlines() if line.startswith("|")]
    others = [re.sub(r"\[(.+)\]\(.+\)", r"\1", cell.strip()) for cell in head.strip("|").split("|")][2:]
    evidence = (ROOT / "docs/compared.md").read_text(encoding="utf-8")
    assert len(rows) >= 5 and len(others) == 4
    for row in rows:
        _, ours, *cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert re.fullmatch(r"\[[^]]+\]\(docs/[^)]+\)", ours), row
        for other, cell in zip(others, cells, strict=True):
            words, link = re.fullmatch(r"\[([^]]+)\]\(([^)]+)\)", cell).groups()
            if words != "–":
                assert link.startswith("https://"), cell
            elif link.startswith("docs/"):
                title = link.partition("#")[2]
                sections = re.split(r"^## ", evidence, flags=re.M)
                (section,) = [
                    each for each in sections if each.splitlines()[0].lower().replace(" ", "-") == title
                ]
                (about,) = [line for line in section.splitlines() if line.startswith(f"| {other} ")]
                assert "https://" in about, f"{other}: {title}"
    named = [entry.name for entry in REGISTRIES["method"].values()]
    assert f"[{len(CLUSTERED & {*named})} methods]" in text  # all of these are registered


@pytest.mark.parametrize("document", ["README.md", "examples/README.md", "recipes/README.md", "ARCHITECTURE.md",
                                      "CONTRIBUTING.md"])  # fmt: skip  # mkdocs checks the links of the others
def test_links_lead_somewhere(document):
    text = (ROOT / document).read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = link.partition("#")
        if path.startswith("https://"):
            continue
        assert (ROOT / document).parent.joinpath(path).exists(), link
        if anchor:
            heads = re.findall(
                r"^#+ (.+)$", (ROOT / document).parent.joinpath(path).read_text(encoding="utf-8"), re.M
            )
            assert anchor in {re.sub(r"[^a-z0-9 -]", "", head.lower()).replace(" ", "-") for head in heads}, (
                link
            )


@pytest.mark.parametrize("line", of("make"))
def test_make_targets_exist_and_are_explained(line):
    done = subprocess.run(["make", "--dry-run", *line.split()[1:]], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    listed = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert line == "make" or f"{line} " in listed


@pytest.mark.parametrize("line", of(BENCHMARKS))
def test_benchmarks_exist(line, tmp_path, monkeypatch, capsys):
    words = line.split()[3:]
    monkeypatch.setattr(
        sys, "argv", ["benchmarks", *words, "--miniature", "--json", str(tmp_path / "found.json")]
    )
    arguments = benchmarks.__main__._parser().parse_intermixed_args()
    assert importlib.util.find_spec(f"benchmarks.{arguments.name}") is not None
    if arguments.name in QUICK:
        assert benchmarks.__main__.main() == 0
        assert "limit" in capsys.readouterr().out


@pytest.mark.parametrize("line", of("ray get-auth-token"))
def test_token_is_made(line, tmp_path, monkeypatch):
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))  # where Ray keeps it
    ray = Path(sys.executable).with_name("ray")
    done = subprocess.run([ray, *line.split()[1:]], capture_output=True, text=True, check=True)
    assert re.fullmatch(r"[0-9a-f]{64}", done.stdout.strip())
    assert (tmp_path / ".ray/auth_token").read_text() == done.stdout.strip()


@pytest.mark.full
def test_make_run_ends_in_a_table_and_a_report():
    had_runs, made = (ROOT / "runs").exists(), set(ROOT.glob("runs/*"))
    done = subprocess.run(["make", "run"], cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    (sweep,) = set(ROOT.glob("runs/*")) - made
    try:
        assert all(method in done.stdout for method in ("FedAvg", "IFCA", "FeSEM", "FeSEM+CAM"))
        assert str(sweep.name) in done.stdout and {row.status for row in read_rows(sweep)} == {"finished"}
        assert (sweep / "report/report.html").is_file()
    finally:
        shutil.rmtree(sweep)
        if not had_runs:
            (ROOT / "runs").rmdir()


def test_standard_module_still_answers():
    assert [line for _, line in commands() if line.split()[:3] == STANDARD.split()] == [
        STANDARD
    ]  # in DECISIONS.md
    done = subprocess.run(
        [sys.executable, *STANDARD.split()[1:]], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "Linux" in done.stdout


def cases():
    """The commands; sweeps take half a minute each, so only the full matrix has them."""
    for line in of(DOOR):
        words = line.split()
        if not {"resume", "report"} & set(words):
            named = line == DOOR or any("tune_configs" in word for word in words)
            swept = named and "--dry-run" not in words
            long = swept and load_sweep(*parts(words[3:])) is not None
            yield pytest.param(line, marks=pytest.mark.full if long else ())


def parts(arguments):
    """(file, overrides, environment, whether the small variant is asked for) of a command."""
    request = archipelago.cli.main.parse(arguments)
    return request.file, request.overrides, None, request.small


@pytest.mark.parametrize("line", list(cases()))
def test_commands_of_the_command_line(line, tmp_path, capsys):
    arguments = shlex.split(line)[3:]
    if arguments[:2] == [
        "data",
        "fetch",
    ]:  # tests/data/test_fetch.py fetches, from its own web server
        from archipelago.data import DATASETS

        assert all(DATASETS.find(name).fetch for name in arguments[2:])
        return
    if arguments and arguments[0] in ("list", "doctor", "data"):
        assert archipelago.cli.main.main(arguments) == 0
        return
    if arguments and arguments[0] == "choose-clusters":
        assert archipelago.cli.main.main(smaller(arguments, tmp_path)) == 0
        assert "was chosen: the least number" in capsys.readouterr().out
        return
    if arguments and arguments[0] == "partition":
        assert archipelago.cli.main.main([*arguments, f"storage={tmp_path}"]) == 0
        assert len(list(tmp_path.glob("*/figures/*.png"))) == 2
        return
    sweep = load_sweep(*parts(arguments))
    if sweep is not None and sweep.tunes:  # tests/sweeps/test_ray.py runs it, on Ray
        assert sweep.planned > 1
        return
    swept = [] if sweep is None else ["sweep.seeds=[0]"]
    arguments = [argument for argument in arguments if not argument.startswith("sweep.seeds")]
    code = archipelago.cli.main.main(smaller([*arguments, *swept], tmp_path))
    printed = capsys.readouterr()
    assert code == 0, printed.err
    if "--dry-run" in arguments:
        assert "the sweep" in printed.out and not list(tmp_path.iterdir())
        return
    (made,) = [path for path in tmp_path.iterdir() if not path.name.startswith(".")]
    assert f"Results: {made}" in printed.out
    states = [row.status for row in read_rows(made)] if swept else [archipelago.open_run(made).status.state]
    assert states and set(states) == {"finished"}


@pytest.mark.slow
def test_resume_and_open_as_the_documents_show(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (line,) = [line for line in of(DOOR) if line.split()[3:4] == ["name=my-run"]]
    arguments = [a for a in smaller(shlex.split(line)[3:], Path("runs")) if not a.startswith("checkpoint")]

    with pytest.raises(CallbackFailure):
        config = load_config(None, [*arguments, "checkpoint.every=1"])
        run_experiment(config, callbacks=[StopAfter(1, "on_checkpoint")], quiet=True)
    (resume,) = [line for line in of(DOOR) if " resume " in line]
    assert archipelago.cli.main.main(shlex.split(resume)[3:]) == 0
    for report in [line for line in of(DOOR) if " report " in line]:
        words = [
            str(path)
            for word in shlex.split(report)[3:]
            for path in (sorted(Path().glob(word)) if "*" in word else [word])
        ]
        assert archipelago.cli.main.main(words) == 0
        made = Path("comparison" if "out=comparison" in words else "runs/my-run/report")
        assert (made / "report.html").stat().st_size > 1_000_000
        assert "figures=no" in words or {path.suffix for path in (made / "figures").iterdir()} == {
            ".png",
            ".svg",
        }
    capsys.readouterr()
    exec(compile(python(RUNS), RUNS, "exec"), {})


def test_own_method_and_module_run_as_the_documents_show(tmp_path):
    """In their folders and other processes, as a user would; tests/test_package.py starts the installed command."""
    lines = [
        line.replace("sweep.seeds=3", "sweep.seeds=1") for line in of("archipelago", "examples/own_method")
    ]
    assert len(lines) == 3
    shown = several(ROOT / "examples" / "own_method",
                    [smaller(shlex.split(line)[1:], tmp_path / str(n)) for n, line in enumerate(lines)])  # fmt: skip
    assert "Sticky IFCA" in shown and "sticky" in shown
    lines = of("archipelago", "examples/own_module")
    assert len(lines) == 2
    several(ROOT / "examples" / "own_module",
            [smaller(shlex.split(line)[1:], tmp_path / f"module-{n}") for n, line in enumerate(lines)])  # fmt: skip


def test_parts_of_every_kind_run_as_the_page_on_extending_shows(tmp_path):
    (tmp_path / "my_parts.py").write_text(python(PARTS))
    (block,) = [block for block in blocks() if block.document == PARTS and block.why]
    *runs, sweep = [shlex.split(line)[1:] for line in block.lines]
    lines = [smaller([*words, "name=parts"], tmp_path / str(n)) for n, words in enumerate(runs)]
    shown = several(
        tmp_path, [*lines, ["--dry-run", *sweep, "clients=4", "rounds=2", "local.steps=1", "model=mlp"]]
    )
    assert "diary: round 2" in shown and "3 trials" in shown
    for n in range(len(runs)):
        run = archipelago.open_run(tmp_path / str(n) / "parts")
        assert run.status.state == "finished" and "micro_doubt" in run.metrics
    assert (tmp_path / "1/parts/lines").is_dir()
    assert "Seconds by round" in (tmp_path / "0/parts/report/report.html").read_text()
    registries = {registry.kind for registry in archipelago.cli.vocabulary.registries()}
    headings = re.findall(r"^## (.+)$", (ROOT / PARTS).read_text(encoding="utf-8"), re.M)
    text = " ".join(headings).lower()
    names = {"update transform": "transforms", "model": "network", "aggregation rule": "aggregation"}
    assert [kind for kind in sorted(registries) if names.get(kind, kind) not in text] == []


PROGRAMS = ["README.md", "docs/first-steps.md", "docs/data/index.md"]


@pytest.mark.parametrize("document", PROGRAMS)
def test_python_as_the_documents_show(document, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    code = re.sub(r"rounds=\d+", IN_PROCESS, python(document))
    if document != "README.md":
        code = code.replace(".report()", '.report(figures="no")')  # README's draws them all
    exec(compile(code, document, "exec"), names)
    if "run" in names:
        assert names["run"].status.state == "finished" and len(names["sweep"].runs) == 4


def test_api_page_names_the_package():
    names = {}
    exec(compile(python("docs/api.md"), "docs/api.md", "exec"), names)
    assert names["ar"] is archipelago


def test_data_of_ones_own_as_the_documents_show(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ARCHIPELAGO_CACHE", str(tmp_path / "cache"))
    found = [
        block.text for block in blocks() if block.document == "docs/data/own.md" and block.kind == "python"
    ]
    code, function = found
    lines = [line for line in code.splitlines() if line.strip() and "import" not in line]
    assert len(lines) <= 10
    more = 'fleet={"backend": "in_process"}, local={"steps": 1}, name="my-arrays"'
    try:
        exec(compile(code.replace('name="my-arrays"', more), "own.md", "exec"), {})
        DATASETS.remove("mine")
        assert archipelago.cli.main.main(["partition", "data=mine", "partition=natural", "clients=6"]) == 0
    finally:
        DATASETS.remove("mine")
    assert archipelago.open_run("runs/my-arrays").status.state == "finished"
    Path("my_data.py").write_text(function)
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        words = ["partition", "data=my_data.blobs", "data.spread=0.5", "clients=4", "partition=iid"]
        assert archipelago.cli.main.main(words) == 0
    finally:
        DATASETS.remove("blobs")
        sys.modules.pop("my_data")


@pytest.mark.parametrize("line", [*of("ray job submit"), *of("ray start")])
def test_ray_commands_are_those_of_the_tests_on_a_real_cluster(line):
    """tests/platform/test_ray_job.py runs them; here: what comes after `--` is a valid experiment."""
    tests = (ROOT / "tests/platform/test_ray_job.py").read_text() + (
        ROOT / "tests/support/clusters.py"
    ).read_text()
    words = [word for word in shlex.split(line.split(" -- ")[0]) if word != "--head"]
    assert all(f'"{word}"' in tests for word in words)
    if " -- " in line:
        arguments = shlex.split(line.split(" -- ")[1])[3:]
        assert load_config(None, [a for a in arguments if not a.startswith("storage")]).method


def test_first_steps_name_the_methods_that_exist():
    from archipelago.strategies import ADDONS, METHODS

    text = (ROOT / "docs/first-steps.md").read_text(encoding="utf-8")
    for name in [*METHODS, *ADDONS]:
        assert f"`{name}`" in text, f"docs/first-steps.md does not name {name}"


def test_references_to_decisions_lead_to_one():
    text = (ROOT / "DECISIONS.md").read_text(encoding="utf-8")
    entries = re.findall(r"^### (\w+)\. .+ \(2026-\d\d-\d\d.*\)(?: \[(.+)\])?$", text, re.M)
    assert len(entries) == text.count("\n### ")  # each has a name and a date
    were = dict(re.findall(r"\| (\d+) \| ([A-Z]\d(?:, [A-Z]\d)*) (?=\|)", text))
    assert sorted(map(int, were)) == list(range(1, 69))
    merged = {(number, name) for name, numbers in entries for number in filter(None, numbers.split(", "))}
    assert merged == {(number, name) for number, names in were.items() for name in names.split(", ")}
    names = {name for name, _ in entries} | set(were)
    for folder in ("archipelago", "actors", "lightning_modules", "platform", "benchmarks", "tests", "."):
        for path in (ROOT / folder).glob("*" if folder == "." else "**/*.py"):
            if path.is_file() and path.suffix in (".py", ".md", ".txt", ".toml"):
                found = re.findall(
                    r"DECISIONS(?:\.md)?,? (?:entry )?([A-G]?\d+)", path.read_text(encoding="utf-8")
                )
                assert set(found) <= names, path


@pytest.mark.full
def test_small_runs_of_the_method_pages_are_those_of_this_code():
    """`python -m docs.hooks.small_runs all` makes them again; what is missing is made when the site is built."""
    from docs.hooks import small_runs
    from docs.hooks.entries import KINDS, entries

    kept = small_runs.kept()
    assert set(kept) == {entry.name for kind in KINDS for entry in entries(kind)}
    for kind in KINDS:
        for entry in entries(kind):
            found = kept[entry.name]
            with tempfile.TemporaryDirectory() as folder:
                made = small_runs._run(kind, entry.name, folder, small_runs.settings(entry.name))
                assert (made is None) == (found is None)
                if made is not None:
                    assert small_runs._last(made[1]) == pytest.approx(found["accuracy"], abs=0.01), entry.name
