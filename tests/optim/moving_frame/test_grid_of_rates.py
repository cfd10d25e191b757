"""The benchmark of rates goes on where an earlier call ended."""

import json
import subprocess
import sys

import pytest

from support.repository import ROOT

SCRIPT = """
import json, sys
from pathlib import Path
sys.path.insert(0, "benchmarks")
import safety

run = dict(objective="likelihood", structure="Dense(8)", form="outer", optimizer="SGD", wrong="", first=2.0)
outcomes = safety.Outcomes(Path(sys.argv[1]))
outcomes.add(run | dict(lr=0.1, last=1.0))
outcomes.add(run | dict(lr=1e3, last=3.0))
outcomes.add(run | dict(lr=1.0, last=1.0, wrong="not finite at step 3"))
outcomes.save()
again = safety.Outcomes(Path(sys.argv[1]))
print(json.dumps([list(again), again.that_fell("likelihood")["SGD"]]))
"""


@pytest.mark.spawns
def test_outcomes_are_kept(tmp_path):
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "outcomes.json")]
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    runs, fell = json.loads(result.stdout)
    place = ["likelihood", "Dense(8), outer", "SGD"]
    assert sorted(runs) == [[*place, "0.1", "fell"], [*place, "1", "not finite at step 3"], [*place, "1000", "rose"]]
    assert {rate: counts for rate, counts in fell.items() if counts[1]} == {"0.1": [1, 1], "1": [0, 1], "1000": [0, 1]}
