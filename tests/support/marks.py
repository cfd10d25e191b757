"""Marks for some cases of a test."""

import pytest


def slow_where(cases, condition):
    """The same cases, of which those that meet the condition are slow; a tuple is a case of several arguments."""
    return [_slow(case) if condition(case) else case for case in cases]


def _slow(case):
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
