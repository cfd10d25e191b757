"""Matrix Lie groups: what a structure is, and its cost.

Structures compose: ``BlockTriangular((Dense(5), Toeplitz(100)))``, ``Kronecker(Triangular(8), Diagonal(9))``.
"""

from .affine import Affine, LowRankAffine
from .base import Element, Group
from .block_diagonal import BlockDiagonal
from .block_triangular import Arrow, BlockTriangular, Heisenberg
from .dense import Dense
from .diagonal import Diagonal, Fixed
from .kronecker import Kronecker
from .low_rank import LowRank
from .marginal import Marginal
from .operator import SymmetricOperator
from .square import Square
from .structures import STRUCTURE_NAMES, StructureLike, as_factory, as_structure
from .toeplitz import Toeplitz
from .triangular import Triangular

__all__ = [
    "STRUCTURE_NAMES",
    "Affine",
    "Arrow",
    "BlockDiagonal",
    "BlockTriangular",
    "Dense",
    "Diagonal",
    "Element",
    "Fixed",
    "Group",
    "Heisenberg",
    "Kronecker",
    "LowRank",
    "LowRankAffine",
    "Marginal",
    "Square",
    "StructureLike",
    "SymmetricOperator",
    "Toeplitz",
    "Triangular",
    "as_factory",
    "as_structure",
]
