"""Centre and scale of data, as far as a structure is invariant under them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..groups import Affine, Group
from ..manifolds import Gaussian

Array = NDArray[Any]


@dataclass
class Units:
    """``z = (x - centre) / scale``.

    The Gaussian ``N(centre, Diag(scale)^2)`` has the affine map from z to x as its frame, so that a product with that
    frame turns a Gaussian of z into that of x: exactly, and within the structure.
    """

    centre: Array
    scale: Array
    constant: Array
    """Which features are, up to rounding."""

    @classmethod
    def of(cls, data: Array, weights: Array, group: Group) -> Units:
        """Return the units of rows whose weights sum to one."""
        centre = weights @ data
        spread = np.sqrt(weights @ (data - centre) ** 2)
        constant = spread <= 10 * np.finfo(np.float64).eps * np.abs(data).max(0)
        wanted = torch.from_numpy(np.where(constant, 1, spread))
        # What the structure holds of that diagonal: all of it, or a common scale (Toeplitz).
        scale = group.matvec(group.from_diagonal(wanted), torch.ones_like(wanted))
        return cls(centre, scale.numpy(), constant)

    @property
    def log_volume(self) -> float:
        return float(np.log(self.scale).sum())

    def standardize(self, data: Array) -> Array:
        return (data - self.centre) / self.scale

    def into(self, components: Gaussian) -> None:
        """Convert components from the units of the data to these, in place."""
        self._change(components, inverse=True)

    def out_of(self, components: Gaussian) -> None:
        """Convert components from these units to those of the data, in place."""
        self._change(components, inverse=False)

    @torch.no_grad()
    def _change(self, components: Gaussian, inverse: bool) -> None:
        group = components.group
        if isinstance(group, Affine):
            roots = torch.from_numpy(self.scale if components.form == "covariance" else 1 / self.scale)
            centre = torch.from_numpy(self.centre).expand(*components.batch_shape, -1)
            units = group.join(group.linear.from_diagonal(roots.expand_as(centre).contiguous()), centre)
            element = (group.ldiv if inverse else group.mul)(units, components.element())
        else:  # low rank: loadings are in units of the noise, which alone has a scale
            root, noise, loadings, mean = components.element()
            centre, scale = torch.from_numpy(self.centre), torch.from_numpy(self.scale)
            mean = (mean - centre) / scale if inverse else centre + scale * mean
            grows = inverse == (components.form == "precision")
            element = (root, noise * scale if grows else noise / scale, loadings, mean)
        components.frame.copy_(group.pack(element))
