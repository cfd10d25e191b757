"""Rosenbrock's function in many dimensions."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from .base import Problem


class Rosenbrock(Problem):
    """Two functions of that name in d dimensions, both with the minimum 0 at ``x = (1, ..., 1)`` (Fig. d).

    - ``form="chained"``, the classical one: ``sum_i 100 (x_{i+1} - x_i^2)^2 + (1 - x_i)^2``. It is not convex.
    - ``form="mild"``: ``1/d sum_i 100 (x_{i+1} - x_i)^2 + (x_i - 1)^2``, a quadratic of condition number about 400.

    A function of a plain vector: ``problem(x)``. The Hessian is tridiagonal; ``hessian_diagonal`` gives its diagonal.
    """

    minimum = 0.0

    def __init__(
        self,
        d: int = 1000,
        form: Literal["chained", "mild"] = "chained",
        *,
        dtype: torch.dtype = torch.float64,
        device: torch.device | str | None = None,
    ) -> None:
        if form not in ("chained", "mild"):
            raise ValueError(f"form must be 'chained' or 'mild', got {form!r}")
        if d < 2:
            raise ValueError(f"d must be at least 2, got {d!r}")
        self.d, self.form = d, form
        self.minimizer = torch.ones(d, dtype=dtype, device=device)

    def start(self) -> nn.Parameter:
        """Return the classical start: -1.2, 1, -1.2, 1, ..."""
        x = self.minimizer.clone()
        x[::2] = -1.2
        return nn.Parameter(x)

    def __call__(self, point: Tensor) -> Tensor:
        """Return the function's value."""
        x, y = point[:-1], point[1:]
        if self.form == "mild":
            return (100 * (y - x).square() + (x - 1).square()).sum() / self.d
        return (100 * (y - x * x).square() + (1 - x).square()).sum()

    def gradient(self, point: Tensor) -> Tensor:
        """Return the gradient."""
        x, y = point[:-1], point[1:]
        result = torch.zeros_like(point)
        if self.form == "mild":
            result[:-1] += (200 * (x - y) + 2 * (x - 1)) / self.d
            result[1:] += 200 * (y - x) / self.d
        else:
            result[:-1] += 400 * x * (x * x - y) + 2 * (x - 1)
            result[1:] += 200 * (y - x * x)
        return result

    def hessian_diagonal(self, point: Tensor) -> Tensor:
        """Return the diagonal of the Hessian."""
        x, y = point[:-1], point[1:]
        result = torch.zeros_like(point)
        if self.form == "mild":
            result[:-1] += 202 / self.d
            result[1:] += 200 / self.d
        else:
            result[:-1] += 1200 * x * x - 400 * y + 2
            result[1:] += 200
        return result
