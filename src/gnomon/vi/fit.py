"""The fit: from a log density to a structured Gaussian near it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

import torch

from .density import Density, Minibatches, batched
from .parameters import Parameters, Specification
from .progress import Progress, reporter
from .result import Fit
from .run import Run
from .settings import Settings
from .structure import Structure, check_structure
from .target import Target


def fit(
    log_density: Density,
    dim: int | None = None,
    *,
    parameters: Mapping[str, Specification] | None = None,
    structure: Structure = "auto",
    data: Iterable[Any] | None = None,
    num_data: int | None = None,
    log_prior: Density | None = None,
    temperature: float = 1.0,
    seed: int | None = None,
    dtype: torch.dtype = torch.float64,
    device: torch.device | str | None = None,
    progress: bool | Progress = False,
    **settings: Any,
) -> Fit:
    """Fit a Gaussian q of a given structure to a log density, by natural-gradient ascent of the evidence lower bound.

    Args:
        log_density: ``(draws, dim) -> (draws,)`` over R^dim, up to a constant; a function of one draw is vmapped. With
            ``parameters`` it takes a dictionary of tensors ``(draws, *shape)`` on their own scale.
        dim: the number of unknowns.
        parameters: instead of ``dim``, names with shapes, constraints of ``torch.distributions`` or pairs of both:
            ``{"beta": 3, "tau": constraints.positive, "w": ((2, 4), constraints.simplex)}``. The Jacobian of the
            constraints is added to the density.
        structure: ``"auto"`` searches for globals and locals and is full where there are none; ``"arrow"``, ``"full"``,
            ``"triangular"``, ``"diagonal"``, ``"low_rank"``; a name such as ``"lowrank:4"`` or ``"arrow:2"`` (with the
            globals first), as :func:`gnomon.groups.as_structure` takes it; a group, or a function from dim to one.
        data: batches of data, such as a ``DataLoader``. Then ``log_density(x, *batch)`` is the log likelihood of a
            batch and ``log_prior(x)`` the log prior. ``num_data`` is the number of all data.
        temperature: the density is raised to the power ``1 / temperature``.
        seed: of the draws; None draws one from torch's generator.
        progress: True shows a bar; a function is called with (steps, elbo, khat, seconds).
        settings: ``form`` ("covariance" or "precision"), ``start`` ("mode", "zero", a point, a dictionary of
            parameters, a Gaussian, or another fit), ``draws`` a step, ``rate``, ``momentum``, ``gradients`` ("auto",
            "path" or "price"), ``max_steps``, ``tolerance`` in nats, ``searches`` for other modes,
            ``evaluation_draws``; see :class:`gnomon.vi.Settings`.

    A rate of 2 is a Newton step for a Gaussian target (:class:`gnomon.Gaussian` has the scale). The fit stops where the
    estimated gap to the best q of the family, plus two standard errors, is below ``tolerance``.
    """
    unknown = settings.keys() - {field.name for field in fields(Settings)}
    if unknown:
        names = ", ".join(field.name for field in fields(Settings))
        raise TypeError(f"fit() does not know the setting {min(unknown)!r}; the settings are {names}")
    checked = Settings(**settings)
    space, named = _space(dim, parameters)
    check_structure(structure, space.dim)
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature!r}")
    like = torch.zeros((), dtype=dtype, device=device)
    batches, function = _with_data(log_density, data, num_data, log_prior)
    if batches is not None and checked.start == "mode":
        checked = Settings(**{**settings, "start": "zero"})  # a mode needs passes over all data
    function = batched(function, space, named, like, () if batches is None else batches.first)
    target = Target(function, space, named=named, temperature=temperature, batches=batches)
    if seed is None:
        seed = int(torch.randint(2**31, ()))
    return Run(target, structure, checked, like, seed).fit(reporter(progress, checked.max_steps))


def _space(dim: int | None, parameters: Mapping[str, Specification] | None) -> tuple[Parameters, bool]:
    if (dim is None) == (parameters is None):
        raise ValueError(f"give either dim or parameters, got dim={dim!r} and parameters={parameters!r}")
    if parameters is not None:
        return Parameters(parameters), True
    if not isinstance(dim, int) or dim < 1:
        raise ValueError(f"dim must be a positive integer, got {dim!r}")
    return Parameters({"x": dim}), False


def _with_data(
    log_density: Density, data: Iterable[Any] | None, num_data: int | None, log_prior: Density | None
) -> tuple[Minibatches | None, Density]:
    if data is None:
        if log_prior is not None or num_data is not None:
            raise ValueError("log_prior and num_data belong to data in batches; without data= add the prior yourself")
        return None, log_density
    if log_prior is None:
        raise ValueError("data= needs log_prior=, because only the likelihood is scaled from a batch to all data")
    batches = Minibatches(data, num_data)
    return batches, batches.density(log_density, log_prior)
