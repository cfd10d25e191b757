"""Which of several equal forms is cheapest, by shape. Multiplications are counted; no choice changes a result.

Sizes: a factor is ``k x k``, a layer's gradient ``d x p``, and ``n`` rows of inputs and output gradients describe it.
"""

from __future__ import annotations

SMALL = 2**16
"""Layers with at most so many entries are updated together, where they are alike: their products cost less than the
calls that start them."""


def keep_rows(n: int, k: int) -> bool:
    """Whether rows x stay as they are until ``A^T (x^T x + damping I) A`` is formed.

    From rows it takes ``2 n k^2 + k^3``, as ``(x A)^T (x A) + damping A^T A``; from their sum of squares
    ``n k^2 + 2 k^3``.
    """
    return n <= k


def keep_product(k: int, rows: int, uses: int) -> bool:
    """Whether ``A A^T`` is formed and kept: ``k^3 + rows k^2`` a use, against ``2 rows k^2`` without it."""
    return k < rows * uses


def keep_square(k: int, damping: float, eps: float) -> bool:
    """Whether ``P = A A^T`` may be updated itself, without A: one large product by few rows, instead of four.

    Curvature in units of its mean lies below k, so that P's eigenvalues are about ``1 / k`` at least and
    ``1 / damping`` at most. The product of curvature and P errs by ``eps k / damping`` in all directions, which P
    multiplies; what that puts between its largest and its smallest eigenvalue must stay below their mean, ten times.
    """
    return damping > 0 and eps * (k / damping) ** 1.5 <= 0.1


def through_rows(n: int, p: int, d: int, cost_k: int, cost_c: int) -> bool:
    """Whether ``C C^T G K K^T`` is found as ``(g C C^T)^T (x K K^T)``, where ``G = g^T x``.

    With ``cost_k`` and ``cost_c`` multiplications for a row (``p^2`` and ``d^2`` where dense) that takes
    ``n (cost_k + cost_c + p d)`` instead of ``d cost_k + p cost_c``.
    """
    return n * (cost_k + cost_c + p * d) < d * cost_k + p * cost_c
