"""Parts of ``A A^T`` and of its inverse, rows and columns at the same positions, in a structure of their own.

A part of ``A A^T`` is the covariance of some coordinates of a Gaussian, a part of the inverse their precision given the
others. Each function answers None where the part has no structure that we know.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..linalg import widen
from .base import Element, Group
from .block_diagonal import BlockDiagonal
from .block_triangular import BlockTriangular
from .dense import Dense
from .diagonal import Diagonal
from .low_rank import LowRank
from .toeplitz import Toeplitz
from .triangular import Triangular

Factor = tuple[Group, Element]


def lower_factor(rows: Tensor) -> Tensor:
    """Return the lower triangular L with ``L L^T = X X^T``, for rows X that are no more numerous than they are long.

    It is from the QR decomposition: the square of X, which has the square of its condition number, is not formed.
    """
    return torch.linalg.qr(widen(rows).mT).R.mT.to(rows.dtype)


def is_whole(where: Tensor, k: int) -> bool:
    """Return whether the positions are 0, 1, ..., k - 1."""
    return len(where) == k and _follow_each_other(where) and int(where[0]) == 0


def _follow_each_other(where: Tensor) -> bool:
    return torch.equal(where, where[0] + torch.arange(len(where), device=where.device))


def _begins(where: Tensor, k: int, at_end: bool) -> bool:
    """Return whether the positions are the first ones, or with ``at_end`` the last ones, in order."""
    return int(where[0]) == (k - len(where) if at_end else 0) and _follow_each_other(where)


def _triangular(lower: Tensor) -> Factor:
    group = Triangular(lower.shape[-1])
    return group, group.from_dense(lower)


# ---------------------------------------------------------------------- parts of A A^T
def part_of_square(group: Group, a: Element, where: Tensor) -> Factor | None:
    """Return B in a group with ``B B^T = (A A^T)[where, where]``."""
    closed = closed_part(group, a, where)
    if closed is not None:
        return closed
    if isinstance(group, Dense):
        return _triangular(lower_factor(a[0][..., where, :]))
    if isinstance(group, Triangular):
        return _triangular(lower_factor(group.to_dense(a)[..., where, :]))
    if isinstance(group, BlockDiagonal):
        return _part_of_blocks(group, a, where)
    if isinstance(group, LowRank):
        loadings, noise = group.covariance_factors(a)
        return _low_rank(loadings[..., where, :], noise[..., where])
    if isinstance(group, BlockTriangular):
        return _part_of_block_triangular(group, a, where)
    return None


def closed_part(group: Group, a: Element, where: Tensor) -> Factor | None:
    """Return ``A[where, where]`` if those rows of A are zero elsewhere.

    Its square is then the part of ``A A^T``.
    """
    m = len(where)
    if is_whole(where, group.k):
        return group, a
    if type(group) is Diagonal:
        return Diagonal(m), (a[0][..., where],)
    if isinstance(group, Triangular) and _begins(where, group.k, group.upper):
        part = Triangular(m, group.upper)
        return part, part.from_dense(group.to_dense(a)[..., where[0] : where[-1] + 1, where[0] : where[-1] + 1])
    if isinstance(group, Toeplitz) and _begins(where, group.k, group.upper):
        return Toeplitz(m, group.upper), (a[0][..., :m],)
    if isinstance(group, BlockDiagonal) and _are_whole_blocks(group, where):
        return _part_of_blocks(group, a, where)
    return _closed_part_of_block_triangular(group, a, where) if isinstance(group, BlockTriangular) else None


def _closed_part_of_block_triangular(group: BlockTriangular, a: Element, where: Tensor) -> Factor | None:
    """Return a closed part of the source alone, or the whole source and a closed part of the target."""
    split = _split(group, a, where)
    if split is None:
        return None
    (in_source, in_target), (a_s, a_t, coupling) = split
    if not len(in_target):
        return closed_part(group.source, a_s, in_source)
    target = closed_part(group.target, a_t, in_target) if is_whole(in_source, group.source.k) else None
    if target is None:
        return None
    return _joined(group, (group.source, a_s), target, coupling[..., in_target, :])


def _joined(group: BlockTriangular, source: Factor, target: Factor, coupling: Tensor) -> Factor:
    (first, a), (rest, b) = (target, source) if group.upper else (source, target)
    return BlockTriangular((first, rest), group.upper), (*a, *b, coupling)


def _low_rank(loadings: Tensor, noise: Tensor) -> Factor:
    """Return the factor of ``B B^T + Diag(c)^2``, dense where the rank is not below the size."""
    m, rank = loadings.shape[-2:]
    if rank < m:
        low = LowRank(m, rank)
        return low, low.element(loadings, noise)
    return _triangular(lower_factor(torch.cat([torch.diag_embed(noise), loadings], -1)))


def _are_whole_blocks(group: BlockDiagonal, where: Tensor) -> bool:
    blocks, counts = torch.unique_consecutive(where // group.block, return_counts=True)
    sizes = (group.k - group.block * blocks).clamp(max=group.block)
    return torch.equal(counts, sizes) and bool((where.diff() > 0).all())


def _part_of_blocks(group: BlockDiagonal, a: Element, where: Tensor) -> Factor | None:
    """Return a part with equally many coordinates of each block, and as many or fewer of the last one."""
    blocks, counts = torch.unique_consecutive(where // group.block, return_counts=True)
    size, stacked, local = int(counts[0]), a[0].shape[-3], where % group.block
    fit = bool((blocks.diff() > 0).all()) and bool((counts[:-1] == size).all()) and int(counts[-1]) <= size
    if not fit:
        return None
    n = int(((blocks < stacked) & (counts == size)).sum())  # the others are at most one, at the end
    stack = _square_factor(a[0][..., blocks[:n, None], local[: n * size].view(n, size), :])
    if n == len(blocks):
        return BlockDiagonal(len(where), size), (stack,)
    index = int(blocks[-1])
    last = _square_factor((a[0][..., index, :, :] if index < stacked else a[1])[..., local[n * size :], :])
    if last.shape[-1] == size:
        return BlockDiagonal(len(where), size), (torch.cat([stack, last.unsqueeze(-3)], -3),)
    return BlockDiagonal(len(where), size), (stack, last)


def _square_factor(rows: Tensor) -> Tensor:
    """Return a square X as it is, and L with ``L L^T = X X^T`` for another."""
    return rows if rows.shape[-2] == rows.shape[-1] else lower_factor(rows)


def _split(
    group: BlockTriangular, a: Element, where: Tensor
) -> tuple[tuple[Tensor, Tensor], tuple[Element, Element, Tensor]] | None:
    """Return the positions in source and target, and the parts of A; None for positions that are not in order."""
    cut = group.first.k
    count = int((where < cut).sum())
    first, rest = where[:count], where[count:] - cut
    if not bool((first < cut).all()):
        return None
    return (rest, first) if group.upper else (first, rest), group._open(a)


def _part_of_block_triangular(group: BlockTriangular, a: Element, where: Tensor) -> Factor | None:
    """Return the part for positions i of the source and j of the target.

    Let ``A = [[S, 0], [C, T]]`` (source, then target). If the rows i of S are zero elsewhere, the part is the square of
    ``[[S_i, 0, 0], [C_ji, T_j, C_jo]]`` with the coupling to what is left out of the source, ``C_jo``. The target takes
    that up, if its structure can.
    """
    split = _split(group, a, where)
    if split is None:
        return None
    (in_source, in_target), (a_s, a_t, coupling) = split
    if not len(in_target):
        return part_of_square(group.source, a_s, in_source)
    coupling = coupling[..., in_target, :]
    target = part_of_square(group.target, a_t, in_target)
    if not len(in_source):
        return None if target is None else _plus_low_rank(*target, coupling)
    source = closed_part(group.source, a_s, in_source)
    if source is None or target is None:
        return None
    left_out = torch.ones(group.source.k, dtype=torch.bool, device=where.device).index_fill(0, in_source, False)
    target = _plus_low_rank(*target, coupling[..., left_out])
    if target is None or not target[0].is_algebra:
        return None
    return _joined(group, source, target, coupling[..., in_source])


def _plus_low_rank(group: Group, a: Element, columns: Tensor) -> Factor | None:
    """Return B with ``B B^T = A A^T + U U^T``."""
    if not columns.shape[-1]:
        return group, a
    if isinstance(group, Diagonal):
        return _low_rank(columns, a[0])
    if isinstance(group, (Dense, Triangular)):
        return _triangular(lower_factor(torch.cat([group.to_dense(a), columns], -1)))
    return None


# ---------------------------------------------------------------------- parts of (A A^T)^-1
def part_of_inverse(group: Group, a: Element, where: Tensor) -> tuple[Group, Element, bool] | None:
    """Return a group, its element B, and whether ``(A A^T)^-1[where, where]`` is ``(B B^T)^-1``.

    If not, it is ``B B^T``. Rows of ``A^-T`` are columns of ``A^-1``: where those of A are zero elsewhere, nothing is
    inverted.
    """
    if isinstance(group, LowRank):
        return *_part_of_low_rank_inverse(group, a, where), True
    transposed = closed_part(group.transposed, group.transpose(a), where)
    if transposed is not None:
        part, b = transposed
        return part.transposed, part.transpose(b), True
    if not isinstance(group, (BlockDiagonal, BlockTriangular)):
        return None
    root = group.transposed, group.transpose(group.ldiv(a, group.identity_like(a)))
    outer = part_of_square(*root, where)
    return None if outer is None else (*outer, False)


def _part_of_low_rank_inverse(group: LowRank, a: Element, where: Tensor) -> Factor:
    """Return the factor of the inverse of ``tau^-1[i, i]``.

    That is ``B_i M B_i^T + Diag(c_i)^2`` with ``M = (I + B_o^T Diag(c_o)^-2 B_o)^-1``. M is the covariance of the
    latent factors given the coordinates o that are left out.
    """
    loadings, noise = group.covariance_factors(a)
    left_out = torch.ones(group.k, dtype=torch.bool, device=where.device).index_fill(0, where, False)
    others = loadings[..., left_out, :] / noise[..., left_out].unsqueeze(-1)
    eye = torch.eye(group.rank, dtype=others.dtype, device=others.device).expand(*others.shape[:-2], -1, -1)
    root = widen(lower_factor(torch.cat([eye, others.mT], -1)))  # root root^T = M^-1
    turned = torch.linalg.solve_triangular(root, widen(loadings[..., where, :]).mT, upper=False).mT
    return _low_rank(turned.to(noise.dtype), noise[..., where])
