"""The maps of the paper's Table spd_table, literally: by eigenvalues, symmetric and not."""

import torch
from torch import Tensor


def power(tau: Tensor, exponent: float) -> Tensor:
    """``tau^exponent`` of a symmetric positive-definite matrix."""
    w, q = torch.linalg.eigh(tau)
    return (q * w**exponent) @ q.mT


def exponential(tau: Tensor, v: Tensor) -> Tensor:
    """``tau^(1/2) Exp(tau^(-1/2) v tau^(-1/2)) tau^(1/2)``."""
    root, inverse_root = power(tau, 0.5), power(tau, -0.5)
    return root @ torch.linalg.matrix_exp(inverse_root @ v @ inverse_root) @ root


def logarithm(tau: Tensor, other: Tensor) -> Tensor:
    """The tangent vector at tau whose exponential is ``other``."""
    root, inverse_root = power(tau, 0.5), power(tau, -0.5)
    w, q = torch.linalg.eigh(inverse_root @ other @ inverse_root)
    return root @ (q * w.log()) @ q.mT @ root


def root_of_ratio(start: Tensor, end: Tensor) -> Tensor:
    """``E = (end start^-1)^(1/2)``: the matrix is not symmetric, and its eigenvalues are real and positive."""
    w, q = torch.linalg.eig(end @ torch.linalg.inv(start))
    return ((q * w.sqrt()) @ torch.linalg.inv(q)).real


def riemannian_transport(start: Tensor, end: Tensor, v: Tensor) -> Tensor:
    """``E v E^T``."""
    e = root_of_ratio(start, end)
    return e @ v @ e.mT


def euclidean_transport(start: Tensor, end: Tensor, g: Tensor) -> Tensor:
    """``H g H^T`` with ``H = end^-1 E start``."""
    h = torch.linalg.inv(end) @ root_of_ratio(start, end) @ start
    return h @ g @ h.mT
