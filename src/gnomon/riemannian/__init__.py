"""Exact maps of the affine-invariant metric on the full SPD manifold (Table spd_table).

Dense, batched over leading dimensions, and differentiable where eigenvalues coincide too.
"""

from .maps import distance, euclidean_transport, exp, geodesic, inner, log, mean, norm, transport

__all__ = [
    "distance",
    "euclidean_transport",
    "exp",
    "geodesic",
    "inner",
    "log",
    "mean",
    "norm",
    "transport",
]
