"""Low precision: factors in half precision, rounded at random; autocast; models in bfloat16; no inverse in a step."""

import functools
import re

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from gnomon.groups import Dense, Group, Toeplitz
from gnomon.optim import INGD, KFAC
from gnomon.optim.ingd import published_precond_lr
from gnomon.optim.rounding import rounded
from gnomon.optim.square import Square
from gnomon.optim.structures import NAMES
from support.teaching import teacher, train

HALF = [torch.bfloat16, torch.float16]


def perceptron():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 32), nn.LayerNorm(32), nn.Tanh(), nn.Linear(32, 2))


def decaying(steps):
    """A rate at whose end runs differ by what they have learned, not by their last step."""
    return lambda step: 1e-2 * (1 - step / steps)


def regression(steps, dtype=torch.float32, **settings):
    """The optimizer after a small regression, and its losses."""
    (x, y), model = teacher(), perceptron().to(dtype)
    optimizer = INGD(model, decaying(steps), **settings)
    losses = train(optimizer, lambda: (model(x.to(dtype)).float() - y).square().mean(), steps)
    return optimizer, losses


@functools.cache
def in_float32(steps, **settings):
    """The losses that those in half precision are compared with."""
    return regression(steps, **settings)[1]


def kept(optimizer):
    """The factors and their momenta, as they are stored."""
    states = [optimizer.state[tracked.layer.weight] for tracked in optimizer._tracked.values()]
    return [state[key] for state in states for key in sorted(state) if key.strip("m_").strip("KC") == ""]


# ---------------------------------------------------------------------- rounding
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("value", [1 + 2.0**-12, -0.3, 0.7e-3, 1.7e-7, -2.1e-8])
def test_rounding_is_right_on_average(dtype, value):
    """Also where float16 has few digits left, and none."""
    x = torch.full((40_000,), value)
    values = rounded(x, dtype, seed=3).float()
    below, above = values.min().item(), values.max().item()
    assert below <= value <= above
    assert set(values.tolist()) == {below, above}
    assert torch.nextafter(torch.tensor(below, dtype=dtype), torch.tensor(1e4, dtype=dtype)).item() == above
    assert values.double().mean().item() == pytest.approx(value, abs=4 * 0.5 * (above - below) / 200)


def test_rounding_is_seeded_and_leaves_what_needs_none():
    x = torch.randn(1000)
    assert torch.equal(rounded(x, torch.bfloat16, seed=3), rounded(x, torch.bfloat16, seed=3))
    assert not torch.equal(rounded(x, torch.bfloat16, seed=3), rounded(x, torch.bfloat16, seed=4))
    assert torch.equal(rounded(x, torch.float64, seed=3), x.double())
    for dtype in HALF:
        short = torch.cat([x.to(dtype).float(), torch.zeros(3)])
        assert torch.equal(rounded(short, dtype, seed=0).float(), short)


@pytest.mark.parametrize("dtype", HALF)
def test_a_seed_fixes_the_run(dtype):
    """Whatever else draws random numbers; see test_citizen.py for runs that are resumed."""
    runs = []
    for seed, others in ((0, 5), (0, 6), (1, 5)):
        model, (x, y) = perceptron(), teacher()
        optimizer = INGD(model, precond_dtype=dtype, precond_momentum=0.5, seed=seed)
        torch.manual_seed(others)
        train(optimizer, lambda model=model, x=x, y=y: (model(x) - y).square().mean(), 30)
        runs.append(kept(optimizer))
        assert all(tensor.dtype == dtype for tensor in runs[-1])
    assert len(runs[0]) == 8
    assert all(torch.equal(a, b) for a, b in zip(runs[0], runs[1], strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(runs[0], runs[2], strict=True))


# ---------------------------------------------------------------------- factors
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("preset", ["paper", "robust"])
def test_factors_move_during_the_published_warm_up(preset, dtype):
    """Steps of b1 = 0.0002, of which plain rounding to bfloat16 would lose every one."""

    def moved(**settings):
        torch.manual_seed(0)
        model = nn.Linear(128, 96, bias=False)
        x = 0.5 * torch.randn(64, 128)
        optimizer = INGD(model, 0.0, preset=preset, precond_lr=published_precond_lr, update_every=1, **settings)
        train(optimizer, lambda: model(x).square().mean(), 60)
        units = optimizer.state[model.weight].get("level", torch.ones(1)) ** 0.5
        # The diagonal, where changes are lost; zeros, as they are elsewhere at first, have finer neighbours.
        return torch.cat([(units * A @ A.mT).diagonal() - 1 for A in optimizer.factors("")])

    full, half = moved(), moved(precond_dtype=dtype)
    assert full.abs().max() > 1e-3
    assert (half @ full / full.square().sum()).item() == pytest.approx(1, abs=0.3)
    assert torch.tensor(1 + 0.0002).bfloat16() == 1


@pytest.mark.parametrize(
    ("structure", "dtype"),
    [*[(s, torch.bfloat16) for s in ("dense", "triangular", "diagonal", "toeplitz")], ("dense", torch.float16)],
)
def test_factors_in_half_precision_end_within_two_percent(structure, dtype):
    """On average over the last steps; benchmarks/precision.py has an autoencoder and a CNN."""
    _, half = regression(250, structure=structure, precond_dtype=dtype)
    assert sum(half[-50:]) == pytest.approx(sum(in_float32(250, structure=structure)[-50:]), rel=0.02)


@pytest.mark.parametrize("b1", [0.2, 0.5])
def test_a_dense_factor_moves_alike_in_either_form(b1):
    """``K K^T`` where K is kept, and P where that is: half precision must not change how factors follow."""
    curvature, one = torch.linspace(0, 1 / b1, 13).view(-1, 1, 1), torch.ones(13, 1, 1)
    rows, ones, damping = curvature.sqrt(), torch.ones(13), torch.full((13,), 0.2)
    square = Square(1)
    push = square.push((one,), square.seen((one,), rows), None, ones, damping, 0.5, b1)
    (moved,) = square.advance((one,), push, 2)
    m = b1 / 2 * (curvature + 0.2 - 1)
    (root,) = Dense(1).advance((one,), (m,), 2, -1.0)
    torch.testing.assert_close(root**2, moved, rtol=0.08, atol=0)


# ---------------------------------------------------------------------- autocast and models in half precision
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("factors", [None, torch.bfloat16])
def test_autocast(dtype, scaled, factors):
    """A scale that overflows float16 at first costs the scaler's steps, and nothing else."""
    (x, y), model = teacher(), perceptron()
    optimizer = INGD(model, decaying(150), precond_dtype=factors)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, enabled=scaled)
    losses = []
    for _ in range(150):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype):
            loss = (model(x).float() - y).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]
    assert losses[-1] == pytest.approx(in_float32(150)[-1], rel=0.15)
    assert optimizer.skipped_steps == optimizer.skipped_updates == 0
    if scaled and dtype == torch.float16:
        assert scaler.get_scale() < 2.0**24
    assert all(tensor.dtype == (factors or torch.float32) for tensor in kept(optimizer))


def test_statistics_under_autocast_are_in_full_precision():
    (x, y), model = teacher(), perceptron()
    optimizer = INGD(model)
    with torch.autocast("cpu", torch.bfloat16):
        loss = (model(x).float() - y).square().mean()
        loss.backward()  # torch advises against it; it works all the same
        statistics = [tracked.statistics for tracked in optimizer._tracked.values()]
        assert all(t.dtype == torch.float32 for s in statistics for t in (*s.inputs.tensors, *s.outputs.tensors))
        optimizer.step()
    assert optimizer.skipped_updates == 0


@pytest.mark.parametrize("settings", [{}, {"precond_dtype": torch.bfloat16}, {"structure": "toeplitz"}])
@pytest.mark.parametrize("preset", ["robust", "paper"])
def test_a_model_in_bfloat16_trains(preset, settings):
    settings = {"preset": preset, "update_every": 1, **settings}
    full = in_float32(200, **settings)
    optimizer, half = regression(200, dtype=torch.bfloat16, **settings)
    assert sum(half[-20:]) < 0.5 * sum(half[:3]) / 3 * 20
    assert sum(half[-20:]) == pytest.approx(sum(full[-20:]), rel=0.25)
    assert optimizer.skipped_steps == optimizer.skipped_updates == 0
    assert all(tensor.dtype == settings.get("precond_dtype", torch.float32) for tensor in kept(optimizer))


# ---------------------------------------------------------------------- no inverse, solve or decomposition
class NoInverse(TorchDispatchMode):
    """Fails at an operation that solves, inverts or decomposes, and counts the others."""

    allowed = ("linalg_vector_norm", "linalg_vecdot")
    forbidden = re.compile(
        r"linalg|cholesky|solve|inverse|pinv|matrix_exp|lstsq|svd|eig|(^|_)(lu|qr|geqrf|orgqr|ormqr|det|logdet|slogdet)(_|$)"
    )

    def __init__(self):
        super().__init__()
        self.products = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.__name__.split(".")[0]
        assert name in self.allowed or not self.forbidden.search(name), f"{name} is no product"
        self.products += name in ("mm", "bmm", "addmm")
        return function(*args, **(kwargs or {}))


FORBIDDEN = {
    "inv": torch.linalg.inv,
    "pinv": torch.linalg.pinv,
    "solve": lambda a: torch.linalg.solve(a, a),
    "triangular solve": lambda a: torch.linalg.solve_triangular(a, a, upper=True),
    "lstsq": lambda a: torch.linalg.lstsq(a, a),
    "cholesky": torch.linalg.cholesky,
    "cholesky_ex": torch.linalg.cholesky_ex,
    "cholesky_inverse": torch.cholesky_inverse,
    "cholesky_solve": lambda a: torch.cholesky_solve(a, a),
    "eigh": torch.linalg.eigh,
    "eig": torch.linalg.eig,
    "svd": torch.linalg.svd,
    "spectral norm": lambda a: torch.linalg.matrix_norm(a, 2),
    "qr": torch.linalg.qr,
    "geqrf": torch.geqrf,
    "householder": lambda a: torch.linalg.householder_product(a, a[0]),
    "lu": torch.linalg.lu,
    "lu_factor": torch.linalg.lu_factor,
    "ldl": torch.linalg.ldl_factor,
    "matrix_exp": torch.linalg.matrix_exp,
    "slogdet": torch.linalg.slogdet,
    "det": torch.linalg.det,
}


@pytest.mark.parametrize("name", FORBIDDEN)
def test_the_check_knows(name):
    with NoInverse(), pytest.raises(AssertionError, match="is no product"):
        FORBIDDEN[name](torch.eye(3))


def test_the_check_looks_into_steps_and_hooks():
    x, _ = teacher()
    model = perceptron()
    with NoInverse(), pytest.raises(AssertionError, match="cholesky_ex is no product"):
        train(KFAC(model), lambda: model(x).square().mean(), 1)

    products = []
    for watched in (False, True):
        model = perceptron()
        optimizer = INGD(model) if watched else None
        with NoInverse() as check:
            model(x).square().mean().backward()
        products.append(check.products)
    assert optimizer is not None
    assert products[1] > products[0]  # those of the statistics


def no_inverses_of_groups(monkeypatch):
    """A structure's own ways to an inverse, which need none of torch's."""

    def refuse(self, *args, **kwargs):
        raise AssertionError(f"an inverse of {self}")

    kinds = [Group]
    for kind in kinds:
        kinds += kind.__subclasses__()
        for name in {"apply_inverse", "ldiv", "logabsdet", "factor"} & set(vars(kind)):
            monkeypatch.setattr(kind, name, refuse)


@pytest.mark.parametrize("curvature", ["kfac", "gradient"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("preset", ["robust", "paper"])
@pytest.mark.parametrize("structure", NAMES)
def test_nothing_is_inverted_or_decomposed(structure, preset, dtype, curvature, monkeypatch):
    """In a step with an update, in one without, and in the hooks."""
    no_inverses_of_groups(monkeypatch)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6), nn.Tanh(), nn.Flatten(), nn.Linear(24, 40))
    model.append(nn.Linear(40, 3))
    settings = {"structure": structure, "precond_dtype": dtype, "curvature": curvature, "preset": preset}
    optimizer = INGD(model, 1e-3, update_every=2, growing_intervals=False, **settings)
    x = torch.randn(16, 2, 4, 4)
    with NoInverse() as check:
        losses = train(optimizer, lambda: model(x).square().mean(), 4)
    assert check.products > 0
    assert losses[-1] < losses[0]
    assert optimizer.skipped_steps == optimizer.skipped_updates == 0


# ---------------------------------------------------------------------- Toeplitz
@pytest.mark.parametrize("upper", [False, True])
@pytest.mark.parametrize("dtype", HALF)
def test_toeplitz_is_transformed_in_float32_and_rounded_once(dtype, upper):
    """Against dense matrices in float64: off by half of the last digit, and by float32's rounding of the transform."""
    group, k = Toeplitz(300, upper), 300
    a, b = (((torch.randn(k) / (1 + torch.arange(k))).to(dtype),) for _ in range(2))
    x, y = (torch.randn(20, k).to(dtype) for _ in range(2))
    A, B = (group.to_dense((element[0].double(),)) for element in (a, b))
    seen = x.double().mT @ y.double()
    diagonals = torch.stack([seen.diagonal(j if upper else -j).sum() for j in range(k)])
    pairs = {
        "mul": (group.mul(a, b)[0], (B @ A)[0] if upper else (B @ A)[:, 0]),
        "apply": (group.apply(a, x), x.double() @ A.mT),
        "apply transposed": (group.apply(a, x, transpose=True), x.double() @ A),
        "apply squared": (group.apply_squared(a, x), x.double() @ A @ A.mT),
        "restrict": (group.restrict(x, y)[0], diagonals),
        "norm": (group.norm_estimate(a), torch.fft.fft(a[0].double(), 1200).abs().max()),
    }
    for name, (found, wanted) in pairs.items():
        assert found.dtype == dtype
        roundings = 2 if name == "apply squared" else 1  # two products
        half_a_digit = 0.5 * torch.finfo(dtype).eps * roundings * wanted.abs()
        error = (found.double() - wanted).abs() - half_a_digit
        slack = 1e-5 * wanted.abs().max() if roundings == 1 else torch.finfo(dtype).eps * wanted.abs().max()
        assert error.max() <= slack, name
