"""The host does not wait for the device in a step."""

import functools
import sys

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from gnomon import linalg
from gnomon.optim import INGD, KFAC
from gnomon.optim.kronecker.shortcut import THROUGH_ROWS
from gnomon.optim.kronecker.structures import NAMES
from support.marks import slow_where
from support.matrices import F64
from support.runs import wide


class NoSynchronisation(TorchDispatchMode):
    """Fails where the host would wait for the device: a number's value, or a shape that depends on values.

    Two reads are allowed, because they are not of a device's memory: the host's copy of what a shortcut has found, and
    a check of :func:`gnomon.linalg.rms_of` that is made on CPUs alone (see a test below).
    """

    waits = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal", "is_nonzero")

    def __init__(self, shortcut=None):
        super().__init__()
        self.shortcut = shortcut

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.__name__.split(".")[0]
        allowed = name not in self.waits or self.is_copy_of_the_host(args[0]) or is_called_by(linalg.rms_of)
        assert allowed, f"{name} waits for the device"
        return function(*args, **(kwargs or {}))

    def is_copy_of_the_host(self, x):
        """The copy of what the device found is in the host's memory also where the model is on a device."""
        copy = None if self.shortcut is None else self.shortcut._found_wrong
        return copy is not None and copy.device.type == "cpu" and x.data_ptr() == copy.data_ptr()


def is_called_by(function):
    frame = sys._getframe()
    while frame is not None and frame.f_code is not function.__code__:
        frame = frame.f_back
    return frame is not None


def mixed_model():
    torch.manual_seed(0)
    head = [nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.Tanh(), nn.Conv2d(4, 4, 1, groups=2), nn.Flatten()]
    return nn.Sequential(*head, nn.Linear(64, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 3))


QUIET = {
    "robust": INGD,
    "kl_clip": functools.partial(INGD, kl_clip=1e-3),
    "paper": functools.partial(INGD, preset="paper"),
    "gradient": functools.partial(INGD, curvature="gradient"),
    "expand": functools.partial(INGD, approx="expand"),
    "average": functools.partial(INGD, grouped="average"),
    "low-memory": functools.partial(INGD, memory="low"),
    "bfloat16": functools.partial(INGD, precond_dtype=torch.bfloat16),
    "direction": functools.partial(INGD, precondition_only=True),
    "sgd": functools.partial(INGD, fallback="sgd"),
    **{name: functools.partial(INGD, structure=name) for name in NAMES},
    "kfac": KFAC,
    "kfac-paper": functools.partial(KFAC, preset="paper", damping=0.1),
    "kfac-gradient": functools.partial(KFAC, curvature="gradient"),
}


def quietly(optimizer, loss, steps=4, shortcut=None):
    """From the third step on the host may not wait."""
    for step in range(steps):
        with NoSynchronisation(shortcut) if step >= 2 else torch.enable_grad():
            optimizer.zero_grad()
            loss().backward()
            optimizer.step()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "samples"),
    slow_where(
        [*[(name, 2) for name in QUIET], *[(name, 40) for name in ("robust", "paper", "kfac")]],
        lambda case: case[0] in NAMES,
    ),
)
def test_no_step_waits(name, samples):
    model = mixed_model()
    optimizer = QUIET[name](model, update_every=2, growing_intervals=False)  # the third step is one with an update
    x = torch.randn(samples, 2, 4, 4)
    quietly(optimizer, lambda: model(x).cos().mean(), shortcut=optimizer._collector._shortcut)
    assert optimizer.skipped_steps == optimizer.skipped_updates == 0


def test_rows_are_checked_without_waiting():
    """The one value that is read, once a step, is the host's copy of what an earlier step has found."""
    model = wide()
    x = torch.randn(2, 40, dtype=F64)
    optimizer = INGD(model)
    shortcut = optimizer._collector._shortcut
    quietly(optimizer, lambda: model(x).cos().mean(), shortcut=shortcut)
    assert optimizer.param_groups[0][THROUGH_ROWS] is True
    assert shortcut._found_wrong.device.type == "cpu"
    with pytest.raises(AssertionError, match="waits"):
        quietly(optimizer, lambda: model(x).cos().mean(), steps=3)


def test_root_mean_squares_read_no_value_of_a_device():
    """There are no values on the meta device, so that to read one is an error."""
    stacks = [torch.empty(2, 3, 4, device="meta"), torch.empty(1, 5, 5, device="meta")]
    assert linalg.rms_of(stacks, stacks[0].device).shape == (3,)
    with pytest.raises((RuntimeError, NotImplementedError)):
        bool(stacks[0].sum() > 0)


@pytest.mark.parametrize("name", ["robust", "kfac"])
def test_no_step_of_embeddings_and_attention_waits(name):
    torch.manual_seed(0)
    embedding, attention, out = nn.Embedding(11, 8, padding_idx=0), nn.MultiheadAttention(8, 2), nn.Linear(8, 5)
    model = nn.ModuleList([embedding, attention, out])
    x = torch.randint(11, (6, 4))

    def loss():
        h = embedding(x)
        return out(attention(h, h, h, need_weights=False)[0]).cos().mean()

    optimizer = QUIET[name](model, update_every=2, growing_intervals=False)
    first = loss().item()
    quietly(optimizer, loss)
    assert loss().item() < first
    assert optimizer.skipped_steps == optimizer.skipped_updates == 0


def test_a_number_that_is_read_is_noticed():
    """The check itself."""
    with NoSynchronisation(), pytest.raises(AssertionError, match="_local_scalar_dense waits"):
        torch.ones(()).item()
    with NoSynchronisation(), pytest.raises(AssertionError, match="waits"):
        bool(torch.ones(()) > 0)
