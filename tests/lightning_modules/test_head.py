"""Which parameters are the head: what the module says, what its layers show, what model.head chooses."""

from __future__ import annotations

import archipelago.core.torchvision_operators  # isort: skip  # noqa: F401  (must come before lightning)
from functools import partial

import pytest
from torch import nn

from archipelago.core.settings import LocalSettings, ModelSettings
from archipelago.experiments.config import check_network, load_config
from archipelago.experiments.runner import run_experiment
from lightning_modules.base import build_module
from lightning_modules.flat import FlatModel, derived_head
from tests.support.errors import mistake

IMAGES = ((3, 32, 32), 10)


def parts(**model: object) -> tuple[dict[str, str], str]:
    """{parameter: part} and the classifier's weight, as strategies see them."""
    spec = FlatModel(build_module(ModelSettings(**model), LocalSettings(), *IMAGES, seed=0)).spec
    (classifier,) = [entry.name for entry in spec.entries if entry.classifier]
    return {entry.name: entry.part for entry in spec.entries}, classifier


def test_network_of_ours_says_what_its_head_is():
    found, classifier = parts(name="cnn_cifar")
    assert {name for name, part in found.items() if part == "head"} == {
        f"network.fc{i}.{kind}" for i in (1, 2, 3) for kind in ("weight", "bias")
    }
    assert classifier == "network.fc3.weight"


def test_model_head_chooses_another():
    found, classifier = parts(name="cnn_cifar", head=["conv2", "fc2"])
    assert {name.split(".")[1] for name, part in found.items() if part == "head"} == {"conv2", "fc2"}
    assert classifier == "network.fc2.weight"


def test_of_a_foreign_module_the_layers_at_the_end_are_the_head():
    found, classifier = parts(target="tests.support.modules.ForeignConvolution")
    assert found == {
        "body.0.weight": "backbone", "body.0.bias": "backbone", "hidden.weight": "head", "hidden.bias": "head",
        "last.weight": "head", "last.bias": "head",
    }  # fmt: skip
    assert classifier == "last.weight"
    found, classifier = parts(target="tests.support.modules.ForeignConvolution", head=["last"])
    assert found["hidden.weight"] == "backbone" and classifier == "last.weight"


@pytest.mark.parametrize(
    ("layers", "head"),
    [
        ([nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)], ("0", "2")),
        ([nn.Linear(2, 2), nn.LayerNorm(2), nn.Linear(2, 2)], ("2",)),
        ([nn.Linear(2, 2), nn.LayerNorm(2)], ()),
        ([nn.Conv2d(1, 1, 1)], ()),
    ],
)
def test_derived_from_the_layers(layers, head):
    assert derived_head(nn.Sequential(*layers)) == head


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (["model.head=[fc9]"], mistake("unknown-name", kind="submodule", name="fc9", nearest="fc3")),
        (["model=cnn_celeba", "model.head=[blocks]"], mistake("no-classifier", says="'blocks'")),
        (
            ["model.target=tests.support.modules.ForeignConvolution", "model.head=[lst]"],
            mistake("unknown-name", kind="submodule", name="lst", nearest="last"),
        ),
    ],
)
def test_wrong_head_is_reported_before_anything_starts(settings, expected):
    config = load_config(
        None, ["model=cnn_cifar", *settings] if settings[0] == "model.head=[fc9]" else settings
    )
    with expected():
        check_network(config, *IMAGES)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Needy", partial(mistake, "needs-arguments", missing=["width", "depth"], says="local")),
        ("Faulty", partial(mistake, "cannot-be-made", says=("ValueError: not today", "modules.py, line"))),
    ],
)
def test_module_that_cannot_be_made_is_reported_before_anything_starts(name, expected, tmp_path):
    settings = [
        f"model.target=tests.support.modules.{name}",
        "fleet.backend=in_process",
        f"storage={tmp_path}",
    ]
    with expected(name=f"tests.support.modules.{name}")():
        run_experiment(load_config(None, settings), quiet=True)
    assert not [*tmp_path.iterdir()]
