"""Hooks on layers: what they hand on, and that they hold on to nothing."""

import copy
import io
import weakref

import torch
from torch import nn

from gnomon.optim.kronecker.curvature import Capture


class Owner:
    """What an optimizer is to its hooks."""

    def __init__(self, model):
        self.seen, self.active = [], True
        self.capture = Capture(model, [model[0], model[2]], self.wants, self.receive)

    def wants(self, module, x):
        return self.active

    def receive(self, module, x, g, number):
        self.seen.append((module, x, g, number))


def setting():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 2))
    owner = Owner(model)
    return model, owner, owner.seen


def test_inputs_and_output_gradients_arrive():
    model, _owner, seen = setting()
    x = torch.randn(5, 3)
    model(x).square().sum().backward()
    assert [module for module, *_ in seen] == [model[2], model[0]]
    for module, inputs, gradient, number in seen:
        torch.testing.assert_close(gradient.mT @ inputs, module.weight.grad)  # the in-place ReLU does not disturb it
        assert number == 1
    model(x).sum().backward()
    assert seen[-1][3] == 2


def test_nothing_is_captured_without_need():
    model, owner, seen = setting()
    with torch.no_grad():
        model(torch.randn(5, 3))
    owner.active = False
    model(torch.randn(5, 3)).sum().backward()
    assert seen == []
    owner.active = True
    owner.capture.close()
    model(torch.randn(5, 3)).sum().backward()
    assert seen == []
    assert not model[0]._forward_hooks


def test_copies_and_pickles_of_the_model_are_free():
    model, owner, seen = setting()
    twin = copy.deepcopy(model)
    twin(torch.randn(5, 3)).sum().backward()
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    torch.load(file, weights_only=False)(torch.randn(5, 3)).sum().backward()
    assert seen == []
    assert owner.capture.passes == 0


def test_the_hooks_go_with_their_owner():
    model, owner, _ = setting()
    reference = weakref.ref(owner)
    del owner  # at once, without the garbage collector
    assert reference() is None
    assert not model[0]._forward_hooks
    model(torch.randn(5, 3)).sum().backward()


def test_a_compiled_model_is_captured_too():
    model, _owner, seen = setting()
    compiled = torch.compile(model, backend="eager")
    x = torch.randn(5, 3)
    compiled(x).square().sum().backward()
    assert len(seen) == 2
    for module, inputs, gradient, _ in seen:
        torch.testing.assert_close(gradient.mT @ inputs, module.weight.grad)
