"""Starting points: from a scalar, a diagonal or an SPD matrix to an element of the group."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..frames import Chart, Form
from ..groups import Dense, Element, Group

Init = float | Tensor | None

_TOLERANCE = 1e-6  # relative; float32 data on a submanifold pass, others do not


def as_group(name: str, structure: Group | int) -> Group:
    """A size means the full manifold."""
    if isinstance(structure, Group):
        return structure
    if isinstance(structure, int) and not isinstance(structure, bool):
        return Dense(structure)
    raise TypeError(f"{name} must be a size or a group such as gnomon.groups.Arrow(100), got {structure!r}")


def initial_element(
    group: Group,
    form: Form,
    init: Init,
    *,
    batch_shape: Sequence[int] = (),
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    project: bool = False,
) -> Element:
    """The factor of ``tau = init`` in the given form; computed in float64, stored in ``dtype``."""
    dtype = dtype or (init.dtype if isinstance(init, Tensor) else torch.get_default_dtype())
    if not dtype.is_floating_point:
        raise TypeError(f"dtype must be a real floating-point type, got {dtype}")
    batch = torch.Size(batch_shape)
    tau = torch.as_tensor(1.0 if init is None else init).detach().to("cpu", torch.float64)
    if not bool(tau.isfinite().all()):
        raise ValueError("init holds values that are not finite; give a finite positive-definite matrix")
    k = group.k
    if tau.ndim == 0:
        element = _from_diagonal(group, form, tau.expand(*batch, k), project)
    elif tau.shape in ((k, k), (*batch, k, k)):
        element = _from_matrix(group, form, tau.expand(*batch, k, k), project)
    elif tau.shape in ((k,), (*batch, k)):
        element = _from_diagonal(group, form, tau.expand(*batch, k), project)
    else:
        raise ValueError(
            f"init has shape {tuple(tau.shape)}; for {group} with batch_shape {tuple(batch)} it must be a "
            f"scalar, a diagonal {(*batch, k)} or a matrix {(*batch, k, k)}"
        )
    return tuple(block.to(device=device, dtype=dtype) for block in element)


def _from_diagonal(group: Group, form: Form, diagonal: Tensor, project: bool) -> Element:
    if not bool((diagonal > 0).all()):
        raise ValueError(
            f"init must be positive, got a smallest entry of {float(diagonal.min()):.6g}; a covariance's "
            "diagonal holds variances"
        )
    root = diagonal.rsqrt() if form == "inverse" else diagonal.sqrt()
    element = group.from_diagonal(root)
    if not project:
        _require_close(group, group.matvec(element, torch.ones_like(root)), root)
    return element


def _from_matrix(group: Group, form: Form, tau: Tensor, project: bool) -> Element:
    asymmetry = float((tau - tau.mT).abs().max() / tau.abs().max().clamp(min=1e-300))
    if asymmetry > _TOLERANCE:
        raise ValueError(
            f"init is not symmetric (relative difference from its transpose {asymmetry:.1e}); "
            "pass (init + init.mT) / 2 if that is what you mean"
        )
    cholesky, info = torch.linalg.cholesky_ex(tau)
    if bool((info != 0).any()):
        smallest = float(torch.linalg.eigvalsh(tau).min())
        raise ValueError(
            f"init is not positive definite (smallest eigenvalue {smallest:.3g}); add a multiple of the identity"
        )
    if form == "outer":
        element = group.factor(tau)
    else:  # tau^-1 = B B^T; and tau = C^T C with C = B^-1
        element = group.factor(torch.cholesky_inverse(cholesky))
        if form == "inner":
            element = group.ldiv(element, group.identity_like(element))
    if not project:
        _require_close(group, _point(Chart(group, form), element), tau)
    return element


def _point(chart: Chart, element: Element) -> Tensor:
    """tau, dense."""
    factor = chart.group.to_dense(element)
    if chart.form == "outer":
        return factor @ factor.mT
    if chart.form == "inner":
        return factor.mT @ factor
    return torch.linalg.inv(factor @ factor.mT)


def _require_close(group: Group, actual: Tensor, wanted: Tensor) -> None:
    error = float(torch.linalg.vector_norm(actual - wanted) / torch.linalg.vector_norm(wanted))
    if not error <= _TOLERANCE:
        raise ValueError(
            f"init is not on the submanifold of {group} (relative distance {error:.1e}); pass project=True to "
            "start from the point that agrees with it on the structure's own entries"
        )
