"""SPD points: values against dense matrices, derivatives, starting points, and life as a module."""

import copy
import io

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import gnomon
from gnomon import groups as g
from gnomon.manifolds import point_of
from gnomon.testing import random_element
from support.structures import STRUCTURES

FORMS = ("outer", "inner", "inverse")


def random_point(group, form="outer", batch=(), dtype=torch.float64, **options):
    point = gnomon.SPD(group, factor=form, batch_shape=batch, dtype=dtype, **options)
    point.frame.copy_(group.pack(random_element(group, batch, dtype=dtype)))
    return point


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
@pytest.mark.parametrize("form", FORMS)
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
    optimizer = gnomon.moving_frame(torch.optim.SGD(point.parameters(), lr=0.1, momentum=0.9))
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


# ---------------------------------------------------------------------- starting points
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
    for group in (g.Dense(3), g.Heisenberg(4, 1, 1), g.Toeplitz(3), g.Kronecker(g.Dense(2), g.Dense(2))):
        for order in (2, None):
            point = gnomon.SPD(group, batch_shape=(0,), order=order)
            optimizer = gnomon.moving_frame(torch.optim.SGD(point.parameters(), lr=0.1), max_step=1.0)
            (point.quad(torch.ones(5, 1, group.k)).sum() + point.logdet().sum()).backward()
            optimizer.step()
            assert point.matrix().shape == (0, group.k, group.k)


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
        (lambda: gnomon.SPD("dense"), r"structure must be a size or a group such as .*, got 'dense'"),
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
        (lambda: gnomon.SPD(2, init="x"), "init must be a number or a tensor, got 'x'"),
        (lambda: gnomon.SPD(2, init=1j), "init must be real"),
        (lambda: gnomon.SPD(2, batch_shape=(-1,)), r"no negative size, got \(-1,\)"),
        (lambda: gnomon.SPD(2, batch_shape="ab"), "batch_shape must be a sequence of sizes, got 'ab'"),
    ],
)
def test_bad_input(build, message):
    with pytest.raises((ValueError, TypeError), match=message):
        build()


# ---------------------------------------------------------------------- life as a module
class Model(torch.nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)
        self.cov = gnomon.SPD(g.Arrow(3), **options)

    def forward(self, x):
        return self.cov.quad(self.linear(x)).mean() - self.cov.logdet()


def test_points_are_found_through_copies_moves_and_loads():
    model = Model()
    assert point_of(model.cov.eta) is model.cov
    assert point_of(model.linear.weight) is None
    twin = copy.deepcopy(model)
    assert point_of(twin.cov.eta) is twin.cov
    assert point_of(model.double().cov.eta) is model.cov
    loaded = Model().double()
    loaded.load_state_dict(model.state_dict(), assign=True)
    assert point_of(loaded.cov.eta) is loaded.cov
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    restored = torch.load(buffer, weights_only=False)
    assert point_of(restored.cov.eta) is restored.cov
    torch.testing.assert_close(restored.cov.matrix(), model.cov.matrix())


def test_a_frame_is_loaded_only_into_its_own_structure():
    for saved, other in (
        (gnomon.SPD(3), gnomon.SPD(3, factor="inverse")),
        (gnomon.SPD(g.Toeplitz(3)), gnomon.SPD(g.Diagonal(3))),
        (gnomon.SPD(g.Triangular(3)), gnomon.SPD(g.Triangular(3, upper=True))),
    ):
        buffer = io.BytesIO()
        torch.save(saved.state_dict(), buffer)
        buffer.seek(0)
        state = torch.load(buffer)
        with pytest.raises(RuntimeError, match=r"frame was saved for .* but this point is"):
            other.load_state_dict(state)
        saved.load_state_dict(state)


def test_a_shallow_copy_does_not_take_the_coordinates_over():
    point = gnomon.SPD(3)
    copy.copy(point)
    assert point_of(point.eta) is point


def test_autocast_leaves_the_geometry_alone():
    for group in (g.Dense(4), g.Triangular(4), g.Heisenberg(4, 1, 1)):
        for form in FORMS:
            point = random_point(group, form, dtype=torch.float32)
            tau = point.matrix().detach()
            optimizer = gnomon.moving_frame(torch.optim.SGD(point.parameters(), lr=0.1, momentum=0.9))
            with torch.autocast("cpu", torch.bfloat16):
                loss = point.matrix().sum() + point.logdet() + point.quad(torch.ones(4))
                torch.testing.assert_close(point.matrix().detach(), tau, rtol=0.02, atol=0.02)
                loss.backward()
                optimizer.step()
            assert point.frame.dtype == torch.float32
            assert not torch.allclose(point.matrix(), tau)


def test_functional_transforms_around_a_point():
    point, q = random_point(g.Arrow(3)), gnomon.Gaussian(3, dtype=torch.float64)
    x = torch.randn(5, 3, dtype=torch.float64)
    scores = torch.func.vmap(torch.func.grad(q.log_prob))(x)
    torch.testing.assert_close(scores, -x)
    torch.testing.assert_close(torch.func.vmap(point.quad)(x), point.quad(x))
    torch.testing.assert_close(torch.func.jacrev(point.quad)(x[0]), 2 * point.matvec(x[0]))


def test_inference_mode():
    with torch.inference_mode():
        point = gnomon.SPD(g.Triangular(3))
        copy.deepcopy(point).matrix()
    trained = gnomon.SPD(g.Triangular(3))
    with torch.no_grad():
        trained.eta.add_(0.1)
    trained.matrix().sum().backward()


def test_points_are_freed():
    import gc
    import weakref

    point = gnomon.SPD(3)
    eta, reference = point.eta, weakref.ref(point)
    del point
    gc.collect()
    assert reference() is None
    assert point_of(eta) is None


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


def test_state_dict_names_and_shapes():
    assert {k: tuple(v.shape) for k, v in gnomon.SPD(3, batch_shape=(2,)).state_dict().items()} == {
        "eta": (2, 3, 3),
        "frame": (2, 3, 3),
    }
    assert tuple(gnomon.SPD(g.Arrow(5)).eta.shape) == (9,)


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


def test_compiled_model_equals_eager():
    if not _has_compiler():
        pytest.skip("torch.compile needs a C++ compiler, and there is none here")
    torch.manual_seed(0)
    model = Model(dtype=torch.float32)
    x = torch.randn(4, 3)
    eager = model(x)
    eager.backward()
    wanted = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    compiled = torch.compile(model)
    value = compiled(x)
    value.backward()
    torch.testing.assert_close(value, eager)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name], rtol=1e-4, atol=1e-5)
    optimizer = gnomon.moving_frame(torch.optim.SGD(model.parameters(), lr=0.1))
    before = compiled(x).item()
    optimizer.step()
    assert compiled(x).item() != before
    torch.testing.assert_close(compiled(x), model(x))


def _has_compiler():
    import shutil

    return any(shutil.which(name) for name in ("g++", "clang++", "c++"))


def test_repr_says_what_it_is():
    assert "Arrow(5, rank=1), outer, order=2, torch.float32, batch_shape=(2,)" in repr(
        gnomon.SPD(g.Arrow(5), batch_shape=(2,), dtype=torch.float32)
    )
