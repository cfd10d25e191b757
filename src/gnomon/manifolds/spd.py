"""Symmetric positive-definite matrices, full and structured."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import riemannian
from ..frames import Chart, Form
from ..groups import Dense, Element, StructureLike
from ..linalg import as_tensor, full_precision, widen
from .init import Init, as_batch_shape, as_group, initial_element
from .point import AtOrigin, Point

# With tau = R R^T, the group operation that gives R x, R^T x, R^-1 x and R^-T x in each form.
_ROOT: dict[Form, str] = {"outer": "matvec", "inner": "rmatvec", "inverse": "rsolve"}
_ROOT_T: dict[Form, str] = {"outer": "rmatvec", "inner": "matvec", "inverse": "solve"}
_INVERSE_ROOT: dict[Form, str] = {"outer": "solve", "inner": "rsolve", "inverse": "rmatvec"}
_INVERSE_ROOT_T: dict[Form, str] = {"outer": "rsolve", "inner": "solve", "inverse": "matvec"}


class SPD(Point):
    """A symmetric positive-definite matrix ``tau`` whose factor lies in a group.

    Args:
        structure: a size ``k`` (the full manifold) or a group from :mod:`gnomon.groups`; with an ``init`` that has a
            size also a name such as ``"lowrank:3"`` (see :func:`gnomon.groups.as_structure`).
        order: truncation of the exponential: 2 (never singular), None (exact) or 1 (only with a bounded step).
        factor: ``"outer"``: ``tau = A A^T``; ``"inner"``: ``tau = A^T A``; ``"inverse"``: ``tau^-1 = A A^T``
            (Eqs. update_coordinate_a, our_update_sgd_full and update_coordinate_b).
        init: a positive scalar, a diagonal or an SPD matrix; the identity unless given.
        project: accept an ``init`` off the submanifold, and start from a point of it nearby (for block structures
            in the outer form the nearest in Kullback-Leibler divergence; other forms fit the inverse of ``init``).
        batch_shape: leading dimensions of independent matrices.

    Vectors are the last dimension of ``x``: shape ``(*sample, *batch_shape, k)``. A learning rate ``beta`` is
    measured in the affine-invariant metric ``tr(tau^-1 u tau^-1 v)``, twice the Fisher-Rao metric of
    N(0, tau): it is a natural-gradient step of ``beta / 2``. Weight decay acts on coordinates that are zero,
    and so does nothing.
    """

    def __init__(
        self,
        structure: StructureLike,
        *,
        order: int | None = 2,
        factor: Form = "outer",
        init: Init = None,
        project: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        batch_shape: Sequence[int] | int = (),
    ) -> None:
        chart = Chart(as_group("structure", structure, init), factor, order)
        element = initial_element(
            chart.group,
            factor,
            init,
            batch_shape=as_batch_shape(batch_shape),
            dtype=dtype,
            device=device,
            project=project,
        )
        super().__init__(chart, element)

    def assign_(self, value: Init, *, project: bool = False) -> SPD:
        """Move to a given matrix, as ``init`` takes it; returns the point itself.

        A matrix that is not on the submanifold is an error, unless ``project`` is set. The state of an optimizer is
        kept, and belongs to where the point was.
        """
        element = initial_element(
            self.group,
            self.chart.form,
            value,
            batch_shape=self.batch_shape,
            dtype=self.dtype,
            device=self.device,
            project=project,
            name="value",
        )
        self._become(element)
        return self

    @property
    def k(self) -> int:
        """The matrix is k x k."""
        return self.group.k

    def forward(self) -> Tensor:
        return self.matrix()

    def factor_matrix(self) -> Tensor:
        """Return the factor ``A``, dense, as a copy."""
        return self.group.to_dense(self.element()).clone()

    def matrix(self) -> Tensor:
        """Return ``tau``, dense. On a large structured point use :meth:`matvec` and its kin instead."""
        if isinstance(self.group, Dense) and self.chart.form != "inverse" and self._at_origin():
            value, pullback, general = self._product, self._pull_back_product, self._moved_product
            return AtOrigin.apply(self.eta, self.frame, value, pullback, general)[0]
        with full_precision(self.frame):
            return self.chart.matrix(self.element())

    # The full manifold at the origin: one product forward and two backward, down to the coordinates.
    def _product(self, frame: Tensor) -> Element:
        return (self.chart.matrix((frame,)),)

    def _pull_back_product(self, frame: Tensor, grads: Element) -> Tensor:
        doubled = grads[0] + grads[0].mT
        return self._pull_back(frame, (doubled @ frame if self.chart.form == "outer" else frame @ doubled,))

    def _moved_product(self, frame: Tensor, eta: Tensor) -> Element:
        return (self.chart.matrix(self._moved(frame, eta)),)

    def _act(self, x: Tensor, *tables: dict[Form, str]) -> Tensor:
        """Apply the operations that the tables name for this form, one after the other."""
        x, element = as_tensor("x", x, self.frame), self.element()
        for table in tables:
            x = getattr(self.group, table[self.chart.form])(element, x)
        return x

    def matvec(self, x: Tensor) -> Tensor:
        """Return ``tau x``."""
        return self._act(x, _ROOT_T, _ROOT)

    def solve(self, x: Tensor) -> Tensor:
        """Return ``tau^-1 x``; with ``factor="inverse"`` it is two products."""
        return self._act(x, _INVERSE_ROOT, _INVERSE_ROOT_T)

    def quad(self, x: Tensor) -> Tensor:
        """Return ``x^T tau x``."""
        return self._act(x, _ROOT_T).square().sum(-1)

    def inv_quad(self, x: Tensor) -> Tensor:
        """Return ``x^T tau^-1 x``."""
        return self._act(x, _INVERSE_ROOT).square().sum(-1)

    def logdet(self) -> Tensor:
        """Return ``log det tau``, of the batch shape."""
        return self._logdet()

    def rsample(self, n: int | Sequence[int] = ()) -> Tensor:
        """Return draws from N(0, tau) of shape ``(*n, *batch_shape, k)``, differentiable in tau."""
        shape = (n,) if isinstance(n, int) else tuple(n)
        noise = torch.randn(*shape, *self.batch_shape, self.k, dtype=self.dtype, device=self.device)
        return self._act(noise, _ROOT)

    @torch.no_grad()
    def sample(self, n: int | Sequence[int] = ()) -> Tensor:
        """Return draws from N(0, tau) of shape ``(*n, *batch_shape, k)``."""
        return self.rsample(n)

    def distance(self, other: SPD | Tensor) -> Tensor:
        """Return the affine-invariant distance on the full manifold to another SPD matrix; dense by nature."""
        other_matrix = other.matrix() if isinstance(other, SPD) else as_tensor("other", other, self.frame)
        return riemannian.distance(widen(self.matrix()), widen(other_matrix)).to(self.dtype)
