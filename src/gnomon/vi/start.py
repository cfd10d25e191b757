"""Where a fit begins: at the mode with the curvature there, or at zero."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..groups import Group, SymmetricOperator
from ..manifolds import Gaussian
from ..optim import LBFGS
from ..optim.hessian import Hutchinson
from .density import DensityError
from .gradients import log_prob_of_noise, mean_of, price_gradient, push, squared_length
from .result import Fit
from .sampling import standard_draws
from .settings import Settings
from .steps import NaturalSteps, squared_norm
from .structure import SWEEP, Structure, lay_out
from .target import Target

MODE_ITERATIONS = 100
PROGRESS = 0.01
"""The search for the mode ends where its last iterations have brought less than this, in nats."""
PATIENCE = 4
BOUNDLESS = 1e100
"""The search for the mode ends at a larger log density than this, before products of gradients overflow."""
DENSE_HESSIAN = 400
"""Up to this dimension the start takes the whole Hessian at the mode."""
DIAGONAL_SAMPLES = 8
"""Beyond, random signs estimate the Hessian's diagonal."""
JITTER = 0.5
"""How far, in each coordinate, the point where a structure is searched lies from the start."""
COMPARED_DRAWS = 32
"""With which the bound at the mode is compared with the bound at zero."""
SPREAD = 2.0
"""Searches for other modes begin in the cube of this half width, as Stan's chains do."""
BETTER = 1.0
"""By how many nats the bound at another mode must be better for the fit to begin anew there."""
GROWTH = 0.5
"""A search goes to a mode if the loss of volume leaves this share of the log density's growth."""
TRIALS = 20
"""Random points that are tried where the density is not finite at zero."""


class Beginning:
    """The structure and the Gaussian with which a fit begins."""

    def __init__(self, target: Target, settings: Settings, like: Tensor, generator: torch.Generator) -> None:
        self.target, self.settings, self.like, self.generator = target, settings, like, generator
        self.price = settings.gradients == "price"
        """Whether the steps take Hessians; known after :meth:`gaussian`."""

    def gaussian(self, structure: Structure) -> Gaussian:
        """Return the first q. The target then has the order of coordinates that the structure asks for."""
        start = self.settings.start
        if isinstance(start, Fit):
            if start.order is not None:
                self.target.reorder(start.order)
            self.price |= self.settings.gradients == "auto" and start.gradients == "price"
            return self._copy(start.posterior, "auto")
        if isinstance(start, Gaussian):
            return self._copy(start, structure)
        x = self._point()
        layout = lay_out(structure, self.target, lambda: self._jittered(x))
        self.price |= self.settings.gradients == "auto" and layout.seen and self.target.dim > SWEEP
        if layout.order is not None:
            self.target.reorder(layout.order.to(x.device))
            x = self.target.in_fitted_order(x)
        at_start = self._gaussian(layout.group, x, torch.ones_like(x))
        if start == "zero":
            return at_start
        if start != "mode":
            return self._gaussian(layout.group, x, self._curvature(x))
        at_mode = self._at_mode(layout.group, x)
        return at_start if at_mode is None else max(at_mode, at_start, key=self._bound)

    def _at_mode(self, group: Group, x: Tensor) -> Gaussian | None:
        """Return a Gaussian with the curvature at the mode; None where the density has none.

        In the neck of a funnel the density grows without end while the volume shrinks. So where a search has not
        ended soon, the volume may take back only a part of what the log density has grown by in its second half.
        """
        search = find_mode(self.target, x)
        q = self._gaussian(group, search.last, self._curvature(search.last))
        if search.ended_soon:
            return q
        middle = self._gaussian(group, search.middle, self._curvature(search.middle))
        before, after = self.target.log_density(torch.stack([search.middle, search.last])).tolist()
        shrinkage = float((middle.entropy() - q.entropy()).detach())
        allowance = math.sqrt(q.d)  # the curvature may be an estimate
        return q if shrinkage <= (1 - GROWTH) * (after - before) + allowance else None

    def _gaussian(self, group: Group, mean: Tensor, precision: Tensor) -> Gaussian:
        """Return the Gaussian of this structure nearest to that of a given precision, a matrix or a diagonal."""
        diagonal = precision.diagonal() if precision.ndim == 2 else precision
        q = Gaussian(group, loc=mean, init=1 / diagonal, form=self.settings.form, dtype=mean.dtype, project=True)
        if precision.ndim == 2:
            fit_quadratic(q, precision)
        return q

    def other_mode(self, q: Gaussian, elbo: float) -> Gaussian | None:
        """Return a Gaussian at another mode, with a better bound than that of the fit; None where none was found.

        The searches begin at random points. A search that comes among the draws of q has found q's own mode, and ends.
        """
        best = None
        for x in self._far_points(q):
            if not bool(self.target.scores(x.unsqueeze(0)).finite):
                continue
            mode = find_mode(self.target, x, lambda place: _is_among_draws(q, place)).last
            if _is_among_draws(q, mode):
                continue
            other = self._gaussian(q.structure, mode, self._curvature(mode))
            bound = self._bound(other)
            if bound > elbo + BETTER:
                best, elbo = other, bound
        return best

    def _far_points(self, q: Gaussian) -> Iterator[Tensor]:
        """Yield random points and their mirror images.

        These lie in the same basin less often than independent points.
        """
        for search in range(self.settings.searches):
            if search % 2 == 0:
                x = SPREAD * (2 * torch.rand(q.d, generator=self.generator, dtype=q.dtype, device=q.device) - 1)
            yield x if search % 2 == 0 else -x

    def _point(self) -> Tensor:
        """Return where the search for a mode begins, or the mean, in the order of the parameters."""
        start = self.settings.start
        if isinstance(start, str):
            return finite_point(self.target, self.like, self.generator)
        x = self.target.parameters.unconstrain(start) if isinstance(start, Mapping) else start
        if not isinstance(x, Tensor):
            raise TypeError(
                f"start must be a name, a tensor, a dictionary, a Gaussian or a Fit, got {type(x).__name__}"
            )
        x = x.detach().to(self.like)
        if x.shape != (self.target.dim,):
            raise ValueError(f"start has shape {tuple(x.shape)}, expected ({self.target.dim},)")
        if not bool(self.target.scores(x.unsqueeze(0)).finite):
            raise ValueError("log_density or its gradient is not finite at start; give another point")
        return x

    def _copy(self, q: Gaussian, structure: Structure) -> Gaussian:
        layout = lay_out(structure, self.target, lambda: q.loc) if not isinstance(structure, str) else None
        if q.batch_shape or q.d != self.target.dim or (layout is not None and layout.group != q.structure):
            raise ValueError(f"start is {q}, which does not fit dim={self.target.dim} and structure={structure!r}")
        copy = Gaussian(q.structure, form=q.form, dtype=self.like.dtype, device=self.like.device)
        copy.frame.copy_(q.frame)
        return copy

    def _jittered(self, x: Tensor) -> Tensor:
        """Return a point near x, because couplings may vanish at a special one."""
        noise = torch.randn(x.shape, generator=self.generator, dtype=x.dtype, device=x.device)
        for scale in (JITTER, JITTER / 10, JITTER / 100):
            near = x + scale * noise
            if bool(self.target.scores(near.unsqueeze(0)).finite):
                return near
        return x

    def _curvature(self, x: Tensor) -> Tensor:
        """Return a positive precision at x: a matrix, or its diagonal where there are many unknowns."""
        if self.target.dim <= DENSE_HESSIAN:
            hessian = self.target.hessian(x)
            return positive_curvature(hessian) if bool(hessian.isfinite().all()) else torch.ones_like(x)
        diagonal = hessian_diagonal(self.target, x, self.generator).abs()
        usable = diagonal[diagonal.isfinite() & (diagonal > 0)]
        typical = float(usable.median()) if len(usable) else 1.0
        return diagonal.nan_to_num(typical).clamp(min=1e-4 * typical)

    def _bound(self, q: Gaussian) -> float:
        pairs = max(2, min(COMPARED_DRAWS, 2**20 // q.d) // 2)
        z = standard_draws(pairs, q.d, generator=self.generator, dtype=q.dtype, device=q.device)
        z = torch.cat([z, -z])
        bound = float((self.target.log_density(mean_of(q) + push(q, z)) - log_prob_of_noise(q, z)).mean())
        return bound if math.isfinite(bound) else -math.inf


def finite_point(target: Target, like: Tensor, generator: torch.Generator) -> Tensor:
    """Return zero, or a random point near it where the density and its gradient are finite."""
    x = like.new_zeros(target.dim)
    for trial in range(TRIALS):
        if bool(target.scores(x.unsqueeze(0)).finite):
            return x
        x = (1 + trial) / 4 * torch.randn(target.dim, generator=generator, dtype=like.dtype, device=like.device)
    raise DensityError(
        f"log_density or its gradient is not finite at zero and at {TRIALS - 1} random points near it; look at the "
        "density, or pass start=x, a point where it is finite"
    )


class Search(NamedTuple):
    """Iterates of a search for the mode: one half way, the last; and whether it ended before the first of them."""

    middle: Tensor
    last: Tensor
    ended_soon: bool


def find_mode(target: Target, x: Tensor, known: Callable[[Tensor], bool] = lambda place: False) -> Search:
    """Maximize the density by L-BFGS from x, for some iterations at most, or until a point is ``known``."""
    place = nn.Parameter(x.clone())

    def negative() -> Tensor:
        target.gradient_evaluations += 1
        place.grad = None
        loss = -target(place.unsqueeze(0)).sum()
        loss.backward()
        return loss.detach()

    optimizer = LBFGS([place])
    losses = [optimizer.evaluate(negative)]
    middle = place.detach().clone()
    for iteration in range(1, MODE_ITERATIONS + 1):
        losses.append(float(optimizer.step(negative)))
        if iteration == MODE_ITERATIONS // 2:
            middle = place.detach().clone()
        if iteration >= PATIENCE and losses[-1 - PATIENCE] - losses[-1] < PROGRESS:
            break
        if losses[-1] < -BOUNDLESS or known(place.detach()):
            break
    return Search(middle, place.detach().clone(), iteration < MODE_ITERATIONS // 2)


def _is_among_draws(q: Gaussian, x: Tensor) -> bool:
    """Return whether x is no farther from the mean of q than its draws are."""
    return squared_length(q, x) < q.d + 6 * math.sqrt(2 * q.d)


def positive_curvature(hessian: Tensor) -> Tensor:
    """Return ``-H`` with the magnitudes of its eigenvalues, in units of its diagonal: a precision, also off the mode.

    Where the diagonal is zero the density is flat, and the precision is 1.
    """
    flat = hessian.diagonal() == 0
    scale = hessian.diagonal().abs().masked_fill(flat, 1.0).rsqrt()
    values, vectors = torch.linalg.eigh(flat.to(hessian).diag() - scale.unsqueeze(-1) * hessian * scale)
    values = values.abs().clamp(min=1e-10 * float(values.abs().max()))
    return (vectors * values) @ vectors.mT / scale.unsqueeze(-1) / scale


def hessian_diagonal(target: Target, x: Tensor, generator: torch.Generator) -> Tensor:
    """Return an estimate of the Hessian's diagonal from a few products with random signs."""
    operator = SymmetricOperator(target.dim, lambda rows: target.hessian_products(x, rows), lambda h: x)
    return Hutchinson(DIAGONAL_SAMPLES, generator)(operator, x)


def fit_quadratic(q: Gaussian, precision: Tensor) -> None:
    """Give q the factor that is nearest, in ``KL(q || p)``, to a Gaussian p of a given precision and of q's mean.

    These are Newton steps on the manifold, in which no density is evaluated.
    """
    steps = NaturalSteps(q, momentum=0.0)
    operator = SymmetricOperator(q.d, lambda rows: -rows @ precision, lambda h: -precision.diagonal()[h.where])
    still = torch.zeros(q.d, dtype=q.dtype, device=q.device)
    for _ in range(100):
        gradient = price_gradient(q, operator, still)
        if squared_norm(gradient) < 1e-8 * q.d:
            break
        steps.take(gradient, 2.0)
