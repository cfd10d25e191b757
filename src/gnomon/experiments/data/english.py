"""English text that most machines have: licences, Debian's copyright files, and documentation strings of Python.

Tokens are bytes. The text depends on the machine.
"""

from __future__ import annotations

import ast
import functools
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from .base import DataError

LICENCES, DEBIAN = Path("/usr/share/common-licenses"), Path("/usr/share/doc")
SHORTEST = 200
"""The least length of a paragraph. Shorter ones are mostly headings, names and addresses."""
LETTERS, SPACES = 0.7, 0.125
"""The least shares of lower-case letters and of spaces in a paragraph of prose. Lists of files have fewer spaces."""
LEAST = 200_000
"""The least bytes of text that are enough for training."""


@functools.cache
def read() -> tuple[Tensor, Tensor]:
    """Return paragraphs of prose as bytes. Of every ten paragraphs the last is held out.

    Each paragraph occurs once, because the same licence is in many files.
    """
    paragraphs = list(dict.fromkeys(p for document in _documents() for p in _prose(document)))
    parts = ["\n\n".join(p for i, p in enumerate(paragraphs) if (i % 10 == 9) == held) for held in (False, True)]
    if len(parts[0]) < LEAST:
        raise DataError(f"this machine has {len(parts[0])} bytes of English text; use a Python that has its source")
    train, held_out = (torch.frombuffer(bytearray(part.encode()), dtype=torch.uint8) for part in parts)
    return train, held_out


def _documents() -> Iterator[str]:
    for file in (*sorted(LICENCES.glob("*")), *sorted(DEBIAN.glob("*/copyright"))):
        if file.is_file():
            yield file.read_text(errors="ignore")
    paths = sysconfig.get_paths()
    torch_folder = Path(torch.__file__).parent
    for folder in (Path(paths["stdlib"]), torch_folder / "nn" / "modules", torch_folder / "optim"):
        for file in sorted(folder.glob("*.py")):
            yield from _docstrings(file.read_text(errors="ignore"))


def _docstrings(source: str) -> Iterator[str]:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, documented) and (text := ast.get_docstring(node)):
            yield text


def _prose(document: str) -> Iterator[str]:
    """Yield the paragraphs of prose, with one space between words."""
    for part in re.split(r"\n[\s.*#|]*\n", document):
        paragraph = " ".join(part.split())
        length = len(paragraph)
        if length < SHORTEST or paragraph.count(" ") < SPACES * length:
            continue
        if sum(map(str.islower, paragraph)) >= LETTERS * length:
            yield paragraph
