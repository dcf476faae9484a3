"""Builds both instruction sets of the kernels into a wheel that every Python on x86-64 Linux can install."""

import importlib.util
import os
import subprocess
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parents[2]
KERNELS = ROOT / "lightning_modules" / "engines" / "compiled"
SYSTEM = (
    "manylinux_2_17_x86_64"  # of the C library they need memory functions alone (tests/test_kernels_wheel.py)
)


def load_recipe():
    """`recipe.py` by its path: importing its package would need PyTorch."""
    spec = importlib.util.spec_from_file_location("recipe", KERNELS / "recipe.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def version():
    """That of the platform: kernels and engine belong together."""
    lines = (ROOT / "pyproject.toml").read_text(encoding="utf-8").splitlines()
    return next(line.split('"')[1] for line in lines if line.startswith("version = "))


class BuildKernels(build_py):
    def run(self):
        recipe = load_recipe()
        folder = Path(self.build_lib) / recipe.PREBUILT
        folder.mkdir(parents=True, exist_ok=True)
        compiler = os.environ.get("CC", "cc")
        for name, flags in recipe.INSTRUCTIONS.items():
            command = [
                compiler,
                *recipe.FLAGS,
                *flags,
                str(KERNELS / "kernels.c"),
                "-o",
                str(folder / f"{name}.so"),
            ]
            subprocess.run([*command, "-lm"], check=True)
        (folder / "__init__.py").write_text('"""Kernels of archipelago-fl, built beforehand."""\n')
        (folder / recipe.DIGEST).write_text(recipe.sources_digest(KERNELS) + "\n")


class TaggedWheel(bdist_wheel):
    def get_tag(self):
        return "py3", "none", SYSTEM


class ForOneSystem(Distribution):
    def has_ext_modules(self):
        return True  # what it holds is compiled, though not against Python


NAME = load_recipe().PREBUILT
setup(
    version=version(),
    packages=[NAME],
    package_dir={NAME: "."},
    cmdclass={"build_py": BuildKernels, "bdist_wheel": TaggedWheel},
    distclass=ForOneSystem,
)
