"""The demonstration and its command."""

import importlib.util
import subprocess
import sys

import pytest
from rich.console import Console

import gnomon


def command(*arguments, **options):
    return subprocess.run(
        [sys.executable, "-c", "from gnomon.cli import main; main()", *arguments],
        capture_output=True,
        text=True,
        check=False,
        **options,
    )


def test_demo_reaches_the_known_optima(tmp_path):
    from gnomon.experiments.demo import demo

    console = Console(record=True, width=80, quiet=True)
    outcomes = demo(tmp_path / "new", iterations=30, console=console)
    assert {outcome.method for outcome in outcomes} == {"SGD", "SGD, momentum", "Adam", "L-BFGS"}
    for outcome in outcomes:
        assert outcome.gaps[-1] < outcome.gaps[0]
        if outcome.method == "L-BFGS":
            assert outcome.gaps[-1] < 1e-8
    assert (tmp_path / "new" / "demo.png").read_bytes().startswith(b"\x89PNG")


def test_command_line(tmp_path):
    assert command("--version").stdout.strip() == f"gnomon {gnomon.__version__}"
    assert "demo" in command("--help").stdout
    result = command("demo", "--iterations", "2", "--output", str(tmp_path))
    assert result.returncode == 0, result.stderr
    assert "nearness" in result.stdout
    assert str(tmp_path) in result.stdout.replace("\n", "")
    assert command("demo", "--iterations", "0").returncode == 2


def test_command_line_names_the_missing_extra():
    blocked = "import sys; sys.modules['typer'] = None; import gnomon.cli"
    result = subprocess.run([sys.executable, "-c", blocked], capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "pip install 'gnomon[experiments]'" in result.stderr


def test_the_library_needs_torch_alone():
    """Importing gnomon loads none of the extras."""
    extras = ("numpy", "scipy", "matplotlib", "rich", "typer", "geoopt", "pymanopt")
    script = (
        f"import sys; before = set(sys.modules); import torch; torch_own = set(sys.modules); import gnomon; "
        f"print([m for m in {extras!r} if m in sys.modules and m not in torch_own])"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


@pytest.mark.skipif(importlib.util.find_spec("geoopt") is None, reason="the benchmark needs geoopt (extra 'bench')")
def test_the_benchmark_runs_in_a_small_form():
    script = (
        "import sys; sys.path.insert(0, 'benchmarks'); import spd;"
        "spd.WANTED[5] = 0; full = spd.full_manifold((5,)); print(spd.full_table(full));"
        "sparse = spd.structured((200, 400)); print(spd.structured_table(sparse))"
    )
    root = next(p for p in __import__("pathlib").Path(__file__).resolve().parents if (p / "benchmarks").is_dir())
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd=root)
    assert result.returncode == 0, result.stderr
    assert "geoopt" in result.stdout
    assert "Toeplitz" in result.stdout
