"""``BATTERIES.md`` names tests that exist, and says something of every case."""

import ast
import re
from pathlib import Path

FOLDER = Path(__file__).parent
TABLE = (FOLDER / "BATTERIES.md").read_text()
SECTIONS = {
    "torch: `test/test_optim.py`": 53,
    "timm: `tests/test_optim.py`": 33,
    "pytorch_optimizer: `tests/test_optimizers.py`": 35,
    "pytorch_optimizer: `tests/test_general_optimizer_parameters.py`": 12,
    "pytorch_optimizer: `tests/test_gradients.py`": 13,
    "pytorch_optimizer: `tests/test_create_optimizer.py`": 4,
    "pytorch_optimizer: `tests/test_wrapper_optimizers.py`": 12,
}
"""The sections of the table whose cases are about optimizers in general, with how many cases those files have."""


def rows_of(section):
    cells = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")]
    return [row for row in cells if row[0] not in ("case", "settings", "error", "---")]


def sections():
    """The rows below each heading."""
    headings = re.split(r"^#{2,3} (.*)$", TABLE, flags=re.MULTILINE)[1:]
    return {title: rows_of(text) for title, text in zip(headings[::2], headings[1::2], strict=True)}


def test_names_of_tests():
    named = re.findall(r"`([^`\s]+\.py)::(\w+)`", TABLE)
    assert len(named) > 200
    for file in {file for file, _ in named}:
        tree = ast.parse((FOLDER / file).read_text())
        there = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        assert {name for other, name in named if other == file} <= there, file


def test_every_case_has_a_test_or_a_reason():
    found = sections()
    for title, rows in found.items():
        assert rows, title
        for case, *answer in rows:
            assert len(answer) == 1, case
            assert "::test_" in answer[0] or len(answer[0].split()) >= 4, case
    assert {title: len(found[title]) for title in SECTIONS} == SECTIONS


def test_every_test_of_this_folder_is_in_the_table():
    for file in FOLDER.glob("test_battery_*.py"):
        if file.name != Path(__file__).name:
            for name in re.findall(r"^def (test_\w+)", file.read_text(), flags=re.MULTILINE):
                assert f"`{file.name}::{name}`" in TABLE, name
