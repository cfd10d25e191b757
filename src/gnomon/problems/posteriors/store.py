"""Data and reference moments as they lie on disk: the folder ``posteriordb`` of the data folder.

``posteriordb/data/NAME.json`` is the data of a model, ``posteriordb/reference_moments.json`` has names, means and
covariances of reference draws by the name of the posterior.
"""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .base import Reference


class PosteriorDataMissingError(FileNotFoundError):
    """The data of a posterior is not on this machine. The message says where it was searched."""


def folder() -> Path:
    """Return the folder ``posteriordb`` in ``GNOMON_DATA``, or in ``.data`` of the working directory."""
    return Path(os.environ.get("GNOMON_DATA", ".data")) / "posteriordb"


def is_available() -> bool:
    """Tell whether data and reference moments are on this machine."""
    return (folder() / "reference_moments.json").is_file()


def read(name: str) -> dict[str, Any]:
    """Return the data of a model. Lists of numbers are tensors, float64."""
    raw = _json(folder() / "data" / f"{name}.json")
    return {key: _tensor(value) if isinstance(value, list) else value for key, value in raw.items()}


def reference(posterior: str) -> Reference | None:
    """Return the moments of a posterior's reference draws, or None where there are none."""
    moments = _json(folder() / "reference_moments.json").get(posterior)
    if moments is None:
        return None
    return Reference(tuple(moments["names"]), _tensor(moments["mean"]), _tensor(moments["cov"]).diagonal().sqrt())


def with_reference() -> list[str]:
    """Return the names of the posteriors that have reference draws."""
    return sorted(_json(folder() / "reference_moments.json"))


def _tensor(value: list[Any]) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


@functools.cache
def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise PosteriorDataMissingError(
            f"the data of posteriordb is not at {path}; set GNOMON_DATA to the folder that holds 'posteriordb' "
            "with data/ and reference_moments.json"
        )
    content: dict[str, Any] = json.loads(path.read_text())
    return content
