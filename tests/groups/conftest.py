"""Settings of the products of groups."""

import pytest

from gnomon import linalg


@pytest.fixture
def small_panels(monkeypatch):
    """Many panels and aligned rows at small sizes."""
    monkeypatch.setattr(linalg, "PANEL", 16)
    monkeypatch.setattr(linalg, "ALIGNED_WIDTH", 3)
