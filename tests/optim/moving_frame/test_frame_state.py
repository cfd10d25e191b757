"""Runs that are resumed, copied and pickled."""

import copy
import io

import pytest
import torch
from torch import optim

import gnomon
from gnomon import groups as g
from gnomon.problems import LogDet
from support.framed import Model, descend, generator, optimizers, train


@pytest.mark.parametrize("name", ["sgd", "adamw", "rmsprop", "lbfgs"])
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(name):
    def fresh():
        torch.manual_seed(0)
        model = Model()
        optimizer = gnomon.moving_frame(optimizers(model)[name]())
        return model, optimizer, optim.lr_scheduler.StepLR(optimizer, 3, 0.5)

    model, optimizer, scheduler = fresh()
    train(model, optimizer, 5, seed=1, scheduler=scheduler)
    checkpoint = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict(), scheduler.state_dict()], checkpoint)
    train(model, optimizer, 5, seed=2, scheduler=scheduler)

    resumed, other, schedule = fresh()
    checkpoint.seek(0)
    for target, state in zip((resumed, other, schedule), torch.load(checkpoint), strict=True):
        target.load_state_dict(state)
    train(resumed, other, 5, seed=2, scheduler=schedule)
    for key, value in model.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[key]), key


def test_copies_and_pickles_go_on_alone():
    model = Model()
    optimizer = gnomon.moving_frame(optimizers(model)["adamw"](), transport="corrected", max_step=0.3)
    train(model, optimizer, 3, seed=0)
    pair = copy.deepcopy((model, optimizer))
    buffer = io.BytesIO()
    torch.save((model, optimizer), buffer)
    buffer.seek(0)
    unpickled = torch.load(buffer, weights_only=False)
    train(model, optimizer, 3, seed=1)
    for twin, other in (pair, unpickled):
        assert type(other) is type(optimizer)
        assert isinstance(other, optim.AdamW)
        train(twin, other, 3, seed=1)
        for key, value in model.state_dict().items():
            assert torch.equal(value, twin.state_dict()[key]), key

    orphan = copy.deepcopy(optimizer)
    for p in orphan.param_groups[1]["params"]:
        p.grad = torch.zeros_like(p)
    with pytest.raises(RuntimeError, match="copy the model and the optimizer together"):
        orphan.step()


def test_lbfgs_copies_go_on_alone():
    point = gnomon.SPD(g.Triangular(4), dtype=torch.float64)
    problem = LogDet.random(4, generator=generator())
    optimizer = gnomon.moving_frame(optim.LBFGS(point.parameters(), line_search_fn="strong_wolfe", max_iter=2))
    descend(optimizer, lambda: problem(point), 2)
    twin, other = copy.deepcopy((point, optimizer))
    descend(optimizer, lambda: problem(point), 2)
    descend(other, lambda: problem(twin), 2)
    assert torch.equal(point.frame, twin.frame)
