"""A guide for Pyro models whose Gaussian has a structure and takes natural steps."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributions import constraints

try:
    import pyro
    from pyro import poutine
    from pyro.distributions import TorchDistribution
    from pyro.infer.autoguide import AutoContinuous
    from pyro.poutine.util import site_is_subsample
except ImportError:
    raise ImportError("gnomon.vi.AutoStructured needs the package pyro-ppl: pip install 'gnomon[pyro]'") from None

from ..manifolds import Gaussian
from .fit import fit
from .result import Fit
from .structure import Globals, Structure


class AutoStructured(AutoContinuous):
    """A structured Gaussian over all continuous latent variables of a model, in their unconstrained space.

        guide = gnomon.vi.AutoStructured(model)
        result = guide.fit(x, y)  # with the arguments of the model
        Predictive(model, guide=guide, num_samples=1000)(x)

    Args:
        model: a Pyro model. Its plates tell which latent variables are local: ``structure="auto"`` proposes an arrow
            with the others as globals, checks it with a few products with the Hessian, and searches where it does not
            hold.
        structure: as in :func:`gnomon.vi.fit`.
        settings: those of :func:`gnomon.vi.fit`.

    :meth:`fit` takes natural steps; ``pyro.infer.SVI`` is not needed. A plate that subsamples is an error.
    """

    def __init__(self, model: Callable[..., Any], *, structure: Structure = "auto", **settings: Any) -> None:
        super().__init__(model)
        self._structure, self._settings = structure, settings
        self._plain_model = (model,)  # self.model draws first values; a tuple, so that a module is not registered twice
        self.result: Fit | None = None

    def fit(self, *args: Any, **kwargs: Any) -> Fit:
        """Fit the guide to the model with these arguments, and return what :func:`gnomon.vi.fit` returns."""
        if self.prototype_trace is None:
            with torch.no_grad():
                self._setup_prototype(*args, **kwargs)
        self._refuse_subsamples(*args, **kwargs)
        structure = self._structure
        if structure == "auto":
            structure = self._from_plates() or "auto"
        density = functools.partial(_log_density, self, args, kwargs)
        value = next(self._sites())[1]["value"]
        settings = {"dtype": value.dtype, "device": value.device, **self._settings}
        with pyro.validation_enabled(False):
            result = fit(density, parameters=self._specification(), structure=structure, **settings)
        self.result = result
        return result

    def get_posterior(self, *args: Any, **kwargs: Any) -> TorchDistribution:
        """Return the fitted Gaussian over the unconstrained latent vector, as a distribution of Pyro."""
        if self.result is None:
            raise RuntimeError("the guide has not been fitted; call guide.fit(...) with the arguments of the model")
        return _Latent(self.result)

    def _loc_scale(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Return what Pyro's ``median`` and ``quantiles`` ask for, from the dense covariance."""
        posterior = self.get_posterior()
        return posterior.mean, posterior.variance.sqrt()

    def _sites(self) -> Iterator[tuple[str, Any, torch.Size]]:
        """Yield the names of latent variables in the guide's order, their nodes, and their unconstrained shapes."""
        for name, shape in self._unconstrained_shapes.items():
            yield name, self._nodes()[name], shape

    def _nodes(self) -> Any:
        assert self.prototype_trace is not None
        return self.prototype_trace.nodes

    @torch.no_grad()
    def _refuse_subsamples(self, *args: Any, **kwargs: Any) -> None:
        """Raise an error for a plate that takes subsamples.

        The trace of the prototype does not show plates that hold observations alone.
        """
        nodes: Any = poutine.trace(self._plain_model[0]).get_trace(*args, **kwargs).nodes
        for name, node in nodes.items():
            if node["type"] == "sample" and site_is_subsample(node) and len(node["value"]) < node["fn"].size:
                raise ValueError(
                    f"plate {name!r} draws {len(node['value'])} of {node['fn'].size} rows, but the fit needs the "
                    "density of all data; leave subsample_size out, or use gnomon.vi.fit with data= and num_data="
                )

    def _specification(self) -> dict[str, Any]:
        return {name: (tuple(node["value"].shape), node["fn"].support) for name, node, _ in self._sites()}

    def _from_plates(self) -> Globals | None:
        """Return the coordinates of variables outside of all plates, if the others are scalars in one plate."""
        heads: list[int] = []
        plates: set[tuple[str, int]] = set()
        start = 0
        for _, node, shape in self._sites():
            frames = [frame for frame in node["cond_indep_stack"] if frame.vectorized]
            plates.update((frame.name, frame.size) for frame in frames)
            if not frames:
                heads.extend(range(start, start + shape.numel()))
            elif shape.numel() != frames[0].size:
                return None
            start += shape.numel()
        return Globals(tuple(heads)) if len(plates) == 1 and start > len(heads) else None


def _log_density(guide: AutoStructured, args: Any, kwargs: Any, values: dict[str, Tensor]) -> Tensor:
    """Return the log joint density of one draw; :func:`gnomon.vi.fit` maps it over the draws."""
    nodes = guide._nodes()
    if any(values[name].shape != nodes[name]["value"].shape for name in values):
        raise ValueError("one draw at a time")  # what tells fit to vmap
    conditioned = poutine.condition(guide._plain_model[0], data=values)
    return torch.as_tensor(poutine.trace(conditioned).get_trace(*args, **kwargs).log_prob_sum())


class _Latent(TorchDistribution):
    """The posterior of a fit, in the order of the parameters."""

    has_rsample = True
    arg_constraints: ClassVar[dict[str, Any]] = {}
    support = constraints.real_vector

    def __init__(self, result: Fit) -> None:
        self._q: Gaussian = result.posterior
        self._target = result._target
        super().__init__(torch.Size(), torch.Size([self._q.d]), validate_args=False)

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        return self._target.in_parameter_order(self._q.rsample(tuple(sample_shape)))

    def log_prob(self, value: Tensor) -> Tensor:
        return self._q.log_prob(self._target.in_fitted_order(value))

    def expand(self, batch_shape: Any, _instance: Any = None) -> _Latent:
        if tuple(batch_shape):
            raise NotImplementedError("the posterior of a fit has no batch; draw with sample_shape instead")
        return self

    @property
    def mean(self) -> Tensor:
        return self._target.in_parameter_order(self._q.loc)

    @property
    def variance(self) -> Tensor:
        return self._target.in_parameter_order(self._q.covariance().diagonal())
