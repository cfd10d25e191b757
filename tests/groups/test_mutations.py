"""A group with one wrong member is refused, and the message names that member."""

import math

import pytest
import torch

from gnomon import groups as g
from gnomon.groups.derived import DERIVED_FROM
from gnomon.testing import check_group
from gnomon.testing.storage import public_members


class Circulant(g.Group):
    """All circulant matrices, by their first columns: a group by convolutions."""

    trivial_transport = True  # abelian

    def __init__(self, k):
        self.k, self.dim = k, k // 2 + 1
        self.shapes = ((k,),)

    @staticmethod
    def _transform(x):
        return torch.fft.rfft(x.float() if x.dtype == torch.bfloat16 else x)

    def _back(self, spectrum, like):
        return torch.fft.irfft(spectrum, self.k).to(like.dtype)

    def mul(self, a, b):
        return (self._back(self._transform(a[0]) * self._transform(b[0]), a[0]),)

    def apply(self, a, rows, transpose=False):
        spectrum = self._transform(a[0]).unsqueeze(-2)
        return self._back((spectrum.conj() if transpose else spectrum) * self._transform(rows), rows)

    def ldiv(self, a, b):
        return (self._back(self._transform(b[0]) / self._transform(a[0]), b[0]),)

    def scale(self, eta):
        """The symmetric part, as E_j + E_j^T is the same for j and k - j."""
        return ((eta[0] + eta[0].flip(-1).roll(1, -1)) / (4 * math.sqrt(self.k)),)


def twice(method):
    """The method with its result doubled."""

    def doubled(self, *args, **kwargs):
        result = getattr(super(type(self), self), method)(*args, **kwargs)
        return tuple(2 * block for block in result) if isinstance(result, tuple) else 2 * result

    return doubled


def mutant(base, *arguments, **members):
    """An instance of a subclass of ``base`` with other members."""
    return type("Mutant", (base,), members)(*arguments)


def without_transpose(method):
    def ignores(self, a, rows, transpose=False):
        return getattr(super(type(self), self), method)(a, rows)

    return ignores


def with_attribute(base, *arguments, **attributes):
    """An instance with wrong attributes."""
    group = base(*arguments)
    for name, value in attributes.items():
        setattr(group, name, value)
    return group


def _no_op(self, square, rows, overwrite=False, scratch=None):
    return rows.clone()


def _overwrites(self, square, rows, overwrite=False, scratch=None):
    return g.Diagonal.times_square(self, square, rows, True, scratch)


def _wrong_in_scratch(self, square, rows, overwrite=False, scratch=None):
    result = g.Dense.times_square(self, square, rows, overwrite)
    return result if scratch is None else scratch


def _transposed_pullback(self, a, grad, left=False):
    """The fault that symmetric test matrices hide: K K^T for K^T K."""
    return g.Dense.pullback(self, a, grad, not left)


def _half_of_the_scratch_layouts(self, square, rows, overwrite=False, scratch=None):
    """Right for plain rows only."""
    if scratch is not None and rows.stride(-1) != 1:
        return scratch
    return g.Dense.times_square(self, square, rows, overwrite, scratch)


def _in_place_mul(self, a, b):
    return (a[0].mul_(b[0]),)


def _aliased_scale(self, eta):
    return (eta[0].mul_(0.5),)


def _reversed_mul(self, a, b):
    return g.Triangular.mul(self, b, a)


def _loses_precision(self, a, b):
    return (g.Diagonal.mul(self, a, b)[0].float(),)


def _detached(self, a):
    return g.Diagonal.logabsdet(self, a).detach()


def _first_of_batch(self, covector):
    return g.Diagonal.trace(self, covector).flatten()[:1].squeeze(0).expand(self.batch_shape(covector))


def _wrong_order(self, n, order=None):
    return g.Triangular.exp(self, n, 1 if order == 2 else order)


def _never_left(self, a, n, order=None, left=False):
    return g.Triangular.move(self, a, n, order)


def _always_float64(self, batch_shape=(), *, dtype=None, device=None):
    return g.Diagonal.identity(self, batch_shape, dtype=torch.float64, device=device)


DOUBLED = [
    *["mul", "apply", "to_dense", "ldiv", "apply_inverse", "logabsdet", "restrict", "pullback", "dual", "scale"],
    *["unscale", "from_dense", "from_diagonal", "identity", "identity_like", "factor", "matvec", "rmatvec", "solve"],
    *[
        "rsolve",
        "gram",
        "trace",
        "squared_norm",
        "square_diagonal",
        "metric_dual",
        "length",
        "squared",
        "times_square",
        "apply_squared",
    ],
    *["bracket", "exp", "move", "retract", "transpose", "congruence", "flatten", "unflatten", "pack", "unpack"],
]
DOUBLES = [pytest.param(method, mutant(g.Triangular, 2, **{method: twice(method)}), id=method) for method in DOUBLED]

WRONG = {
    "trace": mutant(g.Toeplitz, 3, trace=lambda self, covector: covector[0].sum(-1)),
    "times_square, no-op": mutant(g.Dense, 2, times_square=_no_op),
    "times_square, changes the rows": mutant(g.Diagonal, 2, times_square=_overwrites),
    "times_square, ignores scratch": mutant(g.Dense, 2, times_square=_wrong_in_scratch),
    "times_square, one layout": mutant(g.Dense, 2, times_square=_half_of_the_scratch_layouts),
    "dual": mutant(g.Toeplitz, 3, dual=lambda self, n: n),
    "pullback, transposed": mutant(g.Dense, 3, pullback=_transposed_pullback),
    "apply, transpose": mutant(g.Triangular, 2, apply=without_transpose("apply")),
    "apply_inverse, transpose": mutant(g.Triangular, 2, apply_inverse=without_transpose("apply_inverse")),
    "mul, reversed": mutant(g.Triangular, 3, mul=_reversed_mul),
    "mul, in place": mutant(g.Diagonal, 2, mul=_in_place_mul),
    "mul, loses precision": mutant(g.Diagonal, 2, mul=_loses_precision),
    "scale, in place": mutant(g.Diagonal, 2, scale=_aliased_scale),
    "scale, not orthonormal": mutant(g.Triangular, 3, scale=lambda self, eta: (0.5 * eta[0],)),
    "scale, missing": mutant(Circulant, 4, scale=g.Group.scale),
    "logabsdet, no gradient": mutant(g.Diagonal, 2, logabsdet=_detached),
    "trace, of a batch": mutant(g.Diagonal, 2, trace=_first_of_batch),
    "exp, order 2": mutant(g.Triangular, 2, exp=_wrong_order),
    "move, left": mutant(g.Triangular, 2, move=_never_left),
    "norm_bound, below": mutant(g.Triangular, 2, norm_bound=lambda self, n: n[0].abs().amax(-1) / 2),
    "norm_bound, infinite": mutant(g.Diagonal, 2, norm_bound=lambda self, n: n[0].sum(-1) * math.inf),
    "norm_estimate, below": mutant(g.Triangular, 2, norm_estimate=lambda self, n: 0.1 * n[0].abs().amax(-1)),
    "norm_estimate, above": mutant(g.Diagonal, 2, norm_estimate=lambda self, n: 4 * n[0].abs().amax(-1)),
    "reach": mutant(g.Diagonal, 2, reach=lambda self, eta: self.norm_bound(self.scale(eta))),
    "stretch": mutant(g.Diagonal, 2, stretch=lambda self, eta: self.norm_bound(self.scale(eta))),
    "quick_stretch": mutant(g.Diagonal, 2, quick_stretch=lambda self, eta: 0.5 * self.stretch(eta)),
    "products": mutant(g.Arrow, 4, products=property(lambda self: 3)),
    "transposed": mutant(g.Triangular, 2, transposed=property(lambda self: self)),
    "coordinate_sets": mutant(g.Arrow, 3, coordinate_sets=property(lambda self: ((0, 1),))),
    "storage_shape": mutant(g.Arrow, 3, storage_shape=property(lambda self: (1, self.numel))),
    "numel": mutant(g.Diagonal, 3, numel=property(lambda self: 2)),
    "batch_shape": mutant(g.Diagonal, 3, batch_shape=lambda self, a: a[0].shape),
    "unpack, copies": mutant(g.Diagonal, 3, unpack=lambda self, stored: (stored.clone(),)),
    "length, dtype": mutant(g.Diagonal, 3, length=lambda self, eta: torch.linalg.vector_norm(eta[0], dim=-1)),
    "identity, dtype": mutant(g.Diagonal, 3, identity=_always_float64),
    "from_dense, no projection": mutant(g.Toeplitz, 3, from_dense=lambda self, matrix: (matrix[..., 0],)),
    "__eq__, by identity": mutant(g.Diagonal, 3, __eq__=lambda self, other: self is other, __hash__=g.Group.__hash__),
    "__eq__, always": mutant(g.Diagonal, 3, __eq__=lambda self, other: True, __hash__=g.Group.__hash__),
    "__hash__": mutant(g.Diagonal, 3, __hash__=lambda self: id(self)),
    "__repr__": mutant(g.Diagonal, 3, __repr__=lambda self: f"Mutant at {id(self)}", __hash__=lambda self: 3),
    "dim": with_attribute(g.Dense, 3, dim=9),
    "k": with_attribute(g.Dense, 3, k=3.0),
    "shapes": with_attribute(g.Dense, 3, shapes=[[3, 3]]),
    "trivial_transport": with_attribute(g.Triangular, 3, trivial_transport=True),
    "is_algebra": with_attribute(g.Kronecker, g.Dense(2), g.Diagonal(2), is_algebra=True),
    "has_matrix_exp": with_attribute(g.Affine, g.Dense(2), has_matrix_exp=True),
}


@pytest.mark.parametrize(("method", "group"), DOUBLES)
def test_a_doubled_result_is_refused(method, group):
    with pytest.raises(AssertionError, match=rf"`{method}`") as refusal:
        check_group(group)
    assert str(refusal.value).startswith("Mutant(2): ")
    assert f"correct `{method}`, which Mutant defines" in str(refusal.value)


@pytest.mark.parametrize(("fault", "group"), WRONG.items(), ids=WRONG)
def test_a_wrong_member_is_refused(fault, group):
    member = fault.split(",")[0]
    with pytest.raises(AssertionError, match=rf"`{member}`"):
        check_group(group)


def test_every_member_has_a_mutation():
    mutated = {*DOUBLED, *(fault.split(",")[0] for fault in WRONG)}
    assert mutated == public_members()


def test_every_member_is_in_the_table():
    """The table of what defaults are derived from is that of the class."""
    members = {name for name in vars(g.Group) | vars(g.Group.__mro__[1]) if not name.startswith("_")}
    members |= set(g.Group.__annotations__) | {"shapes"}
    special = {"__eq__", "__hash__", "__repr__"}
    assert public_members() == members | special
    assert g.Group.__abstractmethods__ == members - set(DERIVED_FROM) - {
        *["k", "shapes", "dim", "trivial_transport", "is_algebra", "has_matrix_exp"]
    }
    assert {source for names in DERIVED_FROM.values() for source in names} <= public_members()


def test_a_default_that_does_not_hold_is_to_be_overridden():
    """E_j + E_j^T are not orthogonal for circulant matrices, so that the default of ``scale`` does not hold."""
    with pytest.raises(AssertionError, match=r"override `scale`, or correct what its default is derived from: .*`mul`"):
        check_group(type("Circulant", (Circulant,), {"scale": g.Group.scale})(4))


def test_the_message_says_how_far_off_and_what_to_do():
    group = mutant(g.Diagonal, 3, trace=lambda self, covector: 1.3 * covector[0].sum(-1))
    how_far = r"Mutant\(3\): trace is off by \d\.\de-01 \(relative; allowed 1e-10\)"
    with pytest.raises(AssertionError, match=rf"^{how_far}; correct `trace`, which Mutant defines$"):
        check_group(group)
