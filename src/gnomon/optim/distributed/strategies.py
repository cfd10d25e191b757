"""The choice of a way in which several ranks train one model, by what the model is wrapped in or sharded as."""

from __future__ import annotations

from typing import Any, Literal

from torch import nn

from ..kronecker.strategy import Alone
from .process_group import Ranks, wrappers_in
from .scattered import Scattered
from .sharded_tensors import layout_of
from .together import Together, Way

Mode = Literal["none", "update", "full"]
ShardChoice = Mode | Literal["auto"]

WAYS: dict[Mode, Way] = {
    "none": Way(has_owners=False, stores_apart=False),
    "update": Way(has_owners=True, stores_apart=False),
    "full": Way(has_owners=True, stores_apart=True),
}
"""Every rank updates all factors; one updates a layer's and sends them to all; or one stores them alone."""
MODES = tuple(WAYS)
SHARDS = ("auto", *MODES)


def chosen_mode(shard: ShardChoice, model: nn.Module) -> Mode:
    """Return the mode that a choice means for a model.

    ``"auto"`` sends gradients to owners where ranks hold parts of parameters.
    """
    if shard != "auto":
        return shard
    return "full" if any(layout_of(p) is not None for p in model.parameters()) else "none"


def strategy_for(
    model: nn.Module, wrapper: Any = None, shard: ShardChoice = "none", by_gradient: bool = False
) -> Alone:
    """Return the strategy for the ranks that train a model; ``wrapper`` is one that is not a part of the model.

    Without hooks (``by_gradient``), and where gradients go to owners, parameters may be sharded in any way.
    """
    mode = chosen_mode(shard, model)
    ranks = Ranks.of(model if wrapper is None else wrapper, by_gradient and WAYS[mode].stores_apart)
    if ranks.count == 1 and not ranks.is_sharded:
        return Alone()
    if ranks.is_sharded and ranks.count > 1 and WAYS[mode].stores_apart:
        return Scattered(ranks, WAYS[mode], [])
    return Together(ranks, WAYS[mode], wrappers_in(model) if wrapper is None else [wrapper])
