"""The paper's Riemannian baselines (App. imple_baselines), with the exact maps in global coordinates."""

from .ambient import Ambient
from .methods import RGD, AhnSra2020, Alimisis2020, Alimisis2021, StructuredNGD

__all__ = ["RGD", "AhnSra2020", "Alimisis2020", "Alimisis2021", "Ambient", "StructuredNGD"]
