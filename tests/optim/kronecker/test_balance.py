"""The scales of K and C stay together over many updates, and skipped updates are reported."""

import math
import warnings

import pytest
import torch
from torch import nn

from gnomon import groups
from gnomon.optim import INGD
from gnomon.optim.kronecker.dense_factor import DenseFactor
from gnomon.optim.kronecker.factor_forms import FactorPair
from gnomon.optim.kronecker.factor_update import UpdateSettings, imbalance, update
from gnomon.optim.kronecker.gram_factor import GramFactor
from gnomon.optim.kronecker.statistics import statistics_of
from gnomon.optim.kronecker.structured_factor import StructuredFactor

FORMS = {
    "gram": (GramFactor, 20_000),
    "dense": (lambda k: DenseFactor(k, False), 3_000),
    "diagonal": (lambda k: StructuredFactor(groups.Diagonal(k), False), 3_000),
}
"""Forms of factors, and how many updates each is followed for."""


@pytest.mark.slow
@pytest.mark.parametrize(("form", "updates"), FORMS.values(), ids=FORMS)
def test_scales_stay_together_over_many_updates(form, updates):
    """Updates of a pair from few noisy rows: the ratio of the mean squares stays within 1e3, and none is skipped."""
    pair = FactorPair(form(4), form(3))
    k, c = (f.unpack(f.identity(1, torch.float32, "cpu")) for f in pair)
    settings = UpdateSettings(0.0, 0.2, 0.2, 0.5, order=2, inside=True)
    level, ok, worst = torch.zeros(1, dtype=torch.float64), torch.tensor(True), 1.0
    generator = torch.Generator().manual_seed(0)
    skipped = torch.zeros((), dtype=torch.long)
    for number in range(updates):
        x, g = (torch.randn(1, 5, size, generator=generator).exp() for size in (4, 3))
        new = update(pair, settings, k, c, (None, None), level, statistics_of(pair, (k, c), x, g, 5), ok, layers=1)
        k, c, level = pair.left.unpack(new.k), pair.right.unpack(new.c), new.level
        skipped += ~new.finite[0]
        if number % 500 == 0:
            ratio = float(pair.left.mean_square(k) / pair.right.mean_square(c))
            worst = max(worst, ratio, 1 / ratio)
    assert worst < 1e3
    assert skipped == 0


@pytest.mark.slow
def test_a_network_is_never_frozen():
    """The factors of a small network still follow its curvature after 1,000 updates, one at each step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    optimizer = INGD(model, lr=1e-3, update_every=1)
    x = torch.randn(256, 4)
    y = torch.tanh(x @ torch.randn(4, 2))
    for _ in range(1000):
        rows = torch.randint(0, 256, (16,))
        optimizer.zero_grad()
        (model(x[rows]) - y[rows]).square().mean().backward()
        optimizer.step()
    assert optimizer.skipped_updates == 0
    state = optimizer.state[model[0].weight]
    sizes = [state[key].diagonal(dim1=-2, dim2=-1).mean().item() for key in "KC"]
    assert 1e-3 < sizes[0] / sizes[1] < 1e3


@pytest.mark.parametrize("ratio", [1e-9, 1e-2, 0.1, 1.0, 15.0, 17.0, 1e5, 1e12])
def test_balancing_is_exact(ratio):
    """By a power of two, so that ``K K^T x C C^T`` is the same to the last bit, and never beyond balance."""
    factor = imbalance(torch.tensor([ratio]), torch.ones(1))
    assert math.log2(factor.item()).is_integer()
    left = ratio / factor.item() ** 4
    assert 1 / 16 < left < 16
    assert (factor.item() == 1) == (1 / 16 < ratio < 16)


def test_factors_without_a_scale_are_left_alone():
    """The identity has no multiples, so nothing is balanced against it."""
    pair = FactorPair(StructuredFactor(groups.Fixed(4), False), StructuredFactor(groups.Diagonal(3), False))
    assert not pair.left.has_scale
    assert pair.right.has_scale
    assert not StructuredFactor(groups.Affine(groups.Dense(3))).has_scale
    assert StructuredFactor(groups.Heisenberg(6, 2, 2)).has_scale


class Broken(nn.Module):
    """A layer whose output gradients are infinite in the statistics, while its gradient is finite."""

    def __init__(self):
        super().__init__()
        self.good, self.bad = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.bad(self.good(x))


def test_skipped_updates_are_reported_once_by_name():
    """A layer that misses ten updates in a row is named in one warning; others and shorter failures are not."""
    torch.manual_seed(0)
    model = Broken()
    optimizer = INGD(model, update_every=1)
    collector = optimizer._collector
    layer = next(layer for layer in optimizer._layers.values() if layer.name == "bad")

    def step(breaks):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        if breaks:
            s = collector.statistics(layer)
            s.outputs.tensors[0].fill_(math.inf)
        optimizer.step()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number in range(30):
            step(breaks=number % 9 != 0)  # never ten in a row
    assert optimizer.skipped_updates > 20
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(30):
            step(breaks=True)
    assert [str(warning.message).partition(" updates")[0] for warning in caught] == [
        "the factors of layer 'bad' have missed 10"
    ]
