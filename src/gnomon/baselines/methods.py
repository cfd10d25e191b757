"""Optimizers over a full SPD parameter: a symmetric positive-definite tensor, not a point with coordinates.

    tau = torch.nn.Parameter(torch.eye(k, dtype=torch.float64))
    optimizer = gnomon.baselines.Alimisis2020([tau], lr=0.1, momentum=0.9)

Gradients are the Euclidean ones that ``backward()`` leaves in ``tau.grad``. The maps decompose matrices at each step,
which is what these methods cost; use float64.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .. import riemannian
from ..frames import Chart
from ..groups import Dense


class _Baseline(Optimizer):
    """The loop over parameters; a method defines where one of them goes."""

    def __init__(self, params: Any, lr: float, momentum: float = 0.0) -> None:
        if not 0 < lr < math.inf:
            raise ValueError(f"lr must be positive, got {lr!r}")
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum must be at least 0 and below 1, got {momentum!r}")
        super().__init__(params, {"lr": lr, "momentum": momentum})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            square = parameter.ndim >= 2 and parameter.shape[-1] == parameter.shape[-2]
            if not square or bool(torch.linalg.cholesky_ex(parameter.detach()).info.any()):
                self.param_groups.pop()
                raise ValueError(
                    f"params must be symmetric positive-definite matrices, got one of shape {tuple(parameter.shape)} "
                    "that is not; start from torch.eye(k)"
                )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for tau in group["params"]:
                if tau.grad is not None:
                    gradient = 0.5 * (tau.grad + tau.grad.mT)
                    tau.copy_(self._next(tau, gradient, self.state[tau], group["lr"], group["momentum"]))
        return loss

    @abstractmethod
    def _next(self, tau: Tensor, g: Tensor, state: dict[str, Tensor], beta: float, alpha: float) -> Tensor:
        """Return the new point from the old one and the Euclidean gradient there."""


class RGD(_Baseline):
    """Riemannian gradient descent: ``tau <- RExp(tau, -beta tau g tau)`` (Eq. rgd)."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)

    def _next(self, tau: Tensor, g: Tensor, state: dict[str, Tensor], beta: float, alpha: float) -> Tensor:
        return riemannian.exp(tau, -beta * tau @ g @ tau)


class Alimisis2020(_Baseline):
    """Riemannian heavy ball (Alimisis et al. 2020; Eq. rgd_mom), z starting from 0::

    nu  <- alpha z + beta tau g tau
    tau <- RExp(tau, -nu),    z <- nu transported to the new tau
    """

    def __init__(self, params: Any, lr: float, momentum: float = 0.9) -> None:
        super().__init__(params, lr, momentum)

    def _next(self, tau: Tensor, g: Tensor, state: dict[str, Tensor], beta: float, alpha: float) -> Tensor:
        nu = alpha * state.get("z", torch.zeros_like(tau)) + beta * tau @ g @ tau
        new = riemannian.exp(tau, -nu)
        state["z"] = riemannian.transport(tau, new, nu)
        return new


class Alimisis2021(_Baseline):
    """Riemannian Nesterov momentum (Alimisis et al. 2021; App. imple_baselines), y starting from tau::

    z   <- RExp(tau, -beta r)                       with r = tau g tau
    y   <- RExp(y, -beta / (1 - alpha) r transported from tau to y)
    tau <- RExp(y, alpha RExp^-1(y, z))
    """

    def __init__(self, params: Any, lr: float, momentum: float = 0.9) -> None:
        super().__init__(params, lr, momentum)

    def _next(self, tau: Tensor, g: Tensor, state: dict[str, Tensor], beta: float, alpha: float) -> Tensor:
        r = tau @ g @ tau
        y = state.get("y", tau)
        z = riemannian.exp(tau, -beta * r)
        y = riemannian.exp(y, -beta / (1 - alpha) * riemannian.transport(tau, y, r))
        state["y"] = y
        return riemannian.exp(y, alpha * riemannian.log(y, z))


class AhnSra2020(_Baseline):
    """Riemannian Nesterov momentum (Ahn and Sra 2020; App. imple_baselines), z starting from tau::

    y   <- RExp(tau, -beta r)                       with r = tau g tau
    z   <- RExp(tau, alpha / (1 - alpha) RExp^-1(tau, z) - 2 beta r)
    tau <- RExp(y, alpha RExp^-1(y, z))
    """

    def __init__(self, params: Any, lr: float, momentum: float = 0.9) -> None:
        super().__init__(params, lr, momentum)

    def _next(self, tau: Tensor, g: Tensor, state: dict[str, Tensor], beta: float, alpha: float) -> Tensor:
        r = tau @ g @ tau
        y = riemannian.exp(tau, -beta * r)
        toward_z = riemannian.log(tau, state["z"]) if "z" in state else torch.zeros_like(tau)
        z = riemannian.exp(tau, alpha / (1 - alpha) * toward_z - 2 * beta * r)
        state["z"] = z
        return riemannian.exp(y, alpha * riemannian.log(y, z))


class StructuredNGD(_Baseline):
    """Structured natural-gradient descent on the full manifold (Lin et al. 2021): the library's update at alpha = 0.

    ``tau = C^T C`` with ``C <- (I + N + N^2/2) C`` and ``N = -beta/2 C g C^T`` (Eq. our_update_sgd_full).
    """

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)

    def _next(self, tau: Tensor, g: Tensor, state: dict[str, Tensor], beta: float, alpha: float) -> Tensor:
        chart = Chart(Dense(tau.shape[-1]), "inner")
        c = state["C"] if "C" in state else torch.linalg.cholesky(tau).mT
        (state["C"],) = chart.retract((c,), (-beta * c @ g @ c.mT,))
        return chart.matrix((state["C"],))
