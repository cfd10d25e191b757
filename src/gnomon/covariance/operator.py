"""Covariance and precision matrices of fitted Gaussians as linear operators."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse.linalg import LinearOperator

from ..groups import Square
from ..manifolds import Gaussian

Array = NDArray[Any]


class StructuredMatrix(LinearOperator):  # type: ignore[misc]
    """The covariance or the precision of a Gaussian, at the cost of its structure.

    ``matrix @ x`` multiplies vectors (columns) and :meth:`solve` solves with the matrix, both without forming it.
    :meth:`to_dense`, or ``numpy.asarray(matrix)``, makes the k x k array. It is a
    :class:`scipy.sparse.linalg.LinearOperator`, so that for example ``scipy.sparse.linalg.eigsh`` takes it.
    """

    def __init__(self, gaussian: Gaussian, precision: bool, exact: Array | None = None) -> None:
        super().__init__(np.dtype(np.float64), (gaussian.d, gaussian.d))
        self._gaussian, self._precision, self._exact = gaussian, precision, exact

    def _square(self) -> Square:
        """Return the matrix by its factor."""
        group, factor, _ = self._gaussian._parts()
        return Square(group, factor, (self._gaussian.form == "precision") != self._precision)

    @torch.no_grad()
    def _apply(self, columns: Array, inverse: bool = False) -> Array:
        rows = torch.from_numpy(np.array(columns.T, dtype=np.float64, order="C"))
        square = self._square().inverted if inverse else self._square()
        result: Array = square.matvec(rows).numpy().T
        return result

    def _matmat(self, x: Array) -> Array:
        return self._apply(x) if self._exact is None else self._exact @ x

    def _matvec(self, x: Array) -> Array:
        return self._matmat(x.reshape(-1, 1))

    def _adjoint(self) -> StructuredMatrix:
        return self

    _transpose = _adjoint

    def solve(self, x: Any) -> Array:
        """Return the vector, or the columns, that the matrix multiplies to ``x``."""
        columns = np.asarray(x)
        if columns.shape[:1] != self.shape[:1] or columns.ndim > 2:
            raise ValueError(f"x has shape {columns.shape}, expected ({self.shape[0]},) or ({self.shape[0]}, n)")
        return self._apply(columns, inverse=True)

    def logdet(self) -> float:
        """Return the logarithm of the determinant."""
        return (-1 if self._precision else 1) * self._gaussian.logdet().item()

    @torch.no_grad()
    def diagonal(self) -> Array:
        """Return the diagonal, at the cost of the structure."""
        if self._exact is not None:
            return self._exact.diagonal().copy()
        result: Array = self._square().diagonal().numpy().copy()
        return result

    def to_dense(self) -> Array:
        """Return the k x k array."""
        if self._exact is not None:
            return self._exact.copy()
        matrix = self._gaussian.precision() if self._precision else self._gaussian.covariance()
        result: Array = matrix.detach().numpy().copy()
        return result

    def __add__(self, other: Any) -> LinearOperator:
        if not isinstance(other, LinearOperator):
            raise TypeError(f"{self!r}: only operators can be added to it, got {type(other).__name__}")
        return super().__add__(other)

    def __getitem__(self, key: Any) -> Any:
        raise TypeError(f"{self!r}: it has no entries at hand")

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        dense = self.to_dense()
        return dense if dtype is None else dense.astype(dtype)

    def __repr__(self) -> str:
        k = self.shape[0]
        kind = "precision" if self._precision else "covariance"
        factor = "" if self._exact is not None else f", {self._gaussian.form} in {self._gaussian.structure!r}"
        return f"<{k} x {k} {kind}{factor}; numpy.asarray(.) makes it dense>"
