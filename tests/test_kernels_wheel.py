"""The kernels built beforehand: a wheel for machines without a compiler, with the bits of every other build."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from lightning_modules.engines.compiled import build, recipe

ROOT = Path(__file__).resolve().parents[1]
STORED = ROOT / "tests" / "support" / "compiled_digests.json"
ABLE = {"avx2", "fma"} <= build.processor_flags()


def package(folder: Path, digest: str) -> Path:
    """What the wheel installs, with other bytes in place of kernels."""
    made = folder / recipe.PREBUILT
    made.mkdir()
    (made / "__init__.py").touch()
    (made / recipe.DIGEST).write_text(digest + "\n")
    for name in recipe.INSTRUCTIONS:
        (made / f"{name}.so").write_bytes(b"kernels")
    return made


@pytest.mark.skipif(not ABLE, reason="no AVX2 here")
def test_prebuilt_kernels_are_used_where_they_are_of_these_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ARCHIPELAGO_KERNELS", "avx2")
    monkeypatch.setenv("PATH", "")  # no compiler
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    made = package(tmp_path, recipe.sources_digest(Path(build.__file__).parent))
    assert build.library_path() == made / "avx2.so"
    with pytest.raises(build.CannotBuild, match="could not be loaded"):
        build.library.__wrapped__()
    assert (made / "avx2.so").is_file()  # an installed file is nobody's to remove
    (made / recipe.DIGEST).write_text("of other sources\n")
    with pytest.raises(build.CannotBuild, match="no C compiler"):
        build.library_path()


@pytest.mark.full
@pytest.mark.skipif(not ABLE, reason="no AVX2 here")
def test_kernels_wheel_gives_the_stored_bits_without_a_compiler(tmp_path: Path) -> None:
    source = tmp_path / "source"
    for path in ("recipes/kernels", "lightning_modules/engines/compiled"):  # a build leaves folders behind
        (source / path).mkdir(parents=True)
        for file in (ROOT / path).iterdir():
            if file.is_file():
                (source / path / file.name).write_bytes(file.read_bytes())
    (source / "pyproject.toml").write_bytes((ROOT / "pyproject.toml").read_bytes())
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps",
         "--no-build-isolation", "--no-index", "--wheel-dir", tmp_path / "dist", source / "recipes" / "kernels"],
        check=True, capture_output=True,
    )  # fmt: skip
    (wheel,) = (tmp_path / "dist").iterdir()
    version = re.search(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), flags=re.M)
    assert version is not None
    assert wheel.name == f"archipelago_fl_kernels-{version.group(1)}-py3-none-manylinux_2_17_x86_64.whl"
    installed = tmp_path / "installed"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)
    for name in recipe.INSTRUCTIONS:
        library = (installed / recipe.PREBUILT / f"{name}.so").read_bytes()
        needed = {tuple(map(int, found.split(b"."))) for found in re.findall(rb"GLIBC_(\d+\.\d+)", library)}
        assert needed and max(needed) <= (2, 17)  # what the wheel's tag promises
    code = "from tests.support.compiled import digest; print(digest('cnn_cifar'))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(installed), "PATH": "", "XDG_CACHE_HOME": str(tmp_path / "cache")},
    )  # fmt: skip
    assert done.stdout.split()[-1] == json.loads(STORED.read_text())["cnn_cifar"]
    assert not (tmp_path / "cache" / "archipelago").exists()
