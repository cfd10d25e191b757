"""Where a point starts."""

import pytest
import torch

import gnomon
from gnomon import groups as g
from support.points import FORMS, random_point
from support.structures import STRUCTURES


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("group", STRUCTURES, ids=repr)
def test_init_of_every_kind(group, form):
    k = group.k
    torch.testing.assert_close(gnomon.SPD(group, factor=form, init=4.0).matrix(), 4 * torch.eye(k))
    target = random_point(group, form).matrix().detach()
    point = gnomon.SPD(group, factor=form, init=target)
    assert point.dtype == torch.float64
    torch.testing.assert_close(point.matrix(), target)
    torch.testing.assert_close(
        gnomon.SPD(group, factor=form, init=target, dtype=torch.float32).matrix(), target.float()
    )


def test_init_with_a_diagonal():
    d = torch.tensor([1.0, 2.0, 3.0, 4.0])
    for group in (g.Dense(4), g.Diagonal(4), g.Arrow(4), g.Triangular(4, upper=True), g.BlockDiagonal(4, 3)):
        for form in FORMS:
            torch.testing.assert_close(gnomon.SPD(group, init=d, factor=form).matrix(), torch.diag(d))
    grid = torch.tensor([1.0, 2.0]).outer(torch.tensor([3.0, 4.0])).flatten()
    torch.testing.assert_close(gnomon.SPD(g.Kronecker(g.Dense(2), g.Dense(2)), init=grid).matrix(), torch.diag(grid))
    large = gnomon.SPD(g.Arrow(100_000), init=torch.rand(100_000) + 1)
    assert large.logdet() > 0


def test_init_of_batches():
    matrices = torch.stack([torch.eye(3), 2 * torch.eye(3)])
    torch.testing.assert_close(gnomon.SPD(3, init=matrices, batch_shape=(2,)).matrix(), matrices)
    torch.testing.assert_close(
        gnomon.SPD(3, init=torch.ones(3), batch_shape=(2,)).matrix(), torch.eye(3).expand(2, 3, 3)
    )


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("group", STRUCTURES, ids=repr)
def test_projection_of_any_matrix_is_a_point(group, form):
    for condition in (10.0, 1e4):
        matrix = gnomon.problems.random_spd(group.k, condition)
        point = gnomon.SPD(group, factor=form, init=matrix, project=True)
        torch.linalg.cholesky(point.matrix())
        again = gnomon.SPD(group, factor=form, init=point.matrix().detach(), project=True)
        torch.testing.assert_close(again.matrix(), point.matrix(), rtol=1e-6, atol=1e-6)


def test_ill_conditioned_and_badly_scaled_inits():
    for condition in (1e8, 1e12):
        matrix = gnomon.problems.random_spd(20, condition)
        for form in FORMS:
            point = gnomon.SPD(20, factor=form, init=matrix)
            assert (point.matrix() - matrix).norm() < 1e-3 * matrix.norm()
            if form != "inverse":
                torch.testing.assert_close(point.matrix(), matrix)
    hidden = torch.tensor([[1e8, 0, 0], [0, 1, 0.9], [0, 0.9, 1]])
    with pytest.raises(ValueError, match="not on the submanifold"):
        gnomon.SPD(g.Diagonal(3), init=hidden)
    with pytest.raises(ValueError, match="not symmetric"):
        gnomon.SPD(3, init=torch.tensor([[1e8, 0, 0], [0, 1, 0.5], [0, -0.5, 1]]))


def test_inits_of_other_kinds():
    import numpy as np

    assert gnomon.SPD(np.int64(3), init=np.eye(3)).dtype == torch.float64
    assert gnomon.SPD(3, init=torch.tensor([1, 2, 3])).dtype == torch.get_default_dtype()
    torch.testing.assert_close(gnomon.SPD(2, init=[[2.0, 1.0], [1.0, 2.0]]).matrix()[0], torch.tensor([2.0, 1.0]))
    learned = torch.eye(3, requires_grad=True)
    assert gnomon.SPD(3, init=learned.T).eta.is_leaf
    with torch.device("meta"):
        assert gnomon.SPD(g.Arrow(4)).frame.is_meta
    assert gnomon.SPD(3, batch_shape=2).batch_shape == (2,)


def test_an_empty_batch_is_a_batch():
    kronecker = g.Kronecker(g.Dense(2), g.Dense(2))
    for group in (g.Dense(3), g.Heisenberg(4, 1, 1), g.Toeplitz(3), g.LowRank(4, 2), kronecker):
        for order in (2, None):
            point = gnomon.SPD(group, batch_shape=(0,), order=order)
            optimizer = gnomon.moving_frame(torch.optim.SGD(point.parameters(), lr=0.1), max_step=1.0)
            (point.quad(torch.ones(5, 1, group.k)).sum() + point.logdet().sum()).backward()
            optimizer.step()
            assert point.matrix().shape == (0, group.k, group.k)


def test_averages_and_densities_of_an_empty_batch():
    for group in (g.Dense(3), g.Toeplitz(3), g.LowRank(4, 2)):
        q = gnomon.Gaussian(group, batch_shape=(0,))
        assert q.log_prob(torch.ones(5, 1, group.k)).shape == (5, 0)
        q.log_prob(torch.ones(group.k)).sum().backward()
        assert q.eta.grad.shape == q.eta.shape
        average = gnomon.averaged(q)
        for _ in range(2):
            average.update_parameters(q)
        assert average.module.covariance().shape == (0, group.k, group.k)


def test_projection_keeps_the_entries_that_the_structure_chooses():
    full = torch.tensor([[2.0, 0.5, 0.3], [0.5, 3.0, 0.4], [0.3, 0.4, 4.0]])
    diagonal = gnomon.SPD(g.Diagonal(3), init=full, project=True).matrix()
    torch.testing.assert_close(diagonal, torch.diag(full.diagonal()))
    arrow = gnomon.SPD(g.Arrow(3), init=full, project=True).matrix()
    torch.testing.assert_close(arrow[0], full[0])
    torch.testing.assert_close(arrow.diagonal(), full.diagonal())
    assert gnomon.SPD(g.Toeplitz(3), init=torch.tensor([1.0, 2.0, 4.0]), project=True).logdet() > 0


BAD = torch.tensor([[1.0, 2.0], [2.0, 1.0]])


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: gnomon.SPD(2, init=BAD), r"init is not positive definite \(smallest eigenvalue -1\); add a multiple"),
        (lambda: gnomon.SPD(2, init=torch.tensor([[1.0, 0.5], [0.0, 1.0]])), "init is not symmetric"),
        (lambda: gnomon.SPD(2, init=float("nan")), "init holds nan; give finite values"),
        (lambda: gnomon.SPD(2, init=torch.full((2, 2), torch.inf)), "init holds inf; give finite values"),
        (lambda: gnomon.SPD(2, init=-1.0), "init must be positive, got a smallest entry of -1"),
        (lambda: gnomon.SPD(2, init=torch.tensor([1.0, 0.0])), "init must be positive, got a smallest entry of 0"),
        (
            lambda: gnomon.SPD(2, init=torch.ones(3)),
            r"init has shape \(3,\); .* a diagonal \(2,\) or a matrix \(2, 2\)",
        ),
        (lambda: gnomon.SPD(g.Diagonal(2), init=BAD + 2 * torch.eye(2)), r"not on the submanifold .* project=True"),
        (lambda: gnomon.SPD(g.Toeplitz(2), init=torch.tensor([1.0, 2.0])), "not on the submanifold"),
        (lambda: gnomon.SPD(g.Kronecker(g.Dense(2), g.Dense(2)), init=torch.tensor([1.0, 2, 3, 5])), "submanifold"),
        (lambda: gnomon.SPD("dense"), "structure is 'dense', which has no size; pass a size or a group"),
        (lambda: gnomon.SPD(2.5), r"structure must be a size or a group such as .*, got 2\.5"),
        (lambda: gnomon.SPD(0), "k must be a positive integer, got 0"),
        (lambda: gnomon.SPD(2, factor="cholesky"), "factor must be one of 'outer', 'inner', 'inverse', got 'cholesky'"),
        (lambda: gnomon.SPD(2, order=4), "order must be 1, 2 or None"),
        (lambda: gnomon.SPD(2, dtype=torch.int64), "real floating-point type, got torch.int64"),
        (
            lambda: gnomon.SPD(2).matvec(torch.ones(3)),
            r"x has shape \(3,\), but Dense\(2\) acts on vectors of length 2",
        ),
        (lambda: gnomon.SPD(2).distance(BAD), "b is not positive definite"),
        (lambda: gnomon.SPD(2).distance(torch.eye(3)), r"different sizes: a is \(2, 2\), b is \(3, 3\)"),
        (lambda: gnomon.SPD(2, init="x"), "init must be a number, or a tensor or an array of numbers, got 'x'"),
        (lambda: gnomon.SPD(2, init=1j), "init must be real"),
        (lambda: gnomon.SPD(2, batch_shape=(-1,)), r"no negative size, got \(-1,\)"),
        (lambda: gnomon.SPD(2, batch_shape="ab"), "batch_shape must be a sequence of sizes, got 'ab'"),
    ],
)
def test_bad_input(build, message):
    with pytest.raises((ValueError, TypeError), match=message):
        build()


def test_numbers_keep_all_their_digits():
    for given in (0.1, [0.1, 0.1], (0.1, 0.1)):
        point = gnomon.SPD(g.Diagonal(2), init=given, dtype=torch.float64)
        torch.testing.assert_close(
            point.matrix().diagonal(), torch.tensor([0.1, 0.1], dtype=torch.float64), rtol=1e-15, atol=0
        )
        assert gnomon.SPD(g.Diagonal(2), init=given).dtype == torch.get_default_dtype()
    assert gnomon.Gaussian(2, loc=[0.1, 0.7], dtype=torch.float64).loc.tolist() == [0.1, 0.7]
    assert gnomon.Gaussian(2, loc=[0.1, 0.7]).dtype == torch.get_default_dtype()
    assert gnomon.Gaussian(2, loc=torch.zeros(2).double()).dtype == torch.float64


def test_points_on_the_meta_device_answer():
    for group in (g.Dense(3), g.Arrow(3), g.LowRank(3, 1)):
        point = gnomon.SPD(group, device="meta")
        assert point.matrix().shape == (3, 3)
        assert point.logdet().is_meta
        assert gnomon.Gaussian(group, device="meta").log_prob(torch.zeros(5, 3, device="meta")).shape == (5,)
