"""Low rank plus diagonal: the covariance of factor analysis, with Woodbury's identity inside."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..linalg import widen
from .base import Element, Group, positive_size, times
from .block_triangular import BlockTriangular
from .dense import Dense
from .diagonal import Diagonal
from .factor_analysis import fit_factors
from .operator import SymmetricOperator

START = 0.1
"""The norm of a row of loadings at the start, in units of the noise: it changes no direction of tau by more than 1%."""

COLUMNS = 2**15
"""Features that a step works on at a time: what it needs of them stays in the cache."""

EXACT_IN_SINGLE = 1e3
"""Up to this size what float32 loses of ``U U^T`` is small beside the identity."""

D_SYMMETRIC, D_DIAGONAL, D_COUPLING = 0.25, 0.5, math.sqrt(0.5)
"""The scaling of the joint model's coordinates; a quarter of ``eta + eta^T`` is half of its symmetric part."""


def _undefined(self: Group, *args: object, **options: object) -> Any:
    raise TypeError(
        f"{self} is no group: products, inverses and transposes of its matrices are of another kind. Points of SPD and "
        "Gaussian can have this structure; what multiplies elements needs one of the groups, such as Arrow"
    )


class Marginal(Group):
    """A submanifold that is no group itself, but the marginal of one: some coordinates of the vectors are latent.

    It has the coordinates of the joint group, and of a group's operations those that read a matrix: products with
    vectors, inverses, the determinant. A function of the matrix depends on the latent part of the coordinates too,
    since they move the rest. Vectors are kept as they are in the coordinates of the next frame: the transport is
    isometric in the joint metric.
    """

    trivial_transport = True
    is_algebra = False

    # What only groups have.
    mul: Any = _undefined
    ldiv: Any = _undefined
    from_dense: Any = _undefined
    restrict: Any = _undefined
    dual: Any = _undefined
    gram: Any = _undefined
    bracket: Any = _undefined
    trace: Any = _undefined
    metric_dual: Any = _undefined
    congruence: Any = _undefined
    norm_bound: Any = _undefined
    norm_estimate: Any = _undefined
    exp: Any = _undefined
    move: Any = _undefined
    transpose: Any = _undefined

    def start(self, diagonal: Tensor) -> Element:
        """An element near ``Diag(diagonal)`` from which every coordinate can move."""
        raise NotImplementedError

    def gradient(self, a: Element, grad: Element, sign: int) -> Tensor:
        """``+-D.pullback(a, grad)``, the gradient in the coordinates at 0, packed."""
        raise NotImplementedError

    def advance(self, a: Element, eta: Element, order: int | None, sign: int) -> None:
        """:meth:`retract` into the memory of eta."""
        for place, block in zip(eta, self.retract(a, eta, order, sign=sign), strict=True):
            place.copy_(block)

    def length(self, eta: Element) -> Tensor:
        blocks = [block.flatten(-len(shape)) for block, shape in zip(eta, self.shapes, strict=True)]
        lengths = [torch.linalg.vector_norm(block, dim=-1, dtype=torch.float64) for block in blocks]
        return torch.linalg.vector_norm(torch.stack(lengths), dim=0)


class LowRank(Marginal):
    """``tau = B B^T + Diag(c)^2`` with r columns of loadings B: what r latent factors and independent noise make.

    It is the marginal of an arrow: with latent z of unit covariance, ``x = B z + c . e`` is the tail of the vector
    ``(z, x)`` whose factor is ``[[a, 0], [B, Diag(c)]]``, whatever the head a. The coordinates are those of the arrow,
    so that a step is a natural-gradient step of the joint model of z and x,
    ``[B, Diag(c)] <- [B, Diag(c)] Exp(D.eta)``. The head's coordinates stretch the loadings as a whole; they keep
    steps long where the noise is small and EM is slow (as parameter-expanded EM does).

    An element holds ``U = (B / c)^T``, one loading of all features after the other in units of the noise, and the
    Cholesky factor ``K K^T = I + U U^T``. Its matrix is the root ``A = Diag(c) (I + U^T (I + K)^-1 U)``, for which
    ``A A^T = tau``, with the inverse ``(I - U^T (I + K)^-T K^-1 U) Diag(c)^-1``: no k x k matrix, and nothing is
    divided by what vanishes with U. Blocks: K, c, U. A product costs O(k r), a step O(k r^2).

    Zero loadings are a saddle point of every function of tau, which no gradient leads away from. So :meth:`start`
    gives a diagonal small loadings. With ``factor="inverse"`` (for a Gaussian, in precision form) the inverse of tau is
    low rank plus diagonal; the form ``"inner"`` is an error.
    """

    def __init__(self, k: int, rank: int = 1) -> None:
        self.k, self.rank = positive_size("k", k), positive_size("rank", rank)
        if self.rank >= self.k:
            raise ValueError(f"rank must be below k = {k}, got {rank}; the full manifold is Dense({k})")
        self._joint = BlockTriangular((Dense(self.rank), Diagonal(self.k)), upper=True)
        self.shapes = self._joint.shapes
        self.dim = self.k * (self.rank + 1) - self.rank * (self.rank - 1) // 2

    def _arguments(self) -> str:
        return f"{self.k}, rank={self.rank}"

    # ------------------------------------------------------------------ the matrix
    def apply(self, a: Element, rows: Tensor, transpose: bool = False) -> Tensor:
        root, noise, loadings = a
        if transpose:
            rows = rows * noise.unsqueeze(-2)
        result = rows + _divide(rows @ loadings.mT, _plus_identity(root), not transpose) @ loadings
        return result if transpose else result * noise.unsqueeze(-2)

    def apply_inverse(self, a: Element, rows: Tensor, transpose: bool = False) -> Tensor:
        root, noise, loadings = a
        if not transpose:
            rows = rows / noise.unsqueeze(-2)
        divisors = (_plus_identity(root), root) if transpose else (root, _plus_identity(root))
        factors = _divide(_divide(rows @ loadings.mT, divisors[0], True), divisors[1], False)
        result = rows - factors @ loadings
        return result / noise.unsqueeze(-2) if transpose else result

    def logabsdet(self, a: Element) -> Tensor:
        root, noise, _ = a
        return noise.abs().log().sum(-1) + root.diagonal(dim1=-2, dim2=-1).log().sum(-1)

    def squared_norm(self, a: Element) -> Tensor:
        return self.square_diagonal(a).sum(-1)

    def square_diagonal(self, a: Element) -> Tensor:
        _, noise, loadings = a
        return noise.square() * (1 + loadings.square().sum(-2))

    def inverse_diagonal(self, a: Element) -> Tensor:
        """The diagonal of ``tau^-1``."""
        root, noise, loadings = a
        explained = torch.linalg.solve_triangular(widen(root), widen(loadings), upper=False).square().sum(-2)
        return (1 - explained).to(noise.dtype) / noise.square()

    def covariance_factors(self, a: Element) -> tuple[Tensor, Tensor]:
        """The loadings ``B``, of shape ``(*batch, k, r)``, and the noise ``c``."""
        _, noise, loadings = a
        return (noise.unsqueeze(-2) * loadings).mT, noise

    def trace_with(self, a: Element, h: SymmetricOperator) -> Tensor:
        """``tr(tau H) = tr(B^T H B) + <c^2, diag H>``, by r products with H and its diagonal."""
        loadings, noise = self.covariance_factors(a)
        rows = loadings.mT
        return (rows * h.apply(rows)).sum((-2, -1)) + (noise.square() * h.diagonal()).sum(-1)

    def inverse_trace_with(self, a: Element, h: SymmetricOperator) -> Tensor:
        """``tr(tau^-1 H) = <c^-2, diag H> - tr(W^T H W)`` with ``W^T = K^-1 U Diag(c)^-1``."""
        root, noise, loadings = a
        rows = torch.linalg.solve_triangular(widen(root), widen(loadings), upper=False).to(noise.dtype)
        rows = rows / noise.unsqueeze(-2)
        return (h.diagonal() / noise.square()).sum(-1) - (rows * h.apply(rows)).sum((-2, -1))

    # ------------------------------------------------------------------ elements
    def element(self, loadings: Tensor, noise: Tensor) -> Element:
        """The element of ``B B^T + Diag(c)^2`` from B, of shape ``(*batch, k, r)``, and c."""
        return _with_root(noise, loadings.mT / noise.unsqueeze(-2))

    def factor(self, tau: Tensor, start: Tensor | None = None) -> Element:
        """The nearest in Kullback-Leibler divergence: for a sample covariance, factor analysis.

        The search may begin at given noise c, of shape ``(*batch, k)``.
        """
        return self._nearest(tau, start, inverse=False)

    def inverse_factor(self, tau: Tensor, start: Tensor | None = None) -> Element:
        """The element of a matrix whose inverse is nearest to tau in the same sense."""
        return self._nearest(tau, start, inverse=True)

    def _nearest(self, tau: Tensor, start: Tensor | None, inverse: bool) -> Element:
        batch = tau.shape[:-2]
        wide = tau.double().reshape(-1, self.k, self.k)
        starts = [None] * len(wide) if start is None else start.double().reshape(-1, self.k).unbind(0)
        fits = (fit_factors(matrix, self.rank, noise, inverse) for matrix, noise in zip(wide, starts, strict=True))
        loadings, noise = map(torch.stack, zip(*fits, strict=True))
        return self.element(
            loadings.to(tau.dtype).reshape(*batch, self.k, self.rank), noise.to(tau.dtype).reshape(*batch, self.k)
        )

    def from_diagonal(self, diagonal: Tensor) -> Element:
        batch = diagonal.shape[:-1]
        eye = torch.eye(self.rank, dtype=diagonal.dtype, device=diagonal.device)
        return eye.repeat(*batch, 1, 1), diagonal, diagonal.new_zeros(*batch, self.rank, self.k)

    def start(self, diagonal: Tensor) -> Element:
        """The diagonal of tau is the squares of the given one; the rest of it is small."""
        generator = torch.Generator().manual_seed(self.k)
        loadings = torch.randn(self.rank, self.k, generator=generator, dtype=torch.float64, device="cpu")
        loadings = START * loadings / torch.linalg.vector_norm(loadings, dim=-1, keepdim=True)
        loadings = loadings.to(diagonal).expand(*diagonal.shape[:-1], -1, -1)
        return _with_root(diagonal / (1 + loadings.square().sum(-2)).sqrt(), loadings)

    # ------------------------------------------------------------------ coordinates
    def scale(self, eta: Element) -> Element:
        return self._joint.scale(eta)

    def unscale(self, n: Element) -> Element:
        return self._joint.unscale(n)

    def retract(self, a: Element, eta: Element, order: int | None = 2, left: bool = False, sign: int = 1) -> Element:
        """``[B, Diag(c)] Exp(+-D.eta)``: with ``E = Exp(N)`` it is ``c <- c E_c`` and ``U <- (E_a U + E_u) / E_c``."""
        _refuse_inner(self, left)
        _, noise, loadings = a
        n = self.scale(eta)
        head, stretch, shift = self._joint.exp(n if sign > 0 else times(-1, n), order)
        return _with_root(noise * stretch, (head @ loadings + shift) / stretch.unsqueeze(-2))

    def advance(self, a: Element, eta: Element, order: int | None, sign: int) -> None:
        if order != 2:
            super().advance(a, eta, order, sign)
            return
        _, noise, loadings = a
        n = (sign * D_SYMMETRIC) * (eta[0] + eta[0].mT)
        eye = torch.eye(self.rank, dtype=n.dtype, device=n.device)
        head, turn = eye + n + 0.5 * n @ n, sign * D_COUPLING * (eye + 0.5 * n)
        gram = loadings.new_zeros(*loadings.shape[:-2], self.rank, self.rank, dtype=torch.float64)
        for part in _parts(self.k):
            shift, stretch = eta[2][..., part], (sign * D_DIAGONAL) * eta[1][..., part]
            moved = head @ loadings[..., part]
            moved += turn @ shift
            moved.addcmul_(shift, stretch.unsqueeze(-2), value=0.5 * sign * D_COUPLING)
            stretch = 1 + stretch * (1 + 0.5 * stretch)
            moved /= stretch.unsqueeze(-2)
            eta[1][..., part] = noise[..., part] * stretch
            shift.copy_(moved)
            gram += moved @ moved.mT
        if float(gram.diagonal(dim1=-2, dim2=-1).max()) > EXACT_IN_SINGLE:
            gram = _gram(eta[2])
        eta[0].copy_(_root_of(gram))

    def pullback(self, a: Element, grad: Element, left: bool = False) -> Element:
        """With ``dU = N_a U + N_u - U N_c`` and ``dc = c N_c``; K moves with U."""
        _refuse_inner(self, left)
        root, noise, loadings = a
        g_root, g_noise, g_loadings = grad
        g_loadings = g_loadings + _gradient_of_gram(root, g_root) @ loadings
        g_stretch = noise * g_noise - torch.linalg.vecdot(loadings, g_loadings, dim=-2)
        return g_loadings @ loadings.mT, g_stretch, g_loadings

    def gradient(self, a: Element, grad: Element, sign: int) -> Tensor:
        result = a[1].new_empty(*self.batch_shape(a), self.numel)
        self.write_gradient(a, grad, sign, self.unpack(result))
        return result

    def write_gradient(self, a: Element, grad: Element, sign: int, result: Element) -> None:
        """:meth:`gradient` into given memory, some features after the other."""
        root, noise, loadings = a
        through_root, head = _gradient_of_gram(root, grad[0]), torch.zeros_like(root)
        for part in _parts(self.k):
            old = loadings[..., part]
            new = grad[2][..., part] + through_root @ old
            head += new @ old.mT
            stretch = noise[..., part] * grad[1][..., part] - torch.linalg.vecdot(old, new, dim=-2)
            result[1][..., part] = stretch.mul_(sign * D_DIAGONAL)
            result[2][..., part] = new.mul_(sign * D_COUPLING)
        result[0].copy_((sign * D_SYMMETRIC) * (head + head.mT))

    def newton_gradient(self, a: Element, h: SymmetricOperator) -> Element:
        """The gradient in the coordinates of ``1/2 (tr(H tau) - log det tau)``: r products with H, and its diagonal."""
        root, noise, loadings = a
        pulled = noise * h.apply(noise * loadings) - _divide(_divide(loadings.mT, root, True), root, False).mT
        stretch = noise.square() * (h.diagonal() - self.inverse_diagonal(a))
        return self.scale((pulled @ loadings.mT, stretch, pulled))

    def reach(self, eta: Element) -> Tensor:
        """The norm of the 2 x 2 matrix of bounds on the blocks' norms (see ``BlockTriangular.norm_estimate``)."""
        dense = Dense(self.rank)
        head = D_DIAGONAL * dense.norm_bound((eta[0],))
        stretch = D_DIAGONAL * eta[1].abs().amax(-1)
        shift = D_COUPLING * dense.norm_bound((eta[2] @ eta[2].mT,)).sqrt()
        return torch.hypot(head + stretch, shift) + torch.hypot(head - stretch, shift)

    def stretch(self, eta: Element) -> Tensor:
        return self._joint.stretch(eta)


class LowRankAffine(Marginal):
    """The mean and the factor of a Gaussian whose covariance (or precision, ``upper=False``) is low rank plus diagonal.

    Blocks: those of the factor A, and the mean. A step moves the mean by ``A eta / sqrt(2)``, in precision form by
    ``A^-T eta / sqrt(2)``: to first order as in :class:`Affine`, and so along the natural gradient.
    """

    apply: Any = _undefined

    def __init__(self, linear: LowRank, upper: bool = True) -> None:
        self.linear, self.upper = linear, upper
        self.k = linear.k + 1
        self.shapes = (*linear.shapes, (linear.k,))
        self.dim = linear.dim + linear.k

    def _arguments(self) -> str:
        return f"{self.linear!r}, upper={self.upper}"

    def join(self, factor: Element, mean: Tensor) -> Element:
        return (*factor, mean)

    def split(self, a: Element) -> tuple[Element, Tensor]:
        """The factor, and the mean or, in precision form, ``-A^T mean``."""
        factor, mean = a[:-1], a[-1]
        return factor, mean if self.upper else -self.linear.rmatvec(factor, mean)

    def mean(self, a: Element) -> Tensor:
        return a[-1]

    def logabsdet(self, a: Element) -> Tensor:
        return self.linear.logabsdet(a[:-1])

    def scale(self, eta: Element) -> Element:
        return (*self.linear.scale(eta[:-1]), D_COUPLING * eta[-1])

    def unscale(self, n: Element) -> Element:
        return (*self.linear.unscale(n[:-1]), n[-1] / D_COUPLING)

    def _shift(self, factor: Element, n: Tensor) -> Tensor:
        return self.linear.matvec(factor, n) if self.upper else -self.linear.rsolve(factor, n)

    def retract(self, a: Element, eta: Element, order: int | None = 2, left: bool = False, sign: int = 1) -> Element:
        factor = self.linear.retract(a[:-1], eta[:-1], order, left, sign)
        return (*factor, a[-1] + self._shift(a[:-1], sign * D_COUPLING * eta[-1]))

    def advance(self, a: Element, eta: Element, order: int | None, sign: int) -> None:
        self.linear.advance(a[:-1], eta[:-1], order, sign)
        eta[-1].copy_(a[-1] + self._shift(a[:-1], sign * D_COUPLING * eta[-1]))

    def change_of_units(self, eta: Element, order: int | None) -> Tensor:
        """As in :class:`Affine`, for the noise alone: loadings mix the coordinates, but hardly change their scale."""
        return Diagonal(self.linear.k).exp((D_DIAGONAL * eta[1],), order)[0]

    def pull_back_shift(self, factor: Element, gradient: Tensor) -> Tensor:
        """The gradient in the mean's coordinates, but for their scale, from that in the mean."""
        return self.linear.rmatvec(factor, gradient) if self.upper else -self.linear.solve(factor, gradient)

    def pullback(self, a: Element, grad: Element, left: bool = False) -> Element:
        return (*self.linear.pullback(a[:-1], grad[:-1], left), self.pull_back_shift(a[:-1], grad[-1]))

    def gradient(self, a: Element, grad: Element, sign: int) -> Tensor:
        factor, linear = a[:-1], self.linear
        result = a[-1].new_empty(*a[-1].shape[:-1], self.numel)
        *blocks, mean = self.unpack(result)
        linear.write_gradient(factor, grad[:-1], sign, tuple(blocks))
        mean.copy_((sign * D_COUPLING) * self.pull_back_shift(factor, grad[-1]))
        return result

    def reach(self, eta: Element) -> Tensor:
        """As if the mean were one more coupling of the joint model."""
        linear, shift = self.linear.reach(eta[:-1]), torch.linalg.vector_norm(eta[-1], dim=-1)
        return torch.hypot(linear, 2 * D_COUPLING * shift)

    def stretch(self, eta: Element) -> Tensor:
        """As in :class:`Affine`."""
        return torch.maximum(self.linear.stretch(eta[:-1]), D_COUPLING * eta[-1].abs().amax(-1))

    def energy(self, a: Element, x: Tensor) -> Tensor:
        """``(x - mean)^T Sigma^-1 (x - mean) + log det Sigma`` for vectors ``(*sample, *batch, k)``."""
        standardize = self.linear.solve if self.upper else self.linear.rmatvec
        return standardize(a[:-1], x - a[-1]).square().sum(-1) + (2 if self.upper else -2) * self.logabsdet(a)


class Energy:
    """:meth:`LowRankAffine.energy` for given vectors and its gradient, some features at a time and without autograd.

    Let y be ``(x - mean) / c`` and b be ``v = (I + U^T U)^-1 y``; in precision form y is ``c . (x - mean)``, b is y and
    v is ``(I + U^T U) y``. With ``S = I + U U^T`` the gradient in the algebra is that of the joint model,

        N_a: ``I - S^-1 - (U b) (U b)^T``,   N_c: ``1 - diag(U^T S^-1 U) - b . b``,   N_u: ``S^-1 U - (U b) b^T``,

    twice and summed over the vectors (with the opposite sign in precision form). In the mean it is ``-2 v / c``, in
    precision form ``-2 c . v``.
    """

    def __init__(self, group: LowRankAffine, frame: Tensor, x: Tensor) -> None:
        self._group, self._linear, self._upper = group, group.linear, group.upper
        *factor, self._mean = group.unpack(frame)
        self._factor = tuple(factor)
        self._root, self._noise, self._loadings = factor
        self._units = 1 / self._noise if self._upper else self._noise
        self._shape = torch.broadcast_shapes(x.shape, self._mean.shape)
        self._x = x.expand(self._shape).reshape(-1, *self._mean.shape).movedim(0, -2)

    def _deviations(self, part: slice) -> Tensor:
        """y"""
        return (self._x[..., part] - self._mean[..., part].unsqueeze(-2)).mul_(self._units[..., part].unsqueeze(-2))

    @cached_property
    def _scores(self) -> Tensor:
        """``U y`` as rows."""
        terms = [self._deviations(part) @ self._loadings[..., part].mT for part in _parts(self._linear.k)]
        return torch.stack(terms).sum(0)

    def value(self) -> Tensor:
        """The energies."""
        eye_plus_root = _plus_identity(self._root)
        if self._upper:  # A^-1 (x - mean), or A^T (x - mean)
            factors = -_divide(_divide(self._scores, self._root, True), eye_plus_root, False)
        else:
            factors = _divide(self._scores, eye_plus_root, False)
        quadratic = torch.zeros_like(self._scores[..., 0])
        for part in _parts(self._linear.k):
            standardized = self._deviations(part).add_(factors @ self._loadings[..., part])
            quadratic += torch.linalg.vecdot(standardized, standardized)
        logdet = (2 if self._upper else -2) * self._linear.logabsdet(self._factor)
        return (quadratic + logdet.unsqueeze(-1)).movedim(-1, 0).reshape(self._shape[:-1])

    def gradient(self, weights: Tensor) -> Tensor:
        """The packed gradient in the coordinates of the weighted sum of the energies."""
        root, upper, rank, batch = self._root, self._upper, self._linear.rank, self._mean.shape[:-1]
        w = 2 * weights.reshape(-1, *batch).movedim(0, -1).unsqueeze(-1)
        total = w.sum(-2, keepdim=True)
        eye = torch.eye(rank, dtype=root.dtype, device=root.device).expand_as(root)
        inverse = _divide(_divide(eye, root, True), root, False)
        scores = self._scores @ inverse if upper else self._scores  # U b
        weighted = (w * scores).mT
        # The mean's coordinates: those of the root are A^T g and -A^-1 g, and v U^T is known.
        turned = weighted.sum(-1, keepdim=True).mT
        turned = _divide(turned if upper else -turned @ root, _plus_identity(root), False)
        mixing = torch.cat([D_COUPLING * total * inverse, scores, turned], -2)
        result = self._noise.new_empty(*batch, self._group.numel)
        head, stretch, shift, mean = self._group.unpack(result)
        # In precision form both the step and the gradient have the opposite sign.
        for part in _parts(self._linear.k):
            loadings, y = self._loadings[..., part], self._deviations(part)
            projected, fitted, along = (mixing @ loadings).tensor_split([rank, -1], -2)
            v = y - fitted if upper else y + fitted
            b = v if upper else y
            mean[..., part] = (w.mT @ v + along).squeeze(-2).mul_(-D_COUPLING)
            explained = torch.linalg.vecdot(loadings, projected, dim=-2).div_(D_COUPLING)
            shift[..., part] = projected.sub_((D_COUPLING * weighted) @ b)
            stretch[..., part] = D_DIAGONAL * (total.squeeze(-1) - explained - (w.mT @ b.square_()).squeeze(-2))
        head.copy_(2 * D_SYMMETRIC * (total * (eye - inverse) - weighted @ scores))
        return result


def _refuse_inner(group: Group, left: bool) -> None:
    if left:
        raise ValueError(f"factor='inner' is not defined for {group}: A^T A is not low rank plus diagonal; use 'outer'")


# ---------------------------------------------------------------------- the r x r matrices
def _plus_identity(root: Tensor) -> Tensor:
    return root + torch.eye(root.shape[-1], dtype=root.dtype, device=root.device)


def _divide(rows: Tensor, lower: Tensor, transpose: bool) -> Tensor:
    """``rows L^-T`` with ``transpose``, else ``rows L^-1``, for a triangular matrix L."""
    divisor = widen(lower.mT if transpose else lower)
    return torch.linalg.solve_triangular(divisor, widen(rows), upper=transpose, left=False).to(rows.dtype)


def _with_root(noise: Tensor, loadings: Tensor) -> Element:
    return _root_of(_gram(loadings)).to(loadings.dtype), noise, loadings


def _gram(loadings: Tensor) -> Tensor:
    """``U U^T`` in float64: what float32 would lose of a large one can be more than the identity beside it."""
    parts = (loadings[..., part].double() for part in _parts(loadings.shape[-1]))
    return torch.stack([part @ part.mT for part in parts]).sum(0)


def _root_of(gram: Tensor) -> Tensor:
    """The Cholesky factor of ``I + gram``."""
    return torch.linalg.cholesky_ex(_plus_identity(gram)).L


def _gradient_of_gram(root: Tensor, gradient: Tensor) -> Tensor:
    """``M + M^T`` with ``M`` the gradient in ``K K^T`` from that in the Cholesky factor K."""
    wide = widen(root)
    inner = (wide.mT @ widen(gradient).tril()).tril()
    inner = inner + inner.tril(-1).mT
    return _divide(_divide(inner, wide, False).mT, wide, False).to(root.dtype)


def _parts(k: int) -> Iterator[slice]:
    return (slice(first, min(first + COLUMNS, k)) for first in range(0, k, COLUMNS))
