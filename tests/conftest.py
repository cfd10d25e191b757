"""Settings of every test: one BLAS thread a worker, and the same random numbers whatever ran before.

torch is imported when a test runs: with pytest-xdist the process that starts the workers runs none.
"""

import pytest


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed() -> None:
    import torch

    torch.manual_seed(0)


@pytest.fixture
def small_panels(monkeypatch):
    """Many panels and aligned rows of products at small sizes."""
    from gnomon import linalg

    monkeypatch.setattr(linalg, "PANEL", 16)
    monkeypatch.setattr(linalg, "ALIGNED_WIDTH", 3)
