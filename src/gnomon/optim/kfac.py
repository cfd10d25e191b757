"""KFAC: the baseline of INGD, with inverses (right side of Fig. matDL_opt)."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from .distributed.strategies import strategy_for
from .ingd import INGD, PAPER
from .kronecker.config import CurvatureConfig, Scalar, StepConfig, resolves_preset
from .kronecker.inverse_factor import InverseFactors
from .kronecker.optimizer import KroneckerOptimizer

OWN_TO_INGD = {
    "precond_lr",
    "precond_momentum",
    "structure",
    "base_width",
    "scheduled_decay",
    "polar",
    "max_factor_step",
    "order",
    "convention",
    "precond_dtype",
    "memory",
    "compile",
    "shard",
    "seed",
}
"""The arguments of INGD that say how its factors move and are stored, and what its own directions and lengths are."""
GROWTH = 20
"""The steps after which growing intervals grow by one. A running average that forgets 5% of the past at an update needs
more of the first batches than INGD's factors, which forget more."""
SHARED = {
    name: parameter
    for name, parameter in inspect.signature(INGD).parameters.items()
    if name not in OWN_TO_INGD | {"model", "lr"}
}
"""The arguments that both optimizers have, with their defaults."""


class KFAC(KroneckerOptimizer):
    """Kronecker-factored curvature with running averages and Cholesky inverses (Fig. matDL_opt, right).

    With ``mu_AA`` and ``mu_GG`` as in :class:`~gnomon.optim.INGD`, every ``update_every`` steps::

        A <- decay A + (1 - decay) mu_AA          S <- decay S + (1 - decay) mu_GG

    and the direction of a gradient G is ``(S + damping I)^-1 G (A + damping I)^-1``. By default the averages start with
    the first batch, damping is relative to the mean of each diagonal, and steps are those of INGD's defaults.
    ``preset="paper"`` starts from identities, with an absolute damping, the paper's momentum, and SGD for other
    parameters. Factors are dense, and diagonal for embeddings and above ``max_dim``.

    Args:
        model: the model. All its trainable parameters are trained.
        lr: the learning rate.
        decay: the weight of the past in the averages.
        shared: all other arguments of :class:`~gnomon.optim.INGD`, with the same meaning and defaults, except those
            that say how INGD's factors are updated and stored.
    """

    @resolves_preset(PAPER, shared=SHARED)
    def __init__(self, model: nn.Module, lr: Scalar = 1e-2, *, decay: Scalar = 0.95, **shared: Any) -> None:
        chosen = {name: shared.get(name, parameter.default) for name, parameter in SHARED.items()}
        in_groups = ("momentum", "weight_decay", "damping", "update_every", "step_rms", "kl_clip")
        sources = ("curvature", "fisher", "approx", "grouped", "subsample", "scaler")
        steps = ("fallback", "fallback_lr", "growing_intervals", "precondition_only")
        super().__init__(
            model,
            {"lr": lr, "decay": decay, **{name: chosen[name] for name in in_groups}},
            rule=InverseFactors(chosen["relative"]),
            max_dim=chosen["max_dim"],
            curvature=CurvatureConfig(**{name: chosen[name] for name in sources}),
            steps=StepConfig(**{name: chosen[name] for name in steps}, growth=GROWTH),
            groups=chosen["groups"],
            sharing=strategy_for,
        )


def _full_signature() -> inspect.Signature:
    """Return the signature with all arguments and their defaults, for ``help()`` and notebooks."""
    own = inspect.signature(KFAC.__init__)
    parameters = [p for p in own.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    return own.replace(parameters=[*parameters, *SHARED.values()])


KFAC.__init__.__signature__ = _full_signature()  # type: ignore[attr-defined]
