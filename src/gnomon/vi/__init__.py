"""Variational inference: structured Gaussians near a posterior, by natural gradients in the moving frame.

fit = gnomon.vi.fit(log_density, dim=90)  # log_density: (draws, 90) -> (draws,)
print(fit.summary())
"""

from typing import Any

from .density import DensityError
from .fit import fit
from .parameters import Parameters
from .psis import pareto_smooth
from .result import Fit
from .run import RunawayError
from .settings import Settings
from .structure import Globals

__all__ = [
    "AutoStructured",
    "DensityError",
    "Fit",
    "Globals",
    "Parameters",
    "RunawayError",
    "Settings",
    "fit",
    "pareto_smooth",
]


def __getattr__(name: str) -> Any:
    if name == "AutoStructured":  # needs Pyro
        from .guide import AutoStructured

        return AutoStructured
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
