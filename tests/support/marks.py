"""Marks for some cases of a test."""

import pytest


def slow_where(values, condition):
    """The same cases, of which those that meet the condition are slow."""
    return [pytest.param(value, marks=pytest.mark.slow) if condition(value) else value for value in values]
