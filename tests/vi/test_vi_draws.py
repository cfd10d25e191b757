"""Quasi-random normal draws: their distribution and their variance."""

import pytest
import torch

from gnomon.vi.sampling import standard_draws

OPTIONS = {"dtype": torch.float64, "device": torch.device("cpu")}


@pytest.mark.parametrize(("n", "d"), [(1, 1), (3, 1), (4, 2), (3, 7), (10, 4), (2, 200)])
def test_each_draw_is_standard_normal(n, d):
    z = torch.stack([standard_draws(n, d, **OPTIONS) for _ in range(20000 // (n * min(d, 5)))])
    assert z.shape[1:] == (n, d)
    flat = z.flatten()
    assert abs(float(flat.mean())) < 0.03
    assert abs(float(flat.square().mean()) - 1) < 0.04
    assert abs(float(flat.pow(4).mean()) - 3) < 0.3
    # Kolmogorov's distance to the normal distribution.
    ordered = flat.sort().values
    levels = (torch.arange(len(ordered)) + 0.5) / len(ordered)
    assert float((torch.special.ndtr(ordered) - levels).abs().max()) < 2.2 / len(ordered) ** 0.5


def test_directions_are_orthogonal_and_a_full_set_has_nearly_the_identity_as_second_moment():
    z = standard_draws(8, 8, **OPTIONS)
    gram = z @ z.mT
    torch.testing.assert_close(gram, torch.diag(gram.diagonal()), atol=1e-10, rtol=0)
    orthogonal = torch.stack([standard_draws(8, 8, **OPTIONS).square().sum() / 64 for _ in range(200)])
    independent = torch.randn(200, 64, dtype=torch.float64).square().mean(-1)
    assert float(orthogonal.std()) < 0.3 * float(independent.std())


def test_a_generator_makes_draws_repeatable():
    first, second = (standard_draws(4, 5, generator=torch.Generator().manual_seed(3), **OPTIONS) for _ in range(2))
    assert torch.equal(first, second)
