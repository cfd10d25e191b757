"""The exact maps against their axioms, automatic differentiation and geoopt."""

import math

import pytest
import torch

from gnomon import riemannian as r
from gnomon.problems import random_spd


def spd(*batch, k=4):
    A = torch.randn(*batch, k, k, dtype=torch.float64)
    return A @ A.mT + 0.5 * torch.eye(k, dtype=torch.float64)


def sym(*batch, k=4):
    V = torch.randn(*batch, k, k, dtype=torch.float64)
    return V + V.mT


@pytest.mark.parametrize("batch", [(), (3,), (2, 1)])
def test_log_inverts_exp_and_distance_is_the_length(batch):
    tau, v = spd(*batch), sym(*batch)
    other = r.exp(tau, v)
    torch.testing.assert_close(r.log(tau, other), v)
    torch.testing.assert_close(r.exp(tau, r.log(tau, other)), other)
    torch.testing.assert_close(r.distance(tau, other), r.norm(tau, v))
    assert r.distance(tau, other).shape == batch


def test_exp_equals_the_paper_table():
    tau, v = spd(), sym()
    w, q = torch.linalg.eigh(tau)
    root, inverse_root = (q * w.sqrt()) @ q.mT, (q * w.rsqrt()) @ q.mT
    wanted = root @ torch.linalg.matrix_exp(inverse_root @ v @ inverse_root) @ root
    torch.testing.assert_close(r.exp(tau, v), wanted)


def test_transport_is_an_isometry_along_the_geodesic():
    a, b, u, v = spd(), spd(), sym(), sym()
    torch.testing.assert_close(r.inner(b, r.transport(a, b, u), r.transport(a, b, v)), r.inner(a, u, v))
    torch.testing.assert_close(r.transport(a, b, r.log(a, b)), -r.log(b, a))
    torch.testing.assert_close(r.transport(b, a, r.transport(a, b, u)), u)


def test_both_transports_are_related_by_the_metric():
    """Eq. equ_trans_maps, to 1e-10."""
    for _ in range(5):
        a, b, grad = spd(k=6), spd(k=6), sym(k=6)
        riemannian = r.transport(a, b, a @ grad @ a)
        euclidean = b @ r.euclidean_transport(a, b, grad) @ b
        assert float((riemannian - euclidean).norm() / riemannian.norm()) < 1e-10


def test_geodesic_has_constant_speed():
    a, b = spd(3), spd(3)
    torch.testing.assert_close(r.geodesic(a, b, 0.0), a)
    torch.testing.assert_close(r.geodesic(a, b, 1.0), b)
    torch.testing.assert_close(r.distance(a, r.geodesic(a, b, 0.3)), 0.3 * r.distance(a, b))
    times = torch.tensor([0.1, 0.5, 0.9])
    torch.testing.assert_close(r.geodesic(a, b, times)[1], r.geodesic(a[1], b[1], 0.5))


def test_distance_is_affine_invariant():
    a, b, m = spd(), spd(), torch.randn(4, 4, dtype=torch.float64)
    torch.testing.assert_close(r.distance(m @ a @ m.mT, m @ b @ m.mT), r.distance(a, b))


def test_mean_is_stationary_and_weighted():
    points = torch.stack([random_spd(4, c) for c in (2.0, 10.0, 1e4)] + [1e3 * random_spd(4, 50.0)])
    center = r.mean(points)
    assert float(r.log(center, points).mean(0).norm() / center.norm()) < 1e-11
    torch.testing.assert_close(r.mean(points[:2]), r.geodesic(points[0], points[1], 0.5))
    weighted = r.mean(points[:2], torch.tensor([3.0, 1.0], dtype=torch.float64))
    torch.testing.assert_close(weighted, r.geodesic(points[0], points[1], 0.25))
    batched = r.mean(torch.stack([points, points.flip(0)], 1))
    torch.testing.assert_close(batched[0], center)
    torch.testing.assert_close(batched[1], center)


def test_mean_says_when_it_has_not_settled():
    points = torch.stack([random_spd(4, 1e3) for _ in range(3)])
    with pytest.warns(RuntimeWarning, match="max_iter = 1"):
        r.mean(points, max_iter=1)


def test_gradients_exist_where_eigenvalues_coincide():
    eye = torch.eye(3, dtype=torch.float64, requires_grad=True)
    other = (2 * torch.eye(3, dtype=torch.float64)).requires_grad_()
    zero = torch.zeros(3, 3, dtype=torch.float64, requires_grad=True)
    for value in (r.norm(eye, zero), r.distance(eye, eye.detach()), r.exp(eye, zero).sum(), r.log(eye, other).sum()):
        for grad in torch.autograd.grad(value, (eye, other, zero), allow_unused=True):
            assert grad is None or bool(grad.isfinite().all())
    assert torch.autograd.gradcheck(
        lambda x: r.log(torch.eye(3, dtype=torch.float64), 0.5 * (x + x.mT)), (other,), fast_mode=False
    )
    point = (spd(k=3) + torch.eye(3, dtype=torch.float64)).requires_grad_()
    fixed = spd(k=3)
    assert torch.autograd.gradcheck(lambda x: r.transport(0.5 * (x + x.mT), fixed, sym(k=3) * 0 + fixed), (point,))
    assert torch.autograd.gradcheck(lambda x: r.distance(0.5 * (x + x.mT), fixed), (point,))


def test_gradients_of_small_and_low_rank_tangents():
    tau, u = spd(), torch.randn(4, 1, dtype=torch.float64)
    weight = sym()
    for size in (1e-18, 1e-14, 1e-8, 1e-3, 1.0):
        for v in (size * sym(), size * u @ u.mT):
            v = v.requires_grad_()
            (grad,) = torch.autograd.grad((weight * r.exp(tau, v)).sum(), v)
            step = 1e-5 * sym()
            wanted = (weight * (r.exp(tau, v + step) - r.exp(tau, v - step))).sum() / 2
            torch.testing.assert_close((grad * step).sum(), wanted.detach(), rtol=1e-5, atol=1e-10)


def test_mean_in_single_precision_settles():
    points = torch.stack([random_spd(5, 1e3, dtype=torch.float32) for _ in range(4)])
    center = r.mean(points, weights=[1, 1, 2, 1])
    assert r.log(center.double(), points.double()).isfinite().all()
    with pytest.raises(ValueError, match="points is not positive definite"):
        r.mean(torch.stack([points[0], -points[1]]))


def test_agrees_with_geoopt():
    geoopt = pytest.importorskip("geoopt")
    manifold = geoopt.SymmetricPositiveDefinite()
    a, b, v = spd(2), spd(2), sym(2)
    torch.testing.assert_close(r.exp(a, v), manifold.expmap(a, v))
    torch.testing.assert_close(r.log(a, b), manifold.logmap(a, b))
    torch.testing.assert_close(r.distance(a, b), manifold.dist(a, b))
    torch.testing.assert_close(r.transport(a, b, v), manifold.transp(a, b, v))


def test_bad_input():
    with pytest.raises(ValueError, match="tau is not positive definite"):
        r.exp(-spd(), sym())
    with pytest.raises(ValueError, match="b is not positive definite"):
        r.distance(spd(), -spd())
    with pytest.raises(ValueError, match=r"square matrix or a batch of them, got shape \(2, 3\)"):
        r.norm(torch.ones(2, 3), torch.ones(2, 3))
    with pytest.raises(ValueError, match=r"points must have shape \(n, \*batch, k, k\)"):
        r.mean(spd())
    with pytest.raises(ValueError, match="weights must be 3 non-negative numbers"):
        r.mean(spd(3), torch.tensor([1.0, -1.0, 1.0]))


def _graded(k, condition, seed):
    q, _ = torch.linalg.qr(torch.randn(k, k, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)))
    values = torch.logspace(0, -math.log10(condition), k, dtype=torch.float64)
    matrix = (q * values) @ q.mT
    return (matrix + matrix.mT) / 2


def _exact_distance(a, b):
    mpmath = pytest.importorskip("mpmath")
    with mpmath.workdps(60):
        inverse = mpmath.cholesky(mpmath.matrix(a.tolist())) ** -1
        values = mpmath.eigsy(inverse * mpmath.matrix(b.tolist()) * inverse.T, eigvals_only=True)
        return float(mpmath.sqrt(sum(mpmath.log(x) ** 2 for x in values)))


@pytest.mark.parametrize(("condition", "tolerance"), [(1e8, 1e-9), (1e12, 1e-6)])
@pytest.mark.parametrize("seed", range(3))
def test_maps_at_large_condition_numbers(condition, tolerance, seed):
    """Against 60 digits. Rounding of a^-1 b alone would hide its small eigenvalues, and make some of them negative."""
    a, b = _graded(6, condition, seed), _graded(6, condition, seed + 10)
    wanted = _exact_distance(a, b)
    assert r.distance(a, b).item() == pytest.approx(wanted, rel=tolerance)
    assert r.distance(a, r.geodesic(a, b, 0.5)).item() == pytest.approx(wanted / 2, rel=tolerance)
    assert r.norm(a, r.log(a, b)).item() == pytest.approx(wanted, rel=1e3 * tolerance)
    assert bool(r.transport(a, b, a).isfinite().all())
    x = a.clone().requires_grad_()
    (r.distance(x, b) + r.log(x, b).sum()).backward()
    assert bool(x.grad.isfinite().all())
