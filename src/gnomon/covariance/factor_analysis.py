"""Factor analysis by maximum likelihood."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import ClassNamePrefixFeaturesOutMixin, TransformerMixin
from torch import Tensor

from ..groups import LowRank
from ..groups.base import positive_size
from ..groups.low_rank import plus_identity
from ..manifolds import Gaussian
from .base import GaussianEstimator
from .model import Model, StructureModel
from .selection import Trial

Array = NDArray[Any]


class FactorAnalysis(ClassNamePrefixFeaturesOutMixin, TransformerMixin, GaussianEstimator):  # type: ignore[misc]
    """``x = mu + B z + e`` with latent factors ``z ~ N(0, I)`` and noise ``e ~ N(0, Diag(c^2))``.

    So the covariance is ``B B^T + Diag(c^2)``. The maximum of the likelihood is found by Newton's method in the noise
    variances (the loadings B have a closed form for them: Joereskog 1967), and for more than 2000 features by
    :class:`gnomon.optim.LBFGS`, with no matrix of features times features.

    Args:
        n_components: the number of factors, below that of the features.
        shrinkage, target, assume_centered, cv, random_state: as in
            :class:`~gnomon.covariance.StructuredCovariance`; without shrinkage it is maximum likelihood, as in
            :class:`sklearn.decomposition.FactorAnalysis`.

    Attributes:
        components_: the loadings ``B^T``, a factor a row. Their order is that of ``B^T Diag(c^2)^-1 B``, whose
            off-diagonal is zero; the largest loading of a factor is positive.
        noise_variance_: ``c^2``.
        mean_: ``mu``.

    The other attributes are those of :class:`~gnomon.covariance.base.GaussianEstimator`.
    """

    def __init__(
        self,
        n_components: int = 1,
        *,
        shrinkage: float | str = 0.0,
        target: str = "auto",
        assume_centered: bool = False,
        cv: Any = 5,
        random_state: Any = 0,
    ) -> None:
        self.n_components = n_components
        self.shrinkage = shrinkage
        self.target = target
        self.assume_centered = assume_centered
        self.cv = cv
        self.random_state = random_state

    def fit(self, X: ArrayLike, y: object = None, sample_weight: ArrayLike | None = None) -> FactorAnalysis:
        """Fit to the rows of ``X``, in which NaN is a missing value; ``y`` is ignored."""
        positive_size("n_components", self.n_components)
        fixed = self._fixed_shrinkage()
        sample = self._read(X, sample_weight)
        trial = self._choose(self._folds(sample) if fixed is None else None, self._family(sample.k))
        self._keep(sample, trial)
        self._describe(trial)
        return self

    def _family(self, k: int) -> Model:
        rank = positive_size("n_components", self.n_components)
        if rank >= k:
            raise ValueError(
                f"n_components={rank} must be below the number of features, n_features={k}; as many factors as "
                "features are the full covariance, StructuredCovariance('dense')"
            )
        return StructureModel(LowRank(k, rank), "covariance", f"lowrank:{rank}")

    def _describe(self, trial: Trial) -> None:
        _turn(self.gaussian_)
        loadings, noise = _factors(self.gaussian_)
        self.components_: Array = loadings.mT.numpy().copy()
        self.noise_variance_: Array = noise.square().numpy()
        self.mean_ = self.location_

    def transform(self, X: ArrayLike) -> Array:
        """Return the expected factors given what is observed of each row.

        These are ``(I + B^T C B)^-1 B^T C (x - mu)`` with C = c^-2.
        """
        rows = self._rows(X)
        loadings, noise = _factors(self.gaussian_)
        scaled = loadings / noise.unsqueeze(-1)
        deviations = ((rows.double() - self.gaussian_.loc.detach()) / noise).nan_to_num(nan=0.0)
        observed = (~rows.isnan()).double()
        products = (scaled.unsqueeze(-1) * scaled.unsqueeze(-2)).flatten(1)
        matrices = plus_identity((observed @ products).unflatten(-1, (scaled.shape[1], -1)))
        return torch.linalg.solve(matrices, deviations @ scaled).numpy()

    @property
    def _n_features_out(self) -> int:
        return len(self.components_)


def _factors(gaussian: Gaussian) -> tuple[Tensor, Tensor]:
    """Return B and c."""
    group, factor, _ = gaussian._parts()
    assert isinstance(group, LowRank)
    return tuple(part.detach() for part in group.covariance_factors(factor))  # type: ignore[return-value]


@torch.no_grad()
def _turn(gaussian: Gaussian) -> None:
    """Rotate the loadings so that ``B^T Diag(c^2)^-1 B`` is diagonal, largest first, with definite signs."""
    group = gaussian.structure
    assert isinstance(group, LowRank)
    loadings, noise = _factors(gaussian)
    scaled = loadings / noise.unsqueeze(-1)
    _, rotation = torch.linalg.eigh(scaled.mT @ scaled)
    turned = loadings @ rotation.flip(1)
    largest = turned.gather(0, turned.abs().argmax(0, keepdim=True))
    turned = turned * torch.where(largest < 0, -1.0, 1.0)
    element = group.element(turned, noise)
    gaussian.frame.copy_(gaussian.group.pack(gaussian.affine.join(element, gaussian.loc.detach())))
