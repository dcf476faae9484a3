"""Completion: what the program answers to a shell, and what a real bash, zsh and fish make of it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from archipelago.cli import vocabulary
from archipelago.cli.completion import SCRIPTS, VARIABLE
from archipelago.cli.main import main
from tests.support.clusters import ROOT
from tests.support.command_line import started
from tests.support.terminal import typed_line
from tests.support.written_runs import write_run


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One cache for all questions, as a user has it."""
    return str(tmp_path_factory.mktemp("cache"))


def asked(line: str, cache: str, cwd: Path = ROOT) -> list[str]:
    """The values offered at the end of this line, as our scripts ask for them."""
    done = started(
        module="archipelago", cwd=cwd, XDG_CACHE_HOME=cache, PYTHONPATH=str(ROOT),
        **{VARIABLE: "complete_fish", "_TYPER_COMPLETE_FISH_ACTION": "get-args", "_TYPER_COMPLETE_ARGS": line},
    )  # fmt: skip
    assert done.stderr == ""
    return values(done.stdout)


def values(answers: str) -> list[str]:
    return [answer.partition("\t")[0] for answer in answers.splitlines() if answer]


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("archipelago method=ifc", ["method=ifca"]),
        ("archipelago method=ifca+c", ["method=ifca+cam", "method=ifca+cks", "method=ifca+con"]),
        ("archipelago local.lr", ["local.lr="]),
        ("archipelago rounds=3 loc", ["local."]),
        ("archipelago fedprox.", ["fedprox.mu="]),
        ("archipelago rounds=3 seed=1 roun", []),  # given already
        ("archipelago data=dig", ["data=digits"]),
        ("archipelago data.name=dig", ["data.name=digits"]),
        ("archipelago partition=cluster_n", ["partition=cluster_n_class"]),
        ("archipelago model=ml", ["model=mlp"]),
        ("archipelago local.keep_optimizer=t", ["local.keep_optimizer=true"]),
        ("archipelago fleet.backend=in", ["fleet.backend=in_process"]),
        ("archipelago partition partition=ii", ["partition=iid"]),
        ("archipelago --config thesis-7.", [f"thesis-7.{number}" for number in range(1, 7)]),
        ("archipelago rounds=3 --config=dem", ["demo"]),
        ("archipelago --d", ["--dry-run"]),
        ("archipelago choose-", ["choose-clusters"]),
        ("archipelago rep", ["report"]),
        ("archipelago report --js", ["--json"]),
        ("archipelago report figures=n", ["figures=no"]),
        ("archipelago list wec", ["wecfl"]),
        ("archipelago list set", ["settings"]),
        ("archipelago list methods ifc", []),
        ("archipelago data f", ["fetch"]),
        ("archipelago data fetch cifar100 cifar", ["cifar10"]),
        ("archipelago data list data.roo", ["data.root="]),
        ("archipelago sweep.sampler=op", ["sweep.sampler=optuna"]),
    ],
)
def test_completion_offers(
    line: str,
    offered: list[str],
    cache: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", cache)
    monkeypatch.setenv(VARIABLE, "complete_fish")
    monkeypatch.setenv("_TYPER_COMPLETE_FISH_ACTION", "get-args")
    monkeypatch.setenv("_TYPER_COMPLETE_ARGS", line)
    with pytest.raises(SystemExit) as end:
        main([])
    printed = capsys.readouterr()
    assert (end.value.code, values(printed.out), printed.err) == (0, offered, "")


def test_completion_asked_by_another_process(cache: str) -> None:
    assert asked("archipelago method=ifc", cache) == ["method=ifca"]
    assert asked("archipelago local.lr", cache) == ["local.lr="]
    assert asked("archipelago --config thesis-7.", cache) == [f"thesis-7.{number}" for number in range(1, 7)]


def test_completion_at_the_beginning_offers_commands_and_sections(cache: str) -> None:
    offered = asked("archipelago ", cache)
    assert {"list", "resume", "report", "doctor", "method=", "rounds=", "data=", "local.", "fleet."} <= {
        *offered
    }
    assert "completion" not in offered and not any(each.startswith("local.l") for each in offered)


def test_completion_offers_runs_as_words_and_folders_to_continue(cache: str, tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "mine")
    assert asked("archipelago resume ru", cache, tmp_path) == ["runs/"]
    assert asked("archipelago report runs/", cache, tmp_path) == ["runs/mine"]
    assert asked("archipelago resume nothing", cache, tmp_path) == []


@pytest.mark.parametrize(
    ("shell", "variables", "answer"),
    [
        ("bash", {"COMP_WORDS": "archipelago method=ifc", "COMP_CWORD": "1"}, "method=ifca\n"),
        ("zsh", {"_TYPER_COMPLETE_ARGS": "archipelago method=ifc"}, '"method=ifca":"K cluster models'),
    ],
)
def test_completion_answers_typers_own_protocols(
    shell: str, variables: dict[str, str], answer: str, cache: str
) -> None:
    done = started(module="archipelago", XDG_CACHE_HOME=cache, **{VARIABLE: f"complete_{shell}", **variables})
    assert (done.returncode, done.stderr) == (0, "") and answer in done.stdout


def test_completion_imports_nothing_heavy_once_the_names_are_known(cache: str) -> None:
    asked("archipelago method=", cache)
    code = (
        "import sys, atexit; atexit.register(lambda: print(sorted({'torch', 'ray', 'lightning'} & set(sys.modules)),"
        " file=sys.stderr)); from archipelago.cli.main import main; main([])"
    )
    env = {**os.environ, "XDG_CACHE_HOME": cache, VARIABLE: "complete_bash", "COMP_WORDS": "archipelago method=ifc",
           "COMP_CWORD": "1"}  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("method=ifca\n", "[]\n")


def test_vocabulary_is_looked_up_again_when_the_code_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    file = tmp_path / "archipelago" / "completion.json"
    found = vocabulary.vocabulary()
    assert "ifca" in found.kinds["methods"] and vocabulary.vocabulary() == found
    kept = json.loads(file.read_text())
    kept["kinds"]["methods"] = {"kept": ""}
    file.write_text(json.dumps(kept))
    assert list(vocabulary.vocabulary().kinds["methods"]) == ["kept"]
    kept["state"][2] -= 1  # a file of the package is newer now
    file.write_text(json.dumps(kept))
    assert vocabulary.vocabulary() == found
    file.write_text("half a fi")
    assert vocabulary.vocabulary() == found
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))  # a file where a folder should be
    assert vocabulary.vocabulary() == found


@pytest.mark.parametrize("shell", SCRIPTS)
def test_completion_script_is_shown_and_installed_once(
    shell: str, command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert command("--show-completion", shell) == (0, SCRIPTS[shell], "")
    (tmp_path / ".bashrc").write_text("alias ll='ls -l'")
    for _ in range(2):
        code, out, error = command("--install-completion", shell)
        assert (code, error) == (0, "")
    assert Path(out.partition(" is in ")[2].partition(". It works")[0]).read_text() == SCRIPTS[shell]
    if shell == "bash":
        lines = (tmp_path / ".bashrc").read_text().splitlines()
        assert lines == ["alias ll='ls -l'", f"source '{tmp_path}/.bash_completions/archipelago.sh'"]


@pytest.fixture
def home(tmp_path: Path, cache: str) -> dict[str, str]:
    """The environment of a user who has the command `archipelago`, with nothing else in the home."""
    folder = tmp_path / "bin"
    folder.mkdir()
    program = folder / "archipelago"
    program.write_text(
        f"#!{sys.executable}\nimport sys\nsys.path.insert(0, {str(ROOT)!r})\n"
        "from archipelago.cli.main import command_line\ncommand_line()\n"
    )
    program.chmod(0o755)
    return {"HOME": str(tmp_path), "PATH": f"{folder}:/usr/bin:/bin", "TERM": "dumb", "LANG": "C.UTF-8",
            "XDG_CACHE_HOME": cache}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("shell", SCRIPTS)
def test_completion_in_a_real_shell(shell: str, home: dict[str, str], tmp_path: Path, cache: str) -> None:
    """Behind `=` too, which ends a word for bash; and a name that is to be continued has no blank behind it."""
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    subprocess.run(["archipelago", "--install-completion", shell], env=home, check=True, capture_output=True)
    asked("archipelago method=", cache)
    typed = "archipelago method=ifc\tlocal.lr\t0.1 --config dem\t"
    shown = typed_line([shell, "-i"], typed, tmp_path, home)
    assert shown.rstrip() == "archipelago method=ifca local.lr=0.1 --config demo"


def bash_answers(line: str, words: list[str], env: dict[str, str]) -> list[str]:
    """COMPREPLY after bash has called the function for this line, whose words it has split like this."""
    listed = " ".join(f"'{word}'" for word in words)
    code = (
        f"{SCRIPTS['bash']}\nCOMP_LINE='{line}' COMP_POINT={len(line)} COMP_WORDS=({listed}) "
        f"COMP_CWORD={len(words) - 1}\n_archipelago_completion archipelago '{words[-1]}' ''\n"
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(["bash", "--norc", "-c", code], env=env, capture_output=True, text=True, check=True)
    return done.stdout.split()


@pytest.mark.parametrize(
    ("line", "words", "answers"),
    [
        ("archipelago method=ifc", ["archipelago", "method", "=", "ifc"], ["ifca"]),
        ("archipelago model=", ["archipelago", "model", "="], ["mlp"]),
        ("archipelago local.lr", ["archipelago", "local.lr"], ["local.lr="]),
        ("archipelago name=a:b report", ["archipelago", "name", "=", "a", ":", "b", "report"], []),
    ],
)
def test_completion_in_bash_answers_behind_the_equals_sign(
    line: str, words: list[str], answers: list[str], home: dict[str, str]
) -> None:
    found = bash_answers(line, words, home)
    assert found == answers or (words[-1] == "=" and {*answers} < {*found} and "=" not in "".join(found))
