"""A group with the abstract methods alone: it conforms, and points and optimizers take it."""

import pytest
import torch
from torch import nn

import gnomon
from gnomon import groups as g
from gnomon.groups import Group
from gnomon.linalg import widen
from gnomon.optim import INGD
from gnomon.testing import check_group
from support.matrices import F64, close


class Circulant(Group):
    """Symmetric circulant matrices: entry (i, j) is ``c[|i - j|]``, and ``c[m] = c[k - m]``."""

    trivial_transport = True  # symmetric and abelian

    def __init__(self, k):
        self.k, self.dim = k, k // 2 + 1
        self.shapes = ((self.dim,),)

    def _eigenvalues(self, c):
        column = torch.cat([c, c[..., 1 : (self.k + 1) // 2].flip(-1)], -1)
        return torch.fft.rfft(widen(column)).real

    def _element(self, eigenvalues, like):
        return (torch.fft.irfft(eigenvalues, self.k)[..., : self.dim].to(like.dtype),)

    def mul(self, a, b):
        return self._element(self._eigenvalues(a[0]) * self._eigenvalues(b[0]), b[0])

    def apply(self, a, rows, transpose=False):
        spectrum = self._eigenvalues(a[0]).unsqueeze(-2) * torch.fft.rfft(widen(rows))
        return torch.fft.irfft(spectrum, self.k).to(rows.dtype)

    def ldiv(self, a, b):
        return self._element(self._eigenvalues(b[0]) / self._eigenvalues(a[0]), b[0])


class Negated(g.Group):
    """Diagonal matrices, stored with the wrong sign."""

    trivial_transport = True

    def __init__(self, k):
        self.k = self.dim = k
        self.shapes = ((k,),)

    def mul(self, a, b):
        return (-a[0] * b[0],)

    def apply(self, a, rows, transpose=False):
        return -rows * a[0].unsqueeze(-2)

    def ldiv(self, a, b):
        return (-b[0] / a[0],)


class Slanted(g.Group):
    """``u I + v (I + S)`` with the swap S: generators that are not orthogonal."""

    trivial_transport = True

    def __init__(self):
        self.k = self.dim = 2
        self.shapes = ((2,),)

    def _opened(self, a):
        return a[0].sum(-1), a[0][..., 1]  # A = s I + v S

    def _element(self, s, v):
        return (torch.stack([s - v, v], -1),)

    def mul(self, a, b):
        (s, v), (t, w) = self._opened(a), self._opened(b)
        return self._element(s * t + v * w, s * w + v * t)

    def apply(self, a, rows, transpose=False):
        s, v = (x[..., None, None] for x in self._opened(a))
        return s * rows + v * rows.flip(-1)

    def ldiv(self, a, b):
        s, v = self._opened(a)
        determinant = s * s - v * v
        return self.mul(self._element(s / determinant, -v / determinant), b)


def test_the_abstract_methods_are_three():
    assert Group.__abstractmethods__ == {"mul", "apply", "ldiv"}


@pytest.mark.slow
@pytest.mark.parametrize("k", [1, 2, 5, 6])
def test_a_group_of_three_methods_conforms(k):
    check_group(Circulant(k))


@pytest.mark.parametrize(
    ("group", "advice"),
    [
        (Negated(3), "norm_bound is .*; override `norm_bound`, or correct what its default is derived from: `apply`"),
        (Slanted(), "from_dense.* is off .*; override `from_dense`, or .* its default is derived from: `apply`"),
    ],
    ids=["negative generators", "generators that are not orthogonal"],
)
def test_a_default_whose_condition_fails_is_to_be_overridden(group, advice):
    with pytest.raises(AssertionError, match=advice):
        check_group(group)


def test_a_point_of_a_group_of_three_methods_is_trained():
    """The maximum of the likelihood is the sample covariance, averaged along its diagonals."""
    group = Circulant(6)
    samples = torch.randn(200, 6, dtype=F64) @ group.to_dense((torch.tensor([2.0, 0.5, 0.2, 0.1], dtype=F64),))
    cov = gnomon.SPD(group, dtype=F64)
    optimizer = gnomon.moving_frame(torch.optim.SGD(cov.parameters(), lr=0.2, momentum=0.5))
    for _ in range(60):
        optimizer.zero_grad()
        loss = 0.5 * (cov.inv_quad(samples).mean() + cov.logdet())
        loss.backward()
        optimizer.step()
    empirical = samples.mT @ samples / len(samples)
    close(cov.matrix(), group.to_dense(group.from_dense(empirical)), 1e-6)


def test_a_point_starts_from_a_matrix_of_the_structure():
    group = Circulant(5)
    tau = group.to_dense((torch.tensor([2.0, 0.5, 0.2], dtype=F64),))
    for form in ("outer", "inner", "inverse"):
        close(gnomon.SPD(group, factor=form, init=tau, dtype=F64).matrix(), tau)


@pytest.mark.parametrize(
    "structure",
    [pytest.param(Circulant, id="both", marks=pytest.mark.slow), pytest.param(("dense", Circulant), id="one")],
)
def test_factors_of_a_group_of_three_methods_train(structure):
    model = nn.Sequential(nn.Linear(5, 12), nn.Tanh(), nn.Linear(12, 2))
    x = torch.randn(64, 5)
    y = x[:, :2].sin()
    optimizer = INGD(model, 5e-3, structure=structure, update_every=2)
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
