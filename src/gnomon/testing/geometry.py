"""Checks of the local coordinates that a group gives: the metric, the pull-back of gradients, the transport."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.func import jacfwd

from ..frames import Chart, Form
from ..groups import Element, Group
from .algebra import slope
from .elements import near_identity, pair, pieces, random_algebra
from .verdict import close, require


def _bases(group: Group, device: torch.device | str) -> list[Tensor]:
    """Return orthonormal bases, as columns, of the coordinates in each coordinate set."""
    bases = []
    for unit in pieces(group, group.unflatten(torch.eye(group.numel, dtype=torch.float64, device=device))):
        projected = group.flatten(group.unscale(group.scale(unit)))
        values, vectors = torch.linalg.eigh(0.5 * (projected + projected.mT))
        bases.append(vectors[:, values > 0.5])
    return bases


class _SubChart:
    """tau as a function of coordinates in one basis, the rest frozen, with the metric that it induces."""

    def __init__(self, chart: Chart, a: Element, basis: Tensor) -> None:
        self.chart, self.a, self.basis = chart, a, basis

    def factor(self, c: Tensor) -> Element:
        return self.chart.retract(self.a, self.chart.group.unflatten(self.basis @ c))

    def tau(self, c: Tensor) -> Tensor:
        return self.chart.matrix(self.factor(c))

    def tangents(self, c: Tensor) -> Tensor:
        """Return the derivatives of vec(tau) along each coordinate, as columns."""
        return jacfwd(self.tau)(c).flatten(0, 1)

    def metric(self, c: Tensor) -> Tensor:
        tau = self.tau(c)
        d_tau = jacfwd(self.tau)(c).movedim(-1, 0)
        whitened = torch.linalg.solve(tau, d_tau)
        return torch.einsum("aij,bji->ab", whitened, whitened)

    def transport_rate(self, c: Tensor, velocity: Tensor) -> Tensor:
        """Return the matrix R of ``dw/dt = R w`` for a covector along a curve with this velocity.

        This is Eq. parallel_trans_eucl, with the Christoffel symbols of Eq. chris_1st.
        """
        f, df = self.metric(c), jacfwd(self.metric)(c)  # df[b, d, c] = d_c F_bd
        lowered = 0.5 * (df.permute(1, 2, 0) + df.permute(1, 0, 2) - df.permute(2, 0, 1))  # [d, c, b]
        return torch.einsum("ad,dcb,b->ca", torch.linalg.inv(f), lowered, velocity)


def check_metric(group: Group, form: Form, device: torch.device | str = "cpu") -> None:
    """Check that the metric ``tr(tau^-1 u tau^-1 v)`` is the identity at the origin, wherever the frame is."""
    chart = Chart(group, form)
    a = near_identity(group, (), device)
    for basis in _bases(group, device):
        c = torch.zeros(basis.shape[1], dtype=torch.float64, device=device)
        metric = _SubChart(chart, a, basis).metric(c)
        wanted = torch.eye(len(c), dtype=torch.float64, device=device)
        close(group, "retract", metric, wanted, "scale", what=f"the metric at the origin (form {form!r})")


def check_pullback(group: Group, form: Form, device: torch.device | str = "cpu") -> None:
    """Check ``Chart.pullback`` and ``Chart.logdet_gradient``.

    They are the gradients of ``f(A(eta))`` and of ``log det tau`` at 0.
    """
    chart = Chart(group, form)
    a = near_identity(group, (), device)
    grad = random_algebra(group, device=device)
    eta = torch.zeros(group.numel, dtype=torch.float64, device=device, requires_grad=True)
    moved = chart.retract(a, group.unflatten(eta))
    (wanted,) = torch.autograd.grad(pair(group, grad, moved), eta, retain_graph=True)
    actual = group.flatten(chart.pullback(a, grad))
    close(group, "pullback", actual, wanted, "retract", what=f"the gradient in the coordinates (form {form!r})")
    (wanted,) = torch.autograd.grad(chart.logdet(moved), eta)
    actual = group.flatten(chart.logdet_gradient(a))
    close(group, "dual", actual, wanted, "logabsdet", what=f"the gradient of log det tau (form {form!r})")
    close(group, "logabsdet", chart.logdet(a), torch.logdet(chart.matrix(a)), what=f"log det tau (form {form!r})")


def check_transport_order(group: Group, form: Form, device: torch.device | str = "cpu") -> None:
    """Check that the corrected transport of a vector as long as the step is right to third order.

    The oracle integrates the transport equation with Christoffel symbols from automatic differentiation of
    the metric, and changes coordinates by the Jacobian between the two charts.
    """
    chart = Chart(group, form)
    a = near_identity(group, (), device)
    for basis in _bases(group, device):
        old = _SubChart(chart, a, basis)
        s, v = torch.randn(2, basis.shape[1], dtype=torch.float64, device=device).unbind()
        s, v = s / s.norm(), v / v.norm()

        def error(size: float, old: _SubChart = old, s: Tensor = s, v: Tensor = v) -> float:
            step, vector = size * s, size * v
            wanted = _integrated_transport(old, step, vector)
            carried = chart.carry(
                group.unflatten(old.basis @ step), group.unflatten(old.basis @ vector), corrected=True
            )
            return float((old.basis.mT @ group.flatten(carried) - wanted).norm())

        found = slope(error)
        claimed = group.trivial_transport
        kind = "transport by the identity, as trivial_transport claims," if claimed else "the corrected transport"
        complaint = f"{kind} has an error of order {found:.2f}, not 3 (form {form!r})"
        if claimed:
            require(group, "trivial_transport", found > 2.7, complaint)
        else:
            require(group, "bracket", found > 2.7, complaint, "pullback", "retract")


def _integrated_transport(old: _SubChart, step: Tensor, vector: Tensor) -> Tensor:
    """Return a covector in the new frame, carried along the coordinate line to ``step``.

    One Runge-Kutta step integrates the equation of transport.
    """
    start, middle, end = (old.transport_rate(t * step, step) for t in (0.0, 0.5, 1.0))
    k1 = start @ vector
    k2 = middle @ (vector + 0.5 * k1)
    k3 = middle @ (vector + 0.5 * k2)
    k4 = end @ (vector + k3)
    carried = vector + (k1 + 2 * k2 + 2 * k3 + k4) / 6
    new = _SubChart(old.chart, old.factor(step), old.basis)
    jacobian = torch.linalg.lstsq(old.tangents(step), new.tangents(torch.zeros_like(step))).solution
    return jacobian.mT @ carried
