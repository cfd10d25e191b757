"""Low rank plus diagonal against dense twins, automatic differentiation and the joint model of factors and features."""

import copy
import math

import pytest
import torch

from gnomon import groups as g
from gnomon.frames import Chart
from gnomon.groups.low_rank import START
from gnomon.testing.algebra import slope
from gnomon.testing.storage import check_storage, check_value
from support.matrices import F64, close

STRUCTURES = [g.LowRank(2), g.LowRank(6, 2), g.LowRank(5, 4)]
AFFINE = [g.LowRankAffine(group, upper) for group in STRUCTURES[:2] for upper in (True, False)]
BATCHES = [(), (3,), (2, 3)]
CHARTS = ["outer", "inverse"]


def random_element(group, batch=(), dtype=F64):
    noise = 0.5 + torch.rand(*batch, group.k, dtype=F64)
    return tuple(b.to(dtype) for b in group.element(torch.randn(*batch, group.k, group.rank, dtype=F64), noise))


def random_affine(group, batch=()):
    return group.join(random_element(group.linear, batch), torch.randn(*batch, group.linear.k, dtype=F64))


def dense(group, a):
    """``B B^T + Diag(c)^2`` from the loadings."""
    loadings, noise = group.covariance_factors(a)
    return loadings @ loadings.mT + torch.diag_embed(noise.square())


def random_coordinates(group, batch=(), size=1.0):
    eta = tuple(size * torch.randn(*batch, *shape, dtype=F64) for shape in group.shapes)
    return group.unscale(group.scale(eta))


def flat(group, a):
    return group.flatten(a)


@pytest.mark.parametrize("group", [*STRUCTURES, *AFFINE], ids=repr)
def test_storage_and_value(group):
    check_storage(group)
    check_value(group)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("group", STRUCTURES, ids=repr)
def test_operations_equal_their_dense_twins(group, batch):
    a = random_element(group, batch)
    A, tau, x = group.to_dense(a), dense(group, a), torch.randn(*batch, 4, group.k, dtype=F64)
    close(A @ A.mT, tau)
    close(group.apply(a, x), x @ A.mT)
    close(group.apply(a, x, transpose=True), x @ A)
    close(group.apply_inverse(a, x), torch.linalg.solve(A, x.mT).mT)
    close(group.apply_inverse(a, x, transpose=True), torch.linalg.solve(A.mT, x.mT).mT)
    close(2 * group.logabsdet(a), torch.logdet(tau))
    close(group.squared_norm(a), tau.diagonal(dim1=-2, dim2=-1).sum(-1))
    close(group.inverse_diagonal(a), torch.linalg.inv(tau).diagonal(dim1=-2, dim2=-1))
    close(group.apply_squared(a, x), x @ tau)
    samples = torch.randn(5, *batch, group.k, dtype=F64)
    close(group.matvec(a, samples), (A @ samples.unsqueeze(-1)).squeeze(-1))
    close(group.solve(a, group.matvec(a, samples)), samples)
    close(group.rsolve(a, group.rmatvec(a, samples)), samples)


@pytest.mark.parametrize("group", STRUCTURES, ids=repr)
def test_diagonals_and_the_start(group):
    diagonal = 0.5 + torch.rand(2, group.k, dtype=F64)
    close(group.to_dense(group.from_diagonal(diagonal)), torch.diag_embed(diagonal))
    close(group.to_dense(group.identity(dtype=F64)), torch.eye(group.k, dtype=F64))
    start = group.start(diagonal)
    tau = dense(group, start)
    close(tau.diagonal(dim1=-2, dim2=-1), diagonal.square())
    whitened = tau / (diagonal.unsqueeze(-1) * diagonal.unsqueeze(-2))
    gap = torch.linalg.matrix_norm(whitened - torch.eye(group.k, dtype=F64), 2)
    assert bool((gap < 3 * group.rank * START**2).all())
    assert bool((start[2].abs().amax(-1) > 0).all())  # no loading is stuck


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("group", STRUCTURES, ids=repr)
def test_factor_is_exact_on_the_submanifold(group, batch):
    tau = dense(group, random_element(group, batch))
    close(dense(group, group.factor(tau)), tau, 1e-8)
    eye = torch.eye(group.k, dtype=F64)
    close(dense(group, group.factor(eye)), eye, 1e-8)


def divergence_gradient(loadings, noise, tau):
    loadings, noise = loadings.clone().requires_grad_(), noise.clone().requires_grad_()
    model = loadings @ loadings.mT + torch.diag(noise.square())
    loss = torch.logdet(model) + torch.trace(torch.linalg.solve(model, tau))
    return torch.autograd.grad(loss, (loadings, noise))


def test_factor_elsewhere_is_a_stationary_point_of_the_divergence():
    group, half = g.LowRank(8, 2), torch.randn(300, 8, dtype=F64)
    rows = group.matvec(random_element(group), half)
    tau = rows.mT @ rows / 300
    for gradient in divergence_gradient(*group.covariance_factors(group.factor(tau)), tau):
        assert gradient.abs().max() < 1e-6


def test_a_feature_without_noise_rests_on_the_floor():
    """A Heywood case: a factor that is one of the features."""
    group, rows = g.LowRank(6, 1), torch.randn(300, 6, dtype=F64)
    rows[:, 1:] = rows[:, :1] + 0.5 * rows[:, 1:]
    tau = rows.mT @ rows / 300
    loadings, noise = group.covariance_factors(group.factor(tau))
    close(noise[0].square() / tau[0, 0], torch.tensor(1e-7, dtype=F64), 1e-9)
    g_loadings, g_noise = divergence_gradient(loadings, noise, tau)
    assert g_loadings.abs().max() < 1e-4
    assert g_noise[0] > 0
    assert g_noise[1:].abs().max() < 1e-6


def test_singular_covariances_have_a_factor():
    group, rows = g.LowRank(12, 2), torch.randn(6, 12, dtype=F64)
    tau = rows.mT @ rows / 6
    for gradient in divergence_gradient(*group.covariance_factors(group.factor(tau)), tau):
        assert bool(gradient.isfinite().all())


# ---------------------------------------------------------------------- coordinates
def joint_matrix(group, a, eta, order, sign):
    """The tail of ``A E E^T A^T``, densely, for the arrow ``A = [[1, 0], [B, Diag(c)]]`` and ``E = Exp(N)``."""
    (loadings, noise), r = group.covariance_factors(a), group.rank
    arrow = g.Arrow(group.k + r, r)
    head, stretch, shift = eta
    n = arrow.to_dense(arrow.scale((head, stretch, shift.mT))) * sign
    eye = torch.eye(group.k + r, dtype=F64)
    e = torch.linalg.matrix_exp(n) if order is None else eye + n + (n @ n / 2 if order == 2 else 0)
    A = torch.cat(
        [torch.cat([eye[:r, :r], torch.zeros(r, group.k, dtype=F64)], -1), torch.cat([loadings, torch.diag(noise)], -1)]
    )
    return (A @ e @ e.mT @ A.mT)[r:, r:]


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("order", [1, 2, None])
@pytest.mark.parametrize("group", STRUCTURES, ids=repr)
def test_a_step_is_the_step_of_the_joint_model(group, order, sign):
    a, eta = random_element(group), random_coordinates(group, size=0.3)
    moved = group.retract(a, eta, order, sign=sign)
    close(dense(group, moved), joint_matrix(group, a, eta, order, sign))
    A = group.to_dense(moved)
    close(A @ A.mT, dense(group, moved))


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("order", [1, 2, None])
@pytest.mark.parametrize("form", CHARTS)
@pytest.mark.parametrize("group", [*STRUCTURES, *AFFINE], ids=repr)
def test_short_forms_equal_the_plain_ones(group, form, order, batch):
    """The step in the memory of the coordinates, and the gradient some features at a time."""
    chart = Chart(group, form, order)
    a = random_affine(group, batch) if isinstance(group, g.LowRankAffine) else random_element(group, batch)
    frame, eta = group.pack(a), group.pack(random_coordinates(group, batch, 0.3))
    wanted = group.pack(chart.retract(a, group.unpack(eta)))
    close(chart.advance(frame, eta.clone()), wanted)
    grad = tuple(torch.randn_like(block) for block in a)
    close(chart.packed_pullback(frame, grad), group.pack(chart.pullback(a, grad)))


def test_short_forms_over_several_parts_of_the_features(monkeypatch):
    monkeypatch.setattr("gnomon.groups.low_rank.COLUMNS", 3)
    for order in (2, None):
        test_short_forms_equal_the_plain_ones(g.LowRankAffine(g.LowRank(8, 2)), "outer", order, (2,))


@pytest.mark.parametrize("form", CHARTS)
@pytest.mark.parametrize("group", [*STRUCTURES, *AFFINE], ids=repr)
def test_pullback_is_the_gradient_of_the_step(group, form):
    chart = Chart(group, form)
    a = random_affine(group) if isinstance(group, g.LowRankAffine) else random_element(group)
    grad = tuple(torch.randn_like(block) for block in a)
    grad = (grad[0].tril(), *grad[1:])  # the root is triangular
    eta = torch.zeros(group.numel, dtype=F64, requires_grad=True)
    moved = chart.retract(a, group.unflatten(eta))
    (wanted,) = torch.autograd.grad(sum((x * y).sum() for x, y in zip(grad, moved, strict=True)), eta)
    close(flat(group, chart.pullback(a, grad)), wanted)


@pytest.mark.parametrize("order", [1, 2])
def test_truncations_have_their_order(order):
    group = g.LowRank(6, 2)
    a, eta = random_element(group), random_coordinates(group)

    def error(size):
        scaled = tuple(size * block for block in eta)
        exact, truncated = (dense(group, group.retract(a, scaled, o)) for o in (None, order))
        return float((exact - truncated).norm())

    assert slope(error) > order + 0.7


@pytest.mark.parametrize("group", STRUCTURES, ids=repr)
def test_degrees_of_freedom(group):
    """The rank of the derivative of tau in the coordinates."""
    a = random_element(group)

    def tau(eta):
        return dense(group, group.retract(a, group.unflatten(eta)))

    jacobian = torch.func.jacfwd(tau)(torch.zeros(group.numel, dtype=F64)).flatten(0, 1)
    full = group.k * (group.k + 1) // 2
    assert torch.linalg.matrix_rank(jacobian) == min(group.dim, full)
    assert group.dim == group.k * (group.rank + 1) - math.comb(group.rank, 2)


def test_reach_and_length_bound_the_step():
    for group in STRUCTURES:
        arrow = g.Arrow(group.k + group.rank, group.rank)
        for _ in range(10):
            eta = random_coordinates(group)
            n = arrow.to_dense(arrow.scale((eta[0], eta[1], eta[2].mT)))
            norm = float(2 * torch.linalg.matrix_norm(n, 2))
            assert norm * (1 - 1e-9) <= float(group.reach(eta)) <= 2 * group.k * norm
            close(group.length(eta), torch.linalg.vector_norm(flat(group, eta)))
            assert group.length(tuple(b.float() for b in eta)).dtype == F64


# ---------------------------------------------------------------------- precision
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 5e-2)])
@pytest.mark.parametrize("group", STRUCTURES[1:], ids=repr)
def test_precision_is_kept(group, dtype, tolerance):
    a = random_element(group, dtype=dtype)
    wide = group.element(*(x.double() for x in group.covariance_factors(tuple(b.double() for b in a))))
    x = torch.randn(3, group.k).to(dtype)
    eta = tuple(block.to(dtype) for block in random_coordinates(group, size=0.1))
    wide_eta = tuple(block.double() for block in eta)
    for call in (
        lambda a, x, eta: (group.apply(a, x), group.apply_inverse(a, x), group.apply(a, x, True)),
        lambda a, x, eta: (group.logabsdet(a), group.squared_norm(a), group.inverse_diagonal(a), group.reach(eta)),
        lambda a, x, eta: group.retract(a, eta)[1:],
        lambda a, x, eta: group.pullback(a, (a[0].tril(), *a[1:])),
        lambda a, x, eta: group.from_diagonal(a[1]),
    ):
        for found, wanted in zip(call(a, x, eta), call(wide, x.double(), wide_eta), strict=True):
            assert found.dtype == dtype
            scale = max(1.0, float(wanted.abs().max()))
            assert float((found.double() - wanted).abs().max()) < tolerance * scale


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nothing_breaks_at_zero_loadings(dtype):
    group = g.LowRank(50, 3)
    diagonal = 0.5 + torch.rand(50, dtype=dtype)
    a = tuple(block.clone().requires_grad_() for block in group.from_diagonal(diagonal))
    x = torch.randn(4, 50, dtype=dtype)
    close(group.solve(a, x), x / diagonal, 1e-6)
    close(group.rmatvec(a, x), x * diagonal, 1e-6)
    loss = group.solve(a, x).square().sum() + group.logabsdet(a) + group.matvec(a, x).sum()
    for gradient in torch.autograd.grad(loss, a):
        assert bool(gradient.isfinite().all())
    moved = group.retract(a, tuple(torch.zeros_like(block) for block in a))
    close(moved[1], diagonal)


def test_loadings_that_are_large_and_alike_keep_the_root_positive_in_single_precision():
    """What float32 loses of U U^T is ten times the identity beside it."""
    group, k = g.LowRank(2000, 3), 2000
    direction = torch.randn(k, dtype=F64)
    loadings = 1e3 * direction.unsqueeze(-1) + 0.01 * torch.randn(k, 3, dtype=F64)
    exact = group.element(loadings, torch.ones(k, dtype=F64))
    single = group.element(loadings.float(), torch.ones(k))
    assert bool(single[0].isfinite().all())
    close(group.logabsdet(single).double(), group.logabsdet(exact), 1e-3)


# ---------------------------------------------------------------------- cost, and what it is not
def test_no_operation_is_dense():
    """One k x k matrix would need 320 GB here."""
    group = g.LowRank(200_000, 3)
    a = random_element(group)
    eta = tuple(0.1 * torch.randn(shape, dtype=F64) for shape in group.shapes)
    x = torch.randn(2, group.k, dtype=F64)
    close(group.solve(a, group.matvec(a, x)), x, 1e-6)
    for order in (1, 2, None):
        a = group.retract(a, eta, order)
    chart = Chart(group, "inverse")
    chart.packed_pullback(chart.advance(group.pack(a), group.pack(eta)), a)
    group.reach(eta), group.length(eta), group.start(torch.ones(group.k))


@pytest.mark.parametrize(
    "member", ["mul", "ldiv", "from_dense", "bracket", "exp", "restrict", "transpose", "norm_bound"]
)
def test_what_only_groups_have_is_refused(member):
    with pytest.raises(TypeError, match=r"LowRank\(4, rank=2\) is no group"):
        getattr(g.LowRank(4, 2), member)(None, None)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: g.LowRank(3, 3), "rank must be below k = 3, got 3"),
        (lambda: g.LowRank(3, 0), "rank must be a positive integer, got 0"),
        (lambda: g.LowRank(2.5), r"k must be a positive integer, got 2\.5"),
        (lambda: g.BlockTriangular((g.Dense(2), g.LowRank(3))), r"cannot hold LowRank\(3, rank=1\)"),
        (lambda: g.Kronecker(g.Dense(2), g.LowRank(3)), r"right cannot be LowRank\(3, rank=1\), which is no group"),
        (lambda: g.LowRank(3).retract(None, None, left=True), "factor='inner' is not defined"),
    ],
)
def test_bad_input(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_is_a_value():
    assert repr(g.LowRank(10, rank=3)) == "LowRank(10, rank=3)"
    assert g.LowRank(10, 3) == copy.deepcopy(g.LowRank(10, 3)) != g.LowRank(10, 2)
