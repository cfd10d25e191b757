"""Random networks with random settings, types and situations; ``fuzz.py`` beside this file runs more of them."""

import pytest
from fuzz import run

QUICK, ALL, IN_ONE = 20, 300, 20
PARTS = [
    pytest.param(first, marks=[] if first < QUICK else pytest.mark.slow, id=f"{first}-{first + IN_ONE - 1}")
    for first in range(0, ALL, IN_ONE)
]


@pytest.mark.parametrize("first", PARTS)
@pytest.mark.filterwarnings("ignore")
def test_random_networks(first):
    """Few are refused, before the first step; the others train, and go on from a copy and from a file."""
    refused = [reason for number in range(first, first + IN_ONE) if (reason := run(number)) is not None]
    assert len(refused) <= IN_ONE // 4, refused
