"""Gradients that are taken beside the loss's: of inputs, by ``torch.func``, of single samples, or put in by hand."""

import pytest
import torch
from torch import func, nn
from torch.utils.checkpoint import checkpoint

from gnomon.optim import INGD, KFAC
from support.perceptron import batches, equal, objective, perceptron, train

OPTIMIZERS = [INGD, KFAC]
STEPS = 4


def parameters_of(model):
    return {name: p.detach() for name, p in model.named_parameters()}


def functional_loss(model):
    return lambda parameters, x: objective(lambda x: func.functional_call(model, parameters, (x,)), x)


# ---------------------------------------------------------------------- passes for other purposes
def hessian(model, x):
    func.hessian(functional_loss(model))(parameters_of(model), x)


def jacobian_of_inputs(model, x):
    func.jacrev(lambda x: model(x).sum(0))(x)


def jacobian_forward(model, x):
    func.jacfwd(lambda x: model(x).sum(0))(x)


def per_sample(model, x):
    one = functional_loss(model)
    func.vmap(func.grad(one), (None, 0))(parameters_of(model), x.unsqueeze(1))


def per_sample_of_the_model_itself(model, x):
    func.vmap(func.grad(lambda x: model(x).sum()))(x)


def ensemble(model, x):
    func.vmap(model)(torch.stack([x, 2 * x])).sum()


def batched_jacobian(model, x):
    torch.autograd.functional.jacobian(lambda x: model(x).sum(0), x, vectorize=True)


def adversarial(model, x):
    """The fast gradient sign method, whose examples are far from the data."""
    x = (5 * x).requires_grad_()
    torch.autograd.grad(objective(model, x), x)


def backward_to_inputs(model, x):
    x = (5 * x).requires_grad_()
    objective(model, x).backward(inputs=[x])


def curvature_along_a_vector(model, x):
    weight = model[0].weight
    (gradient,) = torch.autograd.grad(objective(model, 5 * x), weight, create_graph=True)
    torch.autograd.grad((gradient * weight.detach()).sum(), weight)


PASSES = [
    hessian,
    jacobian_of_inputs,
    jacobian_forward,
    per_sample,
    per_sample_of_the_model_itself,
    ensemble,
    batched_jacobian,
    adversarial,
    backward_to_inputs,
    curvature_along_a_vector,
]


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("other", PASSES, ids=lambda other: other.__name__)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_other_passes_change_nothing(kind, other, when, set_to_none):
    """Between the loss's backward pass and the step, or before it, also in batches with few rows."""
    for size in (16, 2):
        model, twin = perceptron(), perceptron()
        optimizer, alone = kind(model, update_every=1), kind(twin, update_every=1)
        for x in batches(STEPS, size=size):
            for trained, its_optimizer in ((twin, alone), (model, optimizer)):
                its_optimizer.zero_grad(set_to_none)
                if trained is model and when == "before":
                    other(model, x)
                objective(trained, x).backward()
                if trained is model and when == "after":
                    other(model, x)
                its_optimizer.step()
        assert equal(model, twin)
        assert optimizer.skipped_steps == optimizer.skipped_updates == 0


def test_another_pass_of_an_accumulated_gradient():
    """Three batches that are added up, with a pass of another purpose after each."""
    model, twin = perceptron(), perceptron()
    optimizer, alone = INGD(model, update_every=1), INGD(twin, update_every=1)
    for x in batches(STEPS):
        for trained, its_optimizer in ((twin, alone), (model, optimizer)):
            its_optimizer.zero_grad()
            for part in x.chunk(3):
                objective(trained, part).backward()
                if trained is model:
                    adversarial(model, part)
            its_optimizer.step()
    assert equal(model, twin)


def test_a_pass_that_fails_leaves_nothing_behind():
    model, twin = perceptron(), perceptron()
    optimizer, alone = INGD(model, update_every=1), INGD(twin, update_every=1)

    def fail(gradient):
        raise ValueError("a hook of somebody else")

    for x in batches(STEPS):
        hidden = model[0](x)
        hidden.register_hook(fail)
        with pytest.raises(ValueError, match="somebody else"):
            model[3](model[2](model[1](hidden))).sum().backward()
        train(model, optimizer, [x])
        train(twin, alone, [x])
    assert equal(model, twin)
    assert not optimizer._collector._running


# ---------------------------------------------------------------------- gradients that are put in by hand
def private(model, x):
    """The mean of clipped gradients of single samples, as in DP-SGD."""
    each = func.vmap(func.grad(functional_loss(model)), (None, 0))(parameters_of(model), x.unsqueeze(1))
    norms = torch.stack([g.flatten(1).norm(dim=1) for g in each.values()]).norm(dim=0)
    for name, p in model.named_parameters():
        p.grad = (each[name] * (1 / norms.clamp(min=1)).view(-1, *[1] * p.ndim)).mean(0)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_gradients_of_single_samples(kind):
    """They train as gradients without rows."""
    model = perceptron()
    optimizer = kind(model, update_every=2)
    x = batches(1, size=64)[0]
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        losses.append(objective(model, x).item())
        private(model, x)
        optimizer.step()
    assert losses[-1] < 0.5 * losses[0]
    assert optimizer.skipped_steps == optimizer.skipped_updates == 0
    assert optimizer.state[model[0].weight]  # the layers have factors


def test_gradients_of_the_loss_that_are_put_in_by_hand_come_with_their_statistics():
    model, twin = perceptron(torch.float64), perceptron(torch.float64)
    optimizer, alone = INGD(model, update_every=1), INGD(twin, update_every=1)
    for x in batches(STEPS, torch.float64):
        train(twin, alone, [x])
        optimizer.zero_grad()
        gradients = torch.autograd.grad(objective(model, x), list(model.parameters()))
        for p, gradient in zip(model.parameters(), gradients, strict=True):
            p.grad = gradient
        optimizer.step()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q)


# ---------------------------------------------------------------------- tensors without rows
def test_nested_and_sparse_inputs_are_inputs_without_rows():
    model = nn.Linear(5, 3)
    optimizer = INGD(model, update_every=1)
    nested = torch.nested.nested_tensor([torch.randn(2, 5), torch.randn(4, 5)], layout=torch.jagged)
    before = model.weight.clone()
    for x in (nested, torch.randn(6, 5).to_sparse()):
        optimizer.zero_grad()
        output = model(x)
        (output.values() if output.is_nested else output).square().mean().backward()
        optimizer.step()
        assert not torch.equal(model.weight, before)
        before = model.weight.clone()
        assert before.isfinite().all()


# ---------------------------------------------------------------------- checkpoints
@pytest.mark.parametrize("first", [True, False])
def test_sampled_targets_do_not_go_through_reentrant_checkpoints(first):
    """Also where only a part of the model is in one."""
    model = perceptron()
    optimizer = INGD(model, fisher="mc")
    (x,) = batches(1)
    parts = (model[:2], model[2:])

    def output(reentrant):
        if first:
            return parts[1](checkpoint(parts[0], x.clone().requires_grad_(), use_reentrant=reentrant))
        return checkpoint(parts[1], parts[0](x), use_reentrant=reentrant)

    before = model[0].weight.clone()
    with pytest.raises(RuntimeError, match=r"cannot see the layers in checkpoint.*; give use_reentrant=False"):
        optimizer.observe(output(True), "gaussian")
    result = output(False)
    optimizer.observe(result, "gaussian")
    result.square().mean().backward()
    optimizer.step()
    assert not torch.equal(model[0].weight, before)
    assert all(not torch.equal(optimizer.factors(name)[0], torch.eye(size)) for name, size in (("0", 6), ("3", 9)))


def test_reentrant_checkpoints_of_the_loss():
    model, twin = perceptron(torch.float64), perceptron(torch.float64)
    optimizer, alone = INGD(model, update_every=1), INGD(twin, update_every=1)

    def checkpointed(x):
        return model[3](checkpoint(model[:3], x.clone().requires_grad_(), use_reentrant=True))

    for x in batches(STEPS, torch.float64):
        train(twin, alone, [x])
        train(model, optimizer, [x], lambda _, x: objective(checkpointed, x))
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q)


def test_a_subclass_that_computes_something_else_has_no_rows():
    """Its gradient stands in for them."""

    class Pooled(nn.Linear):
        def forward(self, x):
            return super().forward(x).mean(1)

    class Wide(nn.Linear):
        def forward(self, x):
            return super().forward(x[..., : self.in_features])

    for layer, x in ((Pooled(5, 3), torch.randn(8, 4, 5)), (Wide(5, 3), torch.randn(8, 7))):
        model = nn.Sequential(layer)
        optimizer = INGD(model, update_every=1)
        losses = train(model, optimizer, [x] * 20, lambda model, x: model(x).square().mean())
        assert losses[-1] < 0.5 * losses[0]
        assert not torch.equal(optimizer.factors("0")[1], torch.eye(3))
        assert optimizer.skipped_updates == 0
