"""Eq. sngd_dl: the form of StructuredNewton that keeps ``S = B B^T``."""

import math

import torch

from gnomon.optim import StructuredNewton
from gnomon.problems import random_spd

F64 = torch.float64


def papers_update(B, H, beta):
    """``B Exp(beta/2 B^-1 g B^-T)`` with ``g = (H - S)/2``, as it is printed."""
    inverse = torch.linalg.inv(B)
    return B @ torch.linalg.matrix_exp(beta / 2 * inverse @ (H - B @ B.mT) @ inverse.mT / 2)


def test_the_printed_update_moves_the_preconditioner_by_half_the_step():
    """The text says ``S <- (1 - beta) S + beta H``; what is printed is that with beta/2, to second order."""
    B, H = torch.randn(4, 4, dtype=F64) + 2 * torch.eye(4, dtype=F64), random_spd(4, 10.0)
    S = B @ B.mT

    def error(beta, share):
        new = papers_update(B, H, beta)
        return float((new @ new.mT - (1 - share * beta) * S - share * beta * H).norm())

    assert math.log10(error(1e-4, 0.5) / error(1e-5, 0.5)) > 1.9
    assert math.log10(error(1e-4, 1.0) / error(1e-5, 1.0)) < 1.1


def test_form_b_is_the_printed_update_at_twice_the_rate():
    """``precond_lr`` is the weight that the text means; x moves by ``lr S^-1 g``. Equal up to the truncation."""
    H, slope = random_spd(4, 3.0), torch.randn(4, dtype=F64)
    x = torch.nn.Parameter(torch.zeros(4, dtype=F64))
    rate = 0.01
    optimizer = StructuredNewton([x], lr=0.1, precond_lr=rate, hessian="exact", form="B", init=3.0)
    B = math.sqrt(3.0) * torch.eye(4, dtype=F64)
    for _ in range(5):
        here = x.detach().clone()
        optimizer.step(lambda: 0.5 * x @ H @ x + slope @ x)
        wanted = here - 0.1 * torch.linalg.solve(B @ B.mT, H @ here + slope)
        B = papers_update(B, H, 2 * rate)
        torch.testing.assert_close(x.detach(), wanted, rtol=1e-6, atol=1e-6)
    (found,) = [optimizer.state[x]["frame"].reshape(4, 4)]
    torch.testing.assert_close(found @ found.mT, B @ B.mT, rtol=1e-6, atol=1e-6)
