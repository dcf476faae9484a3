"""The shadow device counts what was counted by hand, and finds what a GPU would refuse."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from tests.support.experiments import outcome, plan_of, run, session_of
from tests.support.shadow import DEVICE, Counts, ShadowDevice
from tests.support.shadow_session import shadow_session


@pytest.fixture
def device():
    with ShadowDevice() as made:
        yield made


def test_shadow_tensors_say_where_they_are(device):
    here, there = torch.ones(2, 3), torch.ones(2, 3).to(DEVICE)
    assert (here.device, there.device) == (torch.device("cpu"), torch.device(DEVICE))
    assert (there.is_cuda, there.is_cpu, there.get_device(), here.is_cuda, here.is_cpu) == (
        True,
        False,
        0,
        False,
        True,
    )
    followers = [
        there + 1, there[0], there.t().contiguous(), torch.zeros_like(there), there.new_zeros(2), there.double(),
        torch.zeros(2, device=DEVICE), torch.tensor([1.0], device="cuda"), torch.arange(3, device=there.device),
        torch.as_tensor(np.ones(2), device=DEVICE), here.cuda(), here.type_as(there),
        nn.Linear(2, 2, device=DEVICE).weight, nn.Linear(2, 2).to(DEVICE).weight, copy.deepcopy(there),
        torch.stack([there, there]).sum(),
        torch.rand(2, device=DEVICE, generator=torch.Generator(device=DEVICE).manual_seed(0)),
    ]  # fmt: skip
    assert {str(each.device) for each in followers} == {DEVICE}
    stayers = [here + 1, there.cpu(), there.to("cpu"), torch.zeros(2), torch.zeros_like(there, device="cpu")]
    assert {str(each.device) for each in stayers} == {"cpu"}
    assert not device.mixed


def test_shadow_device_is_gone_afterwards():
    with ShadowDevice() as device:
        kept = torch.ones(2).to(DEVICE)
        assert torch.cuda.is_available()
        assert torch.cuda.device_count() == 1
    before = device.counts
    assert not torch.cuda.is_available()
    assert str((kept + 1).device) == "cpu"
    assert device.counts == before


def test_shadow_label_does_not_outlive_its_storage(device):
    """The address of a dead storage may be used again, on the CPU."""
    for _ in range(200):
        torch.ones(1000).to(DEVICE)
        assert torch.ones(1000).device.type == "cpu"


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        (lambda x: x.cpu(), Counts(d2h_copies=1, d2h_bytes=48, synchronisations=1)),
        (lambda x: x.to("cpu", torch.float64), Counts(d2h_copies=1, d2h_bytes=48, synchronisations=1)),
        (lambda x: x.to("cpu", non_blocking=True), Counts(d2h_copies=1, d2h_bytes=48)),
        (lambda x: torch.empty(3, 4).copy_(x), Counts(d2h_copies=1, d2h_bytes=48, synchronisations=1)),
        (lambda x: x.tolist(), Counts(d2h_copies=1, d2h_bytes=48, synchronisations=1)),
        (lambda x: x[0, 0].item(), Counts(d2h_copies=1, d2h_bytes=4, synchronisations=1)),
        (lambda x: float(x.sum()), Counts(operations=1, d2h_copies=1, d2h_bytes=4, synchronisations=1)),
        (lambda x: bool(x[0, 0] > 0), Counts(operations=1, d2h_copies=1, d2h_bytes=1, synchronisations=1)),
        (lambda x: x.nonzero(), Counts(operations=1, synchronisations=1)),
        (lambda x: x[x > 0], Counts(operations=2, synchronisations=1)),
        (lambda x: x.repeat_interleave(x[0].long(), 1), Counts(operations=3, synchronisations=1)),  # long, rows, take
        (lambda x: x.repeat_interleave(x[0].long(), 1, output_size=4), Counts(operations=3)),
        (lambda x: x.to(DEVICE), Counts()),
        (lambda x: x.to(x.dtype), Counts()),
        (lambda x: x.double(), Counts(operations=1)),
        (lambda x: torch.ones(3, 4).to(x), Counts(h2d_copies=1, h2d_bytes=48)),
        (lambda x: torch.ones(3, 4).to(DEVICE, torch.float64), Counts(h2d_copies=1, h2d_bytes=96)),
        (lambda x: x.copy_(torch.ones(3, 4)), Counts(h2d_copies=1, h2d_bytes=48)),
        (lambda x: torch.tensor([1.0, 2.0], device=x.device), Counts(h2d_copies=1, h2d_bytes=8)),
        (lambda x: torch.zeros(5, device=x.device), Counts(operations=1)),
        (lambda x: torch.empty(5, device=x.device), Counts()),
        (lambda x: x[torch.tensor([0, 2])], Counts(operations=1, h2d_copies=1, h2d_bytes=16)),
        (lambda x: x.view(4, 3).t()[1:].expand(2, 2, 4).permute(0, 2, 1).detach(), Counts()),
        (lambda x: [part.squeeze(0) for part in x.split(1)], Counts()),
        (lambda x: x.mul_(2).add_(1), Counts(operations=2)),
        (lambda x: torch._foreach_add([x, x, x], 1.0), Counts(operations=1)),
        (lambda x: nn.functional.one_hot(x.long().flatten(), 5), Counts(operations=3)),  # long, zeros, scatter
        (lambda x: torch.cuda.synchronize(), Counts(synchronisations=1)),
    ],
)  # fmt: skip
def test_shadow_counts_by_hand(device, what, expected):
    x = torch.ones(3, 4).to(DEVICE)
    before = device.counts
    what(x)
    assert device.counts - before == expected
    assert not device.mixed


def test_shadow_counts_nothing_on_the_cpu(device):
    model = nn.Linear(3, 2)
    model(torch.ones(4, 3)).sum().backward()
    assert float(model.weight.grad.sum()) == 24.0
    assert not device.counts


def test_shadow_counts_backward(device):
    """y = w x, loss = sum(y^2): forward mul, pow, sum; backward ones, then pow's and mul's formulas."""
    w = torch.full((3,), 2.0, device=DEVICE, requires_grad=True)
    x = torch.ones(3, device=DEVICE)
    start = device.counts
    loss = (w * x).square().sum()
    assert device.counts - start == Counts(operations=3)
    forward = device.counts
    loss.backward()
    # ones_like(loss), expand (a view), pow(y, 1), mul by 2, mul by the gradient, mul by x
    assert device.counts - forward == Counts(operations=5), device.by_operation()
    assert str(w.grad.device) == DEVICE
    assert w.grad.tolist() == [4.0] * 3


def test_shadow_counts_batched_operations_under_vmap(device):
    """Seven clients cost what one costs: operations are seen below torch.func."""
    counted = {}
    for clients in (1, 7):
        w, x = torch.zeros(clients, 3, 2, device=DEVICE), torch.ones(clients, 5, 3, device=DEVICE)
        y = torch.zeros(clients, 5, dtype=torch.int64, device=DEVICE)

        def loss(w, x, y):
            assert str(w.device) == str(torch.zeros(1, device=x.device).device) == DEVICE
            return nn.functional.cross_entropy(x @ w, y)

        before = device.counts
        gradient = torch.func.vmap(torch.func.grad(loss))(w, x, y)
        counted[clients] = device.counts - before
        assert str(gradient.device) == DEVICE
        torch.testing.assert_close(gradient.cpu()[:, 0], torch.tensor([[-0.5, 0.5]]).expand(clients, 2))
    assert counted[1] == counted[7]
    assert 5 < counted[1].operations < 50
    assert not device.mixed


def test_shadow_counts_functional_call_and_optimizer(device):
    module = nn.Linear(3, 2).to(DEVICE)
    assert device.counts == Counts(h2d_copies=2, h2d_bytes=32)
    out = torch.func.functional_call(module, dict(module.named_parameters()), (torch.ones(1, 3).to(DEVICE),))
    out.sum().backward()
    before = device.counts
    torch.optim.SGD(module.parameters(), lr=0.1).step()  # on a GPU, all parameters at once
    assert device.counts - before == Counts(operations=1)


@pytest.mark.parametrize(
    "mix",
    [
        lambda x: x + torch.ones(3, 4),
        lambda x: torch.ones(3, 4).add_(x),
        lambda x: torch.zeros(()).add_(x.sum()),
        lambda x: torch.cat([x, torch.ones(1, 4)]),
        lambda x: nn.functional.linear(x, torch.ones(2, 4)),
        lambda x: x.index_select(0, torch.tensor([0, 1])),
        lambda x: torch.func.vmap(lambda a, b: a * b)(x, torch.ones(3, 4)),
        lambda x: torch._foreach_add([x, x], [torch.ones(3, 4), x]),
    ],
)
def test_shadow_mixed_operation_is_found(device, mix):
    mix(torch.ones(3, 4).to(DEVICE))
    assert len(device.mixed) == 1, device.mixed
    assert device.mixed[0].where.startswith("tests/actors/test_shadow_device.py:")
    assert {where for where, _ in device.mixed[0].inputs} == {"cpu", DEVICE}


def test_shadow_mixed_operation_in_a_backward_is_found(device):
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            return gradient * torch.ones(3, device="cpu")

    x = torch.ones(3, device=DEVICE, requires_grad=True)
    Wrong.apply(x).sum().backward()
    assert len(device.mixed) == 1


@pytest.mark.parametrize(
    "allowed",
    [
        lambda x: x * torch.tensor(2.0),
        lambda x: x.clamp(min=torch.tensor(0.0)),
        lambda x: torch.where(x > 0, x, torch.tensor(0.0)),
        lambda x: x[torch.tensor([1, 0])],
        lambda x: x.copy_(torch.ones(3, 4)),
    ],
)
def test_shadow_allows_what_a_gpu_allows(device, allowed):
    allowed(torch.ones(3, 4).to(DEVICE))
    assert not device.mixed


def hidden(x):
    """A loop that looks at its numbers."""
    return sum(x[i].item() for i in range(3))  # the line that a test looks for


def test_shadow_finds_a_hidden_item_by_its_line(device):
    hidden(torch.ones(3).to(DEVICE))
    line = hidden.__code__.co_firstlineno + 2
    assert device.by_line()[f"tests/actors/test_shadow_device.py:{line}"].synchronisations == 3
    assert device.by_operation()["_local_scalar_dense"].d2h_copies == 3
    assert f"test_shadow_device.py:{line}" in device.table()


def test_shadow_numpy_raises_as_a_gpu_tensor_does(device):
    x = torch.ones(3).to(DEVICE)
    for convert in (lambda: x.numpy(), lambda: np.asarray(x), lambda: x.detach().numpy()):
        with pytest.raises(TypeError, match="can't convert cuda:0 device type tensor to numpy"):
            convert()
    assert x.cpu().numpy().tolist() == [1, 1, 1]


def test_shadow_stages_are_counted_apart(device):
    with device.stage("in"):
        x = torch.ones(3).to(DEVICE)
        with device.stage("work"):
            x = x + 1
    x.cpu()
    assert device.stages == {
        "in": Counts(h2d_copies=1, h2d_bytes=12),
        "work": Counts(operations=1),
        "": Counts(d2h_copies=1, d2h_bytes=12, synchronisations=1),
    }
    assert [(copy.stage, copy.to, copy.shape, copy.bytes) for copy in device.copies] == [
        ("in", DEVICE, (3,), 12),
        ("", "cpu", (3,), 12),
    ]


def test_shadow_memory_runs_out_and_comes_back():
    with ShadowDevice(memory=10_000) as device:
        assert torch.cuda.mem_get_info() == (10_000, 10_000)
        held = torch.zeros(1_500, device=DEVICE)
        assert torch.cuda.mem_get_info()[0] == 4_000
        with pytest.raises(torch.OutOfMemoryError):
            held + 1
        del held
        again = torch.zeros(2_000, device=DEVICE)
        assert torch.cuda.memory_allocated() == 8_000
        assert device.peak == again.numel() * 4


def test_shadow_pinned_memory_and_streams(device):
    pinned, plain = torch.ones(3).pin_memory(), torch.ones(3)
    assert (pinned.is_pinned(), torch.ones(3, pin_memory=True).is_pinned(), plain.is_pinned()) == (
        True,
        True,
        False,
    )
    with torch.cuda.stream(torch.cuda.Stream()) as stream:
        pinned.to(DEVICE, non_blocking=True).record_stream(stream)
        torch.cuda.current_stream().wait_stream(stream)
    plain.to(DEVICE)
    assert [copy.pinned for copy in device.copies] == [True, False]
    assert device.counts == Counts(h2d_copies=2, h2d_bytes=24)


def test_shadow_trace_knows_bytes_and_flops():
    with ShadowDevice(trace=True) as device:
        a, b = torch.ones(4, 5).to(DEVICE), torch.ones(5, 6).to(DEVICE)
        a @ b
        nn.functional.conv2d(torch.ones(2, 3, 8, 8).to(DEVICE), torch.ones(4, 3, 3, 3).to(DEVICE))
    product, convolution = device.kernels
    assert (product.name, product.flops, product.bytes) == ("mm", 2 * 4 * 5 * 6, 4 * (20 + 30 + 24))
    assert convolution.flops == 2 * (2 * 4 * 6 * 6) * (3 * 3 * 3)


def test_shadow_dry_run_counts_without_arithmetic_or_memory():
    """Matrices of 1.6 GB, counted in a moment; integers are computed, or sizes would be wrong."""
    counted = []
    for dry, side in ((False, 8), (True, 8), (True, 20_000)):
        with ShadowDevice(memory=2**50, trace=True, dry=dry) as device:
            x = torch.ones(side, side, device=DEVICE, requires_grad=True)
            before = device.counts
            y = (torch.relu(x @ x) * 2).add_(1)
            y.sum().backward()
            rows = torch.arange(5, device=DEVICE).repeat_interleave(
                torch.tensor([1, 2, 3, 0, 1], device=DEVICE)
            )
            assert rows.tolist() == [0, 1, 1, 2, 2, 2, 4]
            assert float(y.detach()[0, 0]) == (0.0 if dry else 17.0)
            counted.append(device.counts - before)
        assert x.grad.shape == (side, side)
        assert next(kernel.flops for kernel in device.kernels if kernel.name == "mm") == 2 * side**3
        assert device.peak >= 2 * 4 * side**2
    assert counted[0] == counted[1] == counted[2]


# --- a session ------------------------------------------------------------------------------------------


def test_shadow_session_computes_what_the_cpu_computes():
    settings = ("method=ifca", "local.engine=loop")
    with shadow_session(plan_of(*settings)) as shadow:
        counts = [shadow.run_round(round) for round in (1, 2)]
        there = outcome(shadow.session, shadow.reports)
    here = session_of(*settings)
    assert outcome(here, run(here, 2)) == there
    assert all({"train", "evaluate"} <= set(each) for each in counts)


def test_shadow_session_loop_engine_by_hand():
    """Per client, `loop` copies a model, batches and momenta in, and waits for each tensor that comes back."""
    clients, clusters, steps = 8, 2, 3
    with shadow_session(plan_of("method=ifca", "local.engine=loop", "local.batch=1000")) as shadow:
        shadow.run_round(1)
        before = len(shadow.device.copies)
        counts = shadow.run_round(2)
        copies = shadow.device.copies[before:]
        losses = shadow.all_losses(clusters)["losses"]
    tensors = 4  # weights and biases of two layers
    train = counts["train"]
    assert train.d2h_copies == train.synchronisations == clients * (tensors + 2)  # momenta, model, objective
    loads = sum(
        copy.stage == "train" and copy.shape == (shadow.parameters,) and copy.to == DEVICE for copy in copies
    )
    assert train.h2d_copies == loads + clients * (tensors + 2 * steps)
    assert loads in (clients - 1, clients)  # the model of the last evaluation may be there already
    assert losses.synchronisations == losses.d2h_copies == clients * clusters
    assert losses.h2d_copies == clients * (clusters + 3)  # each model; inputs, and targets twice
    assert not shadow.device.mixed
