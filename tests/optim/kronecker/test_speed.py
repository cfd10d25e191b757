"""What saves time or memory changes no result: each saving against the plain form, and what it promises to save."""

import copy
import functools
import gc
import itertools
import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from gnomon import groups
from gnomon.groups import Group, products, symmetric
from gnomon.optim import INGD, KFAC, forms
from gnomon.optim.factors import Covariance, KroneckerFactors, Rows, Seen, Statistics, moment
from gnomon.optim.moves import rms_of
from gnomon.optim.shortcut import VERDICT, Shortcut
from gnomon.optim.structures import NAMES
from gnomon.testing import random_algebra, random_element
from support.structures import SMALL_GROUPS

F64 = torch.float64


def close(actual, expected, tolerance=1e-10):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def all_close(actual, expected, tolerance=1e-10):
    for one, other in zip(actual, expected, strict=True):
        close(one, other, tolerance)


# ---------------------------------------------------------------------- products of large matrices
@pytest.fixture
def small_panels(monkeypatch):
    """Many panels and aligned rows at small sizes."""
    monkeypatch.setattr(products, "PANEL", 16)
    monkeypatch.setattr(products, "LARGE", 3)


def laid_out(x, layout):
    """The same numbers at other places in memory."""
    if layout == "transposed":
        return x.mT.contiguous().mT
    if layout == "strided":
        return torch.stack([x, -x], -1).flatten(-2)[..., ::2]
    return x


LAYOUTS = ("plain", "transposed", "strided")


@pytest.mark.usefixtures("small_panels")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("batch", [(), (3,), (2, 3)], ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 2, 5), (5, 7, 3), (17, 33, 19), (33, 4, 35)], ids=str)
def test_products(shape, batch, layout):
    n, k, m = shape
    a, b = torch.randn(*batch, n, k, dtype=F64), torch.randn(*batch, k, m, dtype=F64)
    close(products.product(laid_out(a, layout), laid_out(b, layout)), a @ b)


@pytest.mark.usefixtures("small_panels")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("batch", [(), (3,), (2, 2)], ids=str)
@pytest.mark.parametrize("k", [1, 5, 33, 64, 97])
def test_symmetric_products(k, batch, layout):
    """Of thin and of square matrices, and both sides of the diagonal alike."""
    rows, s = torch.randn(*batch, 7, k, dtype=F64), torch.randn(*batch, k, k, dtype=F64)
    a, s = torch.randn(*batch, k, k, dtype=F64), s + s.mT
    for left, right in ((rows.mT, rows), (a.mT, s @ a), (s, s)):
        found = products.symmetric_product(laid_out(left, layout), laid_out(right, layout))
        close(found, left @ right, 1e-10)
    assert torch.equal(found[..., :16, 16:], found[..., 16:, :16].mT)


@pytest.mark.usefixtures("small_panels")
def test_products_of_batches_of_different_shapes():
    a, b = torch.randn(3, 1, 37, 5, dtype=F64), torch.randn(2, 5, 4, dtype=F64)
    close(products.product(a, b), a @ b)
    rows = torch.randn(37, 5, dtype=F64)
    close(products.symmetric_product(rows.expand(2, 37, 5), rows.mT), (rows @ rows.mT).expand(2, 37, 37))


@pytest.mark.usefixtures("small_panels")
@pytest.mark.parametrize("multiply", [products.product, products.symmetric_product], ids=["plain", "symmetric"])
def test_gradients_pass_through_products(multiply):
    a = torch.randn(40, 3, dtype=F64, requires_grad=True)
    grad = torch.randn(40, 40, dtype=F64)
    (ours,) = torch.autograd.grad(multiply(a, a.mT), a, grad)
    (theirs,) = torch.autograd.grad(a @ a.mT, a, grad)
    close(ours, theirs)
    b = torch.randn(3, 40, dtype=F64, requires_grad=True)
    (ours,) = torch.autograd.grad(multiply(a.detach(), b), b, grad)
    close(ours, a.detach().mT @ grad)


@pytest.mark.parametrize("batch", [(), (2,), (2, 3)], ids=str)
@pytest.mark.parametrize("k", range(1, 10))
def test_packed_symmetric_matrices(k, batch):
    m = torch.randn(*batch, k, k, dtype=F64)
    m = m + m.mT
    packed = symmetric.pack(m)
    assert packed.shape == (*batch, symmetric.packed_size(k))
    assert k * (k + 1) // 2 <= symmetric.packed_size(k) <= k * (k + 1) // 2 + k
    assert torch.equal(symmetric.unpack(packed, k), m)
    assert torch.equal(symmetric.pack(laid_out(m, "strided")), packed)
    group = groups.Dense(k)
    assert group.compress((m,)).shape == (*batch, *group.compressed_shape)
    assert torch.equal(group.expand(group.compress((m,)))[0], m)


@pytest.mark.parametrize("group", SMALL_GROUPS, ids=repr)
def test_compressed_elements(group):
    """What is kept of a momentum is all of it."""
    n = group.scale(random_algebra(group, (2,)))
    compressed = group.compress(n)
    assert compressed.shape == (2, *group.compressed_shape)
    all_close(group.expand(compressed), n, 1e-14)


# ---------------------------------------------------------------------- operations of groups
@pytest.mark.parametrize("overwrite", [False, True], ids=["kept", "overwritten"])
@pytest.mark.parametrize("group", SMALL_GROUPS, ids=repr)
def test_squares_are_applied(group, overwrite):
    for batch, layout in itertools.product([(2,), (1,), (), (2, 3)], LAYOUTS):
        a = random_element(group, batch)
        rows = laid_out(torch.randn(*batch, 5, group.k, dtype=F64), layout)
        before, dense = rows.clone(), group.to_dense(a)
        found = group.apply_squared(a, rows, overwrite)
        close(found, before @ dense @ dense.mT)
        if not overwrite:
            assert torch.equal(rows, before)
            found.add_(1)  # not in the rows' memory either
            assert torch.equal(rows, before)


@pytest.mark.parametrize("overwrite", [False, True], ids=["kept", "overwritten"])
@pytest.mark.parametrize("group", SMALL_GROUPS, ids=repr)
def test_kept_squares_are_applied_in_given_memory(group, overwrite):
    for batch, layout in itertools.product([(2,), (1,)], ["plain", "transposed"]):
        a = random_element(group, batch)
        before, dense = torch.randn(*batch, 5, group.k, dtype=F64), group.to_dense(a)
        rows, scratch = (laid_out(x, layout) for x in (before.clone(), torch.full_like(before, math.nan)))
        square = group.squared(a)
        close(group.times_square(square, rows, overwrite, scratch), before @ dense @ dense.mT)
        assert overwrite or torch.equal(rows, before)
        close(group.times_square(square, before, scratch=scratch), before @ dense @ dense.mT)


@pytest.mark.parametrize("group", SMALL_GROUPS, ids=repr)
def test_gradients_pass_through_squares(group):
    a = tuple(block.requires_grad_() for block in random_element(group, (2,)))
    rows = torch.randn(2, 4, group.k, dtype=F64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda rows, *a: group.apply_squared(a, rows), (rows, *a), fast_mode=True)


def test_forward_derivatives_pass_through_squares():
    group = groups.Dense(4)
    a, x, v = random_element(group), torch.randn(3, 4, dtype=F64), torch.randn(3, 4, dtype=F64)
    _, ours = torch.func.jvp(lambda x: group.gram(a, x)[0], (x,), (v,))
    xa, va = x @ a[0], v @ a[0]
    close(ours, xa.mT @ va + va.mT @ xa)


@pytest.mark.usefixtures("small_panels")
@pytest.mark.parametrize("k", [1, 4, 33, 50])
def test_short_forms_of_dense_matrices(k):
    """Against those that any group has, for symmetric arguments."""
    group = groups.Dense(k)
    a = (torch.eye(k, dtype=F64) + torch.randn(2, k, k, dtype=F64) / k,)
    s = torch.randn(2, k, k, dtype=F64) / k
    s = s + s.mT
    covector = (s,)
    close(group.trace(covector), Group.trace(group, covector))
    close(group.squared_norm(a), Group.squared_norm(group, a))
    fresh = lambda: (s.clone(),)  # noqa: E731  # some work in the memory of what they are given
    all_close(group.steepest(fresh()), Group.steepest(group, fresh()))
    all_close(group.subtract_identity(fresh()), Group.subtract_identity(group, fresh()))
    half = (s @ a[0],)
    all_close(group.half_seen(a, s), half)
    all_close(group.congruent(a, half), Group.congruent(group, a, half))
    rows = torch.randn(2, 3, k, dtype=F64)
    all_close(group.gram(a, rows), Group.gram(group, a, rows))
    close(group.squared(a)[0], a[0] @ a[0].mT)
    for order in (1, None):
        all_close(group.advance(a, fresh(), order), Group.advance(group, a, fresh(), order))
    kept = fresh()
    close(group.advance(a, kept, 2, -0.5)[0], a[0] @ (torch.eye(k, dtype=F64) - 0.5 * s + 0.3 * 0.25 * s @ s))
    assert torch.equal(kept[0], s)


# ---------------------------------------------------------------------- forms of statistics
def in_form(form, group, a, rows):
    if form is Rows:
        return Rows(rows)
    return Covariance(rows.mT @ rows) if form is Covariance else Seen(group.gram(a, rows), rows.square().sum((-2, -1)))


def side_by_side(left, right, n):
    k, c = random_element(left, (2,)), random_element(right, (2,))
    return k, c, torch.randn(2, n, left.k, dtype=F64), torch.randn(2, n, right.k, dtype=F64) / n


def same_curvature(factors, k, c, one, other, limit=float("inf")):
    seen = [factors.curvature(k, c, s) for s in (one, other)]
    close(seen[0].mean, seen[1].mean)
    level = torch.ones_like(seen[0].mean)
    for ours, theirs in (seen, [s.relative_to(s.mean) for s in seen], [s.relative_to(3 * level) for s in seen]):
        for a, b in zip(*(factors.pressure(k, c, s, 0.1, limit) for s in (ours, theirs)), strict=True):
            all_close(a, b)


PAIRS = [
    (groups.Dense(5), groups.Dense(4)),
    (groups.Triangular(5), groups.Triangular(4, upper=True)),
    (groups.Dense(5), groups.Triangular(4)),
]


@pytest.mark.parametrize("structure", NAMES)
def test_short_forms_of_structures(structure):
    """Against those that any group has, for what factors see of symmetric matrices."""
    for k in (7, 40, 70):
        group = NAMES[structure](k)
        a = random_element(group)
        x = torch.randn(5, k, dtype=F64)
        fresh = functools.partial(group.gram, a, x)
        close(group.trace(fresh()), Group.trace(group, fresh()))
        close(group.squared_norm(a), Group.squared_norm(group, a))
        all_close(group.steepest(fresh()), Group.steepest(group, fresh()))
        all_close(group.subtract_identity(fresh()), Group.subtract_identity(group, fresh()))


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
@pytest.mark.parametrize("structure", NAMES)
def test_the_norm_of_an_algebra_element(structure, scale):
    """Near the largest singular value, whatever the units; zero for nothing."""
    for k in (7, 40, 100):
        group = NAMES[structure](k)
        blocks = [torch.randn(3, *shape, generator=torch.Generator().manual_seed(k)) for shape in group.shapes]
        n = group.scale(tuple(scale * block for block in blocks))
        true = torch.linalg.matrix_norm(group.to_dense(n).double(), 2)
        found = group.norm_estimate(n).double()
        assert (found >= 0.8 * true).all()
        assert (found <= 2 * true).all()
        nothing = group.norm_estimate(tuple(torch.zeros_like(block) for block in blocks))
        assert nothing.abs().max() < 1e-30


def test_a_step_is_along_nesterovs_average_and_as_long_as_asked():
    """Against the formulas of INGD's docstring, with factors that do nothing and a step that is skipped."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    optimizer = INGD(model, 0.1, momentum=0.8, weight_decay=0.3, step_rms=0.2, structure="identity")
    weights = [torch.cat([m.weight, m.bias[:, None]], 1).detach() for m in (model[0], model[2])]
    averages = [torch.zeros_like(w) for w in weights]
    for number in range(8):
        optimizer.zero_grad()
        (model(torch.randn(6, 5, dtype=F64)).square().sum() * (math.nan if number == 4 else 1)).backward()
        optimizer.step()
        for i, m in enumerate((model[0], model[2])):
            g = torch.cat([m.weight.grad, m.bias.grad[:, None]], 1)
            if number != 4:
                averages[i] = 0.8 * averages[i] + 0.2 * g
                ahead = 0.8 * averages[i] + 0.2 * g
                weights[i] = (1 - 0.1 * 0.3) * weights[i] - 0.1 * 0.2 * ahead / ahead.square().mean().sqrt()
            close(torch.cat([m.weight, m.bias[:, None]], 1).detach(), weights[i])
            close(optimizer.state[m.weight]["momentum_buffer"], averages[i][:, :-1])
    assert optimizer.skipped_steps == 1


def test_the_root_mean_square_of_directions_in_float16():
    large = torch.full((1, 99, 101), 6e4, dtype=torch.float16)
    close(rms_of([large], large.device), large[0, 0, :1].double(), 1e-5)


@pytest.mark.parametrize("scale", [1e-32, 1e-17, 1e-14, 1.0, 1e14, 1e17, 1e32])
def test_the_root_mean_square_of_directions(scale):
    torch.manual_seed(1)
    shapes = (1, 501, 100), (3, 35, 20), (1, 1, 5000), (1, 5000, 1), (2, 1, 1)
    stacks = [scale * torch.randn(shape) for shape in shapes]
    stacks[0], stacks[1] = stacks[0][..., :99], stacks[1][..., :19]  # with gaps between the rows
    true = torch.cat([stack.double().square().mean((1, 2)).sqrt() for stack in stacks])
    found = rms_of(stacks, stacks[0].device)
    assert found.dtype == F64
    if 1e-15 < scale < 1e15:
        close(found, true, 1e-6)
    else:
        # Two deviations of a sample. Of a single number the mean magnitude says nothing.
        assert ((found / true)[:-2] - 1).abs().max() < 0.05
        assert ((found / true) > 0.5).all()
        assert ((found / true) < 2).all()
    close(rms_of([stack.double() for stack in stacks], stacks[0].device), true)
    if 1e-14 < scale < 1e4:
        halved = [stack.bfloat16() for stack in stacks]
        close(rms_of(halved, stacks[0].device), rms_of([stack.float() for stack in halved], stacks[0].device), 1e-6)
    stacks[0][0, 123, 4] = math.nan
    assert rms_of(stacks, stacks[0].device).isfinite().tolist() == [False] + 7 * [True]
    assert (rms_of([0 * stack for stack in stacks[1:]], stacks[0].device) == 0).all()


@pytest.mark.parametrize("n", [3, 12])
@pytest.mark.parametrize(("left", "right"), PAIRS, ids=repr)
def test_forms_of_the_same_rows(left, right, n):
    factors = KroneckerFactors(left, right)
    k, c, x, g = side_by_side(left, right, n)
    plain = Statistics(Rows(x), Rows(g), n, 7)
    for inputs, outputs in itertools.product((Rows, Covariance, Seen), repeat=2):
        other = Statistics(in_form(inputs, left, k, x), in_form(outputs, right, c, g), n, 7)
        same_curvature(factors, k, c, plain, other)
        same_curvature(factors, k, c, plain, other, limit=0.2)
    same_curvature(factors, k, c, plain, factors.statistics(k, c, x, g, terms=7))


def test_the_form_that_is_kept():
    rows = lambda n: torch.randn(1, n, 5)  # noqa: E731
    for group in (groups.Dense(5), groups.Triangular(5)):
        a = group.identity((1,))
        assert [type(moment(group, a, rows(n))) for n in (1, 5, 6)] == [Rows, Rows, Covariance]
    for group in (groups.Arrow(5), groups.Diagonal(5), groups.Toeplitz(5)):
        assert isinstance(moment(group, group.identity((1,)), rows(3)), Seen)


@pytest.mark.parametrize("cuts", [(2, 1), (4, 4), (2, 9), (9, 2), (9, 8)], ids=str)
@pytest.mark.parametrize(("left", "right"), [*PAIRS, (groups.Arrow(5), groups.Dense(4))], ids=repr)
def test_sums_of_batches_in_mixed_forms(left, right, cuts):
    """Few rows stay rows, join those of others, or are added to a sum of squares."""
    factors = KroneckerFactors(left, right)
    k, c, x, g = side_by_side(left, right, sum(cuts))
    parts = [
        factors.statistics(k, c, a, b, terms=n)
        for n, a, b in zip(cuts, x.split(list(cuts), 1), g.split(list(cuts), 1), strict=True)
    ]
    whole = factors.total(k, c, *parts)
    same_curvature(factors, k, c, whole, Statistics(Rows(x), Rows(g), sum(cuts), sum(cuts)))
    mean = factors.normalized(k, c, whole)
    same_curvature(factors, k, c, mean, whole)
    for m in (mean.inputs, mean.outputs):
        assert not isinstance(m, Rows)


def test_means_without_factors():
    """As KFAC takes them."""
    factors = KroneckerFactors(groups.Dense(5), groups.Diagonal(4))
    x, g = torch.randn(1, 3, 5, dtype=F64), torch.randn(1, 3, 4, dtype=F64)
    mean = factors.normalized(None, None, factors.statistics(None, None, x, g, terms=2))
    close(mean.inputs.tensors[0], x.mT @ x / 3)
    close(mean.outputs.tensors[0], 2 * g.square().sum(1))


# ---------------------------------------------------------------------- training twice
def trained(build, model, batches, loss=None, before_step=None, parts=1):
    """The model and its optimizer after a step for each batch; ``before_step(step, model, optimizer)`` may meddle."""
    model = copy.deepcopy(model)
    optimizer = build(model)
    loss = loss or (lambda model, x: model(x).cos().sum(1).mean())
    for step, x in enumerate(batches):
        optimizer.zero_grad()
        for rows in x.chunk(parts):
            (loss(model, rows) / parts).backward()
        if before_step is not None:
            before_step(step, model, optimizer)
        optimizer.step()
    return model, optimizer


def state_of(optimizer):
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return [{k: v for k, v in optimizer.state[p].items() if isinstance(v, torch.Tensor)} for p in params]


def same_run(one, other, tolerance=1e-10):
    """Weights and state, or bit for bit with no tolerance."""
    compare = functools.partial(torch.testing.assert_close, rtol=tolerance, atol=tolerance, equal_nan=True)
    for p, q in zip(one[0].parameters(), other[0].parameters(), strict=True):
        compare(p, q)
        assert p.isfinite().all()
    for ours, theirs in zip(state_of(one[1]), state_of(other[1]), strict=True):
        assert ours.keys() == theirs.keys()
        for key, value in ours.items():
            if key in ("KK", "CC") and value.shape != theirs[key].shape:  # every number once
                value = groups.symmetric.unpack(value, theirs[key].shape[-1])
            compare(value, theirs[key])
    for name in ("skipped_steps", "skipped_updates"):
        assert getattr(one[1], name) == getattr(other[1], name)


OPTIMIZERS = {
    "robust": INGD,
    "paper": functools.partial(INGD, preset="paper", precond_lr=0.05),
    "kl_clip": functools.partial(INGD, kl_clip=1e-3),
    "kfac": KFAC,
    "kfac-paper": functools.partial(KFAC, preset="paper", damping=0.1),
}


# ---------------------------------------------------------------------- through rows
def wide(bias=True):
    torch.manual_seed(0)
    layers = [nn.Linear(40, 30, bias=bias), nn.Tanh(), nn.Linear(30, 20, bias=bias)]
    return nn.Sequential(*layers).double()


def wide_batches(n=30, samples=6):
    return [torch.randn(samples, 40, dtype=F64) for _ in range(n)]


@pytest.fixture
def through_rows(monkeypatch):
    """For each step, whether a layer went through its rows."""
    taken = []
    verified = Shortcut.verified

    def spy(self, candidates, settings):
        right = verified(self, candidates, settings)
        taken.append(any(tracked.rows is not None for tracked in candidates))
        return right

    monkeypatch.setattr(Shortcut, "verified", spy)
    return taken


def plainly(monkeypatch, taken, *args, **kwargs):
    """The same run, without rows."""
    with monkeypatch.context() as patch:
        patch.setattr(forms, "through_rows", lambda *sizes: False)
        before = len(taken)
        result = trained(*args, **kwargs)
        assert not any(taken[before:])
        del taken[before:]
    return result


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("every", [1, 5])
@pytest.mark.parametrize(("name", "steps"), [("robust", 30), ("paper", 30), ("kfac", 30), ("kl_clip", 6)])
def test_few_rows_give_the_same_steps(name, steps, every, bias, monkeypatch, through_rows):
    build = functools.partial(OPTIMIZERS[name], update_every=every, growing_intervals=False)
    run = (build, wide(bias), wide_batches(steps))
    ours = trained(*run)
    assert through_rows == [True] * steps
    assert ours[1].param_groups[0][VERDICT] is True
    same_run(ours, plainly(monkeypatch, through_rows, *run))


@pytest.mark.parametrize("structure", ["triangular", "diagonal", "arrow", "block"])
def test_few_rows_with_structures(structure, monkeypatch, through_rows):
    """Where they are cheap for a whole gradient too, rows are taken only if there are very few."""
    run = (functools.partial(INGD, structure=structure, update_every=3), wide(), wide_batches(9, 1))
    ours = trained(*run)
    assert all(through_rows)
    same_run(ours, plainly(monkeypatch, through_rows, *run))


def test_few_rows_of_sequences_and_of_some_steps_only(monkeypatch, through_rows):
    torch.manual_seed(0)
    batches = [torch.randn(samples, 2, 40, dtype=F64) for samples in (3, 40, 2, 3, 40, 40, 3, 1, 3)]
    run = (functools.partial(INGD, update_every=2), wide(), batches)
    ours = trained(*run)
    assert through_rows == [len(x) < 40 for x in batches]
    same_run(ours, plainly(monkeypatch, through_rows, *run))


def penalized(model, x):
    """torch adds the two parts of a gradient in place, which shows by its version."""
    return model(x).cos().sum(1).mean() + 0.05 * sum(p.square().sum() for p in model.parameters())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_penalty_in_the_loss_is_noticed(name, monkeypatch, through_rows):
    run = (functools.partial(OPTIMIZERS[name], update_every=2), wide(), wide_batches(8), penalized)
    ours = trained(*run)
    assert ours[1].param_groups[0].get(VERDICT) is not True
    assert not any(through_rows)
    same_run(ours, plainly(monkeypatch, through_rows, *run))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_penalty_that_leaves_no_version_is_noticed_at_the_first_step(name, monkeypatch, through_rows):
    """As a hook of the parameter adds it: in a new tensor."""

    def build(model):
        model[0].weight.register_hook(lambda g: g + 0.1 * model[0].weight.detach())
        return OPTIMIZERS[name](model, update_every=2)

    run = (build, wide(), wide_batches(8))
    ours = trained(*run)
    assert ours[1].param_groups[0][VERDICT] is False
    assert not any(through_rows)
    same_run(ours, plainly(monkeypatch, through_rows, *run))


def clipped(step, model, optimizer):
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)


def in_place(step, model, optimizer):
    with torch.no_grad():
        model[0].bias.grad.add_(0.1)


def replaced(step, model, optimizer):
    model[2].weight.grad = 0.5 * model[2].weight.grad


@pytest.mark.parametrize("change", [clipped, in_place, replaced], ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", ["robust", "paper", "kfac"])
def test_gradients_that_are_changed_before_the_step(name, change, monkeypatch, through_rows):
    run = (functools.partial(OPTIMIZERS[name], update_every=2), wide(), wide_batches(6))
    ours = trained(*run, before_step=change)
    same_run(ours, plainly(monkeypatch, through_rows, *run, before_step=change))
    assert ours[1].skipped_steps == 0
    if change is clipped:
        assert not any(through_rows)
    if change is replaced:
        assert ours[1].param_groups[0][VERDICT] is False


@pytest.mark.parametrize(
    ("name", "which"),
    [*[(name, "all") for name in ("robust", "paper", "kfac")], ("robust", "0.weight"), ("robust", "2.bias")],
)
def test_a_gradient_changed_behind_the_back_skips_a_step(name, which, monkeypatch, through_rows):
    """That step alone, as if its gradients were not finite; then it trains on without rows."""

    def hidden(step, model, optimizer):
        if step == 10:
            for key, p in model.named_parameters():
                if which in ("all", key):
                    p.grad.data.mul_(0.5)

    def lost(step, model, optimizer):
        if step == 10:
            model[0].weight.grad.fill_(float("nan"))

    run = (functools.partial(OPTIMIZERS[name], update_every=2), wide(), wide_batches(16))
    ours = trained(*run, before_step=hidden)
    assert through_rows == [True] * 11 + [False] * 5
    assert ours[1].skipped_steps == 1
    assert ours[1].param_groups[0][VERDICT] is False
    same_run(ours, plainly(monkeypatch, through_rows, *run, before_step=lost))


@pytest.mark.parametrize("name", ["robust", "paper", "kfac"])
def test_accumulated_gradients(name, monkeypatch, through_rows):
    run = (functools.partial(OPTIMIZERS[name], update_every=2), wide(), wide_batches(6))
    ours = trained(*run, parts=2)
    assert not any(through_rows)
    same_run(ours, plainly(monkeypatch, through_rows, *run, parts=2))


def test_gradients_that_are_zeroed_and_modules_that_are_used_twice(monkeypatch, through_rows):
    def twice(model, x):
        return model(x).cos().sum(1).mean() + model(2 * x).sin().sum(1).mean()

    run = (functools.partial(INGD, update_every=2), wide(), wide_batches(6))
    ours = trained(*run, loss=twice)
    assert not any(through_rows)
    same_run(ours, plainly(monkeypatch, through_rows, *run, loss=twice))
    kept = trained(*run, before_step=lambda step, model, optimizer: None)
    model = copy.deepcopy(run[1])
    optimizer = run[0](model)
    for x in run[2]:
        optimizer.zero_grad(set_to_none=False)  # gradients are added to zeros: none is known to be a product
        model(x).cos().sum(1).mean().backward()
        optimizer.step()
    same_run((model, optimizer), kept)


def resumed(build, model, batches, at, before_step=None):
    """The end of a run, and that of one which goes on from the state saved at a step."""
    whole = trained(build, model, batches, before_step=before_step)
    half = trained(build, model, batches[:at], before_step=before_step)
    saved = copy.deepcopy((half[0].state_dict(), half[1].state_dict()))
    new = copy.deepcopy(model)
    optimizer = build(new)
    new.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    for x in batches[at:]:
        optimizer.zero_grad()
        new(x).cos().sum(1).mean().backward()
        optimizer.step()
    return whole, (new, optimizer)


@pytest.mark.parametrize("at", [1, 7])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_run_through_rows_that_is_resumed(name, at):
    build = functools.partial(OPTIMIZERS[name], update_every=3, growing_intervals=False)
    same_run(*resumed(build, wide(), wide_batches(10), at), tolerance=0)


def test_a_run_that_is_resumed_after_a_step_was_skipped():
    """Right after it: the run goes on without rows, and so must the other."""

    def hidden(step, model, optimizer):
        if step == 6:
            model[0].weight.grad.data.mul_(0.5)

    whole, again = resumed(functools.partial(INGD, update_every=3), wide(), wide_batches(14), 7, hidden)
    assert whole[1].skipped_steps == again[1].skipped_steps == 1
    same_run(whole, again, tolerance=0)


# ---------------------------------------------------------------------- rooms for directions
MIXED = {f"{left}-{right}": (left, right) for left, right in (("dense", "block"), ("block", "dense"))}
ROOMS = {**OPTIMIZERS, **{name: functools.partial(INGD, structure=sides) for name, sides in MIXED.items()}}


@pytest.mark.parametrize("kind", ["few rows", "many rows", "convolutions"])
@pytest.mark.parametrize("name", ROOMS)
def test_gaps_between_the_rows_of_a_room_change_nothing(name, kind, monkeypatch):
    """Products write rows that begin at cache lines sooner. Each layer has its own room."""
    torch.manual_seed(0)
    model = convolutions() if kind == "convolutions" else wide()
    shape = (5, 4, 3, 3) if kind == "convolutions" else (6 if kind == "few rows" else 60, 40)
    monkeypatch.setattr(forms, "SMALL", -1)
    run = (functools.partial(ROOMS[name], update_every=2), model, [torch.randn(shape, dtype=F64) for _ in range(5)])
    plain = trained(*run)
    monkeypatch.setattr(products, "LARGE", 3)
    ours = trained(*run)
    gaps = [not t.room[0].is_contiguous() for t in ours[1]._tracked.values()]
    assert any(gaps) == (name != "block-dense")
    same_run(ours, plain)


# ---------------------------------------------------------------------- stacks
def linear_layers():
    torch.manual_seed(0)
    return nn.Sequential(*[m for _ in range(8) for m in (nn.Linear(6, 6), nn.Tanh())]).double()


def convolutions():
    torch.manual_seed(0)
    pointwise = [m for _ in range(8) for m in (nn.Conv2d(4, 4, 1), nn.Tanh())]
    grouped = [nn.Conv2d(4, 4, 3, groups=2, padding=1), nn.Tanh(), nn.Conv2d(4, 4, 3, groups=2, padding=1)]
    return nn.Sequential(*pointwise, *grouped, nn.Flatten()).double()


STACKED = {
    **OPTIMIZERS,
    **{name: functools.partial(INGD, structure=name) for name in ("diagonal", "triangular", "arrow")},
    "gradient": functools.partial(INGD, curvature="gradient"),
    "no-momentum": functools.partial(INGD, precond_momentum=0.0),
}
MODELS = {
    "linear": (linear_layers, (9, 6)),
    "few-rows": (linear_layers, (3, 6)),
    "convolutions": (convolutions, (5, 4, 3, 3)),
}


@pytest.fixture
def stack_sizes(monkeypatch):
    """How many layers were preconditioned together, for each product."""
    sizes = []
    for cls in (INGD, KFAC):

        def spy(self, stack, *args, _times=cls._times, **kwargs):
            sizes.append(len(stack))
            return _times(self, stack, *args, **kwargs)

        monkeypatch.setattr(cls, "_times", spy)
    return sizes


def alone(monkeypatch, sizes, *args, **kwargs):
    """The same run, each layer on its own."""
    with monkeypatch.context() as patch:
        patch.setattr(forms, "SMALL", -1)
        sizes.clear()
        result = trained(*args, **kwargs)
        assert max(sizes) == 1
    return result


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *[(name, "linear") for name in STACKED if name != "kfac-paper"],
        *[(name, "convolutions") for name in ("robust", "paper", "diagonal", "triangular", "arrow", "kfac")],
        ("robust", "few-rows"),
        ("kfac", "few-rows"),
    ],
)
def test_layers_that_are_alike_together(name, kind, monkeypatch, stack_sizes):
    make, shape = MODELS[kind]
    build = functools.partial(STACKED[name], update_every=3, growing_intervals=False)
    run = (build, make(), [torch.randn(shape, dtype=F64) for _ in range(15)])
    ours = trained(*run)
    assert max(stack_sizes) == 8
    same_run(ours, alone(monkeypatch, stack_sizes, *run))


def frozen_for_a_while(step, model, optimizer):
    model[4].requires_grad_(step not in (2, 3, 4))


def without_gradient(step, model, optimizer):
    if step in (0, 3, 4):
        model[2].weight.grad = model[2].bias.grad = None
    if step in (5, 6):
        model[6].bias.grad = None


@pytest.mark.parametrize("meddle", [frozen_for_a_while, without_gradient], ids=lambda f: f.__name__)
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("robust", "linear"),
        ("robust", "few-rows"),
        ("paper", "convolutions"),
        ("triangular", "linear"),
        ("kfac", "linear"),
    ],
)
def test_stacks_of_changing_layers(name, kind, meddle, monkeypatch, stack_sizes):
    make, shape = MODELS[kind]
    run = (functools.partial(STACKED[name], update_every=2), make(), [torch.randn(shape, dtype=F64) for _ in range(8)])
    ours = trained(*run, before_step=meddle)
    assert {7, 8} <= set(stack_sizes)
    same_run(ours, alone(monkeypatch, stack_sizes, *run, before_step=meddle))


@pytest.mark.parametrize("name", ["robust", "paper", "diagonal", "kfac"])
def test_curvature_that_is_not_finite_skips_its_layer_only(name, monkeypatch, stack_sizes):
    seen = {}

    def spoil(step, model, optimizer):
        keys = ("K", "C", "KK", "CC", "m_K", "m_C", "level", "A", "S", "A_inverse")
        states = [optimizer.state[model[i].weight] for i in range(0, 16, 2)]
        if step == 4:
            tracked = optimizer._tracked[model[6].weight]
            s = tracked.statistics
            spoilt = s.inputs.of([t * float("nan") for t in s.inputs.tensors])
            tracked.statistics = replace(s, inputs=spoilt)
            seen["before"] = [{key: s[key].clone() for key in keys if key in s} for s in states]
        if step == 5:
            seen["after"] = [{key: s[key].clone() for key in keys if key in s} for s in states]

    build = functools.partial(STACKED[name], update_every=1)
    run = (build, linear_layers(), [torch.randn(9, 6, dtype=F64) for _ in range(6)])
    ours = trained(*run, before_step=spoil)
    assert (ours[1].skipped_updates, ours[1].skipped_steps) == (1, 0)
    assert max(stack_sizes) == 8
    stayed = [
        all(torch.equal(before[key], after[key]) for key in before)
        for before, after in zip(seen["before"], seen["after"], strict=True)
    ]
    assert stayed == [index == 3 for index in range(8)]
    same_run(ours, alone(monkeypatch, stack_sizes, *run, before_step=spoil))


class Weighted(groups.Diagonal):
    """A structure of a user's own, whose name does not tell all of it."""

    def __init__(self, k, rate):
        super().__init__(k)
        self.rate = rate

    def scale(self, eta):
        return (0.5 * self.rate * eta[0],)

    def unscale(self, n):
        return (2 / self.rate * n[0],)


def test_layers_of_different_structures_are_not_alike(monkeypatch, stack_sizes):
    structure = {"[0-6]": lambda k: Weighted(k, 1.0), "*": lambda k: Weighted(k, 0.5)}
    build = functools.partial(INGD, structure=structure, update_every=2)
    run = (build, linear_layers(), [torch.randn(9, 6, dtype=F64) for _ in range(4)])
    ours = trained(*run)
    same_run(ours, alone(monkeypatch, stack_sizes, *run))


class Operators(TorchDispatchMode):
    """Counts what is called."""

    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.calls[str(function)] += 1
        return function(*args, **(kwargs or {}))


def calls_of_a_step(build):
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(32, 32) for _ in range(32)])
    optimizer = build(model)
    for counting in (False, True):
        optimizer.zero_grad()
        model(torch.randn(64, 32)).square().mean().backward()
        with Operators() as operators:
            optimizer.step()
        if counting:
            return operators.calls.total()
    raise AssertionError


@pytest.mark.parametrize("name", ["robust", "paper", "kfac"])
def test_stacks_need_fewer_calls(name, monkeypatch):
    build = functools.partial(OPTIMIZERS[name], update_every=1)
    stacked = calls_of_a_step(build)
    monkeypatch.setattr(forms, "SMALL", -1)
    assert 3 * stacked <= calls_of_a_step(build)


# ---------------------------------------------------------------------- memory
@pytest.mark.parametrize("settings", [{}, {"precond_momentum": 0.5}], ids=["no-momentum", "momentum"])
def test_low_memory(settings):
    """On the perceptron 784-512-512-10: at most five times the parameters, and the summary says so."""
    model = nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    optimizer = INGD(model, memory="low", growing_intervals=False, **settings)
    model(torch.randn(128, 784)).square().mean().backward()
    optimizer.step()
    parameters = sum(p.numel() * p.element_size() for p in model.parameters())
    assert optimizer.memory_usage() <= (5 if settings else 3) * parameters
    assert optimizer.summary().bytes == pytest.approx(optimizer.memory_usage(), rel=0.01)


@pytest.mark.parametrize("samples", [4, 50])
@pytest.mark.parametrize("preset", ["robust", "paper"])
def test_low_memory_takes_the_same_steps(preset, samples):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 9), nn.Tanh(), nn.Linear(9, 9, bias=False), nn.Tanh(), nn.Linear(9, 3)).double()
    batches = [torch.randn(samples, 12, dtype=F64) for _ in range(12)]
    build = functools.partial(INGD, preset=preset, update_every=4, growing_intervals=False)
    low, default = (trained(functools.partial(build, memory=memory), model, batches) for memory in ("low", "default"))
    same_run(low, default)
    assert not any(tracked.cache for tracked in low[1]._tracked.values())
    assert low[1].memory_usage() < default[1].memory_usage()


@pytest.mark.parametrize("memory", ["default", "low"])
@pytest.mark.parametrize("structure", NAMES)
def test_no_momentum_takes_no_memory(structure, memory):
    build = functools.partial(INGD, structure=structure, memory=memory)
    model, optimizer = trained(build, wide(), wide_batches(1))
    for layer in (model[0], model[2]):
        kept = optimizer.state[layer.weight].keys()
        assert not {"K", "KK"}.isdisjoint(kept)
        assert not {"C", "CC"}.isdisjoint(kept)
        assert {"m_K", "m_C"}.isdisjoint(optimizer.state[layer.weight])
    with_momentum = trained(functools.partial(build, precond_momentum=0.5), wide(), wide_batches(1))[1]
    assert optimizer.memory_usage() < with_momentum.memory_usage()


def test_momentum_that_begins_later_has_its_place():
    """A schedule that is zero at first."""
    build = functools.partial(INGD, precond_momentum=lambda step: 0.5 * (step > 2), update_every=1)
    model, optimizer = trained(build, wide(), wide_batches(6))
    assert optimizer.state[model[0].weight]["m_K"].abs().max() > 0


def test_momentum_that_is_set_by_hand_later():
    """Dense factors that were built without it have no room for it, and nothing changes."""
    model, optimizer = trained(functools.partial(INGD, update_every=1), wide(), wide_batches(2))
    optimizer.param_groups[0]["precond_momentum"] = 0.5
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(RuntimeError, match="precond_momentum was 0 when the optimizer was built"):
        optimizer.step()
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("memory", ["tiny", None, 0])
def test_a_wrong_value_of_memory(memory):
    with pytest.raises(ValueError, match=f"memory must be 'default' or 'low', got {memory!r}"):
        INGD(nn.Linear(2, 2), memory=memory)


# ---------------------------------------------------------------------- the host does not wait
class NoSynchronisation(TorchDispatchMode):
    """Fails where the host would wait for the device: a number's value, or a shape that depends on values."""

    waits = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal", "is_nonzero")

    def __init__(self, shortcut=None):
        super().__init__()
        self.shortcut = shortcut

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.__name__.split(".")[0]
        assert name not in self.waits or self.is_word(args[0]), f"{name} waits for the device"
        return function(*args, **(kwargs or {}))

    def is_word(self, x):
        """The copy of what the device found is in the host's memory also where the model is on a device."""
        word = None if self.shortcut is None else self.shortcut._word
        return word is not None and x.data_ptr() == word.data_ptr()


def mixed_model():
    torch.manual_seed(0)
    head = [nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.Tanh(), nn.Conv2d(4, 4, 1, groups=2), nn.Flatten()]
    return nn.Sequential(*head, nn.Linear(64, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 3))


QUIET = {
    "robust": INGD,
    "kl_clip": functools.partial(INGD, kl_clip=1e-3),
    "paper": functools.partial(INGD, preset="paper"),
    "gradient": functools.partial(INGD, curvature="gradient"),
    "expand": functools.partial(INGD, approx="expand"),
    "average": functools.partial(INGD, grouped="average"),
    "low-memory": functools.partial(INGD, memory="low"),
    "bfloat16": functools.partial(INGD, precond_dtype=torch.bfloat16),
    "direction": functools.partial(INGD, precondition_only=True),
    "sgd": functools.partial(INGD, fallback="sgd"),
    **{name: functools.partial(INGD, structure=name) for name in NAMES},
    "kfac": KFAC,
    "kfac-paper": functools.partial(KFAC, preset="paper", damping=0.1),
    "kfac-gradient": functools.partial(KFAC, curvature="gradient"),
}


def quietly(optimizer, loss, steps=4, shortcut=None):
    """From the third step on the host may not wait."""
    for step in range(steps):
        with NoSynchronisation(shortcut) if step >= 2 else torch.enable_grad():
            optimizer.zero_grad()
            loss().backward()
            optimizer.step()


@pytest.mark.parametrize(
    ("name", "samples"), [*[(name, 2) for name in QUIET], *[(name, 40) for name in ("robust", "paper", "kfac")]]
)
def test_no_step_waits(name, samples):
    model = mixed_model()
    optimizer = QUIET[name](model, update_every=2, growing_intervals=False)  # the third step is one with an update
    x = torch.randn(samples, 2, 4, 4)
    quietly(optimizer, lambda: model(x).cos().mean(), shortcut=optimizer._shortcut)
    assert optimizer.skipped_steps == optimizer.skipped_updates == 0


def test_the_look_into_memory_is_no_operation():
    model = wide()
    x = torch.randn(2, 40, dtype=F64)
    quietly(INGD(model), lambda: model(x).cos().mean())


@pytest.mark.parametrize("name", ["robust", "kfac"])
def test_no_step_of_embeddings_and_attention_waits(name):
    torch.manual_seed(0)
    embedding, attention, out = nn.Embedding(11, 8, padding_idx=0), nn.MultiheadAttention(8, 2), nn.Linear(8, 5)
    model = nn.ModuleList([embedding, attention, out])
    x = torch.randint(11, (6, 4))

    def loss():
        h = embedding(x)
        return out(attention(h, h, h, need_weights=False)[0]).cos().mean()

    quietly(QUIET[name](model, update_every=2, growing_intervals=False), loss)


def test_a_number_that_is_read_is_noticed():
    """The check itself."""
    with NoSynchronisation(), pytest.raises(AssertionError, match="_local_scalar_dense waits"):
        torch.ones(()).item()
    with NoSynchronisation(), pytest.raises(AssertionError, match="waits"):
        bool(torch.ones(()) > 0)


# ---------------------------------------------------------------------- nothing stays behind
def live_tensors():
    gc.collect()
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


@pytest.mark.parametrize("name", ["robust", "kfac"])
def test_a_thousand_steps_leave_nothing_behind(name):
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    optimizer = OPTIMIZERS[name](model, update_every=10, growing_intervals=False)
    found = []
    for step in range(1, 1001):
        optimizer.zero_grad()
        model(torch.randn(2, 8)).cos().mean().backward()
        optimizer.step()
        if step in (100, 1000):
            found.append((live_tensors(), optimizer.memory_usage()))
    (early, early_bytes), (late, late_bytes) = found
    assert late <= early  # fewer where torch lets go of what another test has left
    assert late_bytes == early_bytes


def test_a_gradient_that_is_not_finite_leaves_rows_in_use():
    torch.manual_seed(0)
    model = wide()
    optimizer = INGD(model, growing_intervals=False)
    for factor in (1.0, math.nan, 1.0):
        optimizer.zero_grad()
        (factor * model(torch.randn(2, 40, dtype=F64)).cos().mean()).backward()
        optimizer.step()
    assert optimizer.skipped_steps == 1
    assert optimizer.param_groups[0]["through_rows"] is True
