"""The structures of Gaussians: a factor of the covariance or precision, beside the mean."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .base import Element, Group
from .block_triangular import BlockTriangular
from .diagonal import Diagonal, Fixed
from .low_rank import D_COUPLING, D_DIAGONAL, LowRank
from .marginal import Marginal, undefined


class Affine(BlockTriangular):
    """``[[L, mu], [0, 1]]`` with ``L`` in a group: the Gaussian family (Sec. sngd_special).

    Its exponential map is that of Eq. gnormal_coord2, ``Exp(N) = [[Exp(N_L), n_mu], [0, 1]]``, which
    agrees with the matrix exponential (Eq. gnormal_coord1) to first order and leaves the mean's step linear. With
    ``upper=False`` the vector is the last row: the form of a Gaussian's precision.
    """

    has_matrix_exp = False

    def __init__(self, linear: Group, upper: bool = True) -> None:
        self.linear = linear
        super().__init__((linear, Fixed(1)), upper)

    def _arguments(self) -> str:
        return f"{self.linear!r}, upper={self.upper}"

    def join(self, factor: Element, mean: Tensor) -> Element:
        """Return the element of a Gaussian with this factor and mean."""
        vector = mean if self.upper else -self.linear.rmatvec(factor, mean)
        return (*factor, torch.ones_like(mean[..., :1]), vector.unsqueeze(-1 if self.upper else -2))

    def split(self, a: Element) -> tuple[Element, Tensor]:
        """Return the factor L and the vector, which is the mean, or ``-L^T mean`` with ``upper=False``."""
        return a[: len(self.linear.shapes)], a[-1].squeeze(-1 if self.upper else -2)

    def mean(self, a: Element) -> Tensor:
        factor, vector = self.split(a)
        return vector if self.upper else -self.linear.rsolve(factor, vector)

    def change_of_units(self, eta: Element, order: int | None) -> Tensor:
        """Return the factors by which a step changes the units of the whitened mean's coordinates.

        With ``L <- L E`` gradients ``L^T g`` become ``E^T L^T g``: the factors are the lengths of E's columns. In
        precision form ``P^-1 g`` becomes ``E P^-1 g`` with the inverse E of what P is multiplied by, and they are the
        lengths of its rows.
        """
        linear = self.linear
        e = linear.exp(linear.scale(eta[: len(linear.shapes)]), order)
        squares = tuple(block.square() for block in e)
        ones = torch.ones_like(eta[-1].mT if self.upper else eta[-1])
        factors = linear.apply(squares, ones, transpose=self.upper).sqrt()
        return factors.mT if self.upper else factors

    @property
    def transposed(self) -> Group:
        return Affine(self.linear.transposed, not self.upper)

    def stretch(self, eta: Element) -> Tensor:
        """Return the stretch of the factor or the shift of the whitened mean, whichever is greater.

        The shift is the largest number of standard deviations by which a coordinate moves. As a length of the mean's
        step the largest coordinate does not grow with their number.
        """
        return torch.maximum(self.linear.stretch(eta[: len(self.linear.shapes)]), self._shift(eta))

    def quick_stretch(self, eta: Element) -> Tensor | None:
        linear = self.linear.quick_stretch(eta[: len(self.linear.shapes)])
        return None if linear is None else torch.maximum(linear, self._shift(eta))

    def _shift(self, eta: Element) -> Tensor:
        """Return by how many standard deviations a coordinate of the whitened mean moves at most."""
        return math.sqrt(0.5) * eta[-1].abs().amax((-2, -1))

    def exp(self, n: Element, order: int | None = None) -> Element:
        cut = len(self.linear.shapes)
        return (*self.linear.exp(n[:cut], order), torch.ones_like(n[cut]), n[-1])

    def move(self, a: Element, n: Element, order: int | None = None, left: bool = False) -> Element:
        e = self.exp(n, order)
        return self.mul(e, a) if left else self.mul(a, e)


class LowRankAffine(Marginal):
    """The mean and the factor of a Gaussian whose covariance (or precision, ``upper=False``) is low rank plus diagonal.

    Blocks: those of the factor A, and the mean. A step moves the mean by ``A eta / sqrt(2)``, in precision form by
    ``A^-T eta / sqrt(2)``: to first order as in :class:`Affine`, and so along the natural gradient.
    """

    apply: Any = undefined

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
        """Return the factor and the vector, which is the mean or, in precision form, ``-A^T mean``."""
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
        """Return the same as :meth:`Affine.change_of_units`, from the noise alone.

        Loadings mix the coordinates, but hardly change their scale.
        """
        return Diagonal(self.linear.k).exp((D_DIAGONAL * eta[1],), order)[0]

    def pull_back_shift(self, factor: Element, gradient: Tensor) -> Tensor:
        """Return the gradient in the mean's coordinates, but for their scale, from the gradient in the mean."""
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
        """Return the reach of a step in which the mean is one more coupling of the joint model."""
        linear, shift = self.linear.reach(eta[:-1]), torch.linalg.vector_norm(eta[-1], dim=-1)
        return torch.hypot(linear, 2 * D_COUPLING * shift)

    def stretch(self, eta: Element) -> Tensor:
        """Return the greater of the same two lengths as :meth:`Affine.stretch`."""
        return torch.maximum(self.linear.stretch(eta[:-1]), D_COUPLING * eta[-1].abs().amax(-1))

    def energy(self, a: Element, x: Tensor) -> Tensor:
        """Return ``(x - mean)^T Sigma^-1 (x - mean) + log det Sigma`` for vectors ``(*sample, *batch, k)``."""
        standardize = self.linear.solve if self.upper else self.linear.rmatvec
        return standardize(a[:-1], x - a[-1]).square().sum(-1) + (2 if self.upper else -2) * self.logabsdet(a)
