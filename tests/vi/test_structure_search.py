"""Globals and locals from a Hessian."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import gnomon
from gnomon.groups import Arrow, BlockDiagonal, BlockTriangular, Dense, Diagonal, as_structure
from gnomon.problems import posteriors
from gnomon.vi.parameters import Parameters
from gnomon.vi.structure import Globals, Layout, check_structure, from_pattern, lay_out, search
from gnomon.vi.target import Target
from support.posteriors import needs_posteriordb


def arrow_pattern(d, heads, blocks=1):
    """Which coordinates are coupled: the heads with all, locals in blocks of their own."""
    pattern = torch.zeros(d, d, dtype=torch.bool)
    tail = [i for i in range(d) if i not in heads]
    for start in range(0, len(tail), blocks):
        block = torch.tensor(tail[start : start + blocks])
        pattern[block.unsqueeze(-1), block] = True
    pattern[heads], pattern[:, heads] = True, True
    return pattern.fill_diagonal_(False)


def sparse_target(pattern, dtype=torch.float64):
    """A density whose Hessian has a given pattern, and depends on the point."""
    torch.manual_seed(0)
    weights = torch.rand(pattern.shape, dtype=dtype) * pattern
    weights = (weights + weights.mT) / len(pattern)

    def log_density(x):
        return -x.square().sum(-1) - ((x @ weights) * x).sum(-1) - (x.sin() @ weights * x.sin()).sum(-1)

    return Target(log_density, Parameters({"x": len(pattern)}))


def hierarchical(locals_, dtype=torch.float64):
    """Locals first, then mean and log standard deviation; with O(d) work."""
    y = 3 * torch.randn(locals_, generator=torch.Generator().manual_seed(0), dtype=dtype)

    def log_density(x):
        theta, mu, log_tau = x[:, :-2], x[:, -2:-1], x[:, -1:]
        prior = -0.5 * ((theta - mu) * (-log_tau).exp()).square() - log_tau
        return (prior - 0.5 * (y - theta).square()).sum(-1) - 0.5 * (mu.square() + log_tau.square()).sum(-1)

    return log_density


@pytest.mark.parametrize("heads", [[0, 1], [3, 7], [8, 9]])
def test_arrow_is_found_wherever_its_globals_are(heads):
    pattern = arrow_pattern(10, heads)
    layout = search(sparse_target(pattern), 0.3 * torch.randn(10, dtype=torch.float64))
    assert layout.group == Arrow(10, 2)
    order = list(range(10)) if layout.order is None else layout.order.tolist()
    assert order[:2] == heads
    assert sorted(order) == list(range(10))


def test_blocks_of_locals_are_kept_together():
    layout = from_pattern(arrow_pattern(20, [5, 11], blocks=3))
    assert layout.group == BlockTriangular((Dense(2), BlockDiagonal(18, 3)))
    permuted = arrow_pattern(20, [5, 11], blocks=3)[layout.order][:, layout.order]
    tail = permuted[2:, 2:]
    blocks = torch.block_diag(*[torch.ones(3, 3)] * 6).bool()
    assert not bool((tail & ~blocks).any())


def test_locals_of_unequal_blocks_are_packed():
    pattern = torch.block_diag(*[torch.ones(size, size) for size in (3, 3, 2, 2, 2)]).bool().fill_diagonal_(False)
    layout = from_pattern(pattern)
    assert layout.group == BlockDiagonal(12, 5)  # 3 + 2, 3 + 2, 2
    permuted = pattern[layout.order][:, layout.order]
    assert not bool(permuted[:5, 5:].any() | permuted[:10, 10:].any())


def test_independent_coordinates_are_diagonal_and_a_full_hessian_is_full():
    assert from_pattern(torch.zeros(7, 7, dtype=torch.bool)).group == Diagonal(7)
    full = torch.ones(9, 9, dtype=torch.bool).fill_diagonal_(False)
    assert from_pattern(full) is None
    assert lay_out("auto", sparse_target(full), lambda: torch.randn(9, dtype=torch.float64)) == Layout(Dense(9))
    chain = (torch.ones(12, 12).tril(1).triu(-1) > 0).fill_diagonal_(False)
    assert from_pattern(chain, only_arrow=True) is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_large_arrow_is_found_by_few_products(dtype):
    target = Target(hierarchical(3000, dtype), Parameters({"x": 3002}))
    layout = search(target, 0.5 * torch.randn(3002, dtype=dtype))
    assert layout.group == Arrow(3002, 2)
    assert layout.order[:2].tolist() == [3000, 3001]
    assert target.gradient_evaluations < 100


def globals_found(posterior):
    """What a fit with ``structure="auto"`` finds: the group, and the unknowns that it takes for globals."""
    target = Target(posterior.log_density, Parameters({"x": posterior.dim}))
    generator = torch.Generator().manual_seed(0)
    x = 0.5 * torch.randn(posterior.dim, generator=generator, dtype=torch.float64)
    layout = lay_out("auto", target, lambda: x)
    return layout.group, list(range(posterior.dim)) if layout.order is None else layout.order.tolist()


ARROWS = (
    "eight_schools-eight_schools_centered",
    "eight_schools-eight_schools_noncentered",
    "rats_data-rats_model",
    "surgical_data-surgical_model",
    "GLMM_Poisson_data-GLMM_Poisson_model",
    "GLMM_data-GLMM1_model",
    "radon_mn-radon_hierarchical_intercept_centered",
    "lsat_data-lsat_model",
)


@pytest.mark.parametrize("make", [posteriors.poisson_mixed_model, posteriors.item_response_model])
@pytest.mark.parametrize("dim", [60, 1500])
def test_arrow_of_generated_models_is_found(make, dim):
    posterior = make(dim)
    assert globals_found(posterior) == (Arrow(dim, posterior.globals), list(range(dim)))


@needs_posteriordb
@pytest.mark.parametrize("name", ARROWS)
def test_arrow_of_hierarchical_models_is_found(name):
    posterior = posteriors.load(name)
    group, order = globals_found(posterior)
    assert group == Arrow(posterior.dim, posterior.globals)
    assert order[: posterior.globals] == list(range(posterior.globals))


@needs_posteriordb
def test_pairs_of_locals_are_found():
    """A county has an intercept and a slope, which depend on each other."""
    posterior = posteriors.load("radon_mn-radon_variable_intercept_slope_centered")
    r = posterior.globals
    group, order = globals_found(posterior)
    assert group == BlockTriangular((Dense(r), BlockDiagonal(posterior.dim - r, 2)))
    assert order[:r] == list(range(r))


@needs_posteriordb
@pytest.mark.parametrize("name", ["arK-arK", "diamonds-diamonds", "nes1972-nes", "gp_pois_regr-gp_pois_regr"])
def test_models_without_locals_are_full(name):
    posterior = posteriors.load(name)
    assert globals_found(posterior)[0] == Dense(posterior.dim)


def test_proposed_globals_are_checked():
    target = Target(hierarchical(30), Parameters({"x": 32}))
    around = lambda: 0.3 * torch.randn(32, dtype=torch.float64)  # noqa: E731
    assert lay_out(Globals((30, 31)), target, around).group == Arrow(32, 2)
    assert lay_out(Globals((0,)), target, around).group == Arrow(32, 2)  # wrong, and so searched


def test_a_large_full_density_is_refused():
    d = 3000
    direction = torch.randn(5, d, dtype=torch.float64)
    target = Target(lambda x: -(x @ direction.mT).pow(4).sum(-1) - x.square().sum(-1).square(), Parameters({"x": d}))
    with pytest.raises(ValueError, match="low_rank"):
        lay_out("auto", target, lambda: torch.randn(d, dtype=torch.float64))


def test_arrow_must_be_there_if_it_is_asked_for():
    full = sparse_target(torch.ones(9, 9, dtype=torch.bool).fill_diagonal_(False))
    with pytest.raises(ValueError, match="found no globals"):
        lay_out("arrow", full, lambda: torch.randn(9, dtype=torch.float64))


@pytest.mark.parametrize(
    ("structure", "message"),
    [
        ("round", "structure must be one of"),
        ("lowrank:9", "rank must be below k = 5"),
        (Arrow(4, 1), "of size 4"),
        (3.5, "must be a name"),
        (Globals((9,)), "9"),
    ],
)
def test_bad_structures_are_refused(structure, message):
    with pytest.raises((TypeError, ValueError), match=message):
        check_structure(structure, 5)


def test_names_are_those_of_the_library():
    target = sparse_target(torch.zeros(9, 9, dtype=torch.bool))
    for name in ("lowrank:2", "arrow:2", "block:3", "dense"):
        check_structure(name, 9)
        assert lay_out(name, target, lambda: torch.zeros(9)).group == as_structure(name, 9)


def test_fit_returns_to_the_order_of_the_parameters():
    fit = gnomon.vi.fit(hierarchical(40), 42, seed=0)
    assert fit.posterior.structure == Arrow(42, 2)
    assert fit.order[:2].tolist() == [40, 41]
    draws = fit.draws(4000)
    assert float(draws[:, :40].std(0).max()) < 1.2  # the locals, not the globals
    again = gnomon.vi.fit(hierarchical(40), 42, start=fit, seed=1)
    assert again.order.tolist() == fit.order.tolist()
    assert again.elbo == pytest.approx(fit.elbo, abs=0.1)
    full = gnomon.vi.fit(hierarchical(40), 42, structure="full", seed=0)
    assert fit.elbo == pytest.approx(full.elbo, abs=0.1)
    torch.testing.assert_close(draws.mean(0), full.draws(4000).mean(0), atol=0.15, rtol=0)


@pytest.mark.slow
def test_many_locals_are_fitted_with_hessians():
    """Beyond the sweep an arrow that is found takes Price's gradients, with which 4 draws a step would do."""
    posterior = posteriors.poisson_mixed_model(3000)
    options = {"seed": 0, "searches": 0}
    fit = gnomon.vi.fit(posterior.log_density, posterior.dim, **options)
    assert (fit.posterior.structure, fit.gradients) == (Arrow(3000, 5), "price")
    assert fit.converged
    assert fit.posterior.loc[:4].tolist() == pytest.approx([1, 0.5, -0.5, 0.25], abs=0.1)
    again = gnomon.vi.fit(posterior.log_density, posterior.dim, start=fit, **options)
    assert again.gradients == "price"
    assert len(again.history) < len(fit.history) / 2
    assert again.elbo == pytest.approx(fit.elbo, abs=1)
    with pytest.warns(UserWarning, match="max_steps=2"):
        given = gnomon.vi.fit(posterior.log_density, 3000, structure=Arrow(3000, 5), start=fit.posterior, max_steps=2)
    assert given.gradients == "path"  # nobody has looked whether the Hessian is an arrow


class LargestTensor(TorchDispatchMode):
    """How many numbers the largest result of an operation has."""

    numbers = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.numbers = max([self.numbers, *sizes])
        return result


@pytest.mark.parametrize("structure", ["arrow", Arrow(5000, 5), "low_rank"], ids=str)
@pytest.mark.filterwarnings("ignore:the fit ended at max_steps")
def test_memory_is_proportional_to_the_number_of_unknowns(structure):
    """From the search for a structure to the evaluation, no tensor has more than a few numbers for each unknown."""
    posterior = posteriors.poisson_mixed_model(5000)
    options = {"draws": 4, "evaluation_draws": 16, "searches": 0, "max_steps": 3, "seed": 0}
    with LargestTensor() as largest:
        gnomon.vi.fit(posterior.log_density, 5000, structure=structure, **options)
    assert 16 * 5000 <= largest.numbers <= 24 * 5000
