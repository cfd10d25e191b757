"""Products of Toeplitz matrices in half precision."""

import pytest
import torch

from gnomon.groups import Toeplitz


@pytest.mark.parametrize("upper", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_toeplitz_is_transformed_in_float32_and_rounded_once(dtype, upper):
    """Against dense matrices in float64: off by half of the last digit, and by float32's rounding of the transform."""
    group, k = Toeplitz(300, upper), 300
    a, b = (((torch.randn(k) / (1 + torch.arange(k))).to(dtype),) for _ in range(2))
    x, y = (torch.randn(20, k).to(dtype) for _ in range(2))
    A, B = (group.to_dense((element[0].double(),)) for element in (a, b))
    seen = x.double().mT @ y.double()
    diagonals = torch.stack([seen.diagonal(j if upper else -j).sum() for j in range(k)])
    pairs = {
        "mul": (group.mul(a, b)[0], (B @ A)[0] if upper else (B @ A)[:, 0]),
        "apply": (group.apply(a, x), x.double() @ A.mT),
        "apply transposed": (group.apply(a, x, transpose=True), x.double() @ A),
        "apply squared": (group.apply_squared(a, x), x.double() @ A @ A.mT),
        "restrict": (group.restrict(x, y)[0], diagonals),
        "norm": (group.norm_estimate(a), torch.fft.fft(a[0].double(), 1200).abs().max()),
    }
    for name, (found, wanted) in pairs.items():
        assert found.dtype == dtype
        roundings = 2 if name == "apply squared" else 1  # two products
        half_a_digit = 0.5 * torch.finfo(dtype).eps * roundings * wanted.abs()
        error = (found.double() - wanted).abs() - half_a_digit
        slack = 1e-5 * wanted.abs().max() if roundings == 1 else torch.finfo(dtype).eps * wanted.abs().max()
        assert error.max() <= slack, name
