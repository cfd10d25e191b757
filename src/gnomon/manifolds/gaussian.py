"""Gaussians as points of an SPD submanifold (the Siegel embedding)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.distributions import Distribution, MultivariateNormal

from ..frames import Chart
from ..groups import Affine, Element, Group, LowRank, LowRankAffine, Square, StructureLike
from ..groups.low_rank_energy import Energy
from ..linalg import as_tensor, widen
from .divergence import Normals, kl_divergence
from .init import Init, as_batch_shape, as_group, as_values, initial_element, natural_dtype
from .normal import LOG_2PI, Indices, StructuredNormal
from .point import AtOrigin, Point


class Gaussian(Point):
    """N(mu, Sigma) with a structured factor, in the coordinates of Eq. gnormal_coord2.

    Args:
        structure: a dimension ``d`` (full covariance) or the group of the factor; with ``loc`` or ``init`` also a name
            such as ``"lowrank:3"``.
        form: ``"covariance"`` keeps ``Sigma = L L^T`` and mu in the frame ``[[L, mu], [0, 1]]``;
            ``"precision"`` keeps ``Sigma^-1 = P P^T`` and ``c = -P^T mu`` in ``[[P, 0], [c^T, 1]]``, in which
            the log-density needs no inverse.
        loc: the mean at the start; zero unless given.
        init: the covariance at the start: a scalar, a diagonal or an SPD matrix; the identity unless given.

    The other arguments are those of :class:`gnomon.SPD`.

    Without momentum, a step with learning rate ``beta`` in the covariance form is structured natural-gradient
    descent with ``gamma = beta / 2`` (Eqs. sngd and gauss_case_update): ``mu <- mu - gamma Sigma g_mu``,
    ``L <- L Exp(-gamma L^T g_Sigma L)``.
    """

    def __init__(
        self,
        structure: StructureLike,
        *,
        form: Literal["covariance", "precision"] = "covariance",
        loc: Tensor | None = None,
        order: int | None = 2,
        init: Init = None,
        project: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        batch_shape: Sequence[int] | int = (),
    ) -> None:
        if form not in ("covariance", "precision"):
            raise ValueError(f"form must be 'covariance' or 'precision', got {form!r}")
        linear = as_group("structure", structure, init, loc)
        upper = form == "covariance"
        affine: Affine | LowRankAffine
        if isinstance(linear, LowRank):
            affine = LowRankAffine(linear, upper)
        elif linear.is_algebra:
            affine = Affine(linear, upper)
        else:
            raise ValueError(f"structure cannot be {linear}: the affine group of a Gaussian needs a matrix algebra")
        if dtype is None and init is None and loc is not None:
            as_values("loc", loc)
            dtype = natural_dtype(loc)
        batch_shape = as_batch_shape(batch_shape)
        chart = Chart(affine, "outer" if upper else "inverse", order)
        factor = initial_element(
            linear,
            chart.form,
            init,
            batch_shape=batch_shape,
            dtype=dtype,
            device=device,
            project=project,
        )
        mean = _initial_mean(loc, (*batch_shape, linear.k), factor[0])
        super().__init__(chart, affine.join(factor, mean))
        self.form = form

    def assign_(self, covariance: Init = None, *, loc: Tensor | None = None, project: bool = False) -> Gaussian:
        """Move to a given covariance, as ``init`` takes it, or mean, or both; returns the Gaussian itself.

        What is not given stays. A covariance that is not on the submanifold is an error, unless ``project`` is set.
        The state of an optimizer is kept, and belongs to where the Gaussian was.
        """
        _, factor, _ = self._parts()
        if covariance is not None:
            factor = initial_element(
                self.structure,
                self.chart.form,
                covariance,
                batch_shape=self.batch_shape,
                dtype=self.dtype,
                device=self.device,
                project=project,
                name="covariance",
            )
        mean = self.loc if loc is None else _initial_mean(loc, (*self.batch_shape, self.d), factor[0])
        self._become(self.affine.join(tuple(block.detach() for block in factor), mean.detach()))
        return self

    @property
    def affine(self) -> Affine | LowRankAffine:
        """The group of the factor and the mean together."""
        assert isinstance(self.group, (Affine, LowRankAffine))
        return self.group

    @property
    def structure(self) -> Group:
        """The group of the factor."""
        return self.affine.linear

    def _parts(self) -> tuple[Group, Element, Tensor]:
        """Return the linear group, its element (L or P), and the vector (mu or c)."""
        factor, vector = self.affine.split(self.element())
        return self.structure, factor, vector

    def _kind(self) -> str:
        return f"{self.structure!r}, {self.form}"

    @property
    def d(self) -> int:
        """The dimension."""
        return self.group.k - 1

    @property
    def loc(self) -> Tensor:
        """The mean, as a copy."""
        return self.affine.mean(self.element()).clone()

    def factor_matrix(self) -> Tensor:
        """Return ``L`` (covariance form) or ``P`` (precision form), dense, as a copy."""
        linear, factor, _ = self._parts()
        return linear.to_dense(factor).clone()

    def covariance(self) -> Tensor:
        """Return ``Sigma``, dense."""
        linear, factor, _ = self._parts()
        return Chart(linear, self.chart.form).matrix(factor)

    def precision(self) -> Tensor:
        """Return ``Sigma^-1``, dense."""
        linear, factor, _ = self._parts()
        return Chart(linear, "inverse" if self.form == "covariance" else "outer").matrix(factor)

    def logdet(self) -> Tensor:
        """Return ``log det Sigma``, of the batch shape."""
        return self._logdet()

    def _vectors(self, x: Tensor) -> Tensor:
        x = as_tensor("x", x, self.frame)
        if x.ndim == 0 or x.shape[-1] != self.d:
            raise ValueError(f"x has shape {tuple(x.shape)}, but this Gaussian has vectors of length {self.d}")
        return x

    def _standardize(self, x: Tensor) -> Tensor:
        """Return ``z`` with ``(x - mu)^T Sigma^-1 (x - mu) = |z|^2``."""
        x = self._vectors(x)
        linear, factor, vector = self._parts()
        if self.form == "covariance":
            return linear.solve(factor, x - vector)
        return linear.rmatvec(factor, x) + vector

    def log_prob(self, x: Tensor) -> Tensor:
        """Return the log-density at ``x`` of shape ``(*sample, *batch_shape, d)``."""
        x = self._vectors(x)
        if isinstance(self.group, LowRankAffine):
            energy = self._low_rank_energy(self.group, x)
        else:
            energy = self._standardize(x).square().sum(-1) + self.logdet()
        return -0.5 * (energy + self.d * LOG_2PI)

    def _low_rank_energy(self, group: LowRankAffine, x: Tensor) -> Tensor:
        """Return ``(x - mu)^T Sigma^-1 (x - mu) + log det Sigma``.

        At the origin it is one node of the graph, whose derivative is that in the coordinates.
        """
        if x.requires_grad or not self._at_origin():
            return group.energy(self.element(), x)
        energy = Energy(group, self.frame, x)
        (value,) = AtOrigin.apply(
            self.eta,
            self.frame,
            lambda frame: (energy.value(),),
            lambda frame, grads: energy.gradient(grads[0]),
            lambda frame, eta: (group.energy(self._moved(frame, eta), x),),
        )
        return value

    def rsample(self, sample_shape: int | Sequence[int] = ()) -> Tensor:
        """Return reparametrized draws, ``(*sample_shape, *batch_shape, d)``."""
        shape = (sample_shape,) if isinstance(sample_shape, int) else tuple(sample_shape)
        noise = torch.randn(*shape, *self.batch_shape, self.d, dtype=self.dtype, device=self.device)
        linear, factor, vector = self._parts()
        if self.form == "covariance":
            return vector + linear.matvec(factor, noise)
        return linear.rsolve(factor, noise - vector)

    @torch.no_grad()
    def sample(self, sample_shape: int | Sequence[int] = ()) -> Tensor:
        """Return draws, ``(*sample_shape, *batch_shape, d)``."""
        return self.rsample(sample_shape)

    def entropy(self) -> Tensor:
        """Return ``d/2 (1 + log 2 pi) + 1/2 log det Sigma``."""
        return 0.5 * (self.d * (1 + LOG_2PI) + self.logdet())

    def kl_divergence(self, other: Gaussian | Distribution) -> Tensor:
        """Return ``KL(self || other)`` for a Gaussian of ours or of torch's; see :func:`gnomon.kl_divergence`."""
        return kl_divergence(self, other)

    def normals(self) -> Normals:
        """Return the mean, the covariance by its factor, and its log-determinant."""
        return Normals(*self._mean_and_covariance(), self.logdet())

    def _mean_and_covariance(self) -> tuple[Tensor, Square]:
        linear, factor, _ = self._parts()
        return self.affine.mean(self.element()), Square(linear, factor, self.form == "precision")

    def marginal(self, indices: Indices) -> StructuredNormal:
        """Return the distribution of some coordinates, in the order given.

        Where they have a structure of their own it costs no more than that, and has it: some coordinates of a diagonal
        or low-rank covariance, the first ones of a lower triangular one (of an upper triangular one the last), an
        arrow's head with some of its tail, whole blocks. Other coordinates get a dense factor, of which an error
        says if it is too large.

        Args:
            indices: different coordinates: a number, several, a slice or a mask. Negative ones count from the end.
                ``slice(None)`` gives this Gaussian as a distribution of torch.

        The result is a distribution of :mod:`torch.distributions` that shares this Gaussian's graph: gradients
        flow to the coordinates, and a step of the optimizer makes it stale.
        """
        return StructuredNormal(*self._mean_and_covariance()).marginal(indices)

    def conditional(self, indices: Indices, values: Tensor) -> StructuredNormal:
        """Return the distribution of the other coordinates, in increasing order, given values of these.

        With the precision P it is ``N(mu_r - P_rr^-1 P_rg (values - mu_g), P_rr^-1)``, which in precision form needs
        no inverse. What :meth:`marginal` says of structures holds for P.

        Args:
            indices: coordinates that are known, as in :meth:`marginal`.
            values: their values, ``(*sample, *batch_shape, len(indices))``; the result has a mean for each.
        """
        return StructuredNormal(*self._mean_and_covariance()).conditional(indices, values)

    def to_distribution(self) -> MultivariateNormal:
        """Return the same as a :class:`torch.distributions.MultivariateNormal`; dense, in at least float32."""
        loc = widen(self.loc)
        if self.form == "covariance":
            return MultivariateNormal(loc, covariance_matrix=widen(self.covariance()))
        return MultivariateNormal(loc, precision_matrix=widen(self.precision()))

    def forward(self, x: Tensor) -> Tensor:
        return self.log_prob(x)


def _initial_mean(loc: Tensor | None, shape: tuple[int, ...], like: Tensor) -> Tensor:
    if loc is None:
        return like.new_zeros(shape)
    mean = as_values("loc", loc).to(like)
    try:
        return mean.expand(shape)
    except RuntimeError:
        raise ValueError(f"loc has shape {tuple(mean.shape)}, expected {shape}") from None
