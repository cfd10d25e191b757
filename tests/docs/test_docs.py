"""Every block of Python in the README and the documentation runs as it stands, and links between pages exist."""

import os
import re
import subprocess
import sys

import pytest

from support.repository import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
IN_SEQUENCE = "The blocks of this page run in sequence."
"""Where a page says so, its blocks are one program; elsewhere each block is one."""
ONE_RANK = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
"""What ``torchrun`` tells the only process."""


def programs(page):
    blocks = BLOCK.findall(page.read_text())
    if IN_SEQUENCE in page.read_text():
        blocks = ["".join(blocks)]
    for number, block in enumerate(blocks):
        yield pytest.param(block, id=f"{page.relative_to(ROOT)}-{number}")


def is_for_ranks(block):
    return "init_process_group" in block


PROGRAMS = [program for page in PAGES for program in programs(page)]
ALONE = [program for program in PROGRAMS if not is_for_ranks(program.values[0])]
ON_RANKS = [program for program in PROGRAMS if is_for_ranks(program.values[0])]


@pytest.mark.slow
@pytest.mark.parametrize("program", ALONE)
def test_block_runs(program, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(program, "block", "exec"), {"__name__": "block"})


@pytest.mark.slow
@pytest.mark.spawns
@pytest.mark.parametrize("program", ON_RANKS)
def test_block_for_ranks_runs(program, tmp_path):
    (tmp_path / "block.py").write_text(program)
    command = [sys.executable, "block.py"]
    ended = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, **ONE_RANK}, capture_output=True, text=True, check=False, timeout=120
    )
    assert ended.returncode == 0, ended.stderr


def test_there_are_blocks():
    assert len(ALONE) >= 25
    assert ON_RANKS


def test_links_between_pages_exist():
    for page in PAGES:
        prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", prose):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
