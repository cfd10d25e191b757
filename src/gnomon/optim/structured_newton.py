"""Newton-like minimization with a structured preconditioner."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..frames import Chart
from ..groups import Element, Group, LowRank, StructureLike, SymmetricOperator, as_structure
from ..groups.base import accumulate, add, positive_size, times
from ..linalg import full_precision
from ..manifolds import all_finite
from .hessian import Diagonals, as_diagonals
from .step_bound import DEFAULT_RADIUS


class StructuredNewton(Optimizer):
    """Minimizes a function with a preconditioner ``S^-1`` on an SPD submanifold, learned from curvature (Sec. opt_dl).

    With ``M = A^T (H + damping I) A`` for the Hessian H, and P the restriction to the structure (it keeps diagonals and
    symmetric blocks and doubles couplings)::

        v  <- momentum v + lr A A^T g                             x <- x - v
        m  <- precond_momentum m + precond_lr / 2 P(M - I)        A <- A Exp(-m)        (S^-1 = A A^T)

    This is the Gaussian submanifold update for (x, S^-1) with ``gamma = lr``: to first order
    ``S <- (1 - precond_lr) S + precond_lr (H + damping I)`` (on Kronecker structures a common scale moves twice as
    fast), while S stays positive definite whatever the Hessian is.
    With both momenta 0 it is structured natural-gradient descent (Lin et al. 2021). A linear change of the parameters
    by an element of the structure's group (its transpose for form "B") changes the whole trajectory alike.

    Args:
        params: parameters, or groups of them; each group is one flat vector with a preconditioner of its own.
        structure: a name, a group, or a function from the number of parameters to one, as in
            :func:`gnomon.groups.as_structure`; dense unless given.
        lr: step size for the parameters; 1 is a Newton step.
        momentum: weight of the parameters' previous step.
        precond_lr: weight of the current Hessian in S.
        precond_momentum: weight of the preconditioner's previous step.
        damping: a multiple of the identity added to the Hessian.
        update_every: steps between updates of the preconditioner; the others cost a gradient alone.
        hessian: where diagonals come from: ``"hutchinson"`` (one random product), ``"exact"``, a function that
            returns the diagonal at the current parameters, or :class:`~gnomon.optim.Banded`,
            :class:`~gnomon.optim.Colored`, :class:`~gnomon.optim.Hutchinson`. Dense rows are always exact.
        form: ``"A"`` keeps ``S^-1 = A A^T`` (Eq. no_mat_inv_opt), which needs products alone; ``"B"`` keeps
            ``S = B B^T`` (Eq. sngd_dl), which solves with B. They agree to first order for transposed structures.
        init: the starting S is this multiple of the identity; None takes the root mean square of the first diagonal.

    ``step(closure)`` takes a closure that returns the loss and does **not** call ``backward()``. A step costs one
    gradient and one Hessian-vector product; an update of the preconditioner, k more for ``Dense(k)``, head + tail and
    the diagonal for ``Heisenberg``, rank and the diagonal for ``Arrow`` and ``LowRank``, the diagonal for ``Diagonal``.
    A diagonal costs ``samples`` (Hutchinson), ``width + 1`` (Banded), one a color (Colored), none (given) or its length
    (exact); the first step takes one more where ``init`` is None. ``hessian_products`` counts all of them.

    A step of the preconditioner is cut back, with its momentum, where it would change S in some direction by more
    than a factor e. A step ``lr u`` of the parameters, ``u = A A^T g``, is cut back where the curvature along it says
    that heavy ball is not stable, ``lr u^T H u > 2 (1 + momentum) g^T u``. Loss, gradient or curvature that is not
    finite: the step is skipped, and ``skipped_steps`` counts it. Frozen parameters stay.
    """

    def __init__(
        self,
        params: Any,
        structure: StructureLike | None = None,
        lr: float = 1.0,
        momentum: float = 0.0,
        precond_lr: float = 0.1,
        precond_momentum: float = 0.0,
        damping: float = 0.0,
        hessian: str | Diagonals | Callable[[], Tensor] = "hutchinson",
        form: Literal["A", "B"] = "A",
        update_every: int = 1,
        init: float | None = None,
    ) -> None:
        for name, value in (("lr", lr), ("precond_lr", precond_lr)):
            if not 0 <= value < math.inf:
                raise ValueError(f"{name} must be finite and at least 0, got {value!r}")
        for name, value in (("momentum", momentum), ("precond_momentum", precond_momentum)):
            if not 0 <= value < 1:
                raise ValueError(f"{name} must be at least 0 and below 1, got {value!r}")
        if not 0 <= damping < math.inf:
            raise ValueError(f"damping must be finite and at least 0, got {damping!r}")
        positive_size("update_every", update_every)
        if form not in ("A", "B"):
            raise ValueError(f"form must be 'A' or 'B', got {form!r}")
        if init is not None and not 0 < init < math.inf:
            raise ValueError(f"init must be a positive multiple of the identity, or None, got {init!r}")
        self.structure = structure
        self.form = form
        self.diagonals = as_diagonals(hessian)
        self.hessian_products = 0
        self.skipped_steps = 0
        super().__init__(
            params,
            {
                "lr": lr,
                "momentum": momentum,
                "precond_lr": precond_lr,
                "precond_momentum": precond_momentum,
                "damping": damping,
                "update_every": update_every,
                "init": init,
            },
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        try:
            self._chart(self.param_groups[-1])  # a structure that does not fit is an error here, not at the first step
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise

    def _chart(self, group: dict[str, Any]) -> Chart:
        size = sum(p.numel() for p in group["params"])
        structure = as_structure("dense" if self.structure is None else self.structure, size)
        self.diagonals.check(size)
        if isinstance(structure, LowRank) and self.form == "B":
            raise ValueError(f"form must be 'A' for {structure}: the diagonal of S^-1 H S^-1 is not at hand")
        return Chart(structure, "outer" if self.form == "A" else "inverse")

    # ------------------------------------------------------------------ the step
    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor:  # type: ignore[override]
        if closure is None:
            raise ValueError("closure is None, but the Hessian needs the loss; pass a closure that returns it")
        steps = [self.state[group["params"][0]].get("step", 0) for group in self.param_groups]
        due = [step % group["update_every"] == 0 for step, group in zip(steps, self.param_groups, strict=True)]
        with torch.enable_grad():
            loss = closure()
            gradients = self._gradients(loss)
        updates = [self._update(*each, gradients) for each in zip(self.param_groups, due, strict=True)]
        if all_finite(loss.detach(), *[tensor for update in updates for tensor in update.values()]):
            for group, update in zip(self.param_groups, updates, strict=True):
                state = self.state[group["params"][0]]
                state.update(update, step=state.get("step", 0) + 1)
                for p, part in zip(group["params"], _split(state["velocity"], group["params"]), strict=True):
                    if p.requires_grad:
                        p.sub_(part)
        else:
            self._skip()
        return loss.detach()

    def _update(self, group: dict[str, Any], due: bool, gradients: dict[Tensor, Tensor]) -> dict[str, Tensor]:
        """Return the new velocity of the parameters, and the preconditioner's momentum and frame.

        Nothing is changed yet.
        """
        chart, params = self._chart(group), group["params"]
        structure = chart.group
        gradient = torch.cat([gradients[p].detach().flatten() for p in params])
        hessian = self._hessian(params, gradients, group["damping"], gradient)
        with full_precision(gradient):
            state = self.state[params[0]]
            if "frame" in state:
                frame = structure.unpack(state["frame"])
            else:
                frame = self._start(structure, hessian, group["init"], gradient)
            old = structure.unpack(state["precond_momentum"]) if "frame" in state else times(0, frame)
            natural = self._precondition(structure, frame, gradient)
            velocity = _stable_rate(gradient, natural, hessian, group) * natural
            if group["momentum"] and "velocity" in state:
                velocity.add_(state["velocity"], alpha=group["momentum"])
            if not due:
                return {"velocity": velocity}
            momentum = self._tangent(structure, frame, hessian, 2 * group["precond_lr"])
            accumulate(momentum, old, group["precond_momentum"])
            momentum = _bounded(structure, momentum)
            step = times(-1, momentum)
            return {
                "velocity": velocity,
                "precond_momentum": structure.pack(chart.carry(step, momentum)),
                "frame": structure.pack(chart.retract(frame, step)),
            }

    def _skip(self) -> None:
        if self.skipped_steps == 0:
            warnings.warn(
                "the loss, its gradient or its curvature is not finite: the step was skipped, and nothing changed; "
                "look at the loss, or take a smaller lr (further ones are only counted, in optimizer.skipped_steps)",
                RuntimeWarning,
                stacklevel=5,
            )
        self.skipped_steps += 1

    # ------------------------------------------------------------------ derivatives
    def _gradients(self, loss: Tensor) -> dict[Tensor, Tensor]:
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise TypeError(f"the closure must return the loss, a tensor with one number, got {loss!r}")
        params = [p for group in self.param_groups for p in group["params"]]
        free = [p for p in params if p.requires_grad]
        try:
            found = torch.autograd.grad(loss, free, create_graph=True, materialize_grads=True)
        except RuntimeError as error:
            raise RuntimeError(
                "the loss that the closure returned cannot be differentiated; return it without calling backward() "
                f"or detach() ({error})"
            ) from error
        return {p: torch.zeros_like(p) for p in params} | dict(zip(free, found, strict=True))

    def _hessian(
        self, params: list[Tensor], gradients: dict[Tensor, Tensor], damping: float, like: Tensor
    ) -> SymmetricOperator:
        curved = [p for p in params if gradients[p].requires_grad]  # where the loss is linear there is no graph

        def product(rows: Tensor) -> Tensor:
            self.hessian_products += len(rows)
            if not curved:
                return torch.zeros_like(rows)
            parts = dict(zip(params, _split(rows, params), strict=True))
            products = torch.autograd.grad(
                [gradients[p] for p in curved],
                curved,
                [parts[p] for p in curved],
                retain_graph=True,
                is_grads_batched=True,
                materialize_grads=True,
            )
            found = dict(zip(curved, products, strict=True))
            return torch.cat([found.get(p, torch.zeros_like(parts[p])).flatten(1) for p in params], -1)

        return SymmetricOperator(len(like), product, lambda part: self.diagonals(part, like), damping)

    # ------------------------------------------------------------------ the preconditioner
    def _start(self, structure: Group, hessian: SymmetricOperator, init: float | None, like: Tensor) -> Element:
        """Return the factor of ``S = init I`` in either form."""
        size = init or hessian.diagonal().square().mean().sqrt().item() or 1.0
        root = size**-0.5 if self.form == "A" else size**0.5
        diagonal = torch.full_like(like, root)
        return structure.start(diagonal) if isinstance(structure, LowRank) else structure.from_diagonal(diagonal)

    def _precondition(self, structure: Group, frame: Element, gradient: Tensor) -> Tensor:
        """Return ``S^-1 g``."""
        if self.form == "A":
            return structure.matvec(frame, structure.rmatvec(frame, gradient))
        return structure.rsolve(frame, structure.solve(frame, gradient))

    def _tangent(self, structure: Group, frame: Element, hessian: SymmetricOperator, size: float) -> Element:
        """Return ``size D.<E, M - I>``, the gradient in the preconditioner's coordinates, ``size`` times."""
        if isinstance(structure, LowRank):
            return times(size, structure.newton_gradient(frame, hessian))
        identity = structure.identity_like(frame)
        if self.form == "A":
            m = structure.congruence(frame, hessian)
        else:  # M = B^-1 H B^-T, a congruence by B^-T in the transposed group
            turned = structure.transposed
            m = turned.transpose(turned.congruence(structure.transpose(structure.ldiv(frame, identity)), hessian))
        return times(size, structure.scale(add(m, structure.dual(identity), -1)))

    # ------------------------------------------------------------------ copies and pickles
    def __getstate__(self) -> dict[str, Any]:
        own = ("structure", "form", "diagonals", "hessian_products", "skipped_steps")
        return {**super().__getstate__(), **{name: vars(self)[name] for name in own}}


def _split(flat: Tensor, params: list[Tensor]) -> list[Tensor]:
    """Return a flat vector, or rows of them, in the shapes of the parameters."""
    parts = flat.split([p.numel() for p in params], -1)
    return [part.reshape(*flat.shape[:-1], *p.shape) for part, p in zip(parts, params, strict=True)]


def _stable_rate(gradient: Tensor, natural: Tensor, hessian: SymmetricOperator, group: dict[str, Any]) -> Tensor:
    """Return ``lr``, or less, so that heavy ball along ``u = S^-1 g`` is stable.

    It is if ``lr u^T H u <= 2 (1 + momentum) g^T u``. This binds where the curvature has grown faster than S has
    followed.
    """
    lr = torch.as_tensor(group["lr"], dtype=natural.dtype, device=natural.device)
    curvature = natural @ hessian.apply(natural.unsqueeze(0)).squeeze(0)
    stable = 2 * (1 + group["momentum"]) * (gradient @ natural)
    return torch.where(lr * curvature > stable, stable / curvature, lr)


def _bounded(structure: Group, momentum: Element) -> Element:
    """Cut back to where no direction of S changes by more than a factor e."""
    share = (DEFAULT_RADIUS / structure.reach(momentum)).clamp(max=1)
    return tuple(share * block for block in momentum)
