"""Starting points: from a scalar, a diagonal or an SPD matrix to an element of the group."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..frames import Chart, Form
from ..groups import Dense, Element, Group, Marginal, StructureLike, as_structure
from ..linalg import as_tensor

Init = float | Tensor | None

_TOLERANCE = 1e-6  # relative to the diagonal; float32 data on a submanifold pass, others do not


def as_group(name: str, structure: StructureLike, *sized: object) -> Group:
    """Return the group that ``structure`` means.

    Names and functions of the size take the size from the shapes of ``sized``.
    """
    if isinstance(structure, Group) or not (isinstance(structure, str) or callable(structure)):
        return as_structure(structure, name=name)
    shapes = (tuple(getattr(value, "shape", ())) for value in sized)
    sizes = [shape[-1] for shape in shapes if shape]
    return as_structure(structure, sizes[0] if sizes else None, name)


def as_batch_shape(batch_shape: Sequence[int] | int) -> torch.Size:
    """Return one size or several as a shape."""
    try:
        batch = torch.Size([batch_shape] if isinstance(batch_shape, int) else batch_shape)
    except TypeError:
        raise TypeError(f"batch_shape must be a sequence of sizes, got {batch_shape!r}") from None
    if any(size < 0 for size in batch):
        raise ValueError(f"batch_shape must hold no negative size, got {tuple(batch)}")
    return batch


def as_values(name: str, value: object) -> Tensor:
    """Return numbers of any kind as a tensor, never on the meta device.

    Those of Python and NumPy keep all their digits.
    """
    values = as_tensor(name, value).detach()
    if values.is_complex():
        raise TypeError(f"{name} must be real, got {values.dtype}")
    if hasattr(value, "__array__") and not isinstance(value, Tensor):
        values = values.double()
    elif not isinstance(value, Tensor):  # torch makes float32 of numbers of Python
        values = torch.as_tensor(value, dtype=torch.float64, device="cpu")
    finite = values.isfinite()
    if not bool(finite.all()):
        raise ValueError(f"{name} holds {values[~finite].flatten()[0].item()}; give finite values")
    return values


def natural_dtype(value: object) -> torch.dtype:
    """Return the precision of given values, which is the default one for those of Python, and for integers."""
    dtype = as_tensor("init", value).dtype
    return torch.get_default_dtype() if isinstance(value, float) or not dtype.is_floating_point else dtype


def initial_element(
    group: Group,
    form: Form,
    init: Init,
    *,
    batch_shape: Sequence[int],
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    project: bool = False,
    name: str = "init",
) -> Element:
    """Return the factor of ``tau = init`` in the given form; computed in float64, stored in ``dtype``.

    ``name`` is the name of the argument in errors.
    """
    if form == "inner" and isinstance(group, Marginal):
        raise ValueError(f"factor cannot be 'inner' for {group}; use 'outer' or 'inverse'")
    values = as_values(name, 1.0 if init is None else init)
    dtype = dtype or natural_dtype(1.0 if init is None else init)
    if not dtype.is_floating_point:
        raise TypeError(f"dtype must be a real floating-point type, got {dtype}")
    if device is None:
        device = values.device if isinstance(init, Tensor) else torch.get_default_device()
    tau = values.to("cpu", torch.float64)
    k, batch = group.k, tuple(batch_shape)
    with torch.device("cpu"):
        if tau.ndim == 0:
            element = _from_diagonal(group, form, tau.expand(*batch, k), project, name)
        elif tau.shape in ((k, k), (*batch, k, k)):
            element = _from_matrix(group, form, tau.expand(*batch, k, k), project, name)
        elif tau.shape in ((k,), (*batch, k)):
            element = _from_diagonal(group, form, tau.expand(*batch, k), project, name)
        else:
            raise ValueError(
                f"{name} has shape {tuple(tau.shape)}; for {group} with batch_shape {batch} it must be a scalar, a "
                f"diagonal {(*batch, k)} or a matrix {(*batch, k, k)}"
            )
    return tuple(block.to(device=device, dtype=dtype) for block in element)


def _from_diagonal(group: Group, form: Form, diagonal: Tensor, project: bool, name: str) -> Element:
    if not bool((diagonal > 0).all()):
        raise ValueError(
            f"{name} must be positive, got a smallest entry of {float(diagonal.min()):.6g}; a covariance's "
            "diagonal holds variances"
        )
    root = diagonal.rsqrt() if form == "inverse" else diagonal.sqrt()
    element = group.from_diagonal(root)
    if not project:
        _require_close(group, group.matvec(element, torch.ones_like(root)) / root, torch.ones_like(root), name)
    return group.start(root) if isinstance(group, Marginal) else element


def _from_matrix(group: Group, form: Form, tau: Tensor, project: bool, name: str) -> Element:
    scale = tau.diagonal(dim1=-2, dim2=-1).abs().clamp(min=1e-300).rsqrt()
    correlation = scale.unsqueeze(-1) * tau * scale.unsqueeze(-2)  # so that no entry is hidden by a larger one
    asymmetry = _largest(correlation - correlation.mT)
    if asymmetry > _TOLERANCE:
        raise ValueError(
            f"{name} is not symmetric (difference from its transpose {asymmetry:.1e} of the diagonal); "
            f"pass ({name} + {name}.mT) / 2 if that is what you mean"
        )
    cholesky, info = torch.linalg.cholesky_ex(tau)
    if bool((info != 0).any()):
        smallest = float(torch.linalg.eigvalsh(tau).min())
        raise ValueError(
            f"{name} is not positive definite (smallest eigenvalue {smallest:.3g}); add a multiple of the identity"
        )
    if isinstance(group, Dense):  # no structure to fit: directly from the Cholesky factor
        if form == "inverse":
            identity = torch.eye(group.k, dtype=tau.dtype)
            return (torch.linalg.solve_triangular(cholesky.mT, identity.expand_as(tau), upper=True),)
        return (cholesky if form == "outer" else cholesky.mT,)
    if form == "outer":
        element = group.factor(tau)
    else:  # tau^-1 = B B^T; and tau = C^T C with C = B^-1
        element = group.factor(torch.cholesky_inverse(cholesky))
        if form == "inner":
            element = group.ldiv(element, group.identity_like(element))
    if not project:
        actual = Chart(group, form).matrix(element)
        _require_close(group, scale.unsqueeze(-1) * actual * scale.unsqueeze(-2), correlation, name)
    return element


def _largest(x: Tensor) -> float:
    return float(x.abs().max()) if x.numel() else 0.0


def _require_close(group: Group, actual: Tensor, wanted: Tensor, name: str) -> None:
    error = _largest(actual - wanted)
    if not error <= _TOLERANCE:
        raise ValueError(
            f"{name} is not on the submanifold of {group} (off by {error:.1e} of the diagonal); pass project=True to "
            "start from a point of the submanifold near it"
        )
