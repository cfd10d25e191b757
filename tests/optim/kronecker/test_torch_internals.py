"""Private names of torch: each has a test that fails by name where torch has changed it."""

import datetime
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from gnomon.optim import INGD
from gnomon.optim import torch_internals as internals
from support.ranks import on_ranks


def test_current_backward_pass():
    """-1 outside of a backward pass; inside a number that is another for each pass."""
    numbers = []
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(lambda g: numbers.append(internals.current_backward_pass()))
    y.sum().backward(retain_graph=True)
    y.sum().backward()
    assert internals.current_backward_pass() == -1
    assert -1 not in numbers
    assert numbers[0] != numbers[1]


def test_at_end_of_backward_pass():
    """A function that is queued in a hook runs after the gradients are there."""
    x, seen = torch.ones(2, requires_grad=True), []
    y = x * 2
    y.register_hook(lambda g: internals.at_end_of_backward_pass(lambda: seen.append(x.grad is not None)))
    y.sum().backward()
    assert seen == [True]


def test_version():
    """A gradient that was changed in place shows it."""
    x = torch.ones(2, requires_grad=True)
    (3 * x).sum().backward()
    assert internals.version(x.grad) == 0
    x.grad.mul_(2)
    assert internals.version(x.grad) == 1


def test_loss_scale():
    """None before the first loss and where the scaler is off; then the factor of the loss."""
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    assert internals.loss_scale(scaler) is None
    scaler.scale(torch.ones(()))
    assert internals.loss_scale(scaler).item() == 64
    off = torch.amp.GradScaler("cpu", enabled=False)
    off.scale(torch.ones(()))
    assert internals.loss_scale(off) is None


@pytest.mark.parametrize(("padding", "wanted"), [((1, 2), [2, 2, 1, 1]), ("same", [1, 1, 1, 1]), (0, [0, 0, 0, 0])])
def test_convolution_padding(padding, wanted):
    """In the order of ``torch.nn.functional.pad``: the last dimension first."""
    assert list(internals.convolution_padding(nn.Conv2d(2, 2, 3, padding=padding))) == wanted


def test_is_dispatch_watched():
    assert not internals.is_dispatch_watched()
    with FlopCounterMode(display=False):
        assert internals.is_dispatch_watched()


def test_own_attributes():
    """The attributes of torch's own base class are left out, those of ours are there."""
    model = nn.Linear(2, 2)
    own = internals.own_attributes(INGD(model))
    assert not internals.own_attributes(torch.optim.SGD(model.parameters(), lr=0.1))
    assert {"_registry", "_preconditioner", "_collector"} <= set(own)


def _of_ranks(rank, count):
    model = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
    seen = []
    model.module.register_forward_hook(lambda *_: seen.append(internals.active_wrapper() is model))
    model(torch.ones(3, 2)).sum().backward()
    hidden = internals.hides_forward_pass(model)
    return seen, internals.active_wrapper() is None, hidden, internals.timeout_of(dist.group.WORLD)


@pytest.mark.spawns
def test_wrapper_and_timeout():
    """``DistributedDataParallel`` announces its forward pass, and the timeout is the one that was given."""
    for seen, after, hidden, timeout in on_ranks(2, _of_ranks):
        assert seen == [True]
        assert after
        assert hidden is False
        assert timeout == datetime.timedelta(seconds=120)


def test_base_of():
    x = torch.randn(3, 4)
    assert internals.base_of(x) is None
    assert internals.base_of(x.view(2, 6)) is x


@pytest.mark.spawns
def test_import_without_the_compiler():
    """``import gnomon`` imports no part of torch that ``import torch`` does not."""
    new = "{name for name in sys.modules.keys() - before if name.split('.')[0] == 'torch'}"
    code = f"import sys, torch; before = set(sys.modules); import gnomon; print({new} or 'nothing')"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert found.strip() == "nothing"


@pytest.mark.spawns
@pytest.mark.slow
def test_run_outside_of_graphs():
    """A graph ends before the call, and the function runs with its side effects, each time."""
    seen = []

    def function(x):
        y = x.sin()
        if torch.compiler.is_compiling():
            internals.run_outside_of_graphs(seen.append, 1)
        else:
            seen.append(1)
        return y.cos()

    compiled = torch.compile(function, backend="eager")
    for _ in range(3):
        torch.testing.assert_close(compiled(torch.ones(2)), torch.ones(2).sin().cos())
    assert seen == [1, 1, 1]
