"""Closed forms on the full SPD manifold. Decompositions are allowed here: these are the oracles."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any, ParamSpec

import torch
from torch import Tensor

from ..linalg import as_tensor

Scalar = Callable[[Tensor], Tensor]
"""A function of each eigenvalue."""
P = ParamSpec("P")


def _takes_arrays(function: Callable[P, Tensor]) -> Callable[P, Tensor]:
    """Let a function of tensors take arrays and data frames too."""
    names = tuple(inspect.signature(function).parameters)

    @functools.wraps(function)
    def with_tensors(*args: P.args, **kwargs: P.kwargs) -> Tensor:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        tensors: Any = {name: as_tensor(name, v) if hasattr(v, "__array__") else v for name, v in given.items()}
        return function(**tensors)  # type: ignore[call-arg]

    return with_tensors


def _sym(x: Tensor) -> Tensor:
    return 0.5 * (x + x.mT)


class _SpectralFunction(torch.autograd.Function):
    """``V f(w) V^T`` of a symmetric matrix, with a backward that survives repeated eigenvalues.

    The derivative in a direction X is ``V (F . V^T X V) V^T`` with the divided differences
    ``F_ij = (f(w_i) - f(w_j)) / (w_i - w_j)``, and the derivative at the midpoint where they are close: closer
    than ``scale(w)``, over which f changes, times the cube root of the precision.
    """

    @staticmethod
    def forward(ctx: Any, matrix: Tensor, f: Scalar, derivative: Scalar, scale: Scalar, w: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(w, v)
        ctx.f, ctx.derivative, ctx.scale = f, derivative, scale
        return (v * f(w).unsqueeze(-2)) @ v.mT

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        w, v = ctx.saved_tensors
        gap = w.unsqueeze(-1) - w.unsqueeze(-2)
        middle = 0.5 * (w.unsqueeze(-1) + w.unsqueeze(-2))
        difference = ctx.f(w).unsqueeze(-1) - ctx.f(w).unsqueeze(-2)
        close = gap.abs() <= torch.finfo(w.dtype).eps ** (1 / 3) * ctx.scale(middle)
        quotient = difference / torch.where(close, torch.ones_like(gap), gap)
        divided = torch.where(close, ctx.derivative(middle), quotient)
        return v @ (divided * (v.mT @ _sym(grad) @ v)) @ v.mT, None, None, None, None, None


def _exp(matrix: Tensor) -> Tensor:
    spectrum = torch.linalg.eigh(matrix.detach())
    return _SpectralFunction.apply(matrix, torch.exp, torch.exp, torch.ones_like, *spectrum)


def _is_narrow(values: Tensor) -> bool:
    """Return whether rounding beside the largest of the ascending eigenvalues leaves enough digits of the smallest."""
    return bool((values[..., 0] > torch.finfo(values.dtype).eps ** (1 / 3) * values[..., -1]).all())


class _Ratio:
    """``W = A^-1 B A^-T`` for the Cholesky factor A of one matrix and another matrix ``B = F F^T``.

    Rounding hides the eigenvalues of W that are small beside its largest. Where there are such, those above one and
    their eigenvectors are taken from the singular values of ``A^-1 F``, and those below one from its inverse
    ``F^-1 A``, in which they are the large ones.
    """

    def __init__(self, a: Tensor, matrix: Tensor, f: Tensor) -> None:
        self.matrix = _whiten(a, matrix)
        self.values, self.vectors = torch.linalg.eigh(self.matrix.detach())
        if not _is_narrow(self.values):
            self.values, self.vectors = self._accurate_spectrum(a.detach(), f.detach())

    @staticmethod
    def _accurate_spectrum(a: Tensor, f: Tensor) -> tuple[Tensor, Tensor]:
        """Return eigenvalues in ascending order, and eigenvectors."""
        u, s, _ = torch.linalg.svd(torch.linalg.solve_triangular(a, f, upper=False))
        _, r, v_h = torch.linalg.svd(torch.linalg.solve_triangular(f, a, upper=False))
        values, vectors = s.flip(-1).square(), u.flip(-1)
        above = values >= 1
        return torch.where(above, values, r.square().reciprocal()), torch.where(above.unsqueeze(-2), vectors, v_h.mT)

    def log(self) -> Tensor:
        return self._function(torch.log, torch.reciprocal)

    def sqrt(self) -> Tensor:
        return self._function(torch.sqrt, lambda w: 0.5 * w.rsqrt())

    def _function(self, f: Scalar, derivative: Scalar) -> Tensor:
        return _SpectralFunction.apply(self.matrix, f, derivative, torch.abs, self.values, self.vectors)


def _ratio(a: Tensor, name: str, matrix: Tensor) -> _Ratio:
    return _Ratio(a, matrix, _cholesky(name, matrix))


def _cholesky(name: str, tau: Tensor) -> Tensor:
    if tau.ndim < 2 or tau.shape[-1] != tau.shape[-2]:
        raise ValueError(f"{name} must be a square matrix or a batch of them, got shape {tuple(tau.shape)}")
    factor, info = torch.linalg.cholesky_ex(tau)
    if bool((info != 0).any()):
        raise ValueError(
            f"{name} is not positive definite; if it is so only by rounding, use float64 or add a multiple of "
            "the identity"
        )
    return factor


def _check_sizes(**matrices: Tensor) -> None:
    """Raise an error unless the matrices of one call are of one size."""
    sizes = {name: tuple(m.shape[-2:]) for name, m in matrices.items()}
    if len(set(sizes.values())) > 1:
        raise ValueError(f"matrices of different sizes: {', '.join(f'{n} is {s}' for n, s in sizes.items())}")


def _whiten(factor: Tensor, matrix: Tensor) -> Tensor:
    """Return ``L^-1 M L^-T``, symmetrized."""
    half = torch.linalg.solve_triangular(factor, matrix, upper=False)
    return _sym(torch.linalg.solve_triangular(factor, half.mT, upper=False))


def _color(factor: Tensor, matrix: Tensor) -> Tensor:
    """Return ``L M L^T``, symmetrized."""
    return _sym(factor @ matrix @ factor.mT)


@_takes_arrays
def exp(tau: Tensor, v: Tensor) -> Tensor:
    """Return the end of the geodesic from tau along v (Table spd_table).

    It is ``tau^(1/2) Exp(tau^(-1/2) v tau^(-1/2)) tau^(1/2)``. With ``v = tau^(1/2) eta tau^(1/2)``, eta are standard
    normal coordinates (Eqs. standard_normal_coord and orth_exp).
    """
    _check_sizes(tau=tau, v=v)
    factor = _cholesky("tau", tau)
    return _color(factor, _exp(_whiten(factor, v)))


@_takes_arrays
def log(tau: Tensor, other: Tensor) -> Tensor:
    """Return the tangent vector at tau that points to ``other``: the inverse of :func:`exp`."""
    _check_sizes(tau=tau, other=other)
    factor = _cholesky("tau", tau)
    return _color(factor, _ratio(factor, "other", other).log())


@_takes_arrays
def inner(tau: Tensor, u: Tensor, v: Tensor) -> Tensor:
    """Return ``tr(tau^-1 u tau^-1 v)``, twice the Fisher-Rao metric of N(0, tau) (Eq. affinemetric)."""
    _check_sizes(tau=tau, u=u, v=v)
    factor = _cholesky("tau", tau)
    return (_whiten(factor, u) * _whiten(factor, v)).sum((-2, -1))


@_takes_arrays
def norm(tau: Tensor, v: Tensor) -> Tensor:
    """Return the length of a tangent vector; the zero vector has the zero subgradient."""
    _check_sizes(tau=tau, v=v)
    return torch.linalg.matrix_norm(_whiten(_cholesky("tau", tau), v))


@_takes_arrays
def distance(a: Tensor, b: Tensor) -> Tensor:
    """Return ``|| log(eigenvalues of a^-1 b) ||``: the geodesic distance, with zero subgradient at ``a = b``."""
    _check_sizes(a=a, b=b)
    factor, other = _cholesky("a", a), _cholesky("b", b)
    values = torch.linalg.eigvalsh(_whiten(factor, b))
    if _is_narrow(values):
        return torch.linalg.vector_norm(values.log(), dim=-1)
    # As in _Ratio: those above one, and those below one from the inverse.
    above = torch.linalg.svdvals(torch.linalg.solve_triangular(factor, other, upper=False))
    below = torch.linalg.svdvals(torch.linalg.solve_triangular(other, factor, upper=False)).flip(-1)
    logs = torch.where(above >= 1, above, 1).log() - torch.where(above < 1, below, 1).log()
    return 2 * torch.linalg.vector_norm(logs, dim=-1)


@_takes_arrays
def geodesic(a: Tensor, b: Tensor, t: Tensor | float) -> Tensor:
    """Return the point at fraction t of the way from a to b; t broadcasts with the batch dimensions."""
    _check_sizes(a=a, b=b)
    factor = _cholesky("a", a)
    fraction = torch.as_tensor(t, dtype=a.dtype, device=a.device)
    return _color(factor, _exp(fraction[..., None, None] * _ratio(factor, "b", b).log()))


def _transport_factor(start: Tensor, end: Tensor) -> Tensor:
    """Return ``E = (end start^-1)^(1/2)``."""
    factor = _cholesky("start", start)
    half = factor @ _ratio(factor, "end", end).sqrt()
    return torch.linalg.solve_triangular(factor, half, upper=False, left=False)


@_takes_arrays
def transport(start: Tensor, end: Tensor, v: Tensor) -> Tensor:
    """Return ``E v E^T`` with ``E = (end start^-1)^(1/2)``: Riemannian parallel transport of a tangent vector.

    It solves Eq. parallel_trans_riem along the geodesic.
    """
    _check_sizes(start=start, end=end, v=v)
    return _color(_transport_factor(start, end), v)


@_takes_arrays
def euclidean_transport(start: Tensor, end: Tensor, g: Tensor) -> Tensor:
    """Return ``H g H^T`` with ``H = end^-1 E start``: parallel transport of a Euclidean gradient.

    ``transport(F^-1 g) = F(end)^-1 euclidean_transport(g)`` with ``F(tau)^-1 g = tau g tau``
    (Eq. equ_trans_maps). It solves Eq. parallel_trans_eucl along the geodesic, and is the transport of Eq. rgd_mom_eg.
    """
    _check_sizes(start=start, end=end, g=g)
    e = _transport_factor(start, end)
    return _color(torch.cholesky_solve(e @ start, _cholesky("end", end)), g)


@_takes_arrays
def mean(points: Tensor, weights: Tensor | None = None, *, tol: float | None = None, max_iter: int = 100) -> Tensor:
    """Return the Karcher mean over the first dimension: the minimizer of ``sum_i w_i distance(x, points_i)^2``.

    The step is the mean of the logarithms, halved whenever it has grown (widely spread points overshoot). The
    iteration ends when the geodesic length of the step is below ``tol``, or, with the default ``tol``, when rounding
    lets it shrink no further; a warning says if ``max_iter`` did not suffice.
    """
    if points.ndim < 3 or points.shape[0] == 0:
        raise ValueError(f"points must have shape (n, *batch, k, k) with n > 0, got {tuple(points.shape)}")
    count = points.shape[0]
    factors = _cholesky("points", points)
    weights = points.new_ones(count) if weights is None else torch.as_tensor(weights, dtype=points.dtype)
    if weights.shape != (count,) or not bool((weights >= 0).all()) or float(weights.sum()) <= 0:
        raise ValueError(f"weights must be {count} non-negative numbers with a positive sum, got {weights}")
    shares = (weights / weights.sum()).to(points.device).reshape(count, *[1] * (points.ndim - 1))
    tolerance = torch.finfo(points.dtype).eps ** 0.75 if tol is None else tol
    settled = torch.finfo(points.dtype).eps ** 0.25 if tol is None else 0.0  # below it growth can only be rounding

    center = (shares * points).sum(0)
    rate = points.new_ones(center.shape[:-2])
    previous = torch.full_like(rate, torch.inf)
    for _ in range(max_iter):
        factor = _cholesky("points", center)
        step = (shares * _Ratio(factor, points, factors).log()).sum(0)
        length = torch.linalg.matrix_norm(step)
        grown = length >= previous
        if bool(((length <= tolerance) | (grown & (length <= settled))).all()):
            return center
        rate = torch.where(grown, 0.5 * rate, rate)
        previous = length
        center = _color(factor, _exp(rate[..., None, None] * step))
    warnings.warn(
        f"the Karcher mean did not settle within max_iter = {max_iter} steps: the last one had length "
        f"{float(previous.max()):.1e}, tol is {tolerance:.1e}; raise either",
        RuntimeWarning,
        stacklevel=2,
    )
    return center
