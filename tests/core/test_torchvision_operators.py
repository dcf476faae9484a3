"""torchvision is importable beside a CPU-only torch, and untouched beside any other build."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from archipelago.core.torchvision_operators import declare_missing_operators

ROOT = Path(__file__).parents[2]


def test_everything_that_needs_torchvision_imports_and_works():
    code = (
        "import archipelago.core.torchvision_operators\n"
        "import torchvision, lightning, torchmetrics, medmnist, torch\n"
        "assert torchvision.models.resnet18(num_classes=3).eval()(torch.zeros(1, 3, 32, 32)).shape == (1, 3)\n"
        "row = torch.arange(3.0).reshape(1, 1, 3)\n"
        "assert torchvision.transforms.functional.hflip(row).flatten().tolist() == [2, 1, 0]\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def refuse(*arguments):
    raise AssertionError("an operator was declared")


@pytest.mark.parametrize("build", ["cuda", "hip"])
def test_nothing_is_touched_beside_a_gpu_build(build, monkeypatch):
    monkeypatch.setattr(torch.version, build, "12.8")
    monkeypatch.setattr(torch.library, "define", refuse)
    monkeypatch.setattr(torch.ops, "load_library", refuse)
    assert declare_missing_operators() is False


def test_nothing_is_touched_where_the_operators_are_there(monkeypatch):
    assert hasattr(torch.ops.torchvision, "nms")  # declared when the tests started, or by torchvision itself
    monkeypatch.setattr(torch.library, "define", refuse)
    assert declare_missing_operators() is False
