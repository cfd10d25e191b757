"""INGD: inverse-free natural-gradient descent for neural networks (Fig. matDL_opt)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ..linalg import align
from .distributed.strategies import SHARDS, ShardChoice, strategy_for
from .distributed.tensor_parallel import mark_parts
from .kronecker.config import CurvatureConfig, FactorConfig, Scalar, StepConfig, check_choice, resolves_preset
from .kronecker.factor_update import early_average, published_precond_lr
from .kronecker.inverse_free_factor import InverseFreeFactors
from .kronecker.layers.base import Approximation, Settings
from .kronecker.named_groups import model_of
from .kronecker.optimizer import KroneckerOptimizer
from .kronecker.polar import PolarDirections
from .kronecker.structures import Structure

PAPER: Settings = {
    "structure": "dense",
    "momentum": 0.9,
    "weight_decay": 0.01,
    "damping": 5e-3,
    "precond_lr": published_precond_lr,
    "precond_momentum": 0.5,
    "approx": "expand",
    "step_rms": None,
    "base_width": None,
    "scheduled_decay": False,
    "polar": False,
    "max_factor_step": math.inf,
    "order": 1,
    "relative": False,
    "growing_intervals": False,
    "subsample": False,
    "fallback": "sgd",
}
"""What arguments that are not given mean with ``preset="paper"``, where that is not what the signature says."""


class INGD(KroneckerOptimizer):
    """Second-order steps for every layer of a model, by matrix multiplications alone (Fig. matDL_opt).

    With ``mu_AA`` the second moment of a layer's inputs and ``mu_GG`` that of its per-sample output gradients,
    ``H_K = K^T mu_AA K`` and ``H_C = C^T mu_GG C``, the factors follow the curvature by::

        m_K <- a1 m_K + b1/(2d) ( tr(H_C) H_K + damping tr(C^T C) K^T K - d I )        K <- K Exp(-m_K)
        m_C <- a1 m_C + b1/(2p) ( tr(H_K) H_C + damping tr(K^T K) C^T C - p I )        C <- C Exp(-m_C)

    with ``a1 = precond_momentum`` and ``b1 = precond_lr``, and a step goes along ``D = C C^T G K K^T`` for the weight
    with its bias as a last column. By default, the average B of the directions (Nesterov's) is scaled to
    a root mean square r in each layer, which shrinks with the number of inputs as initial weights do::

        B <- momentum B + (1 - momentum) D        W <- (1 - lr weight_decay lr / max(lr)) W - lr r Q / rms(Q)
        r = step_rms sqrt(base_width / width)     for a layer with so many inputs, counted as 48 at least

    Q is the polar factor of B, the orthogonal matrix nearest to it, for layers with a dense factor whose batches have
    many rows; where the iterations would take a large part of a step, each half of B has its own. Otherwise Q is B
    itself, and r is half as large unless ``base_width`` is None
    (:class:`~gnomon.optim.kronecker.polar.PolarDirections`).

    Beside that the defaults differ from the figure in what keeps it stable: curvature and damping are relative to the
    mean of the layer's curvature, so that the identity is a matched start and the scale of inputs and loss does not
    matter; an update of a factor is bounded in norm; the exponential is truncated after its second order; factors are
    updated at each step at first, then at intervals that grow up to ``update_every``. ``preset="paper"`` is the figure
    as it stands: absolute curvature, ``K <- K (I - m_K)``, the published schedule of b1,
    ``M <- momentum M + D + weight_decay W``, ``W <- W - lr M``, and SGD for other parameters.

    Args:
        model: the model; all its trainable parameters are trained. Linear, convolution, transposed convolution,
            embedding, attention and recurrent layers and bare matrices get factors, other parameters follow
            ``fallback``. Coordinates of points on manifolds are left to :func:`~gnomon.optim.moving_frame`.
        lr: learning rate; with ``step_rms`` it has about the unit of AdamW's.
        momentum: weight of the past in the average of directions.
        weight_decay: the weight decay. It is decoupled with ``step_rms``, and added to the direction otherwise.
        scheduled_decay: whether decoupled weight decay is multiplied by ``lr / max(lr)`` over the steps so far: then it
            vanishes before the steps do, and the end of a schedule fits the loss alone.
        damping: added to the curvature, relative to its mean (absolute in the paper's preset).
        precond_lr: b1, how fast the factors follow.
        precond_momentum: a1. By default there is none: b1 is so large that it has little to add, and a dense factor
            costs half as much without it.
        update_every: steps between updates of the factors, T in the paper.
        structure: the structure of K and C: ``"auto"`` is dense, with a diagonal on a long side, which is more than 3.5
            times as long as the other one, if it is above 640, or above 256 between two linear layers where the other
            side is at least 64. Smaller long sides of linear layers are diagonal too where their dense factors would
            take more than 8 MB, and more than four times the trained parameters, in all; ``"dense"``,
            ``"triangular"``, ``"diagonal"``, ``"block"``, ``"arrow"``, ``"heisenberg"``, ``"toeplitz"`` or
            ``"identity"``, a function from the size to a group, a pair of those for (K, C), or a mapping from patterns
            of layer names (``"encoder.*"``) to any of these.
        curvature: ``"kfac"`` takes inputs and output gradients of layers by hooks, and the gradient matrix where no
            hook can see them; ``"gradient"`` takes the gradient matrix alone.
        fisher: ``"empirical"`` takes the gradients of the loss; ``"mc"`` those of targets drawn from the model's
            predictions, see :meth:`observe`.
        approx: where a weight is applied at several positions of a sample: ``"expand"`` counts each, ``"reduce"``
            takes means of inputs and sums of gradients; ``"auto"`` reduces convolutions, whose positions are pooled
            before the loss as a rule, and expands sequences.
        grouped: factors for each group of a convolution (``"each"``), or the paper's ``"average"`` over them.
        step_rms: root mean square of the step of a layer with ``base_width`` inputs at ``lr = 1``; None for steps as
            long as they are.
        base_width: the number of inputs at which a layer's steps have the root mean square ``step_rms``. They are
            smaller in wider layers and larger in narrower ones, down to 48 inputs; those of embeddings are
            ``2 step_rms``. A convolution counts its input channels or the positions of a patch, whichever are more.
            None for the same everywhere.
        polar: whether a step goes along the polar factor of B, the orthogonal matrix nearest to it. It is taken where
            a factor is dense and a batch has enough rows to pay for it. A mapping from patterns of layer names to
            numbers says how many matrices lie side by side in the outputs of a layer, as in ``{"*.qkv": 3}``; 0 leaves
            B as it is. It needs ``step_rms``, and is not used with ``precondition_only``.
        kl_clip: the alternative to ``step_rms``: a bound on ``lr^2 <G, D>``, over all layers.
        max_factor_step: bound on the spectral norm of what an update adds to ``m_K`` and ``m_C``; ``math.inf`` for
            none.
        order: the order at which the exponential is truncated, 1 or 2. With 2 a dense factor without momentum is stored
            as ``K K^T``, where size and damping bound its condition
            (:func:`~gnomon.optim.kronecker.gram_factor.is_safe`), and moves as
            :class:`~gnomon.optim.kronecker.gram_factor.GramFactor` says. Other dense factors move by
            ``I - m_K + 0.3 m_K^2``, and sparse factors by ``I - m_K + 0.5 m_K^2``. A saved state says which form it
            has, and is converted when it is loaded.
        relative: whether curvature and damping are relative to the curvature's mean, that of the batch with
            ``curvature="kfac"`` and a running one with ``"gradient"``.
        growing_intervals: whether updates are more frequent at first. The interval grows by one every five steps.
        subsample: whether statistics may come from one sample in two to four, where there are many more rows than
            the factors are large, and those of convolutions by positions from every second one along each axis.
        convention: ``"outside"`` keeps b1 out of the momentum, ``m <- a1 m + (...)``, ``K <- K Exp(-b1 m)``, which
            differs where b1 changes.
        precond_dtype: type of the factors; half precision is rounded at random, seeded by ``seed``. None is that of
            the weight, and float32 at least.
        memory: ``"low"`` stores each entry of a symmetric matrix once, stores no products between updates and, on CPUs,
            allocates the memory of directions anew at each step. It needs less memory and more time.
        compile: whether ``torch.compile`` makes one function of each layer's move, the part of a step that comes after
            its direction, and of updates of sparse factors, after up to half a minute for each shape at first. Moves
            then take about half of the time and updates a third. Moves in half precision, of shards and along polar
            factors, and updates of other factors, are as without it.
        max_dim: a factor of a larger size is diagonal.
        fallback: how other parameters are trained, ``"adamw"`` or ``"sgd"``.
        fallback_lr: their learning rate, that of the layers unless given.
        groups: dictionaries with ``params`` and settings for them, as in torch; all other parameters are a group too.
        precondition_only: ``step()`` replaces each gradient by its direction and moves nothing: for use before the
            ``step()`` of another optimizer.
        scaler: the ``GradScaler`` of the training loop, if there is one, so that curvature has the loss's own units.
            Without it ``step_rms`` works all the same, while ``kl_clip`` and the paper's preset do not.
        shard: on several ranks, whether each updates all factors (``"none"``), a layer's are updated by one rank, which
            sends them to the others (``"update"``), or stored by it alone, which sends directions (``"full"``).
            ``"auto"`` is ``"full"`` where ``fully_shard()`` or tensor parallelism has divided the parameters, so that
            gradients go to owners, and ``"none"`` otherwise.
        preset: ``"robust"`` or ``"paper"``: what arguments that are not given mean.
        seed: the seed of random rounding.

    Numbers may be functions of the step: ``lr=lambda step: ...``. A gradient that is not finite skips the step, and
    curvature that is not finite the update; ``skipped_steps`` and ``skipped_updates`` count them.
    """

    _factors: InverseFreeFactors

    @resolves_preset(PAPER)
    def __init__(
        self,
        model: nn.Module,
        lr: Scalar = 1e-2,
        *,
        momentum: Scalar = 0.8,
        weight_decay: Scalar = 0.2,
        scheduled_decay: bool = True,
        damping: Scalar = 0.2,
        precond_lr: Scalar = early_average,
        precond_momentum: Scalar = 0.0,
        update_every: int = 10,
        structure: Structure = "auto",
        curvature: Literal["kfac", "gradient"] = "kfac",
        fisher: Literal["empirical", "mc"] = "empirical",
        approx: Approximation | Literal["auto"] = "auto",
        grouped: Literal["each", "average"] = "each",
        step_rms: Scalar | None = 0.5,
        base_width: Scalar | None = 128,
        polar: bool | Mapping[str, int] = True,
        kl_clip: Scalar | None = None,
        max_factor_step: float = 0.5,
        order: Literal[1, 2] = 2,
        relative: bool = True,
        growing_intervals: bool = True,
        subsample: bool = True,
        convention: Literal["inside", "outside"] = "inside",
        precond_dtype: torch.dtype | None = None,
        memory: Literal["default", "low"] = "default",
        compile: bool = False,
        max_dim: int | None = 8192,
        fallback: Literal["adamw", "sgd"] = "adamw",
        fallback_lr: Scalar | None = None,
        groups: Iterable[Settings] = (),
        precondition_only: bool = False,
        scaler: torch.amp.GradScaler | None = None,
        shard: ShardChoice = "auto",
        preset: Literal["robust", "paper"] = "robust",
        seed: int = 0,
    ) -> None:
        check_choice("shard", shard, SHARDS)
        config = FactorConfig(relative, order, max_factor_step, convention, precond_dtype, memory, compile, seed)
        self._factors, self._shard = InverseFreeFactors(config), shard
        super().__init__(
            model,
            {
                "lr": lr,
                "momentum": momentum,
                "weight_decay": weight_decay,
                "peak_lr": 0.0 if scheduled_decay else None,
                "damping": damping,
                "precond_lr": precond_lr,
                "precond_momentum": precond_momentum,
                "update_every": update_every,
                "step_rms": step_rms,
                "base_width": base_width,
                "kl_clip": kl_clip,
            },
            rule=self._factors,
            structure=structure,
            max_dim=max_dim,
            curvature=CurvatureConfig(curvature, fisher, approx, grouped, subsample, scaler),
            steps=StepConfig(fallback, fallback_lr, growing_intervals, precondition_only, compile),
            groups=groups,
            sharing=partial(strategy_for, shard=shard, by_gradient=curvature == "gradient"),
            low_memory=memory == "low",
            direction=None if polar is False else PolarDirections(polar),
        )

    @classmethod
    def from_groups(
        cls,
        groups: Iterable[Settings],
        lr: Scalar = 1e-2,
        *,
        tensor_parallel_group: ProcessGroup | None = None,
        **settings: Any,
    ) -> INGD:
        """Return an INGD of parameters with names, for engines that hand over groups of them and no model.

        Factors come from gradient matrices, and there are no hooks. A parameter of two dimensions is a matrix, one of
        three a stack of matrices, as those of experts. Others follow ``fallback``. A first step with zero gradients
        makes the state and changes nothing. ``param_groups`` have the names of their parameters in ``names``.

        Args:
            groups: dictionaries with ``params``, pairs of a name and a parameter as ``model.named_parameters()`` gives
                them, and settings.
            lr: the learning rate.
            tensor_parallel_group: the ranks that have the parts of matrices, where parameters are plain tensors that
                hold a rank's part, as Megatron's do. A part has the attributes ``tensor_model_parallel = True`` and
                ``partition_dim``, the dimension that is divided evenly; other parameters are the same at all of these
                ranks. Each gradient goes to one rank, and its direction comes back. DTensors need no such group.
            settings: other arguments of the constructor.
        """
        for name in ("model", "groups"):
            if name in settings:
                raise TypeError(f"there is no argument {name} in from_groups(), whose first one is the groups")
        if settings.setdefault("curvature", "gradient") != "gradient":
            raise ValueError(f"curvature must be 'gradient' without a model, got {settings['curvature']!r}")
        model, named = model_of(groups)
        mark_parts(model.named_parameters(), tensor_parallel_group, settings.get("shard", "auto"))
        optimizer = cls(model, lr, groups=named, **settings)
        names = optimizer._registry.names()
        for group in optimizer.param_groups:
            group["names"] = [names[p] for p in group["params"]]
        return optimizer

    def factors(self, name: str) -> tuple[Tensor, Tensor]:
        """Return the dense K and C of a layer, in the curvature's own units: ``K K^T x C C^T`` is near its inverse.

        They have shapes ``(p, p)`` and ``(d, d)``, with a leading dimension where a layer has several blocks.
        """
        layer = next((layer for layer in self._layers.values() if layer.name == name), None)
        if layer is None:
            known = ", ".join(repr(layer.name) for layer in self._layers.values())
            raise KeyError(f"no layer {name!r} has factors; those that have: {known}")
        stack = self._preconditioner.stack([layer])
        k, c = self._factors.factors(stack)
        dense = layer.pair.left.to_dense(k), layer.pair.right.to_dense(c)
        if (levels := self._factors.levels(stack)) is not None:
            unit = (levels**-0.25).to(dense[0].dtype)
            dense = dense[0] * align(unit, dense[0]), dense[1] * align(unit, dense[1])
        K, C = (m.squeeze(0) if layer.layer.blocks == 1 else m for m in dense)
        return K.clone(), C.clone()
