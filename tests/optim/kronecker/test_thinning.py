"""How many rows of a batch are taken, and what the others would have added."""

import pytest
import torch
from torch import nn

from gnomon.optim import INGD
from gnomon.optim.kronecker.layers import Thinning, layer_of


def test_how_many_rows_are_enough():
    def thinning(module, *shape, approximation="expand", ranks=1):
        x = torch.zeros(shape)
        return layer_of(module).thinning(x, module(x), approximation, ranks)

    convolution = nn.Conv2d(4, 8, 3, padding=1, bias=False)  # its factors are of sizes 36 and 8
    assert thinning(convolution, 2, 4, 4, 4) == Thinning(positions=1)  # 8 rows would be left
    assert thinning(convolution, 4, 4, 4, 4) == Thinning(positions=2)
    assert thinning(convolution, 2, 4, 4, 4, ranks=2) == Thinning(positions=2)
    assert thinning(convolution, 18, 4, 4, 4) == Thinning(samples=2, positions=2)
    assert thinning(convolution, 99, 4, 4, 4) == Thinning(samples=4, positions=2)
    assert thinning(convolution, 1, 4, 99, 99) == thinning(convolution, 4, 99, 99) == Thinning()
    assert thinning(convolution, 64, 4, 1, 1) == Thinning()
    assert thinning(convolution, 99, 4, 4, 4, approximation="reduce") == Thinning()
    assert thinning(convolution, 144, 4, 4, 4, approximation="reduce") == Thinning(samples=2)
    linear = nn.Linear(9, 5, bias=False)
    assert thinning(linear, 12, 6, 9) == Thinning(samples=4)
    assert thinning(linear, 6, 6, 9) == Thinning(samples=2)
    assert thinning(linear, 5, 6, 9) == Thinning()


@pytest.mark.parametrize("size", [16, 17])
def test_rows_that_are_left_out_are_made_up_for(size):
    """Where all rows are the same, a part of them says as much as all."""
    module, found = nn.Conv2d(2, 3, 3, bias=False).double(), []
    for subsample in (True, False):
        optimizer = INGD(module, approx="expand", subsample=subsample)
        y = module(torch.ones(16, 2, size, size, dtype=torch.float64))
        (y.sum((2, 3)) * torch.arange(1.0, 4)).sum().backward()
        seen = optimizer._collector.statistics(optimizer._layers[module.weight])
        outputs, inputs = (moment.energy * moment.unit.square() for moment in (seen.outputs, seen.inputs))
        found.append((outputs, inputs / seen.rows, seen.terms))
        optimizer.close()
    torch.testing.assert_close(found[0], found[1])


def test_positions_say_more_than_as_many_rows_of_fewer_samples():
    """Of smooth images, where neighbours are alike."""
    torch.manual_seed(0)
    layer = layer_of(nn.Conv2d(3, 2, 3, padding=1, bias=False))
    images = nn.functional.avg_pool2d(torch.randn(512, 3, 20, 20, dtype=torch.float64), 5, 1)  # of 16 x 16 pixels
    g = torch.zeros(512, 2, 16, 16)

    def moment(x, g, every=1):
        rows = layer.rows(x, g, every=every)[0]
        return rows.mT @ rows / rows.shape[1]

    true, distance = moment(images, g), torch.zeros(2)
    for batch in range(0, 512, 16):
        x, zeros = images[batch : batch + 16], g[:16]
        found = moment(x, zeros, every=2), moment(x[::4], zeros[::4])
        distance += torch.stack([torch.linalg.matrix_norm(m - true).squeeze() for m in found])
    assert distance[0] < 0.7 * distance[1]
