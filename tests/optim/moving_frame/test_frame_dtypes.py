"""Frames in bfloat16, and types that change."""

import pytest
import torch
from torch import optim

import gnomon
from gnomon import groups as g
from gnomon.problems import LogDet
from gnomon.testing import random_element
from support.framed import Model, train
from support.marks import slow_where
from support.structures import STRUCTURES


@pytest.mark.slow
@pytest.mark.parametrize(
    "group", slow_where(STRUCTURES, lambda group: not isinstance(group, (g.Dense, g.Triangular, g.Arrow))), ids=repr
)
def test_bfloat16_closes_the_gap(group):
    """100 steps on a well-conditioned log-det problem close at least 95% of the initial gap."""
    target = group.to_dense(random_element(group))
    problem = LogDet(torch.linalg.inv(target @ target.mT))
    point = gnomon.SPD(group, dtype=torch.bfloat16)
    half = LogDet(problem.C.bfloat16())
    optimizer = gnomon.moving_frame(optim.SGD(point.parameters(), lr=0.1, momentum=0.5))

    def gap():
        exact = gnomon.SPD(group, dtype=torch.float64)
        exact.frame.copy_(point.frame)
        return problem(exact).item() - problem.minimum

    start = gap()
    for _ in range(100):
        optimizer.zero_grad()
        half(point).backward()
        optimizer.step()
    assert point.frame.dtype == torch.bfloat16
    assert gap() < 0.05 * start


def test_state_follows_the_dtype():
    model = Model()
    optimizer = gnomon.moving_frame(optim.SGD(model.parameters(), lr=0.01, momentum=0.9))
    train(model, optimizer, 2, seed=0)
    model.double()
    saved = optimizer.state_dict()
    optimizer = gnomon.moving_frame(optim.SGD(model.parameters(), lr=0.01, momentum=0.9))
    optimizer.load_state_dict(saved)
    model.loss(torch.ones(2, 4, dtype=torch.float64)).backward()
    optimizer.step()
    assert optimizer.state[model.cov.eta]["momentum_buffer"].dtype == torch.float64


def test_double_in_mid_training():
    def ended(dtype):
        torch.manual_seed(0)
        model = Model()
        optimizer = gnomon.moving_frame(optim.SGD(model.parameters(), lr=0.01, momentum=0.9))
        train(model, optimizer, 2, seed=0)
        model.to(dtype)
        for _ in range(2):
            optimizer.zero_grad()
            model.loss(torch.ones(2, 4, dtype=dtype)).backward()
            optimizer.step()
        return model

    model, plain = ended(torch.float64), ended(torch.float32)
    assert not bool(model.cov.eta.any())
    assert model.cov.frame.dtype == torch.float64
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[key].float(), value)


@pytest.mark.slow
@pytest.mark.parametrize("lr", [1e-2, 1.0, 1e3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "group", [g.Dense(6), g.Triangular(6), g.Diagonal(6), g.Arrow(6, 2), g.Toeplitz(6), g.LowRank(6, 2)], ids=repr
)
def test_no_rate_spoils_a_point_in_half_precision(group, dtype, lr):
    """There is no guard of the condition, but the bound alone keeps a likelihood with enough samples well posed."""
    rows = torch.randn(40, 6, generator=torch.Generator().manual_seed(0)).to(dtype)
    for optimizer in (optim.SGD, optim.Adam, optim.RMSprop):
        for form in ("outer", "inverse"):
            point = gnomon.SPD(group, factor=form, dtype=dtype)
            arguments = {} if optimizer is optim.SGD else {"eps": 1e-4}  # 1e-8 is zero in float16
            opt = gnomon.moving_frame(optimizer(point.parameters(), lr=lr, **arguments))
            for _ in range(60):
                opt.zero_grad()
                (point.inv_quad(rows).mean() + point.logdet()).backward()
                opt.step()
            values = torch.linalg.svdvals(point.factor_matrix().detach().double())
            assert values.isfinite().all()
            assert float(values[0] / values[-1]) < 100
            assert not opt.skipped_steps
