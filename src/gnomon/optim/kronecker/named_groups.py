"""Parameters with names in the place of a model, as engines for large models hand them over."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from .layers.base import Settings

TABLES = ("embed", "wte", "wpe")
"""Parts of the names of embeddings."""


def model_of(groups: Iterable[Settings]) -> tuple[nn.Module, list[Settings]]:
    """Return a model that has the parameters of groups under their names, and the groups with parameters alone.

    It computes nothing: it tells an optimizer the names and kinds of parameters. A weight whose name is that of an
    embedding belongs to one in the model.
    """
    model, found, seen = nn.Module(), [], set[int]()
    for group in groups:
        if not isinstance(group, Mapping) or "params" not in group:
            raise TypeError(f"a group must be a dictionary with 'params' and settings, got {group!r}")
        named = dict(_pairs(group["params"]))
        for name, p in named.items():
            if id(p) in seen:
                raise ValueError(f"groups hold {name} twice")
            seen.add(id(p))
            _put(model, name, p)
        found.append({**group, "params": list(named.values())})
    if not seen:
        raise ValueError("groups hold no parameters")
    return model, found


def _pairs(params: Any) -> Iterable[tuple[str, nn.Parameter]]:
    for pair in params.items() if isinstance(params, Mapping) else params:
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str)):
            raise TypeError(
                "params must be pairs of a name and a parameter, as model.named_parameters() gives them, got "
                f"{type(pair).__name__}"
            )
        name, p = pair
        if not isinstance(p, nn.Parameter):
            raise TypeError(f"params must hold parameters, got {type(p).__name__} for {name}")
        yield name, p


def _put(model: nn.Module, name: str, p: nn.Parameter) -> None:
    """Register a parameter under a name with dots, in modules that are made where they are missing."""
    *path, last = name.split(".")
    for place, part in enumerate(path):
        if part not in model._modules:
            is_table = place == len(path) - 1 and last == "weight" and _is_table(name, p)
            model.add_module(part, nn.Embedding(1, 1, device="meta") if is_table else nn.Module())
        inner = model._modules[part]
        assert inner is not None
        model = inner
    known = model._parameters.get(last)
    if known is not None and known.device.type != "meta":
        raise ValueError(f"groups hold two parameters with the name {name}")
    model.register_parameter(last, p)


def _is_table(name: str, p: Tensor) -> bool:
    return p.ndim == 2 and any(word in name for word in TABLES)
