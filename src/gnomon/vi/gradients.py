"""Natural gradients of the evidence lower bound, in the coordinates of a Gaussian's moving frame.

A draw of q = N(mu, Sigma) is ``x = mu + F z`` with z standard normal; F is L in covariance form (``Sigma = L L^T``)
and ``P^-T`` in precision form (``Sigma^-1 = P P^T``). With ``u = F^T (grad log p(x) - grad log q(x))
= F^T grad log p(x) + z`` the gradient of ``E[log p - log q]`` in the algebra is, in both forms,

    mean: ``E[u]``,    factor: ``<E_j, E[u z^T]>``,

the path derivative ("sticking the landing"). It vanishes for every single draw where q is p. ``E[u z^T]`` is symmetric,
so the mean of it and of its transpose is taken. By the theorems of Bonnet and Price it is also
``F^T E[Hess log p] F + I``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..groups import Affine, Element, Group, LowRank, LowRankAffine, SymmetricOperator
from ..groups.base import add
from ..manifolds import Gaussian


def push(q: Gaussian, z: Tensor) -> Tensor:
    """Return ``F z`` for each row."""
    linear, factor = q.structure, factor_of(q)
    return linear.apply(factor, z) if q.form == "covariance" else linear.apply_inverse(factor, z, transpose=True)


def pull(q: Gaussian, rows: Tensor) -> Tensor:
    """Return ``F^T g`` for each row."""
    linear, factor = q.structure, factor_of(q)
    return linear.apply(factor, rows, transpose=True) if q.form == "covariance" else linear.apply_inverse(factor, rows)


def factor_of(q: Gaussian) -> Element:
    return q.affine.split(q.group.unpack(q.frame))[0]


def mean_of(q: Gaussian) -> Tensor:
    return q.affine.mean(q.group.unpack(q.frame))


def squared_length(q: Gaussian, x: Tensor) -> float:
    """Return ``(x - mu)^T Sigma^-1 (x - mu)``."""
    return float(-2 * (q.log_prob(x).detach() + q.entropy().detach()) + q.d)


def log_prob_of_noise(q: Gaussian, z: Tensor) -> Tensor:
    """Return ``log q(mu + F z)``, without solving for z."""
    return -q.entropy().detach() - 0.5 * (z.square().sum(-1) - q.d)


def path_gradient(q: Gaussian, z: Tensor, odd: Tensor, even: Tensor) -> Element:
    """Return the gradient in the coordinates from pairs of draws ``mu + F z`` and ``mu - F z``.

    Of the scores ``grad log p`` of a pair, ``odd`` is half the difference and ``even`` the mean of both over all pairs:
    the mean of ``u z^T`` over a pair is ``(F^T odd + z) z^T``, and that of u is ``F^T even``.
    """
    pulled = pull(q, torch.cat([odd, even.unsqueeze(0)]))  # together: with many unknowns the passes over F cost most
    u = (pulled[:-1] + z) / len(z)
    return join(q, symmetric_moment(q.structure, factor_of(q), u, z), pulled[-1])


def symmetric_moment(linear: Group, factor: Element, u: Tensor, z: Tensor) -> Element:
    """Return ``<E_j, M>`` of the symmetric part M of ``sum of u z^T``.

    For low rank it is that in the coordinates of the joint model, where ``tau = B B^T + Diag(c)^2`` moves by
    ``dB = B N_a^T + Diag(c) N_u^T`` and ``dc = c N_c``. The gradient in tau is the symmetric part of ``sum of p r^T``
    with ``p = A^-T u``, ``r = A^-T z`` and ``tau = A A^T``.
    """
    if not isinstance(linear, LowRank):
        if linear.trivial_transport:
            return linear.restrict(u, z)
        return linear.restrict(torch.cat([u, z]) / 2, torch.cat([z, u]))
    p, r = linear.apply_inverse(factor, torch.cat([u, z]), transpose=True).chunk(2)
    loadings, noise = linear.covariance_factors(factor)
    p_head, r_head = p @ loadings, r @ loadings
    p, r = p * noise, r * noise
    head = r_head.mT @ p_head
    return (head + head.mT) / 2, (p * r).sum(0), (r_head.mT @ p + p_head.mT @ r) / 2


def price_gradient(q: Gaussian, hessian: SymmetricOperator, score: Tensor) -> Element:
    """Return the gradient in the coordinates from the average Hessian of log p and the average ``grad log p``."""
    linear, factor = q.structure, factor_of(q)
    if isinstance(linear, LowRank):
        curvature = _low_rank_curvature(q, linear, factor, hessian)
        return join(q, curvature, pull(q, score.unsqueeze(0)).squeeze(0))
    if q.form == "covariance":
        moment = linear.congruence(factor, hessian)
    else:  # F = P^-T is in the transposed group
        other = linear.transposed
        inverse = linear.transpose(linear.ldiv(factor, linear.identity_like(factor)))
        moment = other.transpose(other.congruence(inverse, hessian))
    return join(q, add(moment, linear.dual(linear.identity_like(factor))), pull(q, score.unsqueeze(0)).squeeze(0))


def _low_rank_curvature(q: Gaussian, linear: LowRank, factor: Element, hessian: SymmetricOperator) -> Element:
    """Return :func:`symmetric_moment` with ``z = I``, by as many products as there are dimensions."""
    z = torch.eye(linear.k, dtype=q.dtype, device=q.device)
    return symmetric_moment(linear, factor, pull(q, hessian.apply(push(q, z))) + z, z)


def join(q: Gaussian, moment: Element, mean: Tensor) -> Element:
    """Return the gradient in the orthonormal coordinates of the affine group from those in its algebra."""
    group = q.affine
    if isinstance(group, LowRankAffine):
        return group.scale((*moment, mean))
    assert isinstance(group, Affine)
    vector = mean.unsqueeze(-1 if group.upper else -2)
    return group.scale((*moment, torch.zeros_like(mean[..., :1]), vector))
