"""SPD points: values against dense matrices, and derivatives."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import gnomon
from gnomon import groups as g
from support.marks import slow_where
from support.points import FORMS, random_point
from support.structures import STRUCTURES


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("batch", [(), (2, 3)])
@pytest.mark.parametrize("group", STRUCTURES, ids=repr)
def test_methods_equal_their_dense_twins(group, form, batch):
    point = random_point(group, form, batch)
    tau = point.matrix()
    A = point.factor_matrix()
    wanted = {"outer": A @ A.mT, "inner": A.mT @ A, "inverse": torch.linalg.inv(A @ A.mT)}[form]
    x = torch.randn(4, *batch, group.k, dtype=torch.float64)
    column = x.unsqueeze(-1)
    torch.testing.assert_close(tau, wanted)
    torch.testing.assert_close(point(), tau)
    torch.testing.assert_close(point.matvec(x), (tau @ column).squeeze(-1))
    torch.testing.assert_close(point.solve(x), torch.linalg.solve(tau, column).squeeze(-1))
    torch.testing.assert_close(point.quad(x), (column.mT @ tau @ column).squeeze(-1, -2))
    torch.testing.assert_close(point.inv_quad(x), (column.mT @ torch.linalg.solve(tau, column)).squeeze(-1, -2))
    torch.testing.assert_close(point.logdet(), torch.logdet(tau))
    other = tau + torch.eye(group.k, dtype=torch.float64)
    torch.testing.assert_close(point.distance(other), gnomon.riemannian.distance(tau, other))
    assert point.distance(point).abs().max() < 1e-6


@pytest.mark.parametrize("form", FORMS)
def test_samples_have_the_covariance(form):
    point = random_point(g.Arrow(3), form)
    draws = point.sample(200_000)
    assert draws.shape == (200_000, 3)
    assert not draws.requires_grad
    assert point.rsample((2, 5)).requires_grad
    torch.testing.assert_close(draws.T.cov().double(), point.matrix().detach(), rtol=0.03, atol=0.03)


@pytest.mark.parametrize("order", [1, 2, None])
@pytest.mark.parametrize("form", slow_where(FORMS, lambda form: form != "outer"))
@pytest.mark.parametrize(
    "group", [g.Dense(3), g.Triangular(3), g.Arrow(4), g.Kronecker(g.Dense(2), g.Dense(2))], ids=repr
)
def test_fast_path_has_right_first_and_second_derivatives(group, form, order):
    point = random_point(group, form, order=order)
    weight, x = torch.randn(group.k, group.k, dtype=torch.float64), torch.randn(group.k, dtype=torch.float64)

    def loss(p):
        return (weight * p.matrix()).sum().sin() + p.logdet() ** 2 + p.inv_quad(x)

    def at(eta):
        class Wrapper(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.point = point

            def forward(self):
                return loss(self.point)

        return torch.func.functional_call(Wrapper(), {"point.eta": eta}, ())

    assert point._at_origin()
    zero = torch.zeros_like(point.eta)
    (fast,) = torch.autograd.grad(loss(point), point.eta)
    torch.testing.assert_close(fast, torch.func.grad(at)(zero))

    (grad,) = torch.autograd.grad(loss(point), point.eta, create_graph=True)
    v = torch.randn_like(grad)
    (product,) = torch.autograd.grad((grad * v).sum(), point.eta)
    torch.testing.assert_close(product, torch.func.jvp(torch.func.grad(at), (zero,), (v,))[1])


class _CountProducts(TorchDispatchMode):
    names = ("mm", "addmm", "bmm", "baddbmm", "_linalg_det", "linalg_inv_ex", "linalg_cholesky_ex", "_linalg_eigh")

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function.overloadpacket.__name__ in self.names
        return function(*args, **(kwargs or {}))


def test_a_momentum_step_on_the_full_manifold_is_five_products():
    point = random_point(g.Dense(6))
    optimizer = gnomon.moving_frame(torch.optim.SGD(point.parameters(), lr=1e-3, momentum=0.9))
    weight = torch.randn(6, 6, dtype=torch.float64)
    for _ in range(2):
        with _CountProducts() as forward:
            loss = (weight * point.matrix()).sum()
        with _CountProducts() as backward:
            loss.backward()
        with _CountProducts() as step:
            optimizer.step()
    assert (forward.count, backward.count, step.count) == (1, 2, 2)


def test_logdet_at_the_origin_differentiates_without_an_inverse():
    point = random_point(g.Dense(6))
    value = point.logdet()
    with _CountProducts() as backward:
        value.backward()
    assert backward.count == 0
    torch.testing.assert_close(point.eta.grad, torch.eye(6, dtype=torch.float64))


def test_functional_transforms_around_a_point():
    point, q = random_point(g.Arrow(3)), gnomon.Gaussian(3, dtype=torch.float64)
    x = torch.randn(5, 3, dtype=torch.float64)
    scores = torch.func.vmap(torch.func.grad(q.log_prob))(x)
    torch.testing.assert_close(scores, -x)
    torch.testing.assert_close(torch.func.vmap(point.quad)(x), point.quad(x))
    torch.testing.assert_close(torch.func.jacrev(point.quad)(x[0]), 2 * point.matvec(x[0]))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_dtype_is_kept(dtype):
    for group in STRUCTURES:
        point = gnomon.SPD(group, dtype=dtype)
        point(), point.logdet().backward()
        assert point.eta.grad.dtype == dtype
        x = torch.ones(group.k, dtype=dtype)
        for value in (point.matrix(), point.matvec(x), point.solve(x), point.quad(x), point.sample(2)):
            assert value.dtype == dtype
        assert gnomon.SPD(group).to(dtype).matrix().dtype == dtype


def test_a_graph_that_a_fold_has_overtaken_is_refused():
    point = gnomon.SPD(3)
    loss = point.matrix().sum()
    with torch.no_grad():
        point.eta.add_(0.1)
    point.fold()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_what_methods_return_does_not_follow_the_point():
    point, q = gnomon.SPD(3), gnomon.Gaussian(3)
    values = [point.factor_matrix(), point.matrix(), q.loc, q.factor_matrix(), q.covariance()]
    kept = [value.detach().clone() for value in values]
    for p in (point, q):
        with torch.no_grad():
            p.eta.add_(0.1)
        p.fold()
    for value, before in zip(values, kept, strict=True):
        torch.testing.assert_close(value.detach(), before)


def test_coordinates_moved_by_hand_are_seen_and_fold_keeps_the_point():
    point = random_point(g.Heisenberg(5, 1, 1))
    start = point.matrix()
    with torch.no_grad():
        point.eta.add_(0.3 * torch.randn_like(point.eta))
    moved = point.matrix()
    assert not torch.allclose(start, moved)
    assert point.fold() is None
    assert not bool(point.eta.any())
    torch.testing.assert_close(point.matrix(), moved)
    torch.nn.utils.vector_to_parameters(0.1 * torch.ones(point.eta.numel(), dtype=torch.float64), point.parameters())
    assert not torch.allclose(point.matrix(), moved)


def test_batch_elements_that_would_overflow_stay():
    point = gnomon.SPD(3, dtype=torch.float32, batch_shape=(2,))
    with torch.no_grad():
        point.eta[0] = 1e30
        point.eta[1] = 0.1 * torch.eye(3)
    assert point.fold().tolist() == [False, True]
    torch.testing.assert_close(point.matrix()[0], torch.eye(3))
    assert point.logdet()[1] > 0.2


def test_repr_says_what_it_is():
    assert "Arrow(5, rank=1), outer, order=2, torch.float32, batch_shape=(2,)" in repr(
        gnomon.SPD(g.Arrow(5), batch_shape=(2,), dtype=torch.float32)
    )
