"""Models that are compiled, or compute their activations again."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from gnomon.optim import INGD
from support.perceptron import batches, close, objective, perceptron, train


@pytest.mark.slow
def test_a_compiled_model_gives_the_same_losses():
    data = batches(12)
    model, twin = perceptron(), perceptron()
    compiled = torch.compile(twin, backend="aot_eager")
    plain = train(model, INGD(model, update_every=3), data)
    torch.testing.assert_close(train(compiled, INGD(compiled, update_every=3), data), plain, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(reentrant):
    data = batches(8)

    def loss(model, x):
        x = x.requires_grad_()
        hidden = checkpoint(model[:3], x, use_reentrant=reentrant)
        return (model[3](hidden) - x[:, :3].detach().sin()).square().mean()

    model, twin = perceptron(), perceptron()
    train(model, INGD(model, update_every=2), data)
    train(twin, INGD(twin, update_every=2), data, loss)
    close(model, twin)


def test_names_and_patterns_of_wrapped_models():
    compiled = torch.compile(perceptron(), backend="eager")
    optimizer = INGD(compiled, structure={"0": "diagonal", "*": "dense"})
    train(compiled, optimizer, batches(1))
    assert optimizer.factors("0")[0].count_nonzero() == 6
    with pytest.raises(ValueError, match="structure has the pattern 'head', which matches no layer; there are"):
        INGD(perceptron(), structure={"head": "dense"})


def test_a_model_that_was_compiled_before():
    """Its hooks are not called: the gradient stands in for the statistics."""
    model = perceptron()
    compiled = torch.compile(model, backend="eager")
    objective(compiled, batches(1)[0]).backward()
    model.zero_grad()
    optimizer = INGD(model)
    train(compiled, optimizer, batches(4))
    assert not torch.equal(optimizer.factors("0")[0], torch.eye(6))
