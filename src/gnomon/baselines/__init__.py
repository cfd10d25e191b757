"""The paper's Riemannian baselines (App. imple_baselines), with the exact maps in global coordinates.

For variational inference there is :class:`BatchAndMatch`.
"""

from .ambient import Ambient
from .batch_and_match import BatchAndMatch
from .methods import RGD, AhnSra2020, Alimisis2020, Alimisis2021, StructuredNGD

__all__ = ["RGD", "AhnSra2020", "Alimisis2020", "Alimisis2021", "Ambient", "BatchAndMatch", "StructuredNGD"]
