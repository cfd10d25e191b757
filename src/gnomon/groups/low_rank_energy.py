"""The energy of a Gaussian whose covariance is low rank plus diagonal, and its gradient, without autograd."""

from __future__ import annotations

import math
from functools import cached_property

import torch
from torch import Tensor

from .affine import LowRankAffine
from .low_rank import D_COUPLING, D_DIAGONAL, D_SYMMETRIC, divide, feature_slices, plus_identity


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
        count = math.prod(self._shape[: len(self._shape) - self._mean.ndim])
        self._x = x.expand(self._shape).reshape(count, *self._mean.shape).movedim(0, -2)

    def _deviations(self, part: slice) -> Tensor:
        """Return y for some of the features."""
        return (self._x[..., part] - self._mean[..., part].unsqueeze(-2)).mul_(self._units[..., part].unsqueeze(-2))

    @cached_property
    def _scores(self) -> Tensor:
        """``U y`` as rows."""
        terms = [self._deviations(part) @ self._loadings[..., part].mT for part in feature_slices(self._linear.k)]
        return torch.stack(terms).sum(0)

    def value(self) -> Tensor:
        """Return the energies."""
        eye_plus_root = plus_identity(self._root)
        if self._upper:  # A^-1 (x - mean), or A^T (x - mean)
            factors = -divide(divide(self._scores, self._root, True), eye_plus_root, False)
        else:
            factors = divide(self._scores, eye_plus_root, False)
        quadratic = torch.zeros_like(self._scores[..., 0])
        for part in feature_slices(self._linear.k):
            standardized = self._deviations(part).add_(factors @ self._loadings[..., part])
            quadratic += torch.linalg.vecdot(standardized, standardized)
        logdet = (2 if self._upper else -2) * self._linear.logabsdet(self._factor)
        return (quadratic + logdet.unsqueeze(-1)).movedim(-1, 0).reshape(self._shape[:-1])

    def gradient(self, weights: Tensor) -> Tensor:
        """Return the packed gradient in the coordinates of the weighted sum of the energies."""
        root, upper, rank, batch = self._root, self._upper, self._linear.rank, self._mean.shape[:-1]
        w = 2 * weights.reshape(self._x.shape[-2], *batch).movedim(0, -1).unsqueeze(-1)
        total = w.sum(-2, keepdim=True)
        eye = torch.eye(rank, dtype=root.dtype, device=root.device).expand_as(root)
        inverse = divide(divide(eye, root, True), root, False)
        scores = self._scores @ inverse if upper else self._scores  # U b
        weighted = (w * scores).mT
        # The mean's coordinates: those of the root are A^T g and -A^-1 g, and v U^T is known.
        turned = weighted.sum(-1, keepdim=True).mT
        turned = divide(turned if upper else -turned @ root, plus_identity(root), False)
        mixing = torch.cat([D_COUPLING * total * inverse, scores, turned], -2)
        result = self._noise.new_empty(*batch, self._group.numel)
        head, stretch, shift, mean = self._group.unpack(result)
        # In precision form both the step and the gradient have the opposite sign.
        for part in feature_slices(self._linear.k):
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
