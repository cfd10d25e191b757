"""Optimizers: :func:`moving_frame` makes a Riemannian one of any in :mod:`torch.optim`."""

from .moving_frame import moving_frame
from .state import vector_state

__all__ = ["moving_frame", "vector_state"]
