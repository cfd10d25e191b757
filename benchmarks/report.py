"""Where benchmark results go: a section of RESULTS.md for people, a JSON file for programs."""

from __future__ import annotations

import json
import platform
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
RESULTS = HERE / "RESULTS.md"


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def machine(*packages: str) -> str:
    """What the figures were measured on."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
        cpu = names[0] if names else cpu
    versions = ", ".join(f"{p} {version(p)}" for p in ("torch", *packages))
    return f"{cpu}; Python {platform.python_version()}, {versions}; {torch.get_num_threads()} BLAS thread"


def write(section: str, text: str, data: dict[str, Any]) -> None:
    """Replace one section of RESULTS.md and its JSON file."""
    (HERE / f"{section}.json").write_text(json.dumps(data, indent=1) + "\n")
    write_section(section, text)


def write_section(section: str, text: str) -> None:
    """Replace one section of RESULTS.md."""
    begin, end = f"<!-- begin {section} -->", f"<!-- end {section} -->"
    block = f"{begin}\n{text.strip()}\n{end}"
    old = RESULTS.read_text() if RESULTS.exists() else "# Benchmark results\n"
    pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
    new = pattern.sub(lambda _: block, old) if pattern.search(old) else f"{old.rstrip()}\n\n{block}\n"
    RESULTS.write_text(new)
