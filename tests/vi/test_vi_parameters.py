"""Named parameters: shapes, constraints, Jacobians."""

import math

import pytest
import torch
from torch.distributions import Dirichlet, Gamma, biject_to, constraints

import gnomon
from gnomon.vi.parameters import Parameters

SPACE = {
    "beta": 3,
    "tau": constraints.positive,
    "w": ((2, 3), constraints.simplex),
    "rho": ((2,), constraints.interval(-1.0, 1.0)),
    "scalar": (),
}


def test_vectors_become_parameters_and_return():
    space = Parameters(SPACE)
    assert space.dim == 3 + 1 + 2 * 2 + 2 + 1
    x = torch.randn(5, space.dim, dtype=torch.float64)
    values = space.constrain(x)
    assert {name: tuple(value.shape) for name, value in values.items()} == {
        "beta": (5, 3),
        "tau": (5,),
        "w": (5, 2, 3),
        "rho": (5, 2),
        "scalar": (5,),
    }
    assert bool((values["tau"] > 0).all())
    torch.testing.assert_close(values["w"].sum(-1), torch.ones(5, 2, dtype=torch.float64))
    torch.testing.assert_close(space.unconstrain(values), x)
    assert not bool(space.violations(values).any())


def test_log_determinant_is_that_of_the_jacobian():
    space = Parameters({"tau": ((2,), constraints.positive), "rho": constraints.unit_interval, "beta": 1})
    x = torch.randn(3, space.dim, dtype=torch.float64)
    _, logdet = space.constrain_with_logdet(x)

    def flat(row):
        return torch.cat([value.flatten() for value in space.constrain(row.unsqueeze(0)).values()])

    expected = torch.stack([torch.linalg.slogdet(torch.func.jacrev(flat)(row)).logabsdet for row in x])
    torch.testing.assert_close(logdet, expected)


def test_entries_have_names():
    assert Parameters({"b": (1, 2), "t": constraints.positive}).entries() == ["b[0,0]", "b[0,1]", "t"]


def test_values_at_the_end_of_the_scale_violate_their_constraint():
    space = Parameters({"tau": constraints.positive, "p": constraints.unit_interval})
    x = torch.tensor([[-800.0, 0.0], [0.0, 0.0]], dtype=torch.float64)
    assert space.violations(space.constrain(x)).tolist() == [True, False]


@pytest.mark.parametrize(
    ("specification", "message"),
    [
        ({}, "parameters is empty"),
        ({"a": "x"}, r"parameters\['a'\] must be a shape"),
        ({"n": constraints.nonnegative_integer}, r"parameters\['n'\] has the constraint"),
        ({"w": ((), constraints.simplex)}, r"parameters\['w'\] has shape"),
    ],
)
def test_bad_specifications_are_named(specification, message):
    with pytest.raises((TypeError, ValueError), match=message):
        Parameters(specification)


def test_missing_values_are_named():
    with pytest.raises(ValueError, match="'tau'"):
        Parameters({"tau": constraints.positive}).unconstrain({})


def test_fit_of_a_gamma_and_a_dirichlet_density():
    gamma, dirichlet = Gamma(200.0, 10.0), Dirichlet(torch.tensor([300.0, 500.0, 200.0]))
    fit = gnomon.vi.fit(
        lambda v: gamma.log_prob(v["rate"]) + dirichlet.log_prob(v["share"]),
        parameters={"rate": constraints.positive, "share": (3, constraints.simplex)},
        dtype=torch.float32,
        seed=0,
    )
    draws = fit.draws(4000)
    assert draws["share"].shape == (4000, 3)
    assert float(draws["rate"].mean()) == pytest.approx(20.0, abs=0.1)
    assert float(draws["rate"].std()) == pytest.approx(math.sqrt(2.0), rel=0.06)
    torch.testing.assert_close(draws["share"].mean(0), dirichlet.mean, atol=2e-3, rtol=0)
    torch.testing.assert_close(draws["share"].std(0), dirichlet.variance.sqrt(), rtol=0.06, atol=0)
    assert fit.elbo == pytest.approx(0.0, abs=0.02)  # the densities are normalized
    start = {name: value[0] for name, value in fit.draws(1).items()}
    assert biject_to(constraints.simplex)(torch.zeros(2)).shape == (3,)
    again = gnomon.vi.fit(
        lambda v: gamma.log_prob(v["rate"]) + dirichlet.log_prob(v["share"]),
        parameters={"rate": constraints.positive, "share": (3, constraints.simplex)},
        start=start,
        dtype=torch.float32,
        seed=0,
    )
    assert again.elbo == pytest.approx(0.0, abs=0.02)
