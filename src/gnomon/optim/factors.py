"""The Kronecker factors of a layer's preconditioner and their update (Fig. matDL_opt)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..groups import Element, Group
from ..groups.base import accumulate, add, align, times


@dataclass
class Statistics:
    """Sums over the rows of one or several batches: ``<E, K^T x x^T K>``, ``<E, C^T g g^T C>`` and their traces.

    Rows may come in any number of parts, as long as the factors stay what they are.
    """

    h_k: Element
    h_c: Element
    trace_k: Tensor
    trace_c: Tensor
    rows: int
    """Input rows so far: they are averaged."""
    terms: int
    """Terms of the loss so far: its gradients are those of a mean over them, and their squares count as many times."""

    def __add__(self, other: Statistics) -> Statistics:
        return Statistics(
            add(self.h_k, other.h_k),
            add(self.h_c, other.h_c),
            self.trace_k + other.trace_k,
            self.trace_c + other.trace_c,
            self.rows + other.rows,
            self.terms + other.terms,
        )


@dataclass(frozen=True)
class KroneckerFactors:
    """``(K K^T) x (C C^T)`` for a batch of ``d x p`` matrices: K in a group of size p, C in one of size d."""

    left: Group
    """The group of K, on the inputs."""
    right: Group
    """The group of C, on the outputs."""

    def statistics(self, k: Element, c: Element, x: Tensor, g: Tensor, terms: int) -> Statistics:
        """From rows ``x`` of shape ``(blocks, n, p)`` and ``g`` of shape ``(blocks, n, d)``."""
        xk = self.left.apply(k, x, transpose=True)
        gc = self.right.apply(c, g, transpose=True)
        return Statistics(
            self.left.restrict(xk, xk),
            self.right.restrict(gc, gc),
            xk.square().sum((-2, -1)),
            gc.square().sum((-2, -1)),
            x.shape[-2],
            terms,
        )

    def pressure(self, k: Element, c: Element, s: Statistics, damping: float) -> tuple[Element, Element]:
        """``1/2 P( tr(H_C)/d H_K + damping tr(C^T C)/d K^T K - I )`` and its twin: the update at ``b1 = 1``.

        P keeps diagonals and symmetric blocks and doubles couplings, as for any structure.
        """
        mean_k, mean_c = 1 / s.rows, float(s.terms)
        in_k = _half_projected(
            self.left,
            k,
            s.h_k,
            mean_k * mean_c * s.trace_c / self.right.k,
            damping * self.right.squared_norm(c) / self.right.k,
        )
        in_c = _half_projected(
            self.right,
            c,
            s.h_c,
            mean_k * mean_c * s.trace_k / self.left.k,
            damping * self.left.squared_norm(k) / self.left.k,
        )
        return in_k, in_c

    def precondition(self, k: Element, c: Element, matrix: Tensor) -> Tensor:
        """``C C^T G K K^T``."""
        rows = self.left.apply(k, self.left.apply(k, matrix, transpose=True))
        return self.right.apply(c, self.right.apply(c, rows.mT, transpose=True)).mT


def _half_projected(group: Group, a: Element, h: Element, weight: Tensor, damping: Tensor) -> Element:
    """``1/2 P( weight H + damping A^T A - I )``."""
    m = tuple(align(weight, block) * block for block in h)
    accumulate(m, tuple(align(damping, block) * block for block in group.pullback(a, group.dual(a))))
    accumulate(m, group.dual(group.identity_like(a)), -1)
    return times(2, group.scale(group.scale(m)))
