"""The structures that tests run over."""

from gnomon import groups as g

SMALL_GROUPS = [
    g.Dense(1),
    g.Dense(4),
    g.Triangular(4),
    g.Triangular(4, upper=True),
    g.Diagonal(5),
    g.BlockDiagonal(7, 3),
    g.BlockDiagonal(6, 3),
    g.BlockDiagonal(3, 8),
    g.Arrow(5),
    g.Arrow(6, rank=2),
    g.Heisenberg(6, 2, 2),
    g.Heisenberg(5, 1, 2),
    g.Toeplitz(6),
    g.Toeplitz(6, upper=True),
    g.BlockTriangular((g.Dense(2), g.Toeplitz(2), g.Diagonal(2))),
    g.BlockTriangular((g.Triangular(2), g.Diagonal(3)), upper=True),
    g.BlockTriangular((g.Dense(1), g.Dense(1), g.Diagonal(3), g.Dense(2)), upper=True),
    g.BlockTriangular((g.BlockTriangular((g.Dense(2), g.Diagonal(1))), g.BlockDiagonal(3, 2)), upper=True),
    g.Kronecker(g.Dense(2), g.Dense(3)),
    g.Kronecker(g.Dense(2), g.Triangular(3)),
    g.Kronecker(g.Toeplitz(3), g.Kronecker(g.Diagonal(2), g.Arrow(2))),
    g.Affine(g.Dense(3)),
    g.Affine(g.Triangular(3)),
    g.Affine(g.Dense(3), upper=False),
    g.Affine(g.Arrow(3), upper=False),
]

# The structures of the documentation's table, at a size where optimizing over them is a real problem.
STRUCTURES = [
    g.Dense(8),
    g.Triangular(8),
    g.Triangular(8, upper=True),
    g.Diagonal(8),
    g.BlockDiagonal(8, 3),
    g.BlockTriangular((g.Dense(3), g.Toeplitz(3), g.Diagonal(2))),
    g.Arrow(8, rank=2),
    g.Heisenberg(8, 2, 2),
    g.Toeplitz(8),
    g.Kronecker(g.Dense(2), g.Dense(4)),
]
