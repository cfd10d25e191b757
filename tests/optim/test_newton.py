"""StructuredNewton: the update against independent references, invariance, cost, and Rosenbrock's function."""

import copy
import io
import itertools
import math

import pytest
import torch

import gnomon
from gnomon import groups
from gnomon.optim import Banded, Colored, Hutchinson, StructuredNewton
from gnomon.problems import Rosenbrock, random_spd
from gnomon.testing import random_element

F64 = torch.float64


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def curved_function(k, seed=0):
    """Smooth, not convex, with a dense Hessian that changes with x."""
    g = generator(seed)
    q = random_spd(k, 30.0, generator=g)
    w = torch.randn(k, k, dtype=F64, generator=g)
    return lambda x: 0.5 * x @ q @ x + torch.sin(w @ x).sum()


def start(k, seed=5):
    return torch.randn(k, dtype=F64, generator=generator(seed))


def projected(structure, m):
    """P of the update, by its definition: the generators E_j and D_j = 1 / ||E_j + E_j^T||."""
    result = torch.zeros_like(m)
    for i in range(structure.numel):
        unit = torch.zeros(structure.numel, dtype=F64)
        unit[i] = 1
        e = structure.to_dense(structure.scale(structure.unflatten(unit)))
        if e.any():
            result += 4 * e * (e * m).sum()
    return result


@pytest.mark.parametrize(
    "structure",
    [groups.Dense(5), groups.Diagonal(5), groups.Arrow(5), groups.Heisenberg(5, 1, 2), groups.Triangular(5)],
    ids=repr,
)
def test_one_step_is_the_formula(structure):
    """x <- x - lr A A^T g and A <- A E(-(gamma/2) P(A^T H A - I)), E the quadratic exponential."""
    f, gamma, damping = curved_function(5), 0.1, 0.3
    x = torch.nn.Parameter(start(5))
    optimizer = StructuredNewton([x], structure, lr=0.2, precond_lr=gamma, damping=damping, hessian="exact", init=4.0)
    for _ in range(3):
        state = optimizer.state[x]
        A = structure.to_dense(structure.unpack(state["frame"])) if state else 0.5 * torch.eye(5, dtype=F64)
        here = x.detach().clone()
        g = torch.func.grad(f)(here)
        H = torch.func.hessian(f)(here) + damping * torch.eye(5, dtype=F64)
        optimizer.step(lambda: f(x))
        u = A @ A.mT @ g
        rate = min(0.2, (2 * (g @ u) / (u @ H @ u)).item()) if u @ H @ u > 0 else 0.2
        torch.testing.assert_close(x.detach(), here - rate * u)
        N = -gamma / 2 * projected(structure, A.mT @ H @ A - torch.eye(5, dtype=F64))
        new = structure.to_dense(structure.unpack(optimizer.state[x]["frame"]))
        bound = structure.norm_bound(structure.from_dense(N)).item()
        N = N * min(1, 0.5 / bound)
        torch.testing.assert_close(new, A @ (torch.eye(5, dtype=F64) + N + N @ N / 2))


def test_dense_without_momentum_is_the_gaussian_submanifold_update():
    """Structured natural-gradient descent on N(x, S^-1) with g_Sigma = (H - S) / 2 (Sec. 5 of the mathematics)."""
    f, gamma = curved_function(4), 0.05
    x = torch.nn.Parameter(start(4))
    optimizer = StructuredNewton([x], lr=gamma, precond_lr=gamma, hessian="exact", init=20.0)
    gaussian = gnomon.Gaussian(4, loc=start(4), init=torch.full((4,), 1 / 20.0, dtype=F64))
    descent = gnomon.moving_frame(torch.optim.SGD(gaussian.parameters(), lr=2 * gamma))
    for _ in range(10):
        optimizer.step(lambda: f(x))
        mean, covariance = gaussian.loc.detach(), gaussian.covariance().detach()
        in_covariance = 0.5 * (torch.func.hessian(f)(mean) - torch.linalg.inv(covariance))
        descent.zero_grad()
        (gaussian.loc @ torch.func.grad(f)(mean) + (gaussian.covariance() * in_covariance).sum()).backward()
        descent.step()
        torch.testing.assert_close(x.detach(), gaussian.loc.detach(), rtol=1e-9, atol=1e-9)


def curvature(optimizer, structure, x):
    """S of an optimizer, dense."""
    factor = structure.to_dense(structure.unpack(optimizer.state[x]["frame"]))
    return torch.linalg.inv(factor @ factor.mT) if optimizer.form == "A" else factor @ factor.mT


@pytest.mark.parametrize(
    "structure", [groups.Dense(5), groups.Arrow(5, 2), groups.Heisenberg(5, 1, 1), groups.Toeplitz(5)], ids=repr
)
def test_both_forms_agree_to_first_order(structure):
    """Form A on a structure and form B on its transpose: S differs by the truncation alone, O(gamma^4)."""
    f = curved_function(5)

    def moved(form, gamma):
        x = torch.nn.Parameter(start(5))
        group = structure if form == "A" else structure.transposed
        optimizer = StructuredNewton([x], group, lr=0.0, precond_lr=gamma, hessian="exact", form=form, init=40.0)
        for _ in range(2):
            optimizer.step(lambda: f(x))
        return curvature(optimizer, group, x)

    errors = [(moved("A", gamma) - moved("B", gamma)).norm().item() for gamma in (1e-2, 1e-3)]
    steps = [(moved("A", gamma) - 40 * torch.eye(5, dtype=F64)).norm().item() for gamma in (1e-2, 1e-3)]
    assert math.log10(errors[0] / errors[1]) == pytest.approx(4, abs=0.2)
    assert math.log10(steps[0] / steps[1]) == pytest.approx(1, abs=0.1)
    if isinstance(structure, groups.Dense):
        hessian = torch.func.hessian(f)(start(5))
        wanted = 40 * torch.eye(5, dtype=F64)
        for _ in range(2):
            wanted = (1 - 1e-3) * wanted + 1e-3 * hessian
        torch.testing.assert_close(moved("A", 1e-3), wanted, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("form", ["A", "B"])
@pytest.mark.parametrize(
    "structure",
    [groups.Dense(6), groups.Arrow(6, 2), groups.Heisenberg(6, 1, 2), groups.Triangular(6), groups.Diagonal(6)],
    ids=repr,
)
def test_invariance_under_the_group(structure, form):
    """In the parameters y with x = Q y, Q in the group, the trajectory is that of x transformed."""
    f, torch_state = curved_function(6), torch.random.get_rng_state()
    torch.manual_seed(0)
    q = random_element(structure)
    torch.random.set_rng_state(torch_state)
    if form == "B":  # S = B B^T turns into Q^T S Q: B goes with the transpose
        q = structure.transposed.from_dense(structure.to_dense(q).mT)
    Q = (structure if form == "A" else structure.transposed).to_dense(q)

    def run(function, x0, frame):
        x = torch.nn.Parameter(x0)
        settings = {"lr": 0.3, "momentum": 0.5, "precond_lr": 0.02, "precond_momentum": 0.5}
        optimizer = StructuredNewton([x], structure, hessian="exact", form=form, **settings)
        optimizer.state[x] = {"frame": frame, "precond_momentum": torch.zeros_like(frame)}
        path = []
        for _ in range(8):
            optimizer.step(lambda: function(x))
            path.append(x.detach().clone())
        return torch.stack(path)

    identity = structure.identity(dtype=F64)
    frame = structure.pack(tuple(0.2 * block for block in identity) if form == "A" else tuple(5 * b for b in identity))
    # A = Q A_y and B_y = Q^T B
    start_y = torch.linalg.solve(Q, start(6))
    scaled = 0.2 * torch.linalg.inv(Q) if form == "A" else 5 * Q.mT
    path_x = run(f, start(6), frame)
    path_y = run(lambda y: f(Q @ y), start_y, structure.pack(structure.from_dense(scaled)))
    torch.testing.assert_close(path_y @ Q.mT, path_x, rtol=1e-7, atol=1e-7)


def test_the_preconditioner_finds_the_hessian_of_a_quadratic():
    h = random_spd(6, 20.0, generator=generator())
    x = torch.nn.Parameter(start(6))
    optimizer = StructuredNewton([x], precond_lr=0.3, precond_momentum=0.3, lr=0.5)
    for _ in range(60):
        optimizer.step(lambda: 0.5 * x @ h @ x)
    torch.testing.assert_close(curvature(optimizer, groups.Dense(6), x), h, rtol=1e-6, atol=1e-6)
    assert x.norm() < 1e-6


@pytest.mark.parametrize(
    ("structure", "hessian", "products"),
    [
        (groups.Dense(30), "hutchinson", 30),
        (groups.Heisenberg(30, 3, 4), "hutchinson", 3 + 4 + 1),
        (groups.Heisenberg(30, 3, 4), Hutchinson(5), 3 + 4 + 5),
        (groups.Heisenberg(30, 3, 4), Banded(1), 3 + 4 + 2),
        (groups.Heisenberg(30, 3, 4), lambda: torch.ones(30, dtype=F64), 3 + 4),
        (groups.Heisenberg(30, 3, 4), "exact", 30),
        (groups.Arrow(30, 2), Banded(2), 2 + 3),
        (groups.Arrow(30, 20), Banded(0), 20 + 1),
        (groups.Heisenberg(30, 20, 4), Banded(0), 24 + 1),
        (groups.Heisenberg(30, 4, 20), Banded(0), 24 + 1),
        (groups.Diagonal(30), "hutchinson", 1),
    ],
)
def test_the_cost_in_hessian_vector_products(structure, hessian, products):
    """Those of an update, and one a step for its length."""
    problem = Rosenbrock(30)
    x = problem.start()
    optimizer = StructuredNewton([x], structure, hessian=hessian, init=1000.0)
    for _ in range(3):
        optimizer.step(lambda: problem(x))
    assert optimizer.hessian_products == 3 * (products + 1)


def test_updates_of_the_preconditioner_can_be_seldom():
    problem = Rosenbrock(30, "mild")
    x = problem.start()
    optimizer = StructuredNewton([x], groups.Arrow(30), hessian=Banded(1), update_every=4, init=10.0, lr=0.5)
    frames = []
    for _ in range(9):
        optimizer.step(lambda: problem(x))
        frames.append(optimizer.state[x]["frame"])
    assert optimizer.hessian_products == 3 * (1 + 2) + 9
    changed = [not torch.equal(a, b) for a, b in itertools.pairwise(frames)]
    assert changed == [False, False, False, True, False, False, False, True]
    with pytest.raises(ValueError, match="update_every must be a positive integer, got 0"):
        StructuredNewton([x], update_every=0)


def test_diagonals_by_coloring_given_and_exact_agree():
    problem = Rosenbrock(20)
    diagonals = {}
    pattern = torch.ones(20, 20).tril(1).triu(-1)
    for name in ("exact", "banded", "colored", "sparse", "given"):
        x = problem.start()
        rule = {
            "exact": "exact",
            "banded": Banded(1),
            "colored": Colored(pattern),
            "sparse": Colored(pattern.to_sparse()),
            "given": lambda x=x: problem.hessian_diagonal(x),
        }[name]
        settings = {"lr": 0.1, "precond_lr": 0.05, "damping": 2.0, "init": 500.0}
        optimizer = StructuredNewton([x], groups.Heisenberg(20, 2, 2), hessian=rule, **settings)
        for _ in range(5):
            optimizer.step(lambda x=x: problem(x))
        diagonals[name] = x.detach().clone()
    for name in diagonals:
        torch.testing.assert_close(diagonals[name], diagonals["exact"], msg=name)


def test_hutchinson_is_unbiased_and_seeded():
    h = random_spd(8, 10.0, generator=generator())
    operator = groups.SymmetricOperator(8, lambda rows: rows @ h, lambda part: h.diagonal()[part.where])
    estimate = Hutchinson(20000, generator(1))(operator, h)
    torch.testing.assert_close(estimate, h.diagonal(), rtol=0.05, atol=0.1)
    again = Hutchinson(20000, generator(1))(operator, h)
    assert torch.equal(estimate, again)


@pytest.mark.slow
def test_mild_rosenbrock_with_momentum_needs_less_than_seven_tenths_of_the_iterations():
    problem = Rosenbrock(1000, "mild")

    def iterations(**settings):
        x = problem.start()
        optimizer = StructuredNewton([x], groups.Heisenberg(1000, 5, 5), hessian=Banded(1), precond_lr=0.1, **settings)
        first = problem(x).item()
        for i in range(1000):
            if optimizer.step(lambda: problem(x)).item() <= 1e-6 * first:
                return i
        return 1000

    assert iterations(lr=1.5, momentum=0.8, precond_momentum=0.5) <= 0.7 * iterations(lr=0.95)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"momentum": 0.9}, {"update_every": 5, "momentum": 0.9}, {"lr": 2.0}])
@pytest.mark.parametrize("seed", range(5))
def test_a_double_well_is_left_by_its_sides(seed, settings):
    """From near its saddle, where S shrinks under negative curvature, into walls whose curvature grows fast."""
    x = torch.nn.Parameter(0.3 * torch.randn(2, dtype=F64, generator=generator(seed)))
    optimizer = StructuredNewton([x], **settings)
    for _ in range(150):
        loss = optimizer.step(lambda: (x**4 - x**2).sum())
    assert optimizer.skipped_steps == 0
    assert loss.item() == pytest.approx(-0.5, abs=0.01)


def test_frozen_parameters_stay():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)).double()
    model[0].requires_grad_(False)
    before = model[0].weight.clone()
    optimizer = StructuredNewton(model.parameters(), groups.Diagonal, momentum=0.5, damping=1.0)
    x = torch.randn(9, 2, dtype=F64, generator=generator())
    losses = [optimizer.step(lambda: model(x).square().mean()).item() for _ in range(20)]
    assert losses[-1] < 0.1 * losses[0]
    assert torch.equal(model[0].weight, before)


def test_many_parameters_groups_and_copies():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)).double()
    x, y = torch.randn(50, 3, dtype=F64), torch.randn(50, 1, dtype=F64)

    def closure(model):
        return lambda: (model(x) - y).square().mean()

    groups_of = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.3}]
    settings = {"lr": 0.5, "momentum": 0.5, "precond_lr": 0.2, "damping": 0.1}
    optimizer = StructuredNewton(groups_of, groups.Diagonal, hessian="exact", **settings)
    first = closure(model)().item()
    for _ in range(20):
        optimizer.step(closure(model))
    assert closure(model)().item() < 0.9 * first
    twin_model, twin = copy.deepcopy((model, optimizer))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    loaded_model = copy.deepcopy(model)
    loaded = StructuredNewton(
        [{"params": loaded_model[0].parameters()}, {"params": loaded_model[2].parameters()}],
        groups.Diagonal,
        hessian="exact",
    )
    loaded.load_state_dict(torch.load(file))
    for _ in range(5):
        for o, m in ((optimizer, model), (twin, twin_model), (loaded, loaded_model)):
            o.step(closure(m))
    for p, q, r in zip(model.parameters(), twin_model.parameters(), loaded_model.parameters(), strict=True):
        assert torch.equal(p, q)
        assert torch.equal(p, r)


def test_low_precision_and_linear_parts():
    x = torch.nn.Parameter(torch.full((6,), 3.0, dtype=torch.float32))
    optimizer = StructuredNewton([x], groups.Arrow(6), hessian="exact", damping=1.0, lr=0.3, precond_lr=0.2)
    for _ in range(50):
        optimizer.step(lambda: x[:3].square().sum() + x[3:].sum() * 1e-3)  # linear in half of x
    assert x.dtype == torch.float32
    assert x[:3].abs().max() < 1e-3
    assert x.isfinite().all()
    linear = torch.nn.Parameter(torch.ones(2, dtype=F64))
    optimizer = StructuredNewton([linear], damping=1.0, lr=0.1)
    optimizer.step(lambda: linear.sum())
    torch.testing.assert_close(linear.detach(), torch.full((2,), 0.9, dtype=F64))


def test_a_step_that_is_not_finite_changes_nothing():
    x = torch.nn.Parameter(torch.ones(3, dtype=F64))
    optimizer = StructuredNewton([x], lr=0.1)
    optimizer.step(lambda: x.square().sum())
    before, state = x.detach().clone(), copy.deepcopy(optimizer.state_dict()["state"][0])
    with pytest.warns(RuntimeWarning, match="the step was skipped, and nothing changed"):
        optimizer.step(lambda: x.square().sum() * math.nan)
    optimizer.step(lambda: x.square().sum() * math.inf)
    assert optimizer.skipped_steps == 2
    assert torch.equal(x, before)
    for key, value in optimizer.state_dict()["state"][0].items():
        assert value == state[key] if key == "step" else torch.equal(value, state[key])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": -1.0}, r"lr must be finite and at least 0, got -1\.0"),
        ({"momentum": 1.0}, r"momentum must be at least 0 and below 1, got 1\.0"),
        ({"precond_momentum": -0.1}, r"precond_momentum must be at least 0 and below 1, got -0\.1"),
        ({"damping": math.inf}, "damping must be finite and at least 0, got inf"),
        ({"form": "C"}, "form must be 'A' or 'B', got 'C'"),
        ({"init": 0.0}, r"init must be a positive multiple of the identity, or None, got 0\.0"),
        ({"hessian": "guess"}, "hessian must be 'hutchinson', 'exact'"),
        ({"hessian": Hutchinson}, "hessian must be 'hutchinson', 'exact'"),
        ({"hessian": Colored(torch.eye(2))}, "pattern is of size 2, but a group of params has 3 numbers"),
        ({"structure": groups.Arrow(7)}, r"structure must be a group of size 3, got Arrow\(7, rank=1\)"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        StructuredNewton([torch.nn.Parameter(torch.zeros(3))], **settings)


def test_bad_closures():
    x = torch.nn.Parameter(torch.ones(3))
    optimizer = StructuredNewton([x])
    with pytest.raises(ValueError, match="closure is None"):
        optimizer.step()

    def with_backward():
        loss = x.square().sum()
        loss.backward()
        return loss

    with pytest.raises(RuntimeError, match=r"return it without calling backward\(\)"):
        optimizer.step(with_backward)
    with pytest.raises(TypeError, match="the closure must return the loss, a tensor with one number, got 3"):
        optimizer.step(lambda: 3.0)
    with pytest.raises(ValueError, match="hessian must return the 3 numbers of the diagonal, got tensor"):
        StructuredNewton([x], groups.Diagonal, hessian=lambda: torch.ones(2)).step(lambda: x.square().sum())
    with pytest.raises(ValueError, match=r"structure must be one of dense, triangular, .* got 'sparse'"):
        StructuredNewton([x], "sparse")
    fitted = StructuredNewton([x], groups.Diagonal(3))
    with pytest.raises(ValueError, match=r"structure must be a group of size 2, got Diagonal\(3\)"):
        fitted.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
    assert len(fitted.param_groups) == 1
    with pytest.raises(ValueError, match="pattern must be a square matrix"):
        Colored(torch.ones(3))
    with pytest.raises(ValueError, match="width must be an integer of at least 0"):
        Banded(-1)
