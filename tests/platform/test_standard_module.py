"""From the project's root, `platform` is our package; it must answer exactly as the standard module does."""

from __future__ import annotations

import json
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Loads the standard module from its own file, beside whatever `import platform` finds.
STANDARD = """
import importlib.util, os, sys
path = os.path.join(os.path.dirname(os.__file__), "platform.py")
spec = importlib.util.spec_from_file_location("standard_platform", path)
standard = importlib.util.module_from_spec(spec)
spec.loader.exec_module(standard)
import platform
"""


def python(
    *arguments: str, cwd: Path = ROOT, stdin: bytes | None = None
) -> subprocess.CompletedProcess[bytes]:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=env, input=stdin, capture_output=True, timeout=120
    )


def output(*arguments: str, cwd: Path = ROOT, stdin: bytes | None = None) -> str:
    done = python(*arguments, cwd=cwd, stdin=stdin)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode()


def test_from_the_root_the_package_is_found_and_elsewhere_the_standard_module(tmp_path: Path) -> None:
    where = "import platform; print(platform.__file__)"
    assert Path(output("-c", where).strip()) == ROOT / "platform" / "__init__.py"
    assert Path(output("-c", where, cwd=tmp_path).strip()).name == "platform.py"


def test_every_name_is_there_and_none_is_added() -> None:
    code = (
        STANDARD
        + """
import json
ours, theirs = ({n for n in vars(m) if not n.startswith("__")} for m in (platform, standard))
same = {n: type(getattr(platform, n)) is type(getattr(standard, n)) for n in theirs}
print(json.dumps([sorted(ours ^ theirs), sorted(n for n, ok in same.items() if not ok), len(theirs)]))
print(platform.__doc__ == standard.__doc__, platform.__version__ == standard.__version__)
"""
    )
    names, docs = output("-c", code).splitlines()
    difference, other_types, count = json.loads(names)
    assert difference == []
    assert other_types == []
    assert count > 30
    assert docs == "True True"


def test_every_function_gives_the_standard_answer() -> None:
    code = (
        STANDARD
        + """
import inspect, types
checked = []
for name in sorted(n for n in vars(standard) if not n.startswith("_")):
    theirs, ours = getattr(standard, name), getattr(platform, name)
    if isinstance(theirs, types.ModuleType):
        assert theirs is ours, name
    elif inspect.isclass(theirs):
        assert [n for n in vars(theirs)] == [n for n in vars(ours)], name
        assert ours.__module__ == "platform" and ours.__qualname__ == theirs.__qualname__, name
    elif callable(theirs) and hasattr(theirs, "__module__") and theirs.__module__ != "standard_platform":
        assert theirs is ours, name  # taken from another module
    elif callable(theirs):
        needed = [
            p for p in inspect.signature(theirs).parameters.values()
            if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        ]
        assert str(inspect.signature(theirs)) == str(inspect.signature(ours)), name
        if not needed:
            outcomes = []
            for function in (theirs, ours):
                try:
                    outcomes.append(function())
                except Exception as error:
                    outcomes.append(repr(error))
            assert outcomes[0] == outcomes[1], (name, outcomes)
            checked.append(name)
    else:
        assert theirs == ours, name
assert platform.platform(terse=True) == standard.platform(terse=True)
assert platform.platform(aliased=True) == standard.platform(aliased=True)
print(" ".join(checked))
"""
    )
    checked = output("-W", "ignore", "-c", code).split()
    assert {"uname", "machine", "node", "platform", "python_version", "python_build", "system"} <= set(
        checked
    )


@pytest.mark.parametrize("writer_at_root", [True, False])
def test_uname_survives_pickling_between_the_root_and_elsewhere(writer_at_root: bool, tmp_path: Path) -> None:
    writer, reader = (ROOT, tmp_path) if writer_at_root else (tmp_path, ROOT)
    write = "import pickle, platform, sys; sys.stdout.buffer.write(pickle.dumps(platform.uname()))"
    read = (
        "import pickle, platform, sys; u = pickle.load(sys.stdin.buffer); assert u == platform.uname(); "
        "assert type(u) is platform.uname_result; print(u.processor == platform.processor(), u.node)"
    )
    written = python("-c", write, cwd=writer)
    assert written.returncode == 0, written.stderr.decode()
    assert output("-c", read, cwd=reader, stdin=written.stdout).split() == ["True", os.uname().nodename]


def test_uname_of_the_root_is_read_in_this_process() -> None:
    import platform

    write = "import pickle, platform, sys; sys.stdout.buffer.write(pickle.dumps(platform.uname()))"
    assert pickle.loads(python("-c", write).stdout) == platform.uname()


@pytest.mark.parametrize("module", ["uuid", "torch", "ray", "pytest", "asyncio", "ctypes.util"])
def test_modules_that_use_platform_import_from_the_root(module: str) -> None:
    assert output("-c", f"import {module}, platform; print(platform.system())").strip() == os.uname().sysname


def test_spawned_processes_start_from_the_root(tmp_path: Path) -> None:
    code = """
import multiprocessing, platform
if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.apply(platform.uname) == platform.uname())
"""
    script = tmp_path / "spawn.py"
    script.write_text(code)
    assert (
        output("-c", f"import runpy; runpy.run_path({str(script)!r}, run_name='__main__')").strip() == "True"
    )


@pytest.mark.parametrize("arguments", [(), ("terse",), ("nonaliased",)])
def test_python_m_platform_prints_what_the_standard_module_prints(
    arguments: tuple[str, ...], tmp_path: Path
) -> None:
    standard = output("-m", "platform", *arguments, cwd=tmp_path)
    assert output("-m", "platform", *arguments) == standard != ""


@pytest.mark.slow
@pytest.mark.parametrize(
    "command", [[str(Path(sys.executable).parent / "pytest")], [sys.executable, "-m", "pytest"]]
)
def test_both_ways_of_starting_pytest_can_import_the_entry_point(command: list[str], tmp_path: Path) -> None:
    test = tmp_path / "test_entry_point.py"
    test.write_text(
        "import platform\nimport platform.launch\n\n\n"
        "def test_entry_point():\n    assert callable(platform.launch.command_line)\n    assert platform.system()\n"
    )
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    done = subprocess.run(
        [*command, "-q", "-p", "no:cacheprovider", f"--rootdir={ROOT}", f"--confcutdir={ROOT}", "-c",
         str(ROOT / "pyproject.toml"), str(ROOT / "conftest.py"), str(test), str(ROOT / "tests/runs/test_trees.py")],
        cwd=ROOT, env=env, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed and int(passed[1]) > 10  # this one, and a file of the suite
