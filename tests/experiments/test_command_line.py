"""The command line as a whole: what it imports, and what it offers."""

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from gnomon.cli import main

COMMANDS = ["demo", "train", "compare", "tune", "reproduce", "bench", "plan"]
HEAVY = {"matplotlib", "optuna", "scipy", "sklearn"}
"""Packages that only a running command needs."""


def imported_by(code):
    """The modules that a new process has imported after some code."""
    code = f"import sys, torch, gnomon; before = set(sys.modules); {code}; print(*set(sys.modules) - before)"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()


@pytest.mark.spawns
def test_the_command_line_imports_an_experiment_only_when_its_command_runs():
    added = imported_by("import gnomon.cli")
    experiments = {name for name in added if name.startswith("gnomon.experiments.")}
    assert {name.split(".")[2] for name in experiments} == {"commands"}
    assert not {name.split(".")[0] for name in added} & HEAVY


def test_the_help_lists_the_commands_in_this_order():
    text = CliRunner().invoke(main, ["--help"], env={"COLUMNS": "80", "TERM": "dumb"}).output
    lines = [line.split() for line in text.split("Commands")[1].splitlines()]
    assert [words[1] for words in lines if len(words) > 1 and words[1] in COMMANDS] == COMMANDS
