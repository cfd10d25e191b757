"""Maximum likelihood of a structure from second moments, in closed form."""

from __future__ import annotations

from collections.abc import Callable
from functools import singledispatch
from typing import Literal

import torch
from torch import Tensor

from .base import Element, Group
from .block_diagonal import BlockDiagonal
from .block_triangular import BlockTriangular
from .dense import Dense
from .diagonal import Diagonal, Fixed
from .low_rank import LowRank
from .moments import Moments, RowMoments, SingularMomentsError, cholesky
from .toeplitz import Toeplitz
from .triangular import Triangular

Form = Literal["covariance", "precision"]
Solver = Callable[[Group, Moments, Form], Element]
"""Finds by iteration what has no closed form."""


def likeliest(group: Group, moments: Moments, form: Form, solver: Solver) -> Element:
    """Return the factor that minimizes ``log det Sigma + tr(Sigma^-1 S)``.

    In covariance form ``Sigma = A A^T``, and in precision form ``Sigma^-1 = A A^T``. A block-triangular structure is a
    regression. In covariance form the target is regressed on the source, whose own distribution has the source's
    structure, and what is left has the target's. In precision form the source is regressed on the target. The slopes
    are free, so that they are those of least squares, and each part is a problem of its own. Parts without a closed
    form are left to the solver.

    Raises:
        SingularMomentsError: where the likelihood has no maximum.
    """
    return _likeliest(group, moments, form, solver)


def has_closed_form(group: Group, form: Form) -> bool:
    """Return whether :func:`likeliest` needs no solver."""
    if isinstance(group, BlockTriangular):
        return all(has_closed_form(block, form) for block in group.blocks)
    if isinstance(group, LowRank):
        return True  # not a formula, but Newton's method in few iterations
    return type(group) in (Dense, Triangular, Diagonal, Fixed, BlockDiagonal, Toeplitz)


@singledispatch
def _likeliest(group: Group, moments: Moments, form: Form, solver: Solver) -> Element:
    return solver(group, moments, form)


def _root(matrix: Tensor, form: Form) -> Tensor:
    """Return A with ``A A^T`` equal to the matrix or to its inverse."""
    root = cholesky(matrix)
    if form == "covariance":
        return root
    eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device).expand_as(matrix)
    return torch.linalg.solve_triangular(root.mT, eye, upper=True)


@_likeliest.register
def _(group: Dense, moments: Moments, form: Form, solver: Solver) -> Element:
    return (_root(moments.dense(), form),)


@_likeliest.register
def _(group: Triangular, moments: Moments, form: Form, solver: Solver) -> Element:
    matrix = moments.dense()
    root = cholesky(matrix)
    return group.factor(matrix if form == "covariance" else torch.cholesky_inverse(root))


@_likeliest.register
def _(group: Diagonal, moments: Moments, form: Form, solver: Solver) -> Element:
    variances = moments.diagonal()
    if not bool((variances > 0).all()):
        raise SingularMomentsError("a feature has no variance")
    return (variances.sqrt() if form == "covariance" else variances.rsqrt(),)


@_likeliest.register
def _(group: Fixed, moments: Moments, form: Form, solver: Solver) -> Element:
    return (torch.ones_like(moments.diagonal()),)


@_likeliest.register
def _(group: BlockDiagonal, moments: Moments, form: Form, solver: Solver) -> Element:
    count, last = divmod(group.k, group.block)
    blocks = (_root(moments.blocks(group.block, count), form),)
    return (*blocks, _root(moments.part(group.k - last, group.k).dense(), form)) if last else blocks


@_likeliest.register
def _(group: BlockTriangular, moments: Moments, form: Form, solver: Solver) -> Element:
    cut = group.first.k
    first, rest = slice(0, cut), slice(cut, group.k)
    source, target = (rest, first) if group.upper else (first, rest)
    if form == "covariance":
        slopes, left = moments.regress(target, source)
        a_source = _likeliest(group.source, moments.part(source.start, source.stop), form, solver)
        a_target = _likeliest(group.target, left, form, solver)
        coupling = group.source.apply(a_source, slopes, transpose=True)
    else:
        slopes, left = moments.regress(source, target)
        a_source = _likeliest(group.source, left, form, solver)
        a_target = _likeliest(group.target, moments.part(target.start, target.stop), form, solver)
        coupling = -group.source.apply(a_source, slopes.mT, transpose=True)
    return group._close(a_source, a_target, coupling)


@_likeliest.register
def _(group: Toeplitz, moments: Moments, form: Form, solver: Solver) -> Element:
    """Return the factor from ``M = A^-1`` (of a precision, ``M = A^T``), which whitens the data.

    Its terms m minimize ``tr(M S M^T) - 2 k log m_0``, where the trace is ``m^T Q m``. So m is
    ``sqrt(k / v_0) v`` with ``Q v = e_0``.
    """
    if isinstance(moments, RowMoments):  # Q is as large as S
        return solver(group, moments, form)
    matrices = moments.dense()
    # Upper filters are lower ones of the features in reverse order, and so are transposes.
    reverse = group.upper != (form == "precision")
    root = cholesky(_sums_along_diagonals(matrices.flip(-1, -2) if reverse else matrices).flip(-1, -2))
    first = torch.zeros_like(root[..., :1])
    first[..., 0, 0] = 1
    v = torch.cholesky_solve(first, root).squeeze(-1)
    whitening = ((group.k / v[..., :1]).sqrt() * v,)
    return whitening if form == "precision" else group.ldiv(whitening, group.identity_like(whitening))


def _sums_along_diagonals(matrices: Tensor) -> Tensor:
    """Return ``C_ij = sum_t S_(i-t)(j-t)``; in reverse order these are ``Q_ij = tr(Z_i S Z_j^T)`` of shifts Z_i."""
    sums = matrices.clone()
    for row in range(1, matrices.shape[-1]):
        sums[..., row, 1:] += sums[..., row - 1, :-1]
    return sums


@_likeliest.register
def _(group: LowRank, moments: Moments, form: Form, solver: Solver) -> Element:
    matrices = moments.dense()
    if form == "precision":
        cholesky(matrices)  # an error where they are singular
        return group.inverse_factor(matrices)
    if not bool((matrices.diagonal(dim1=-2, dim2=-1) > 0).all()):
        raise SingularMomentsError("a feature has no variance")
    return group.factor(matrices)
