"""Facts about this machine: the versions of packages, and the rate of matrix products."""

from __future__ import annotations

import platform
import statistics
import time
from importlib.metadata import version

import torch

from ... import __version__

RATE_SIZE = 512
"""The side of the square matrices whose product is timed."""


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages on which results depend."""
    own = {"python": platform.python_version(), "gnomon": __version__}
    return own | {name: version(name) for name in ("torch", "scipy")}


def versions_text() -> str:
    """Return the versions as one line for the end of a page."""
    return ", ".join(f"{name} {number}" for name, number in versions().items())


def multiplication_rate(repeat: int = 30) -> float:
    """Measure the floating-point operations per second of a product of square float32 matrices."""
    a, b = torch.randn(2, RATE_SIZE, RATE_SIZE)
    times = []
    for _ in range(repeat):
        start = time.process_time()
        torch.mm(a, b)
        times.append(time.process_time() - start)
    return 2 * RATE_SIZE**3 / statistics.median(times)
