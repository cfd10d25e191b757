"""The algorithms by which :class:`~gnomon.groups.Group` derives its defaults from other members of a group."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..linalg import align, widen
from .elements import Element, add, times

if TYPE_CHECKING:
    from .base import Group

DERIVED_FROM: dict[str, tuple[str, ...]] = {
    "numel": ("shapes",),
    "storage_shape": ("shapes", "numel"),
    "pack": ("flatten",),
    "unpack": ("unflatten",),
    "flatten": ("shapes",),
    "unflatten": ("shapes",),
    "batch_shape": ("shapes",),
    "coordinate_sets": ("shapes",),
    "identity": ("from_diagonal",),
    "identity_like": ("identity",),
    "from_diagonal": ("from_dense",),
    "from_dense": ("restrict", "dual"),
    "to_dense": ("apply",),
    "apply_inverse": ("ldiv", "apply", "identity_like"),
    "logabsdet": ("to_dense",),
    "restrict": ("apply",),
    "pullback": ("mul",),
    "dual": ("restrict", "to_dense"),
    "scale": ("dual", "pullback", "identity_like"),
    "unscale": ("scale", "dual", "pullback", "identity_like"),
    "factor": ("identity", "apply_inverse", "restrict", "scale", "norm_bound", "length", "move"),
    "transposed": (),
    "transpose": ("transposed", "to_dense", "from_dense"),
    "matvec": ("apply",),
    "rmatvec": ("apply",),
    "solve": ("apply_inverse",),
    "rsolve": ("apply_inverse",),
    "apply_squared": ("squared", "times_square", "apply"),
    "squared": (),
    "times_square": ("apply",),
    "gram": ("apply", "restrict"),
    "products": ("k",),
    "congruence": ("to_dense", "restrict"),
    "bracket": ("mul",),
    "trace": ("identity_like",),
    "metric_dual": ("scale",),
    "squared_norm": ("dual",),
    "square_diagonal": ("to_dense",),
    "length": ("flatten",),
    "norm_bound": ("apply",),
    "norm_estimate": ("apply",),
    "reach": ("norm_bound", "scale"),
    "stretch": ("reach", "length"),
    "quick_stretch": (),
    "exp": ("mul", "identity_like", "norm_bound"),
    "move": ("mul", "exp"),
    "retract": ("scale", "move"),
    "__repr__": ("k",),
    "__eq__": (),
    "__hash__": ("__repr__",),
}
"""What the default of each member of ``Group`` is derived from, apart from the storage of elements.

The abstract methods, the attributes and the flags are not derived from anything.
"""

_TAYLOR_RADIUS = 0.5  # the remainder of degree 15 is then below 0.5^16 / 16! < 1e-18
_FACTOR_STEPS = 100


def eye_like(group: Group, x: Tensor) -> Tensor:
    """Return the k x k identity in the type of ``x``."""
    return torch.eye(group.k, dtype=x.dtype, device=x.device)


def ones(group: Group, dtype: torch.dtype, device: torch.device) -> Element:
    """Return the sum of all generators."""
    return tuple(torch.ones(shape, dtype=dtype, device=device) for shape in group.shapes)


# ---------------------------------------------------------------------- adjoints
def adjoint(group: Group, function: Callable[[Element], Element], batch: Sequence[int], covector: Element) -> Element:
    """Return the covector ``N -> <covector, function(N)>`` of a linear function of algebra elements.

    Reverse differentiation gives it at the cost of the function. ``torch.func`` is used because the result must
    be differentiable as well.
    """
    zero = tuple(covector[0].new_zeros(*batch, *shape) for shape in group.shapes)
    value, pull_back = torch.func.vjp(lambda *n: function(n), *zero)  # type: ignore[misc]  # no auxiliary value
    return pull_back(tuple(c.expand_as(v) for c, v in zip(covector, value, strict=True)))


def adjoint_of_apply(group: Group, x: Tensor, y: Tensor) -> Element:
    """Return ``<E_j, X^T Y>``, because ``<N, X^T Y> = <X, Y N^T>``."""
    batch = torch.broadcast_shapes(x.shape[:-2], y.shape[:-2])
    return adjoint(group, lambda n: (group.apply(n, y),), batch, (x,))


def adjoint_of_mul(group: Group, a: Element, grad: Element, left: bool) -> Element:
    """Return ``<E_j, A^T G>``, because ``<N, A^T G> = <G, A N>``; with ``left``, ``<E_j, G A^T>``."""
    batch = torch.broadcast_shapes(group.batch_shape(a), group.batch_shape(grad))
    return adjoint(group, lambda n: group.mul(n, a) if left else group.mul(a, n), batch, grad)


# ---------------------------------------------------------------------- coordinates
def symmetric_gram(group: Group, n: Element) -> Element:
    """Return ``<E_j + E_j^T, N + N^T> = 2 <E_j, N + N^T>``: the metric at the identity, applied to N."""
    transposed = group.pullback(n, group.dual(group.identity_like(n)))  # <E_j, N^T I>
    return times(2, add(group.dual(n), transposed))


@functools.lru_cache(maxsize=64)
@torch.inference_mode(False)  # kept, and so fit for every later use
def generator_squares(group: Group, dtype: torch.dtype, device: torch.device) -> Element:
    """Return ``||E_j||_F^2`` for orthogonal generators, each of which is orthogonal to all others in their sum."""
    return tuple(block.to(dtype) for block in group.dual(ones(group, torch.float64, device)))


@functools.lru_cache(maxsize=64)
@torch.inference_mode(False)  # kept, and so fit for every later use
def generator_scales(group: Group, dtype: torch.dtype, device: torch.device) -> Element:
    """Return ``1 / ||E_j + E_j^T||_F`` for generators with orthogonal symmetric parts; zero for a part that is zero."""
    squares = symmetric_gram(group, ones(group, torch.float64, device))
    return tuple(torch.where(square > 0, square.rsqrt(), 0).to(dtype) for square in squares)


# ---------------------------------------------------------------------- the exponential and the factor
def taylor_exponential(group: Group, n: Element) -> Element:
    """Return ``Exp(N)`` by scaling and squaring of the Taylor polynomial of degree 15.

    Only products are taken, so that the result is within the structure. The polynomial is evaluated in powers of
    ``N^4`` (Paterson and Stockmeyer), with six products. (The dense ``torch.linalg.matrix_exp`` loses four digits at
    norms about 0.03.)
    """
    batch = group.batch_shape(n)
    squarings = (group.norm_bound(n).double() / _TAYLOR_RADIUS).clamp(min=1).log2().ceil()
    squarings = squarings.where(squarings.isfinite(), 0)
    n = tuple(block * align(0.5**squarings, block).to(block.dtype) for block in n)
    n2 = group.mul(n, n)
    powers = [group.identity_like(n), n, n2, group.mul(n, n2)]
    n4 = group.mul(n2, n2)
    result: Element | None = None
    for start in (12, 8, 4, 0):
        if result is not None:
            result = group.mul(result, n4)
        for degree, power in enumerate(powers, start):
            term = times(1 / math.factorial(degree), power)
            result = term if result is None else add(result, term)
    assert result is not None
    for done in range(int(squarings.max()) if batch.numel() else 0):
        squared = group.mul(result, result)
        # Each batch element is squared as often as its own norm asks: more would only cost digits.
        pairs = zip(result, squared, strict=True)
        result = tuple(torch.where(align(squarings, new) > done, new, old) for old, new in pairs)
    return result


def nearest_factor(group: Group, tau: Tensor) -> Element:
    """Return the element with ``A A^T`` nearest to tau in the affine-invariant distance.

    The method is Gauss-Newton from the identity. With ``W = A^-1 tau A^-T`` the step solves ``N + N^T = log W`` by
    least squares in orthonormal coordinates. It is cut to norm 1, and shortened by the length of the residual, because
    the distance bends more the farther tau is from the submanifold. On the submanifold the residual vanishes, so that
    convergence is quadratic.
    """
    root = torch.linalg.cholesky(widen(tau))
    eye = eye_like(group, root)
    a = group.identity(tau.shape[:-2], dtype=root.dtype, device=tau.device)
    enough = 8 * group.k * torch.finfo(root.dtype).eps
    for _ in range(_FACTOR_STEPS):
        whitened = group.apply_inverse(a, root.mT).mT  # A^-1 L: its singular values squared are W's eigenvalues
        u, s, _ = torch.linalg.svd(whitened)
        log_w = u @ (2 * s.log().unsqueeze(-1) * u.mT)
        eta = times(2, group.scale(group.restrict(eye.expand_as(log_w), log_w)))
        n = group.scale(eta)
        size = group.norm_bound(n)
        residual = (log_w.square().sum((-2, -1)) - group.length(eta).square()).clamp(min=0).sqrt()
        share = torch.minimum(1 / size, 1 / (1 + residual)).to(size.dtype)
        a = group.move(a, tuple(block * align(share, block) for block in n))
        if not bool((size > enough).any()):
            break
    return tuple(block.to(tau.dtype) for block in a)


# ---------------------------------------------------------------------- vectors
def by_rows(group: Group, a: Element, x: Tensor, operation: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply an operation on rows ``(*batch, n, k)`` to vectors ``(*sample, *batch, k)``."""
    if x.ndim == 0 or x.shape[-1] != group.k:
        raise ValueError(
            f"x has shape {tuple(x.shape)}, but {group} acts on vectors of length {group.k} along the last "
            "dimension; transpose x if its vectors are columns"
        )
    batch = group.batch_shape(a)
    if not batch:  # by far the most frequent case, and a few microseconds quicker
        return operation(x.reshape(-1, group.k)).reshape(x.shape)
    try:
        shape = torch.broadcast_shapes(x.shape[:-1], batch)
    except RuntimeError:
        raise ValueError(
            f"x has shape {tuple(x.shape)}, which does not broadcast with the batch shape {tuple(batch)}: "
            f"give (*sample, *{tuple(batch)}, {group.k})"
        ) from None
    samples = math.prod(shape[: len(shape) - len(batch)])
    rows = x.expand(*shape, group.k).reshape(samples, *batch, group.k).movedim(0, -2)
    return operation(rows).movedim(-2, 0).reshape(*shape, group.k)
