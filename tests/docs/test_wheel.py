"""The wheel installs without its dependencies' help, runs, and says what the repository says of the version."""

import re
import subprocess
import sys
from importlib.util import find_spec

import pytest

import gnomon
from support.repository import ROOT


def run(*command, **options):
    ended = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False, **options)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder with what the wheel installs; torch and the rest are those of this environment."""
    for package in ("build", "hatchling"):
        if find_spec(package) is None:
            pytest.skip(f"building the wheel needs {package}: pip install 'gnomon[dev]'")
    folder = tmp_path_factory.mktemp("wheel")
    run("-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT)
    (wheel,) = folder.glob("*.whl")
    target = folder / "installed"
    run("-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", target, wheel)
    return target


@pytest.mark.slow
@pytest.mark.spawns
def test_the_wheel_installs_and_runs(installed, tmp_path):
    environment = {"PYTHONPATH": str(installed), "PATH": "", "OMP_NUM_THREADS": "1"}
    script = "import gnomon; print(gnomon.__file__, gnomon.__version__, float(gnomon.SPD(3).logdet()))"
    place, version, logdet = run("-c", script, cwd=tmp_path, env=environment).split()
    assert place.startswith(str(installed))
    assert (version, logdet) == (gnomon.__version__, "0.0")
    assert "train" in run("-m", "gnomon", "--help", cwd=tmp_path, env=environment)


@pytest.mark.slow
@pytest.mark.spawns
def test_the_wheel_holds_the_package_and_nothing_else(installed):
    names = {path.name for path in installed.iterdir()} - {"bin"}
    assert names == {"gnomon", f"gnomon-{gnomon.__version__}.dist-info"}
    assert (installed / "gnomon" / "py.typed").exists()


def test_one_version_everywhere():
    assert f"\nversion: {gnomon.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    headings = re.findall(r"^## \[(.*?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert next(heading for heading in headings if heading != "Unreleased") == gnomon.__version__
