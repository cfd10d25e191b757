"""Warnings of what an optimizer notices in the program around it."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence

import torch.distributed as dist
from torch import nn

from ...manifolds import point_of

LARGE_PART, MANY_NUMBERS = 1 / 3, 10_000
"""The share of a model's trained numbers that may have no factors, and their number, before a warning."""


def warn_of_model(names: Mapping[nn.Parameter, str], others: Iterable[nn.Parameter], trained: int) -> None:
    """Warn of what an optimizer does not train in its own way.

    ``others`` are the parameters without factors among ``trained`` numbers.
    """
    warn_of_points(names)
    largest = sorted(others, key=lambda p: -p.numel())
    missing = sum(p.numel() for p in largest)
    if missing > LARGE_PART * trained and missing > MANY_NUMBERS:
        found = ", ".join(f"{names[p]} {tuple(p.shape)}" for p in largest[:3] if p in names)
        warnings.warn(
            f"{missing / trained:.0%} of the trained numbers have no factors and follow the fallback, the largest in "
            f"{found}. Recurrent layers and bare matrices have factors with relative=True or curvature='gradient'; "
            "flat parameters of FullyShardedDataParallel need fully_shard() in its place. For others give fallback_lr "
            "the rate that AdamW would have",
            stacklevel=5,
        )


def warn_of_points(names: Mapping[nn.Parameter, str]) -> None:
    """Warn where a model holds points on manifolds, which need steps of their own."""
    found = {name: point for p, name in names.items() if (point := point_of(p)) and p.requires_grad}
    if found:
        kinds = ", ".join(f"{name} (of {type(point).__name__})" for name, point in found.items())
        warnings.warn(
            f"the model has coordinates of points on manifolds: {kinds}; this optimizer leaves them out. Train them "
            "beside it with gnomon.optim.moving_frame(torch.optim.SGD(point.parameters(), lr=...)), or freeze them",
            stacklevel=6,
        )


def warn_of_other_ranks(stacklevel: int) -> None:
    """Warn where a process trains as if it were alone, and is not."""
    ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if ranks > 1:
        warnings.warn(
            f"this process is one of {ranks} ranks, but the model is neither in DistributedDataParallel nor in "
            "fully_shard(), so that the statistics of layers are those of this rank's batches. Where ranks average "
            "gradients by themselves their weights drift apart: wrap the model, or give curvature='gradient', "
            "whose factors follow the averaged gradients",
            stacklevel=stacklevel,
        )


def warn_of_modules_not_called(stacklevel: int) -> None:
    """Warn that no hook has seen the modules whose weights have gradients."""
    warnings.warn(
        "the model's layers have gradients, but no module of them was called since this optimizer was built: "
        "gradients stand in for the statistics of layers. A compiled model sees hooks only if its first call "
        "comes after the optimizer is built (torch.compiler.reset() lets it begin anew). Where gradients come "
        "from elsewhere, give curvature='gradient'",
        stacklevel=stacklevel,
    )


def warn_of_replaced_parts(names: Sequence[str], stacklevel: int) -> None:
    """Warn that parameters are not in the model any more."""
    warnings.warn(
        f"a part of the model was replaced after this optimizer was built: {', '.join(names)} of before is dropped, "
        "with its state; add what took its place with add_param_group({'params': [...]})",
        stacklevel=stacklevel,
    )


def warn_of_skipped_updates(layer: str, count: int) -> None:
    """Warn that a layer's factors do not follow its curvature."""
    warnings.warn(
        f"the factors of layer {layer!r} have missed {count} updates in a row, because the curvature of its batches "
        "was not finite; look for inputs or output gradients that are infinite or NaN",
        stacklevel=2,
    )


def warn_of_skipped_steps(count: int, stacklevel: int) -> None:
    """Warn of the first step that was skipped, or of many in a row."""
    first = (
        "a gradient, or its natural direction, is not finite: the step was skipped, and nothing changed; look at the "
        "loss, the data or the learning rate (further ones are only counted, in optimizer.skipped_steps)"
    )
    many = (
        f"the last {count} steps were all skipped, because gradients or their natural directions were not finite: the "
        "model is not trained any more. Go back to a checkpoint, with a smaller learning rate or without the data that "
        "gives such gradients"
    )
    warnings.warn(first if count == 1 else many, stacklevel=stacklevel)
