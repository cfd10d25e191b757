"""Local coordinates at a moving frame: orthonormal scaling, pull-back, retraction, transport."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .groups import Affine, Element, Group, Marginal
from .groups.base import accumulate, add, check_order, times
from .linalg import align, widen

Form = Literal["outer", "inner", "inverse"]
FORMS: tuple[Form, ...] = ("outer", "inner", "inverse")


@dataclass(frozen=True)
class Chart:
    """Generalized normal coordinates (Sec. 3) of an SPD submanifold at a moving frame.

    ===========  ===================  ==========================  =======================
    form         point                coordinates                 gradient from dl/dA
    ===========  ===================  ==========================  =======================
    ``outer``    ``tau = A A^T``      ``A(eta) = A Exp(D.eta)``   ``D.<E, A^T dl/dA>``
    ``inner``    ``tau = A^T A``      ``A(eta) = Exp(D.eta) A``   ``D.<E, dl/dA A^T>``
    ``inverse``  ``tau^-1 = A A^T``   ``A(eta) = A Exp(-D.eta)``  ``-D.<E, A^T dl/dA>``
    ===========  ===================  ==========================  =======================

    At ``eta = 0`` the metric is the identity in each of them: the Euclidean gradient in eta is the
    Riemannian gradient and its Euclidean norm the geodesic length. The metric is affine-invariant, twice
    the Fisher-Rao metric of N(0, tau): a step ``beta`` here is a natural-gradient step ``beta / 2`` there.
    """

    group: Group
    form: Form = "outer"
    order: int | None = 2

    def __post_init__(self) -> None:
        if self.form not in FORMS:
            raise ValueError(f"factor must be one of {', '.join(map(repr, FORMS))}, got {self.form!r}")
        check_order(self.order)

    @property
    def _left(self) -> bool:
        return self.form == "inner"

    @property
    def _sign(self) -> int:
        return -1 if self.form == "inverse" else 1

    def retract(self, a: Element, eta: Element) -> Element:
        """Return the factor at coordinates eta: the map phi of the paper (Eq. gen_normal_param)."""
        return self.group.retract(a, eta, self.order, self._left, self._sign)

    def pullback(self, a: Element, grad: Element) -> Element:
        """Return the gradient in eta at 0 from the gradient in the factor's blocks: one product, no inverse.

        For dense factors it is ``A^T g A`` or ``B^-1 g B^-T`` (Eqs. egd_coordinate_a and egd_coordinate_b).
        """
        g = self.group.scale(self.group.pullback(a, grad, left=self._left))
        return times(-1, g) if self.form == "inverse" else g

    def packed_pullback(self, frame: Tensor, grad: Element) -> Tensor:
        """Return :meth:`pullback` for a stored factor, as one tensor."""
        group = self.group
        if isinstance(group, Marginal):
            return group.gradient(group.unpack(frame), grad, self._sign)
        return group.pack(self.pullback(group.unpack(frame), grad))

    def advance(self, frame: Tensor, eta: Tensor) -> Tensor:
        """Return :meth:`retract` for a stored factor and coordinates; the result may be in the memory of eta."""
        group = self.group
        if isinstance(group, Marginal):
            group.advance(group.unpack(frame), group.unpack(eta), self.order, self._sign)
            return eta
        return group.pack(self.retract(group.unpack(frame), group.unpack(eta)))

    def matrix(self, a: Element) -> Tensor:
        """Return ``tau``, dense."""
        factor = self.group.to_dense(a)
        if self.form == "inverse":
            factor = torch.linalg.inv(widen(factor)).to(factor.dtype)
        return factor @ factor.mT if self.form == "outer" else factor.mT @ factor

    def logdet(self, a: Element) -> Tensor:
        """Return ``log det tau``."""
        return 2 * self._sign * self.group.logabsdet(a)

    def logdet_gradient(self, a: Element) -> Element:
        """Return the gradient of ``log det tau`` in eta at 0: the coordinates of ``2 tr(D.eta)``, whatever ``a``."""
        return times(2, self.group.scale(self.group.dual(self.group.identity_like(a))))

    def carry(self, step: Element, vector: Element, corrected: bool = False) -> Element:
        """Return a tangent vector in the new frame, after the fold of ``step``.

        These are Eqs. transport_approx and jacobian_transform:

        - Symmetric and abelian structures: the vector itself, which is exact (Eq. jacob_vec_sym).
        - The affine group of a Gaussian: the chain rule of Eq. gnormal_coord2, unless ``corrected``.
        - Otherwise parallel transport to second order in the step.
        """
        if self.group.trivial_transport:
            return vector
        if isinstance(self.group, Affine) and not corrected:
            return self._affine_chain_rule(self.group, step, vector)
        return self._parallel_transport(step, vector)

    def velocity(self, direction: Element, t: float) -> Element:
        """Return the coordinates, in the frame at ``eta = t d``, of the velocity of the curve ``t -> A(t d)``.

        Along a one-parameter subgroup it is the direction itself. On the affine group of a Gaussian, whose map is not
        the matrix exponential, it is ``E^-1 dE/dt`` with ``E = Exp(t D.d)`` as in Eq. gnormal_coord2.
        """
        group = self.group
        if not isinstance(group, Affine):
            return direction
        n = times(self._sign, group.scale(direction))
        e = group.exp(times(t, n), self.order)
        cut = len(group.linear.shapes)
        change = (*group.linear.mul(e[:cut], n[:cut]), torch.zeros_like(n[cut]), n[-1])
        return times(self._sign, group.unscale(group.ldiv(e, change)))

    def carries_by_bracket(self, corrected: bool = False) -> bool:
        """Return whether :meth:`carry` uses the correction, which holds for short steps only."""
        group = self.group.linear if isinstance(self.group, Affine) and not corrected else self.group
        return not group.trivial_transport

    def _parallel_transport(self, step: Element, vector: Element) -> Element:
        """Return ``w_c = v_c - 1/2 ( <[S,V],E_c> - <V,[S,E_c]> - <S,[V,E_c]> )`` with ``<X,Y> = tr((X+X^T)(Y+Y^T))``.

        ``S = D.s`` and ``V = D.v``; the generators are orthonormal, so that it is
        ``v - 1/2 [S,V]/D + D.<E, [S^T,V] + [V^T,S]>`` (Eq. chris_error together with the chain rule of
        App. jac_vec_prod, for any vector). For the inner and inverse forms S, V and E are transposed, which
        turns the sign. The correction is orthogonal to the vector, as the derivative of a rotation must be;
        the result is scaled back to the vector's length, since the true transport is an isometry.
        """
        group = self.group
        s, v = group.scale(step), group.scale(vector)
        s_dual, v_dual = group.dual(s), group.dual(v)
        cross = group.pullback(s, v_dual)
        accumulate(cross, group.pullback(v, s_dual))
        accumulate(cross, group.pullback(s, v_dual, left=True), -1)
        accumulate(cross, group.pullback(v, s_dual, left=True), -1)
        correction = accumulate(group.scale(cross), group.unscale(group.bracket(s, v)), -0.5)
        carried = add(vector, correction, 1 if self.form == "outer" else -1)
        return self._restore_length(carried, vector)

    def _restore_length(self, carried: Element, vector: Element) -> Element:
        """Scale each coordinate set of ``carried`` to the length that it has in ``vector``."""
        result = list(carried)
        for blocks in self.group.coordinate_sets:
            old, new = (self._squared_length(x, blocks) for x in (vector, carried))
            share = torch.where(new > 0, (old / new).sqrt(), 1)
            for i in blocks:
                result[i] = align(share, carried[i]) * carried[i]
        return tuple(result)

    def _squared_length(self, vector: Element, blocks: tuple[int, ...]) -> Tensor:
        squares = [vector[i].square().flatten(-len(self.group.shapes[i])).sum(-1) for i in blocks]
        return torch.stack(squares).sum(0)

    def _affine_chain_rule(self, group: Affine, step: Element, vector: Element) -> Element:
        """Return ``w = v^T d(eta)/d(xi)`` of Eq. gnormal_coord2, for eta and xi at the old and the new frame.

        Covariance form: ``w_mu = Exp(D.s_L)^T v_mu``. Precision form: ``w_P = v_P - D.<E, s_c^T v_c>``. The
        linear part is carried as its own group asks.
        """
        cut = len(group.linear.shapes)
        linear = Chart(group.linear, self.form, self.order)
        s_linear, v_mean = step[:cut], vector[-1]
        w_linear = linear.carry(s_linear, vector[:cut])
        if group.upper:
            e = group.linear.exp(times(self._sign, group.linear.scale(s_linear)), self.order)
            w_mean = group.linear.apply(e, v_mean.mT, transpose=True).mT
        else:
            w_mean = v_mean
            turned = group.linear.scale(group.linear.restrict(step[-1], v_mean))
            w_linear = add(w_linear, turned, self._sign)
        return (*w_linear, vector[cut], w_mean)
