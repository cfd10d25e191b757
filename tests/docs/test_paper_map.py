"""docs/paper.md: its numbers are complete, and every symbol, test and command on it exists."""

import ast
import importlib
import re
import shlex
from functools import cache

import pytest
import typer

pytest.importorskip("matplotlib", reason="the page names experiments (extra 'experiments')")
pytest.importorskip("optuna", reason="the page names experiments (extra 'experiments')")

from gnomon.cli import main
from gnomon.experiments.commands.reproduce import named as meant_by
from support.repository import ROOT

PAGE = (ROOT / "docs/paper.md").read_text()
ENTRIES = [entry for part in re.split(r"^## .*$", PAGE, flags=re.MULTILINE) for entry in part.split("\n### ")[1:]]
HEADINGS = [line.lstrip("# ") for line in PAGE.splitlines() if line.startswith(("## ", "### "))]
LABELS = {label for heading in HEADINGS for label in re.findall(r"`(\w+:\w+)`", heading)}


def words(text):
    return text.split()


MAIN_TEXT = words(
    """
    rgd rgd_mom rgd_mom_eg equ_trans_maps affinemetric standard_normal_coord rgd_standard_norm orth_exp local_rgd_mom
    transport_approx jacobian_transform gen_normal_param submanifolds gnormal_coord1 gnormal_coord2 sngd
    gauss_case_update sngd_dl no_mat_inv_opt mat_sub_manifold mat_gauss_norm_coord
    """
)
"""The labels of the display equations in the paper's main text, in its order."""
APPENDIX = words(
    """
    chris_1st parallel_trans_riem parallel_trans_eucl jacob_vec_sym metric_simple chris_error gauss_grad_eq_matrix
    egd_coordinate_a egd_coordinate_b update_coordinate_a update_coordinate_b matgauss_just our_update_sgd_full
    """
)
FLOATS = words(
    """
    tab:spd_table tab:normal_coord fig:normal_coord_changes fig:matDL_opt fig:a fig:b fig:c fig:d fig:dnn_imagenet100
    table:results1 table:results2 figure:dnn figure:dnn_time table:hyperparameters_opt table:nn_models table:data_stats
    tab:updates
    """
)
SECTIONS = words(
    """
    app:more_results app:summary apd:fim apd:chris_sym apd:expmap apd:trans_rg apd:trans_eg apd:equ_alimi
    apd:jac_vec_prod apd:simple_fim apd:metric_trivi_sym apd:1st_approx_trans_eg apd:sngd_coordinate
    apd:ngd_gaussian_identites apd:gnormal_spd apd:simple_update_spd apd:mat_gauss_dl apd:imple_baselines
    """
)
EQUATIONS, FIGURES, TABLES, APPENDICES = 96, 6, 8, "ABCDEFGHIJ"
"""How many of each the paper has."""


def title(entry):
    return entry.splitlines()[0]


def fields(name, text=PAGE):
    """What is between backticks in the lines that begin with ``- NAME:``."""
    return [
        value for line in re.findall(rf"^- {name}: (.*)$", text, re.MULTILINE) for value in re.findall(r"`(.*?)`", line)
    ]


def numbers(kind):
    """The numbers in headings such as ``Eqs. 27 and 28`` or ``Eqs. 35 to 39``, in the order of the page."""
    found = []
    for heading in HEADINGS:
        match = re.match(rf"{kind} (\d+)(?: (and|to) (\d+))?", heading)
        if match:
            first, last = int(match[1]), int(match[3] or match[1])
            assert last - first == 1 or match[2] != "and", heading
            found += range(first, last + 1)
    return found


def test_every_number_has_one_entry():
    assert numbers(r"Eqs?\.") == list(range(1, EQUATIONS + 1))
    assert sorted(numbers("Figure")) == list(range(1, FIGURES + 1))
    assert sorted(numbers("Table")) == list(range(1, TABLES + 1))
    assert "".join(re.findall(r"^Appendix (\w):", "\n".join(HEADINGS), re.MULTILINE)) == APPENDICES


def test_every_label_has_an_entry():
    wanted = {f"eq:{label}" for label in MAIN_TEXT + APPENDIX} | {*FLOATS, *SECTIONS}
    assert wanted - LABELS == set()
    assert LABELS - wanted == set()


def test_labelled_equations_are_in_the_papers_order():
    on_page = [label for heading in HEADINGS for label in re.findall(r"`eq:(\w+)`", heading)]
    assert on_page == MAIN_TEXT + APPENDIX


@pytest.mark.parametrize("entry", ENTRIES, ids=title)
def test_an_entry_has_all_parts(entry):
    assert fields("Code", entry) or "- Code: none" in entry
    if fields("Code", entry):
        assert fields("Test", entry)
        assert fields("Command", entry)
    if re.match(r"Eqs?\. \d+.*`eq:", entry):
        assert "$$" in entry


@pytest.mark.parametrize("symbol", sorted({*fields("Code"), *re.findall(r"`(gnomon(?:\.\w+)+)`", PAGE)}))
def test_symbols_exist(symbol):
    names = symbol.split(".")
    for cut in range(len(names), 0, -1):
        try:
            found = importlib.import_module(".".join(names[:cut]))
        except ModuleNotFoundError:
            continue
        for name in names[cut:]:
            found = getattr(found, name)
        return
    pytest.fail(f"{symbol} is no module")


@cache
def functions_in(path):
    return {node.name for node in ast.parse((ROOT / path).read_text()).body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("test", sorted(set(fields("Test"))))
def test_tests_exist(test):
    path, name = test.split("::")
    assert name.startswith("test_")
    assert name in functions_in(path)


def is_parsed(arguments):
    """Whether the command line takes the arguments; nothing is run."""
    group = typer.main.get_command(main)
    command = group.get_command(typer.Context(group), arguments[0])
    given = command.make_context(arguments[0], list(arguments[1:])).params
    return arguments[0] != "reproduce" or bool(meant_by(given["name"]))


@pytest.mark.parametrize("command", sorted(set(fields("Command"))))
def test_commands_exist(command):
    program, *arguments = shlex.split(command)
    if program == "gnomon":
        assert is_parsed(arguments)
    else:
        assert [program, *arguments[:2]] == ["python", "-m", "pytest"]
        assert all((ROOT / path).exists() for path in arguments[2:])


def test_the_papers_names_that_commands_have_are_those_of_entries():
    """``fig-a`` is the label ``fig:a``, ``table-1`` is ``table:results1``; other names have printed numbers."""
    for name in (command.split()[2] for command in fields("Command") if command.startswith("gnomon reproduce")):
        kind, which = name.split("-")
        labels = {f"fig:{which}", f"table:results{which}"} & LABELS
        printed = {"fig": "Figure", "table": "Table"}[kind]
        assert labels or int(which) in numbers(printed), name


REFERENCE = re.compile(
    r"(?:Eqs?\. (?=[a-z])|(?:App\.|Fig\.|Sec\.|Table) (?=\w+_))(\w+(?:, \w+_\w+)*(?: (?:and|to) \w+_\w+)?)"
)
"""``Eq. rgd``, ``Eqs. a_1, b_1 and c_1`` or ``App. imple_baselines`` in running text."""


def labels_in(path):
    text = re.sub(r"\s+", " ", path.read_text())
    return {label for labels in REFERENCE.findall(text) for label in re.split(r", | and | to ", labels)}


def test_docstrings_and_the_page_name_the_same_equations():
    """What source files call ``Eq. rgd`` is on the page; and each equation of the main text is in a docstring."""
    known = {label.split(":")[1] for label in LABELS} | {"low_rank_spd", "sngd_special", "opt_dl"}
    named = {path: labels_in(path) for path in sorted((ROOT / "src").rglob("*.py"))}
    assert {(path.name, label) for path, labels in named.items() for label in labels - known} == set()
    assert set(MAIN_TEXT) - set.union(*named.values()) == set()
