"""Points beside ordinary parameters, in groups, and out of use."""

import torch
from torch import optim

import gnomon
from gnomon.problems import LogDet, random_spd
from support.framed import Model, descend, generator


def test_ordinary_parameters_are_left_to_their_optimizer():
    torch.manual_seed(0)
    model, plain = Model(), torch.nn.Linear(4, 4)
    plain.load_state_dict(model.linear.state_dict())
    optimizer = gnomon.moving_frame(optim.Adam(model.parameters(), lr=0.1))
    reference = optim.Adam(plain.parameters(), lr=0.1)
    for seed in range(3):
        x = torch.randn(8, 4, generator=generator(seed))
        optimizer.zero_grad()
        model.loss(x).backward()
        for a, b in zip(plain.parameters(), model.linear.parameters(), strict=True):
            a.grad = b.grad.clone()
        optimizer.step()
        reference.step()
    for a, b in zip(plain.parameters(), model.linear.parameters(), strict=True):
        assert torch.equal(a, b)


def test_weight_decay_does_nothing_to_a_point():
    def run(decay):
        point = gnomon.SPD(4, init=3.0, dtype=torch.float64)
        optimizer = gnomon.moving_frame(optim.AdamW(point.parameters(), lr=0.05, weight_decay=decay))
        return descend(optimizer, lambda: LogDet(random_spd(4, generator=generator()))(point), 5)

    assert run(0.0) == run(0.5)


def test_parameter_groups_may_come_later():
    first, second = gnomon.SPD(3, dtype=torch.float64), gnomon.SPD(3, dtype=torch.float64)
    optimizer = gnomon.moving_frame(optim.SGD(first.parameters(), lr=0.1))
    first.matrix().sum().backward()
    optimizer.step()
    optimizer.add_param_group({"params": second.parameters(), "lr": 0.2})
    (first.matrix().sum() + second.matrix().sum()).backward()
    optimizer.step()
    assert not bool(second.eta.any())
    assert not torch.allclose(second.frame, torch.eye(3, dtype=torch.float64))


def test_an_unused_point_stays():
    used, unused = gnomon.SPD(3), gnomon.SPD(3)
    optimizer = gnomon.moving_frame(optim.Adam([*used.parameters(), *unused.parameters()], lr=0.1))
    used.matrix().sum().backward()
    optimizer.step()
    torch.testing.assert_close(unused.matrix(), torch.eye(3))
