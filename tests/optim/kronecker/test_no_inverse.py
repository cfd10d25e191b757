"""No inverse, solve or decomposition in a step."""

import re

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from gnomon.groups import Group
from gnomon.optim import INGD, KFAC
from gnomon.optim.kronecker.structures import NAMES
from support.marks import slow_where
from support.teaching import student, teacher, train


class NoInverse(TorchDispatchMode):
    """Fails at an operation that solves, inverts or decomposes, and counts the others."""

    allowed = ("linalg_vector_norm", "linalg_vecdot")
    forbidden = re.compile(
        r"linalg|cholesky|solve|inverse|pinv|matrix_exp|lstsq|svd|eig|(^|_)(lu|qr|geqrf|orgqr|ormqr|det|logdet|slogdet)(_|$)"
    )

    def __init__(self):
        super().__init__()
        self.products = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.__name__.split(".")[0]
        assert name in self.allowed or not self.forbidden.search(name), f"{name} is no product"
        self.products += name in ("mm", "bmm", "addmm")
        return function(*args, **(kwargs or {}))


FORBIDDEN = {
    "inv": torch.linalg.inv,
    "pinv": torch.linalg.pinv,
    "solve": lambda a: torch.linalg.solve(a, a),
    "triangular solve": lambda a: torch.linalg.solve_triangular(a, a, upper=True),
    "lstsq": lambda a: torch.linalg.lstsq(a, a),
    "cholesky": torch.linalg.cholesky,
    "cholesky_ex": torch.linalg.cholesky_ex,
    "cholesky_inverse": torch.cholesky_inverse,
    "cholesky_solve": lambda a: torch.cholesky_solve(a, a),
    "eigh": torch.linalg.eigh,
    "eig": torch.linalg.eig,
    "svd": torch.linalg.svd,
    "spectral norm": lambda a: torch.linalg.matrix_norm(a, 2),
    "qr": torch.linalg.qr,
    "geqrf": torch.geqrf,
    "householder": lambda a: torch.linalg.householder_product(a, a[0]),
    "lu": torch.linalg.lu,
    "lu_factor": torch.linalg.lu_factor,
    "ldl": torch.linalg.ldl_factor,
    "matrix_exp": torch.linalg.matrix_exp,
    "slogdet": torch.linalg.slogdet,
    "det": torch.linalg.det,
}


@pytest.mark.parametrize("name", FORBIDDEN)
def test_the_check_knows(name):
    with NoInverse(), pytest.raises(AssertionError, match="is no product"):
        FORBIDDEN[name](torch.eye(3))


def test_the_check_looks_into_steps_and_hooks():
    x, _ = teacher()
    model = student()
    with NoInverse(), pytest.raises(AssertionError, match="cholesky_ex is no product"):
        train(KFAC(model), lambda: model(x).square().mean(), 1)

    products = []
    for watched in (False, True):
        model = student()
        optimizer = INGD(model) if watched else None
        with NoInverse() as check:
            model(x).square().mean().backward()
        products.append(check.products)
    assert optimizer is not None
    assert products[1] > products[0]  # those of the statistics


def no_inverses_of_groups(monkeypatch):
    """A structure's own ways to an inverse, which need none of torch's."""

    def refuse(self, *args, **kwargs):
        raise AssertionError(f"an inverse of {self}")

    kinds = [Group]
    for kind in kinds:
        kinds += kind.__subclasses__()
        for name in {"apply_inverse", "ldiv", "logabsdet", "factor"} & set(vars(kind)):
            monkeypatch.setattr(kind, name, refuse)


@pytest.mark.parametrize("curvature", ["kfac", "gradient"])
@pytest.mark.parametrize("dtype", slow_where([None, torch.bfloat16], lambda dtype: dtype is None))
@pytest.mark.parametrize("preset", slow_where(["robust", "paper"], lambda preset: preset == "paper"))
@pytest.mark.parametrize("structure", NAMES)
def test_nothing_is_inverted_or_decomposed(structure, preset, dtype, curvature, monkeypatch):
    """In a step with an update, in one without, and in the hooks."""
    no_inverses_of_groups(monkeypatch)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6), nn.Tanh(), nn.Flatten(), nn.Linear(24, 40))
    model.append(nn.Linear(40, 3))
    settings = {"structure": structure, "precond_dtype": dtype, "curvature": curvature, "preset": preset}
    optimizer = INGD(model, 1e-3, update_every=2, growing_intervals=False, **settings)
    x = torch.randn(16, 2, 4, 4)
    with NoInverse() as check:
        losses = train(optimizer, lambda: model(x).square().mean(), 4)
    assert check.products > 0
    assert losses[-1] < losses[0]
    assert optimizer.skipped_steps == optimizer.skipped_updates == 0
