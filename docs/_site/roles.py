"""Docstrings for the reference: roles become links, literal blocks and tables become Markdown.

The docstrings of the package are reStructuredText where they refer to each other (``:class:`gnomon.SPD` ``), before
blocks of code (``::``) and in tables. The reference is Markdown.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

ROLE = re.compile(r":(?:class|func|meth|attr|mod|data|exc|obj):`([^`]+)`")
LITERAL_BLOCK = re.compile(r"::$", re.MULTILINE)
RULE = r"^(?:=+ +)+=+$"
TABLE = re.compile(rf"{RULE}\n(.+)\n{RULE}\n((?:.+\n)+?){RULE}", re.MULTILINE)

SHARED = re.compile(r"^( +)((?:\w+, )+\w+): (.*(?:\n\1 +.*)*)", re.MULTILINE)
"""Parameters that are described together: ``cv, random_state: as in ...``."""


def candidates(owner: griffe.Object, name: str) -> list[str]:
    """Where a name in the docstring of an object may be found: in the object, in what surrounds it, in the package."""
    name = name.lstrip(".")
    scopes: list[str] = []
    scope: griffe.Object | None = owner
    while scope is not None:
        scopes.append(scope.path)
        if isinstance(scope, griffe.Class):
            scopes += [base.path for base in scope.mro()]
        scope = scope.parent
    return [f"{scope}.{name}" for scope in scopes] + [name]


def found(owner: griffe.Object, name: str) -> str | None:
    """The full path of what a role names, or None for names outside the package."""
    collection = owner.modules_collection
    for path in candidates(owner, name):
        try:
            return str(collection[path].canonical_path)
        except (KeyError, griffe.AliasResolutionError, griffe.CyclicAliasError):
            continue
    return None


def link(owner: griffe.Object, target: str) -> str:
    """A link to what a role names, where the reference has it; its name in any case."""
    name = target.removeprefix("~")
    shown = name.rpartition(".")[2] if target.startswith("~") else name.lstrip(".")
    path = found(owner, name)
    if path is None:
        return f"`{shown}`"
    return f'<autoref optional identifier="{path}"><code>{shown}</code></autoref>'


def table(match: re.Match[str]) -> str:
    """A table of Markdown from one with rules of ``=``; columns are where the rule has its gaps."""
    rule = match[0].splitlines()[0]
    starts = [0, *(gap.end() for gap in re.finditer(" +", rule))]
    ends = [*starts[1:], None]
    rows = [match[1], *match[2].splitlines()]
    cells = [[row[start:end].strip() for start, end in zip(starts, ends, strict=True)] for row in rows]
    lines = ["| " + " | ".join(row) + " |" for row in cells]
    return "\n".join([lines[0], "|" + "---|" * len(starts), *lines[1:]])


def one_by_one(shared: re.Match[str]) -> str:
    """An entry for each of the parameters that are described together."""
    indent, names, text = shared.groups()
    return "\n".join(f"{indent}{name}: {text}" for name in names.split(", "))


def markdown(owner: griffe.Object, text: str) -> str:
    """The docstring of an object as Markdown."""
    text = TABLE.sub(table, text)
    text = SHARED.sub(one_by_one, text)
    text = LITERAL_BLOCK.sub(":", text)
    return ROLE.sub(lambda role: link(owner, role[1]), text)


class Roles(griffe.Extension):
    """Rewrites every docstring when all of a package is loaded, so that names can be looked up."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        self._rewrite(pkg)

    def _rewrite(self, thing: griffe.Object) -> None:
        if thing.docstring is not None:
            thing.docstring.value = markdown(thing, thing.docstring.value)
        for member in thing.members.values():
            if not member.is_alias:
                self._rewrite(member)
