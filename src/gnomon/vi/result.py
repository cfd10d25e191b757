"""What a fit returns: the posterior, how good it is, and draws on the parameters' own scale."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..manifolds import Gaussian
from .schedule import History
from .summary import table, verdict
from .target import Target


class Evaluation(NamedTuple):
    """The bound with its standard error, k-hat, and the draws they come from with their smoothed log weights."""

    elbo: float
    elbo_error: float
    khat: float
    draws: Tensor
    log_weights: Tensor


class Counts(NamedTuple):
    """What a fit has used, and what it has left out."""

    gradient_evaluations: int
    density_evaluations: int
    nonfinite_draws: int
    violating_draws: int
    skipped_steps: int
    overflows: int
    returns: int
    other_modes: int


class Fit:
    """A structured Gaussian near a posterior.

    Attributes:
        posterior: a :class:`gnomon.Gaussian` over the unconstrained unknowns, in the order that its structure asks for:
            its coordinate ``i`` is coordinate ``order[i]`` of the parameters.
        order: None where that is the order of the parameters.
        elbo, elbo_error: the evidence lower bound and its standard error.
        khat: the shape of the tail of the importance weights; see :meth:`summary`.
        gap, gap_error: the estimate of what is missing to the best Gaussian of this structure, in nats.
        converged: whether the gap came below the tolerance.
        history: one entry for each step, see :class:`gnomon.vi.schedule.History`.
        counts: evaluations, and what was skipped.
        gradients: ``"path"`` or ``"price"``, which the steps took.
    """

    def __init__(
        self,
        posterior: Gaussian,
        target: Target,
        history: History,
        gap: tuple[float, float],
        converged: bool,
        evaluation: Evaluation,
        counts: Counts,
        gradients: str,
    ) -> None:
        self.posterior, self.history, self.converged, self.counts = posterior, history, converged, counts
        self.gradients = gradients
        self.gap, self.gap_error = gap
        self.elbo, self.elbo_error, self.khat = evaluation.elbo, evaluation.elbo_error, evaluation.khat
        self.order = target.order
        self._target, self._evaluation = target, evaluation

    @torch.no_grad()
    def draws(self, n: int, *, resample: bool = False) -> Any:
        """Return ``n`` draws on the scale of the parameters: ``(n, dim)``, or a dictionary of ``(n, *shape)``.

        With ``resample`` they are drawn, with replacement and by smoothed importance weights, from the draws that
        :attr:`khat` comes from. This corrects the shape of the approximation where k-hat is below 0.7.
        """
        return self._named(self.unconstrained_draws(n, resample=resample))

    @torch.no_grad()
    def unconstrained_draws(self, n: int, *, resample: bool = False) -> Tensor:
        """Return draws as :meth:`draws` does, of the unconstrained vectors in the order of the parameters."""
        if n < 1:
            raise ValueError(f"n must be a positive integer, got {n!r}")
        if not resample:
            return self._target.in_parameter_order(self.posterior.sample((n,)))
        weights = self._evaluation.log_weights.exp()
        chosen = torch.multinomial(weights, n, replacement=True)
        return self._target.in_parameter_order(self._evaluation.draws[chosen])

    def _named(self, x: Tensor) -> Any:
        return self._target.parameters.constrain(x) if self._target.named else x

    def summary(self, n: int = 2000, most: int = 40) -> str:
        """Return a table of means, standard deviations and quantiles from ``n`` draws, and a verdict in words.

        The table has at most ``most`` rows.
        """
        x = self.unconstrained_draws(n)
        values = self._target.parameters.constrain(x)
        columns = torch.cat([value.reshape(n, -1) for value in values.values()], -1)
        return f"{table(self._target.parameters.entries(), columns, most)}\n\n{verdict(self)}"

    def __repr__(self) -> str:
        return (
            f"Fit({self.posterior.structure!r}, elbo={self.elbo:.3f} +- {self.elbo_error:.1g}, khat={self.khat:.2f}, "
            f"converged={self.converged})"
        )

    def to_arviz(self, n: int = 1000, *, resample: bool = False) -> Any:
        """Return draws as ArviZ's ``InferenceData``, one chain of ``n`` draws; this needs the package arviz."""
        try:
            import arviz
        except ImportError:
            raise ImportError("to_arviz() needs the package arviz: pip install 'gnomon[vi]'") from None
        values = self._target.parameters.constrain(self.unconstrained_draws(n, resample=resample))
        posterior = {name: value.unsqueeze(0).cpu().numpy() for name, value in values.items()}
        if int(arviz.__version__.split(".")[0]) >= 1:  # all groups in one dictionary
            return arviz.from_dict({"posterior": posterior})
        return arviz.from_dict(posterior=posterior)
