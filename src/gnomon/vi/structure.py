"""From the name of a structure to a group, and the search for globals and locals in a Hessian.

In a hierarchical model the local unknowns are independent given the global ones: the Hessian of the log density has an
arrow, and so has its average over q. At the optimum the precision of q *is* minus that average. So a Gaussian whose
covariance has a lower arrow factor with the globals first loses nothing beside a full one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..groups import (
    STRUCTURE_NAMES,
    Arrow,
    BlockDiagonal,
    BlockTriangular,
    Dense,
    Diagonal,
    Group,
    LowRank,
    Triangular,
    as_structure,
)
from .target import Target


@dataclass(frozen=True)
class Globals:
    """A proposal: given these coordinates, all others are independent. A few products with the Hessian check it."""

    indices: tuple[int, ...]


Structure = str | Group | Globals | Callable[[int], Group]

DEFAULT_RANK = 8
SWEEP = 1024
"""Up to this dimension a sweep takes a product for each coordinate; beyond, random vectors probe for an arrow."""
SMALLEST = 5
"""Below this dimension nothing is gained by a structure."""
LARGEST_BLOCK = 8
"""The largest group of locals that are dependent given the globals."""
WORTHWHILE = 0.75
"""A structure is taken if it has at most this share of a full Gaussian's numbers."""
NEGLIGIBLE = 1e-7
"""Entries of the Hessian below this share of their row's and column's largest are rounding."""
PROBES = 6
MOST_GLOBALS = 64


@dataclass(frozen=True)
class Layout:
    """A group, and which coordinate of the parameters each of its coordinates is; None for the same order.

    ``seen`` tells that the Hessian of the density was seen to have this structure.
    """

    group: Group
    order: Tensor | None = None
    seen: bool = False


NAMED: dict[str, Callable[[int], Group]] = {
    "full": Dense,
    "triangular": Triangular,
    "diagonal": Diagonal,
    "low_rank": lambda dim: LowRank(dim, min(DEFAULT_RANK, dim - 1)) if dim > 1 else Dense(1),
}
SEARCHED = ("auto", "arrow")


def check_structure(structure: Structure, dim: int) -> None:
    """Raise an error for what is no structure of this dimension."""
    if isinstance(structure, str):
        if structure in (*NAMED, *SEARCHED):
            return
        if structure.partition(":")[0] not in STRUCTURE_NAMES:
            names = ", ".join(map(repr, (*SEARCHED, *NAMED)))
            raise ValueError(
                f"structure must be one of {names}, a name such as 'lowrank:4' as elsewhere in the library, a group or "
                f"a function of dim, got {structure!r}"
            )
        structure = as_structure(structure, dim)
    if isinstance(structure, Globals):
        if not all(0 <= i < dim for i in structure.indices) or len(structure.indices) >= dim:
            raise ValueError(f"structure is {structure}, but there are {dim} unknowns")
        return
    if not isinstance(structure, Group):
        if not callable(structure):
            raise TypeError(f"structure must be a name, a group or a function of dim, got {structure!r}")
        structure = structure(dim)
    if structure.k != dim:
        raise ValueError(f"structure is {structure}, of size {structure.k}, but there are {dim} unknowns")


def lay_out(structure: Structure, target: Target, around: Callable[[], Tensor]) -> Layout:
    """Return the group for a structure; ``around`` gives a point for the search, if there is one."""
    if isinstance(structure, Group):
        return Layout(structure)
    if isinstance(structure, Globals):
        found = _verified(target, around(), structure)
        return found if found is not None else lay_out("auto", target, around)
    if not isinstance(structure, str):
        return Layout(structure(target.dim))
    if structure in NAMED:
        return Layout(NAMED[structure](target.dim))
    if structure not in SEARCHED:
        return Layout(as_structure(structure, target.dim))
    only_arrow = structure == "arrow"
    found = None
    if target.dim >= SMALLEST or (only_arrow and target.dim > 1):
        found = search(target, around(), only_arrow)
    if found is not None:
        return found
    if only_arrow:
        raise ValueError(
            "structure='arrow' found no globals and independent locals in the Hessian of log_density; use "
            "structure='auto' or 'full', or pass gnomon.groups.Arrow(dim, rank=r) with the r globals first"
        )
    if target.dim > 2 * SWEEP:
        raise ValueError(
            f"structure='auto' found no arrow among {target.dim} unknowns, and a full covariance of that size is too "
            "large; pass structure='low_rank' or 'diagonal', or a group"
        )
    return Layout(Dense(target.dim))


def search(target: Target, x: Tensor, only_arrow: bool = False) -> Layout | None:
    """Find globals and locals from one sweep of Hessian-vector products at x; return None where there are none."""
    if target.dim > SWEEP:
        return _probe(target, x)
    return from_pattern(couplings(target.hessian(x)), only_arrow)


def couplings(hessian: Tensor) -> Tensor:
    """Return which coordinates a Hessian couples."""
    sizes = hessian.abs()
    scale = sizes.amax(-1).clamp(min=1e-300).sqrt()
    coupled = sizes > NEGLIGIBLE * scale * scale.unsqueeze(-1)
    coupled.fill_diagonal_(False)
    return coupled


def from_pattern(coupled: Tensor, only_arrow: bool = False) -> Layout | None:
    """Find the cheapest arrow: the coordinate with most couplings becomes global, one after the other.

    What remains falls into groups that are independent given the globals. The number of globals is that with the
    fewest numbers in the factor.
    """
    d = len(coupled)
    full = d * (d + 1) // 2
    remaining = coupled.clone()
    taken: list[int] = []
    best: tuple[int, int, list[list[int]]] | None = None
    for _ in range(min(MOST_GLOBALS, d // 2) + 1):
        groups = _components(remaining, taken)
        largest = max(map(len, groups))
        if largest <= (1 if only_arrow else LARGEST_BLOCK):
            r = len(taken)
            cost = r * (r + 1) // 2 + r * (d - r) + sum(len(g) * (len(g) + 1) // 2 for g in groups)
            if best is None or cost < best[0]:
                best = cost, r, groups
        degrees = remaining.sum(-1)
        if not bool(degrees.any()):
            break
        taken.append(int(degrees.argmax()))
        remaining[taken[-1]] = False
        remaining[:, taken[-1]] = False
    if best is None or best[0] > WORTHWHILE * full:
        return None
    return _layout(sorted(taken[: best[1]]), best[2], d)


def _components(coupled: Tensor, without: list[int]) -> list[list[int]]:
    """Return the connected components of a graph."""
    neighbours = [row.nonzero().flatten().tolist() for row in coupled]
    seen = set(without)
    found = []
    for first in range(len(neighbours)):
        if first in seen:
            continue
        seen.add(first)
        component = [first]
        for i in component:
            fresh = [j for j in neighbours[i] if j not in seen]
            seen.update(fresh)
            component.extend(fresh)
        found.append(sorted(component))
    return found


def _layout(heads: list[int], groups: list[list[int]], d: int) -> Layout | None:
    """Lay out globals first, then groups of locals in blocks of one size."""
    r, rest = len(heads), d - len(heads)
    for block in range(max(map(len, groups)), LARGEST_BLOCK + 1):
        packed = _packed(groups, block)
        if packed is None:
            continue
        order = heads + packed
        tail: Group = Diagonal(rest) if block == 1 else BlockDiagonal(rest, block)
        if r:
            tail = Arrow(d, r) if block == 1 else BlockTriangular((Dense(r), tail))
        return Layout(tail, None if order == list(range(d)) else torch.tensor(order), seen=True)
    return None


def _packed(groups: list[list[int]], block: int) -> list[int] | None:
    """Order groups one after the other, largest first, so that none lies across two blocks.

    Return None where that fails.
    """
    if block == 1:
        return [i for group in groups for i in group]
    waiting = sorted(groups, key=lambda group: (-len(group), group[0]))
    order: list[int] = []
    while waiting:
        room = block - len(order) % block
        fitting = next((group for group in waiting if len(group) <= room), None)
        if fitting is None:
            return None
        waiting.remove(fitting)
        order.extend(fitting)
    return order


def _verified(target: Target, x: Tensor, proposal: Globals) -> Layout | None:
    probes = _Probes(target, x)
    heads = torch.tensor(proposal.indices, dtype=torch.long, device=x.device)
    if not probes.leave_a_diagonal(heads, probes.rows(heads)):
        return None
    others = [[i] for i in range(target.dim) if i not in set(proposal.indices)]
    return _layout(sorted(proposal.indices), others, target.dim)


def _probe(target: Target, x: Tensor) -> Layout | None:
    """Find an arrow by few products: coordinates whose probes vary most are tried as globals."""
    probes = _Probes(target, x)
    ranking = probes.numbers.var(0).argsort(descending=True)
    rows = x.new_zeros(0, target.dim)
    r = 1
    while r <= MOST_GLOBALS:
        rows = torch.cat([rows, probes.rows(ranking[len(rows) : r])])
        if probes.leave_a_diagonal(ranking[:r], rows):
            return _layout(*_without_locals(ranking[:r], rows), target.dim)
        r *= 2
    return None


class _Probes:
    """Products of the Hessian at x with random signs v.

    The numbers ``v . (H v)`` of a local vary by its couplings to the globals alone. With the globals' rows of H known,
    what is left of them is the diagonal, which does not depend on v.
    """

    def __init__(self, target: Target, x: Tensor) -> None:
        generator = torch.Generator().manual_seed(target.dim)
        self._target, self._x = target, x
        self._signs = (2 * torch.randint(2, (PROBES, target.dim), generator=generator) - 1).to(x)
        self._products = target.hessian_products(x, self._signs)
        self.numbers = self._signs * self._products

    def rows(self, indices: Tensor) -> Tensor:
        """Return rows of H."""
        units = torch.zeros(len(indices), self._target.dim, dtype=self._x.dtype, device=self._x.device)
        units[torch.arange(len(indices)), indices] = 1.0
        return self._target.hessian_products(self._x, units) if len(indices) else units

    def leave_a_diagonal(self, heads: Tensor, rows: Tensor) -> bool:
        """Return whether the rest of H is diagonal beside the rows and columns of the heads."""
        left = self._signs * (self._products - self._signs[:, heads] @ rows)
        spread = left.var(0).sqrt()
        spread[heads] = 0.0
        rounding = max(NEGLIGIBLE, 1e3 * torch.finfo(self._x.dtype).eps)
        return bool((spread <= rounding * self.numbers.abs().amax(0)).all())


def _without_locals(heads: Tensor, rows: Tensor) -> tuple[list[int], list[list[int]]]:
    """Return the globals among the heads, and the groups of locals.

    Globals are coupled to coordinates beyond the heads, or to another head that is not.
    """
    coupled = rows.abs() > NEGLIGIBLE * rows.abs().amax(-1, keepdim=True)
    among = coupled[:, heads].fill_diagonal_(False)
    beyond = coupled.clone()
    beyond[:, heads] = False
    strong = beyond.any(-1)
    strong = strong | (among & ~strong).any(-1)
    chosen = heads[strong].sort().values
    local = torch.ones(rows.shape[-1], dtype=torch.bool, device=rows.device)
    local[chosen] = False
    return chosen.tolist(), [[i] for i in local.nonzero().flatten().tolist()]
