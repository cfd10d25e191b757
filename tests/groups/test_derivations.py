"""The table of what each default is derived from says what the code does."""

import ast
import inspect

import pytest

from gnomon.groups import derived
from gnomon.groups.base import Group
from gnomon.groups.derived import DERIVED_FROM
from gnomon.groups.elements import Blocks
from gnomon.testing.storage import public_members
from support.repository import ROOT

STORAGE = {name for name in vars(Blocks) if not name.startswith("_")} | {"shapes"}
CONSTANT = {"coordinate_sets": {"shapes"}, "products": {"k"}}
"""Members that are attributes."""


def _functions(source):
    return {node.name: node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)}


METHODS = _functions(inspect.getsource(Group))
ALGORITHMS = _functions(inspect.getsource(derived))


def _called(function, receiver, seen=frozenset()):
    """The members that a method or an algorithm uses, also through algorithms and private methods."""
    names = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id == receiver:
                private = node.attr.startswith("_") and node.attr in METHODS
                names |= _called(METHODS[node.attr], "self") if private else {node.attr}
            elif node.value.id == "derived":
                names |= _called(ALGORITHMS[node.attr], "group", seen | {node.attr})
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self.transposed":
            names.add(node.attr)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ALGORITHMS.keys() - seen:
            name = ast.unparse(node.func)
            names |= _called(ALGORITHMS[name], "group", seen | {name})
    return names


@pytest.mark.parametrize("member", [name for name in DERIVED_FROM if name in METHODS and "__" not in name])
def test_the_table_names_what_a_default_calls(member):
    called = _called(METHODS[member], "self") & public_members()
    wanted = set(DERIVED_FROM[member])
    ours = {"k", *STORAGE} - CONSTANT.get(member, set())  # every default may use the size and the storage
    assert called - ours == wanted - ours


def test_nothing_is_derived_from_itself():
    def ancestors(member):
        names = set(DERIVED_FROM.get(member, ()))
        return names.union(*(ancestors(name) for name in names))

    for member in DERIVED_FROM:
        assert member not in ancestors(member)


def test_the_page_names_every_member():
    page = (ROOT / "docs" / "groups.md").read_text()
    missing = {name for name in public_members() if not name.startswith("__") and f"`{name}" not in page}
    assert not missing
