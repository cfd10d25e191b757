"""Settings of the products of groups."""

import pytest

from gnomon.groups import products


@pytest.fixture
def small_panels(monkeypatch):
    """Many panels and aligned rows at small sizes."""
    monkeypatch.setattr(products, "PANEL", 16)
    monkeypatch.setattr(products, "LARGE", 3)
