"""`model.init`: the variances of the literature, what stays as it is, and FedSoft's letters."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from archipelago.core.schema import composed
from archipelago.core.settings import MODEL_STARTS, LocalSettings, ModelSettings
from lightning_modules.base import build_module


def module_of(
    start: str, name: str = "cnn_letters", shape: tuple[int, ...] = (1, 28, 28), seed: int = 0
) -> nn.Module:
    settings = composed(ModelSettings)(name=name, init=start)
    return build_module(settings, LocalSettings(), shape, 26, seed).network


# Of a linear layer 3136 -> 512 and a convolution 32 -> 64 of 5x5: fan_in 3136 and 800, fan_out 512 and 1600.
VARIANCES = {
    "default": (1 / (3 * 3136), 1 / (3 * 800)),
    "xavier_normal": (2 / 3648, 2 / 2400),
    "xavier_uniform": (2 / 3648, 2 / 2400),
    "kaiming_normal": (2 / 3136, 2 / 800),
    "kaiming_uniform": (2 / 3136, 2 / 800),
    "xavier_normal+kaiming_uniform": (2 / 3648, 2 / 800),
}


@pytest.mark.parametrize("start", MODEL_STARTS)
def test_weights_have_the_variance_that_they_are_named_for(start: str) -> None:
    network = module_of(start)
    found = network.fc1.weight.var().item(), network.conv2.weight.var().item()
    assert found == pytest.approx(VARIANCES[start], rel=0.03)
    uniform = start in ("default", "xavier_uniform", "kaiming_uniform")
    assert (network.fc1.weight.abs().max() < 1.75 * network.fc1.weight.std()) == uniform


def test_biases_stay_and_the_seed_alone_decides() -> None:
    plain, drawn, again = module_of("default"), module_of("xavier_normal"), module_of("xavier_normal")
    assert torch.equal(plain.fc1.bias, drawn.fc1.bias) and not torch.equal(plain.fc1.weight, drawn.fc1.weight)
    assert torch.equal(drawn.fc1.weight, again.fc1.weight)
    assert not torch.equal(drawn.fc1.weight, module_of("xavier_normal", seed=1).fc1.weight)


def test_fedsofts_letters_start_with_logits_about_thirty_times_larger_than_pytorchs() -> None:
    x = torch.rand(16, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    ratios = []
    for seed in range(4):  # one start alone is between 22 and 40
        sizes = []
        for start in ("default", "xavier_normal+kaiming_uniform"):
            network = module_of(start, "cnn_letters_published", seed=seed)
            with torch.no_grad():  # before the ReLU and the softmax that it ends in
                sizes.append(network.fc2(network.features(x)).std().item())
        ratios.append(sizes[1] / sizes[0])
    assert 25 < sum(ratios) / len(ratios) < 35
