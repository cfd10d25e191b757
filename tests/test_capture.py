"""Hooks on layers: what they hand on, and that they hold on to nothing."""

import copy
import gc
import io
import weakref

import torch
from torch import nn

from gnomon.optim.capture import Capture


def setting():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 2))
    seen = []
    capture = Capture(model, [model[0], model[2]], lambda module, x, g, number: seen.append((module, x, g, number)))
    return model, capture, seen


def test_inputs_and_output_gradients_arrive():
    model, _, seen = setting()
    x = torch.randn(5, 3)
    model(x).square().sum().backward()
    assert [module for module, *_ in seen] == [model[2], model[0]]
    for module, inputs, gradient, number in seen:
        torch.testing.assert_close(gradient.mT @ inputs, module.weight.grad)  # the in-place ReLU does not disturb it
        assert number == 1
    model(x).sum().backward()
    assert seen[-1][3] == 2


def test_nothing_is_captured_without_need():
    model, capture, seen = setting()
    with torch.no_grad():
        model(torch.randn(5, 3))
    capture.active = False
    model(torch.randn(5, 3)).sum().backward()
    assert seen == []
    capture.active = True
    capture.close()
    model(torch.randn(5, 3)).sum().backward()
    assert seen == []
    assert not model[0]._forward_hooks


def test_copies_and_pickles_of_the_model_are_free():
    model, capture, seen = setting()
    twin = copy.deepcopy(model)
    twin(torch.randn(5, 3)).sum().backward()
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    torch.load(file, weights_only=False)(torch.randn(5, 3)).sum().backward()
    assert seen == []
    assert capture.passes == 0


def test_the_hooks_go_with_their_owner():
    model, capture, _ = setting()
    reference = weakref.ref(capture)
    del capture
    gc.collect()
    assert reference() is None
    assert not model[0]._forward_hooks
    model(torch.randn(5, 3)).sum().backward()


def test_a_compiled_model_is_captured_too():
    model, _, seen = setting()
    compiled = torch.compile(model, backend="eager")
    x = torch.randn(5, 3)
    compiled(x).square().sum().backward()
    assert len(seen) == 2
    for module, inputs, gradient, _ in seen:
        torch.testing.assert_close(gradient.mT @ inputs, module.weight.grad)
