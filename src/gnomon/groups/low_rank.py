"""Low rank plus diagonal: the covariance of factor analysis, with Woodbury's identity inside."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from ..linalg import widen
from .base import Element, Group, positive_size, times
from .block_triangular import BlockTriangular
from .dense import Dense
from .diagonal import Diagonal
from .factor_analysis import fit_factors
from .marginal import Marginal
from .operator import SymmetricOperator

START = 0.1
"""The norm of a row of loadings at the start, in units of the noise: it changes no direction of tau by more than 1%."""

COLUMNS = 2**15
"""Features that a step works on at a time: what it needs of them stays in the cache."""

EXACT_IN_SINGLE = 1e3
"""Up to this size what float32 loses of ``U U^T`` is small beside the identity."""

D_SYMMETRIC, D_DIAGONAL, D_COUPLING = 0.25, 0.5, math.sqrt(0.5)
"""The scaling of the joint model's coordinates; a quarter of ``eta + eta^T`` is half of its symmetric part."""


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
        result = rows + divide(rows @ loadings.mT, plus_identity(root), not transpose) @ loadings
        return result if transpose else result * noise.unsqueeze(-2)

    def apply_inverse(self, a: Element, rows: Tensor, transpose: bool = False) -> Tensor:
        root, noise, loadings = a
        if not transpose:
            rows = rows / noise.unsqueeze(-2)
        divisors = (plus_identity(root), root) if transpose else (root, plus_identity(root))
        factors = divide(divide(rows @ loadings.mT, divisors[0], True), divisors[1], False)
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
        """Return the diagonal of ``tau^-1``."""
        root, noise, loadings = a
        explained = torch.linalg.solve_triangular(widen(root), widen(loadings), upper=False).square().sum(-2)
        return (1 - explained).to(noise.dtype) / noise.square()

    def covariance_factors(self, a: Element) -> tuple[Tensor, Tensor]:
        """Return the loadings ``B``, of shape ``(*batch, k, r)``, and the noise ``c``."""
        _, noise, loadings = a
        return (noise.unsqueeze(-2) * loadings).mT, noise

    def trace_with(self, a: Element, h: SymmetricOperator) -> Tensor:
        """Return ``tr(tau H) = tr(B^T H B) + <c^2, diag H>``, by r products with H and its diagonal."""
        loadings, noise = self.covariance_factors(a)
        rows = loadings.mT
        return (rows * h.apply(rows)).sum((-2, -1)) + (noise.square() * h.diagonal()).sum(-1)

    def inverse_trace_with(self, a: Element, h: SymmetricOperator) -> Tensor:
        """Return ``tr(tau^-1 H) = <c^-2, diag H> - tr(W^T H W)`` with ``W^T = K^-1 U Diag(c)^-1``."""
        root, noise, loadings = a
        rows = torch.linalg.solve_triangular(widen(root), widen(loadings), upper=False).to(noise.dtype)
        rows = rows / noise.unsqueeze(-2)
        return (h.diagonal() / noise.square()).sum(-1) - (rows * h.apply(rows)).sum((-2, -1))

    # ------------------------------------------------------------------ elements
    def element(self, loadings: Tensor, noise: Tensor) -> Element:
        """Return the element of ``B B^T + Diag(c)^2`` from B, of shape ``(*batch, k, r)``, and c."""
        return _with_root(noise, loadings.mT / noise.unsqueeze(-2))

    def factor(self, tau: Tensor, start: Tensor | None = None) -> Element:
        """Return the element nearest to tau in Kullback-Leibler divergence.

        For a sample covariance this is factor analysis. The search may begin at given noise c, of shape ``(*batch,
        k)``.
        """
        return self._nearest(tau, start, inverse=False)

    def inverse_factor(self, tau: Tensor, start: Tensor | None = None) -> Element:
        """Return the element of the matrix whose inverse is nearest to tau in the same sense."""
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
        """Return an element whose tau has the squares of ``diagonal`` on its diagonal, and small entries elsewhere."""
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
        """Return ``[B, Diag(c)] Exp(+-D.eta)``.

        With ``E = Exp(N)`` it is ``c <- c E_c`` and ``U <- (E_a U + E_u) / E_c``.
        """
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
        for part in feature_slices(self.k):
            shift, stretch = eta[2][..., part], (sign * D_DIAGONAL) * eta[1][..., part]
            moved = head @ loadings[..., part]
            moved += turn @ shift
            moved.addcmul_(shift, stretch.unsqueeze(-2), value=0.5 * sign * D_COUPLING)
            stretch = 1 + stretch * (1 + 0.5 * stretch)
            moved /= stretch.unsqueeze(-2)
            eta[1][..., part] = noise[..., part] * stretch
            shift.copy_(moved)
            gram += moved @ moved.mT
        if bool((gram.diagonal(dim1=-2, dim2=-1) > EXACT_IN_SINGLE).any()):
            gram = _gram(eta[2])
        eta[0].copy_(_root_of(gram))

    def pullback(self, a: Element, grad: Element, left: bool = False) -> Element:
        """Return the gradient in ``N``, with ``dU = N_a U + N_u - U N_c`` and ``dc = c N_c``; K moves with U."""
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
        """Write :meth:`gradient` into given memory, some features after the other."""
        root, noise, loadings = a
        through_root, head = _gradient_of_gram(root, grad[0]), torch.zeros_like(root)
        for part in feature_slices(self.k):
            old = loadings[..., part]
            new = grad[2][..., part] + through_root @ old
            head += new @ old.mT
            stretch = noise[..., part] * grad[1][..., part] - torch.linalg.vecdot(old, new, dim=-2)
            result[1][..., part] = stretch.mul_(sign * D_DIAGONAL)
            result[2][..., part] = new.mul_(sign * D_COUPLING)
        result[0].copy_((sign * D_SYMMETRIC) * (head + head.mT))

    def newton_gradient(self, a: Element, h: SymmetricOperator) -> Element:
        """Return the gradient in the coordinates of ``1/2 (tr(H tau) - log det tau)``.

        It takes r products with H, and the diagonal of H.
        """
        root, noise, loadings = a
        pulled = noise * h.apply(noise * loadings) - divide(divide(loadings.mT, root, True), root, False).mT
        stretch = noise.square() * (h.diagonal() - self.inverse_diagonal(a))
        return self.scale((pulled @ loadings.mT, stretch, pulled))

    def reach(self, eta: Element) -> Tensor:
        """Return the norm of the 2 x 2 matrix of bounds on the blocks' norms.

        See ``BlockTriangular.norm_estimate``.
        """
        dense = Dense(self.rank)
        head = D_DIAGONAL * dense.norm_bound((eta[0],))
        stretch = D_DIAGONAL * eta[1].abs().amax(-1)
        shift = D_COUPLING * dense.norm_bound((eta[2] @ eta[2].mT,)).sqrt()
        return torch.hypot(head + stretch, shift) + torch.hypot(head - stretch, shift)

    def stretch(self, eta: Element) -> Tensor:
        return self._joint.stretch(eta)


def _refuse_inner(group: Group, left: bool) -> None:
    if left:
        raise ValueError(f"factor='inner' is not defined for {group}: A^T A is not low rank plus diagonal; use 'outer'")


# ---------------------------------------------------------------------- the r x r matrices
def plus_identity(root: Tensor) -> Tensor:
    return root + torch.eye(root.shape[-1], dtype=root.dtype, device=root.device)


def divide(rows: Tensor, lower: Tensor, transpose: bool) -> Tensor:
    """Return ``rows L^-T`` with ``transpose``, else ``rows L^-1``, for a triangular matrix L."""
    divisor = widen(lower.mT if transpose else lower)
    return torch.linalg.solve_triangular(divisor, widen(rows), upper=transpose, left=False).to(rows.dtype)


def _with_root(noise: Tensor, loadings: Tensor) -> Element:
    return _root_of(_gram(loadings)).to(loadings.dtype), noise, loadings


def _gram(loadings: Tensor) -> Tensor:
    """Return ``U U^T`` in float64: what float32 would lose of a large one can be more than the identity beside it."""
    parts = (loadings[..., part].double() for part in feature_slices(loadings.shape[-1]))
    return torch.stack([part @ part.mT for part in parts]).sum(0)


def _root_of(gram: Tensor) -> Tensor:
    """Return the Cholesky factor of ``I + gram``."""
    return torch.linalg.cholesky_ex(plus_identity(gram)).L


def _gradient_of_gram(root: Tensor, gradient: Tensor) -> Tensor:
    """Return ``M + M^T``, where ``M`` is the gradient in ``K K^T``, from the gradient in the Cholesky factor K."""
    wide = widen(root)
    inner = (wide.mT @ widen(gradient).tril()).tril()
    inner = inner + inner.tril(-1).mT
    return divide(divide(inner, wide, False).mT, wide, False).to(root.dtype)


def feature_slices(k: int) -> Iterator[slice]:
    return (slice(first, min(first + COLUMNS, k)) for first in range(0, k, COLUMNS))
