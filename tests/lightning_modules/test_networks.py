"""The networks of the papers: sizes, shapes, names, gradients, seeds, and what they say to wrong data."""

from __future__ import annotations

import ast
import inspect
import math
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from archipelago.core.errors import UserError
from archipelago.core.randomness import seeded_torch
from archipelago.core.schema import composed
from archipelago.core.settings import ModelSettings
from lightning_modules import networks, networks_base, networks_residual
from lightning_modules.networks import NETWORKS, Network, build_network, default_network, pooled
from tests.support.errors import refused


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """As in the fleet, and faster here: these batches are too small to share."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def build(name: str, shape: tuple[int, ...], outputs: int, seed: int = 0, **settings: object) -> Network:
    with seeded_torch(seed):
        return build_network(composed(ModelSettings)(name=name, **settings), shape, outputs)


def batch(shape: tuple[int, ...], size: int = 3, seed: int = 1) -> torch.Tensor:
    return torch.randn((size, *shape), generator=torch.Generator().manual_seed(seed))


# (name, shape of a sample, outputs, parameters, head); the counts of the thesis's networks are printed there,
# the others are worked out here. A k x k convolution a -> b has a*b*k*k + b, BatchNorm of a has 2a, a linear
# layer a -> b has a*b + b.
PUBLISHED = [
    # 64*10 + 10
    ("linear", (1, 8, 8), 10, 650, ("fc1",)),
    # FedSoft's synthetic data: 10 weights, no bias
    ("linear_regression", (10,), 1, 10, ("fc1",)),
    # 64*64 + 64 = 4,160; 64*10 + 10 = 650 (the default model.hidden is [64])
    ("mlp", (64,), 10, 4_810, ("fc1", "fc2")),
    # 1*16*9 + 16 = 160; 16*4*4*64 + 64 = 16,448; 64*10 + 10 = 650
    ("cnn_digits", (1, 8, 8), 10, 17_258, ("fc1", "fc2")),
    # printed; 456 + 2,416 + 400*120+120 + 120*84+84 + 84*10+10
    ("cnn_cifar", (3, 32, 32), 10, 62_006, ("fc1", "fc2", "fc3")),
    # PathMNIST, printed; 456 + 2,416 + 256*120+120 + 120*84+84 + 84*9+9
    ("cnn_cifar", (3, 28, 28), 9, 44_641, ("fc1", "fc2", "fc3")),
    # printed; 416 + 32 + 12,832 + 64 + 1568*10+10
    ("cnn_fashion", (1, 28, 28), 10, 29_034, ("fc1",)),
    # TissueMNIST, printed; 416 + 32 + 12,832 + 64 + 1568*8+8
    ("cnn_fashion", (1, 28, 28), 8, 25_896, ("fc1",)),
    # 1*32*25+32 = 832; 32*64*25+64 = 51,264; 3136*248+248 = 777,976; 248*62+62 = 15,438
    ("cnn_femnist", (1, 28, 28), 62, 845_510, ("fc1", "fc2")),
    # 832; 51,264; 64*4*4*2048+2048 = 2,099,200; 2048*62+62 = 127,038
    ("cnn_fedem", (1, 28, 28), 62, 2_278_334, ("fc1", "fc2")),
    # 3*32*9+32 = 896; three of 32*32*9+32 = 9,248; four BatchNorms of 64; 32*6*6*2+2 = 2,306
    ("cnn_celeba", (3, 84, 84), 2, 31_202, ("fc1",)),
    # 832; 51,264; 3136*512+512 = 1,606,144; 512*26+26 = 13,338
    ("cnn_letters", (1, 28, 28), 26, 1_671_578, ("fc1", "fc2")),
    ("cnn_letters_published", (1, 28, 28), 26, 1_671_578, ("fc1", "fc2")),
    # 896; 18,496; 73,856; 147,584; 295,168; 590,080; 4096*1024+1024 = 4,195,328; 524,800; 5,130
    ("cnn_fedsoft_cifar", (3, 32, 32), 10, 5_851_338, ("fc1", "fc2", "fc3")),
    # Stem 3*8*9 + 16 = 232. Blocks, convolutions without bias: 8 -> 8: 576 + 576 + 32 = 1,184;
    # 8 -> 16: 1,152 + 2,304 + 64 + shortcut 128 + 32 = 3,680;
    # 16 -> 32: 4,608 + 9,216 + 128 + 512 + 64 = 14,528;
    # 32 -> 64: 18,432 + 36,864 + 256 + 2,048 + 128 = 57,728. Together 77,352.
    # CIFAR-100: 64*100 + 100 = 6,500; Tiny ImageNet: 256*200 + 200 = 51,400.
    ("resnet_slim", (3, 32, 32), 100, 83_852, ("fc1",)),
    ("resnet_slim", (3, 64, 64), 200, 128_752, ("fc1",)),
    # torchvision gives 11,689,512 for 1000 classes, of which 512*1000 + 1000 belong to them; 512*10 + 10
    ("resnet18", (3, 32, 32), 10, 11_181_642, ("fc1",)),
    # torchvision gives 3,504,872 for 1000 classes, of which 1280*1000 + 1000 belong to them; 1280*10 + 10
    ("mobilenet_v2", (3, 32, 32), 10, 2_236_682, ("fc1",)),
]
EVERY = pytest.mark.parametrize(
    ("name", "shape", "outputs"),
    [case[:3] for case in PUBLISHED],
    ids=[f"{case[0]}-{'x'.join(map(str, case[1]))}-{case[2]}" for case in PUBLISHED],
)

# The smallest image each network can take: below it a pool would leave nothing.
SMALLEST = {
    "cnn_digits": 2,
    "cnn_cifar": 16,
    "cnn_fashion": 4,
    "cnn_femnist": 4,
    "cnn_fedem": 16,
    "cnn_celeba": 16,
    "cnn_letters": 4,
    "cnn_letters_published": 4,
    "cnn_fedsoft_cifar": 8,
    "resnet_slim": 25,
    "resnet18": 8,
    "mobilenet_v2": 8,
}


def test_every_registered_network_is_in_the_table():
    assert {case[0] for case in PUBLISHED} == set(NETWORKS)
    assert set(SMALLEST) == set(NETWORKS) - {"linear", "linear_regression", "mlp"}
    assert all(entry.about and "\n" not in entry.about for entry in NETWORKS.values())


@pytest.mark.parametrize(("name", "shape", "outputs", "parameters", "head"), PUBLISHED)
def test_parameter_counts_and_heads(name, shape, outputs, parameters, head):
    network = build(name, shape, outputs)
    assert sum(parameter.numel() for parameter in network.parameters()) == parameters
    assert network.head == head
    assert network.classifier == head[-1]


@EVERY
def test_names_that_contain_fc_are_the_head_and_the_classifier_comes_last(name, shape, outputs):
    network = build(name, shape, outputs)
    linear_layers = [key for key, module in network.named_modules() if isinstance(module, nn.Linear)]
    assert tuple(linear_layers) == network.head
    papers_head = [key for key, _ in network.named_parameters() if "fc" in key]
    assert {key.split(".")[0] for key in papers_head} == set(network.head)
    names = list(network.state_dict())
    own = [f"{network.classifier}.{key}" for key in network.get_submodule(network.classifier).state_dict()]
    assert names[-len(own) :] == own  # FeMAM clusters the last two entries, FedBase the last weight


@pytest.mark.parametrize(
    ("name", "shape", "outputs", "size"),
    [
        ("cnn_cifar", (3, 32, 32), 10, 840),
        ("cnn_fashion", (1, 28, 28), 10, 15_680),
        ("cnn_cifar", (3, 28, 28), 9, 756),
        ("cnn_fashion", (1, 28, 28), 8, 12_544),
        ("cnn_femnist", (1, 28, 28), 62, 248 * 62),
        ("cnn_celeba", (3, 84, 84), 2, 1152 * 2),
    ],
)
def test_classifier_weights_have_the_size_that_the_papers_cluster(name, shape, outputs, size):
    network = build(name, shape, outputs)
    assert network.get_submodule(network.classifier).weight.numel() == size


def test_head_sizes_of_the_contrastive_term():
    """The thesis's code compares 59,134 (CIFAR-10) and 15,690 (Fashion-MNIST) head values."""
    for name, shape, size in [("cnn_cifar", (3, 32, 32), 59_134), ("cnn_fashion", (1, 28, 28), 15_690)]:
        head = [value for key, value in build(name, shape, 10).named_parameters() if "fc" in key]
        assert sum(value.numel() for value in head) == size


@EVERY
def test_output_and_features_fit_the_classifier(name, shape, outputs):
    network = build(name, shape, outputs).eval()
    x = batch(shape)
    with torch.no_grad():
        assert network(x).shape == (3, outputs)
        classifier = network.get_submodule(network.classifier)
        assert network.features(x).shape == (3, classifier.in_features)
        if name != "cnn_letters_published":
            assert torch.equal(network(x), classifier(network.features(x)))
        alone = torch.cat([network(x[i : i + 1]) for i in range(3)])
    torch.testing.assert_close(network(x), alone)  # a prediction does not depend on the samples beside it


@EVERY
def test_gradient_reaches_every_parameter(name, shape, outputs):
    # In eval mode: in train mode BatchNorm takes the mean away, and the bias of a convolution before it has
    # gradient zero, as it should.
    network = build(name, shape, outputs).eval()
    network(batch(shape)).square().sum().backward()
    for key, parameter in network.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, key


@pytest.mark.parametrize("name", ["cnn_fashion", "cnn_celeba", "resnet_slim"])
def test_batch_norm_follows_the_data_in_train_mode_only(name):
    network = build(name, (3, 32, 32), 10)
    before = {key: value.clone() for key, value in network.named_buffers()}
    network.eval()(batch((3, 32, 32)))
    assert all(torch.equal(value, before[key]) for key, value in network.named_buffers())
    network.train()(batch((3, 32, 32)))
    assert all(not torch.equal(value, before[key]) for key, value in network.named_buffers())


@EVERY
def test_same_seed_same_weights(name, shape, outputs):
    first, again, other = (build(name, shape, outputs, seed=seed).state_dict() for seed in (7, 7, 8))
    assert all(torch.equal(value, again[key]) for key, value in first.items())
    weight = f"{build(name, shape, outputs).classifier}.weight"
    assert not torch.equal(first[weight], other[weight])


def test_mlp_follows_its_settings():
    network = build("mlp", (3, 4), 5, hidden=[7, 6])
    assert network.head == ("fc1", "fc2", "fc3")
    shapes = [tuple(value.shape) for value in network.parameters()]
    assert shapes == [(7, 12), (7,), (6, 7), (6,), (5, 6), (5,)]
    assert build("mlp", (4,), 3, hidden=[]).head == ("fc1",)
    with refused("out-of-range", says="[8, 0]", setting="model.hidden", given=(8, 0)):
        build("mlp", (4,), 3, hidden=[8, 0])


def test_linear_regression_is_a_dot_product():
    network = build("linear_regression", (2,), 1)
    with torch.no_grad():
        network.fc1.weight.copy_(torch.tensor([[2.0, -3.0]]))
        assert network(torch.tensor([[1.0, 1.0], [4.0, 2.0]])).tolist() == [[-1.0], [2.0]]
        assert network(torch.zeros(1, 2)).item() == 0  # no bias


def test_published_letters_end_in_relu_and_softmax():
    plain = build("cnn_letters", (1, 28, 28), 26).eval()
    published = build("cnn_letters_published", (1, 28, 28), 26).eval()
    x = batch((1, 28, 28), size=16)
    with torch.no_grad():
        logits, probabilities = plain(x), published(x)
    torch.testing.assert_close(probabilities, torch.softmax(logits.clamp(min=0), dim=1))
    assert (logits.max(dim=1).values > 0).all()
    assert torch.equal(logits.argmax(1), probabilities.argmax(1))
    # Certain and right is the best it can be, and the loss of that is log(1 + 25/e), not 0.
    with torch.no_grad():
        published.fc2.bias[4] = 1e4
        loss = F.cross_entropy(published(x), torch.full((16,), 4))
    assert loss.item() == pytest.approx(math.log(1 + 25 / math.e), rel=1e-5)


def test_letters_have_no_non_linearity_but_the_pools():
    network = build("cnn_letters", (1, 28, 28), 26).eval()
    x = batch((1, 28, 28))
    for layer in (network.conv1, network.conv2, network.fc1, network.fc2):
        nn.init.zeros_(layer.bias)
    with torch.no_grad():  # max-pools commute with positive factors, so without ReLU and bias all of it does
        torch.testing.assert_close(network(3 * x), 3 * network(x), rtol=1e-4, atol=1e-5)
        signs = (network.features(x) < 0).float().mean()
    assert 0.2 < signs < 0.8  # a ReLU behind fc1 would leave none negative


@pytest.mark.parametrize("name", sorted(SMALLEST))
@pytest.mark.parametrize("oblong", [False, True])
def test_smallest_image_works_and_a_smaller_one_is_refused(name, oblong):
    side = SMALLEST[name]
    shape = (2, side, side + 9) if oblong else (1, side, side)
    assert build(name, shape, 4)(batch(shape)).shape == (3, 4)
    short = (shape[0], shape[1] - 1, shape[2])
    with pytest.raises(UserError) as refusal:
        build(name, short, 4)
    written = "x".join(map(str, short))
    assert f"Model '{name}' expects images" in str(refusal.value)
    assert f"at least {side}x{side} pixels" in str(refusal.value)
    assert f"samples of shape {written}" in str(refusal.value)


UNFIT = [
    (name, shape)
    for name, smallest in SMALLEST.items()
    for shape in [(10,), (28, 28), (1, 1, 28, 28), (1, 8, 8), (3, 20, 20), (3, 1, 40)]
    if len(shape) != 3 or min(shape[1:]) < smallest
]


@pytest.mark.parametrize(("name", "shape"), UNFIT)
@pytest.mark.parametrize("outputs", [1, 4])
def test_network_that_is_refused_names_one_that_works(name, shape, outputs):
    with refused("unfit-data", model=name) as refusal:
        build(name, shape, outputs)
    other = re.search(r"use model=(\w+)", str(refusal.value)).group(1)
    assert other != name
    assert build(other, shape, outputs)(batch(shape)).shape == (3, outputs)


def test_linear_regression_refuses_classes():
    with refused("unfit-data", says=("10 classes", "model=mlp"), model="linear_regression"):
        build("linear_regression", (5,), 10)
    with refused("unfit-data", says="model=cnn_digits", model="linear_regression"):
        build("linear_regression", (1, 8, 8), 10)


@pytest.mark.parametrize("name", sorted(NETWORKS))
def test_empty_samples_and_no_outputs_are_refused(name):
    for shape in [(), (0,), (1, 0, 28)]:
        with refused("unfit-data", says="feature", model=name):
            build(name, shape, 1)
    with refused("unfit-data", says="output", model=name):
        build(name, (1, 32, 32), 0)


@pytest.mark.parametrize(
    ("shape", "classes", "name"),
    [
        ((10,), None, "linear_regression"),
        ((10,), 0, "linear_regression"),
        ((10,), 1, "linear_regression"),
        ((10,), 2, "mlp"),
        ((28, 28), 10, "mlp"),
        ((1, 1, 40), 10, "mlp"),
        ((1, 8, 8), 10, "cnn_digits"),
        ((1, 28, 28), 10, "cnn_fashion"),
        ((1, 28, 28), 62, "cnn_femnist"),
        ((1, 28, 28), 26, "cnn_letters"),
        ((3, 28, 28), 9, "cnn_cifar"),
        ((3, 32, 32), 100, "resnet_slim"),
        ((3, 32, 32), 10, "cnn_cifar"),
        ((3, 64, 64), 200, "resnet_slim"),
        ((1, 64, 64), 10, "resnet_slim"),
        ((3, 84, 84), 2, "cnn_celeba"),
    ],
)
def test_default_network(shape, classes, name):
    assert default_network(shape, classes) == name


@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize("height", [1, 2, 3, 8, 15, 16, 24, 63, 64, 84])
def test_default_network_always_works(channels, height):
    for shape in [(channels, height, height), (channels, height, 30), (channels, height), (height,)]:
        for outputs in (1, 3):
            network = build(default_network(shape, outputs), shape, outputs).eval()
            with torch.no_grad():
                assert network(batch(shape, size=2)).shape == (2, outputs)


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_group_norm_keeps_no_statistics_of_the_batch(norm):
    network = build("resnet18", (1, 16, 16), 4, norm=norm).train()
    assert sum(p.numel() for p in network.parameters()) == 11_181_642 - 2 * 3136 - 6 * 513
    x = batch((1, 16, 16), size=4)
    with torch.no_grad():
        alone, beside = network(x[:2])[0], network(x)[0]
    assert (len(list(network.buffers())) == 0) == (norm == "group")
    assert torch.allclose(alone, beside, atol=1e-5) == (norm == "group")


@pytest.mark.parametrize("module", [networks, networks_base, networks_residual])
def test_networks_need_nothing_but_torch(module):
    tree = ast.parse(inspect.getsource(module))
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    packages = {name.split(".")[0] for name in imported}
    allowed = {
        "__future__",
        "collections",
        "dataclasses",
        "math",
        "typing",
        "torch",
        "archipelago",
        "lightning_modules",
    }
    assert packages <= allowed | ({"torchvision"} if module is networks_residual else set())


@pytest.mark.parametrize("channels_last", [False, True])
def test_pooling_before_the_relu_is_the_same_bits(channels_last: bool) -> None:
    order = torch.channels_last if channels_last else torch.contiguous_format
    drawn = torch.randn(5, 6, 9, 10, generator=torch.Generator().manual_seed(0)).round(
        decimals=1
    )  # with ties
    drawn[0, 0] = -1.0
    drawn[0, 1] = 0.0
    found = []
    for pool in (pooled, lambda x: F.max_pool2d(F.relu(x), 2)):
        x = drawn.clone(memory_format=order).requires_grad_()
        y = pool(x)
        (y * torch.arange(y.numel()).reshape(y.shape)).sum().backward()
        found.append((y, x.grad))
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])
    for odd in (drawn, drawn[..., :9], drawn[..., :8, :]):
        with torch.no_grad():
            x = odd.clone(memory_format=order)
            assert torch.equal(pooled(x), F.max_pool2d(F.relu(x), 2))
    drawn[1, 1, 3, 3] = math.nan
    with torch.no_grad():
        assert pooled(drawn).isnan().sum() == 1
