"""Optimizers: :func:`moving_frame` makes any of torch's a Riemannian one; :class:`INGD` is for networks."""

from .distributed.plan import LayerPlan, Plan, plan
from .hessian import Banded, Colored, Hutchinson
from .ingd import INGD
from .kfac import KFAC
from .lbfgs import LBFGS
from .moving_frame import moving_frame
from .state import vector_state
from .structured_newton import StructuredNewton

__all__ = [
    "INGD",
    "KFAC",
    "LBFGS",
    "Banded",
    "Colored",
    "Hutchinson",
    "LayerPlan",
    "Plan",
    "StructuredNewton",
    "moving_frame",
    "plan",
    "vector_state",
]
