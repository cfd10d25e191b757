"""Hooks on layers: what they hand on, and that they hold on to nothing."""

import copy
import io
import weakref

import pytest
import torch
from torch import nn

from gnomon.optim import INGD
from gnomon.optim.kronecker.hooks import Capture, computed_tensor


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


@pytest.mark.slow
def test_a_compiled_model_is_captured_too():
    model, _owner, seen = setting()
    compiled = torch.compile(model, backend="eager")
    x = torch.randn(5, 3)
    compiled(x).square().sum().backward()
    assert len(seen) == 2
    for module, inputs, gradient, _ in seen:
        torch.testing.assert_close(gradient.mT @ inputs, module.weight.grad)


def test_a_graph_that_must_not_end_names_the_remedy():
    torch._dynamo.reset()
    model, _owner, _ = setting()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="for fullgraph=True build it with curvature='gradient'"):
        torch.compile(model, backend="eager", fullgraph=True)(torch.randn(5, 3))


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_scripts_and_traces():
    model, owner, _ = setting()
    for scripted in (model, copy.deepcopy(model)):
        with pytest.raises(AttributeError, match=r"torch\.jit\.script cannot compile .* after optimizer\.close\(\)"):
            torch.jit.script(scripted)
    x = torch.randn(5, 3)
    torch.testing.assert_close(torch.jit.trace(model, x)(x), model(x))
    owner.capture.close()
    torch.testing.assert_close(torch.jit.script(model)(x), model(x))


class Named(nn.Linear):
    """Names its input differently, and takes more."""

    def forward(self, x, scale=1.0):
        return super().forward(x) * scale


@pytest.mark.parametrize(
    "call",
    [
        lambda layer, x: layer(x=x),
        lambda layer, x: layer(scale=torch.tensor(2.0), x=x),
        lambda layer, x: layer(x, scale=2.0),
        lambda layer, x: nn.Linear.forward(layer, x) + 0 * layer(x=x),
    ],
)
def test_inputs_by_other_names(call):
    layer = Named(3, 2)
    owner = Owner(nn.ModuleList([layer, nn.Identity(), nn.Linear(1, 1)]))
    x = torch.randn(5, 3)
    call(layer, x).sum().backward()
    ((_, inputs, gradient, _),) = owner.seen
    assert torch.equal(inputs, x)
    assert gradient.shape == (5, 2)


def test_other_inputs_are_left_alone():
    """A first argument that is no tensor, or a default."""

    class Other(nn.Linear):
        def forward(self, index=0, x=None):
            return super().forward(x)

    layer = Other(3, 2)
    owner = Owner(nn.ModuleList([layer, nn.Identity(), nn.Linear(1, 1)]))
    for arguments in ((1, torch.randn(5, 3)), (None, torch.randn(5, 3))):
        layer(*arguments).sum().backward()
    layer(x=torch.randn(5, 3)).sum().backward()
    assert owner.seen == []


@pytest.mark.parametrize("shape", [(1, 4), (4, 1), (3, 4), (2, 3, 4)])
@pytest.mark.parametrize("settings", [{}, {"preset": "paper"}, {"fisher": "mc"}], ids=str)
def test_activations_that_work_in_place_on_sequences(shape, settings):
    """The output of a linear map of a sequence is a view, whose hooks torch forgets where it is overwritten."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.ELU(inplace=True)).double()
    twin = nn.Sequential(nn.Linear(2, 3), nn.ELU()).double()
    twin.load_state_dict(model.state_dict())
    x = torch.randn(*shape, 2, dtype=torch.float64)
    found = []
    for one in (model, twin):
        optimizer = INGD(one, **settings)
        torch.manual_seed(1)
        output = one(x)
        if "fisher" in settings:
            optimizer.observe(output)
        output.square().sum().backward()
        assert optimizer._collector.statistics(optimizer._layers[one[0].weight]) is not None
        optimizer.step()
        found.append(one[0].weight.detach())
    torch.testing.assert_close(*found)


def test_the_tensor_behind_an_output():
    """Another shape of all numbers of a tensor that has a gradient; parts and transposes are what they are."""
    x = torch.randn(3, 4, requires_grad=True).sin()
    assert computed_tensor(x) is x
    assert computed_tensor(x.view(2, 6)) is x
    for view in (x[:2], x.mT, torch.randn(4).view(2, 2)):
        assert computed_tensor(view) is view
