"""Models whose type changes during training."""

import pytest
import torch

from gnomon.optim import INGD
from support.perceptron import batches, close, perceptron, train


@pytest.mark.slow
@pytest.mark.parametrize("target", [torch.float64, torch.bfloat16])
def test_another_type_after_construction_and_later(target):
    """The losses are those of a model that stays in float32, to the precision of the other type."""
    data = batches(36)
    twin = perceptron()
    wanted = train(twin, INGD(twin, update_every=2, base_width=None), data)
    model = perceptron()
    optimizer = INGD(model, update_every=2, base_width=None)
    losses = []
    for part, dtype in ((data[:3], target), (data[3:6], torch.float32), (data[6:], target)):
        model.to(dtype)
        losses += train(model, optimizer, [x.to(dtype) for x in part])
    assert losses[-1] < 0.3 * losses[0]
    assert losses == pytest.approx(wanted, rel=1e-4 if target == torch.float64 else 0.15)


@pytest.mark.parametrize("precond_dtype", [None, torch.bfloat16])
def test_another_type_between_updates(precond_dtype):
    """The factors of the last update go on, in the new type: the steps are those of a model that keeps its own."""
    data = batches(4)
    model, twin = perceptron(), perceptron()
    optimizer, other = (INGD(m, precond_dtype=precond_dtype, growing_intervals=False) for m in (model, twin))
    train(twin, other, data)
    train(model, optimizer, data[:2])
    model.double()
    train(model, optimizer, [x.double() for x in data[2:]])
    assert all(p.dtype == torch.float64 for p in model.parameters())
    close(model.float(), twin)
    assert optimizer.skipped_steps == optimizer.skipped_updates == 0
