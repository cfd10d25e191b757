"""Engines that hand over named parameter groups: a step with zero gradients, states by name, sharded parameters."""

import copy
import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from gnomon.optim import INGD, plan
from support.ranks import on_ranks

F64 = torch.float64
STEPS = 6
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class Transformer(nn.Module):
    """A table of tokens, a stack of experts, matrices, norms and an output layer."""

    def __init__(self, width=12, experts=3):
        super().__init__()
        torch.manual_seed(0)
        self.tok_embeddings = nn.Embedding(17, width)
        self.norm = nn.LayerNorm(width)
        self.experts = nn.Parameter(torch.randn(experts, width, width) / width**0.5)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.output = nn.Linear(width, 17, bias=False)

    def forward(self, tokens):
        h = self.norm(self.tok_embeddings(tokens))
        chosen = self.experts[torch.arange(h.shape[1]) % 3]
        h = h + torch.einsum("ntp,tdp->ntd", h, chosen).tanh()
        return self.output(h + self.down(torch.tanh(self.up(h))))


def batches(steps=STEPS):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 17, (8, 6), generator=generator) for _ in range(steps)]


def loss_of(model, tokens):
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), (tokens.flatten() * 3 + 1) % 17)


def train(model, optimizer, rank=0, count=1, data=None):
    for tokens in batches() if data is None else data:
        optimizer.zero_grad()
        loss_of(model, tokens.chunk(count)[rank]).backward()
        optimizer.step()


def for_titan(model, **settings):
    """As torchtitan builds optimizers: one group of all parameters; states are made by a step with zero gradients."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    optimizer = INGD.from_groups([{"params": named}], lr=1e-2, update_every=2, **settings)
    get_optimizer_state_dict(model, optimizer, options=FLAT)
    return optimizer


def for_megatron(named, **settings):
    """As Megatron does: groups by multipliers of the rate and of the weight decay."""
    groups = [
        {"params": [(n, p) for n, p in named if p.ndim > 1], "wd_mult": 1.0, "lr_mult": 1.0},
        {"params": [(n, p) for n, p in named if p.ndim <= 1], "wd_mult": 0.0, "lr_mult": 0.5},
    ]
    own = [
        {"params": g["params"], "lr": 1e-2 * g["lr_mult"], "weight_decay": 0.2 * g["wd_mult"]}
        for g in groups
        if g["params"]
    ]
    return INGD.from_groups(own, update_every=2, **settings)


def whole(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def weights(model):
    return {name: whole(p) for name, p in model.named_parameters()}


# ---------------------------------------------------------------------- one process
def test_named_groups_get_factors_by_shape():
    model = Transformer()
    optimizer = for_megatron(list(model.named_parameters()))
    layers = {layer.name: layer for layer in optimizer._layers.values()}
    assert set(layers) == {"tok_embeddings", "experts", "up.weight", "down.weight", "output.weight"}
    assert layers["experts"].layer.blocks == 3
    assert str(layers["tok_embeddings"].pair.left) == "Diagonal(17)"
    assert layers["tok_embeddings"].turn is None
    assert not any(module._forward_hooks for module in model.modules())
    assert {name for group in optimizer.param_groups for name in group["names"]} == dict(
        model.named_parameters()
    ).keys()
    rates = {name: group["lr"] for group in optimizer.param_groups for name in group["names"]}
    assert (rates["up.weight"], rates["up.bias"]) == (1e-2, 5e-3)
    first = loss_of(model, batches()[0])
    train(model, optimizer)
    assert loss_of(model, batches()[0]) < first


@pytest.mark.parametrize("settings", [{}, {"step_rms": None, "lr": 1e-3}, {"preset": "paper", "lr": 1e-3}], ids=str)
def test_a_first_step_with_zero_gradients_makes_the_state_alone(settings):
    model = Transformer()
    twin = copy.deepcopy(model)
    optimizer = INGD.from_groups([{"params": model.named_parameters()}], **settings)
    other = INGD.from_groups([{"params": twin.named_parameters()}], **settings)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    made = {name: {key: t.shape for key, t in optimizer.state[p].items()} for name, p in model.named_parameters()}
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))
    assert all(group["step"] == 0 for group in optimizer.param_groups)
    assert optimizer.memory_usage() > 0
    train(model, optimizer)
    train(twin, other)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))
    after = {name: {key: t.shape for key, t in other.state[p].items()} for name, p in twin.named_parameters()}
    assert made == after


def test_states_are_saved_by_name():
    model = Transformer()
    optimizer = for_titan(model)
    train(model, optimizer)
    saved = get_optimizer_state_dict(model, optimizer, options=FLAT)
    assert "state.up.weight.K" in saved
    assert "state.experts.momentum_buffer" in saved
    twin = copy.deepcopy(model)
    other = for_titan(twin)
    set_optimizer_state_dict(twin, other, saved, options=FLAT)
    train(model, optimizer)
    train(twin, other)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))


W = nn.Parameter(torch.ones(2, 2))


@pytest.mark.parametrize(
    ("groups", "settings", "error", "message"),
    [
        ([W], {}, TypeError, "a group must be a dictionary"),
        ([{"params": [W]}], {}, TypeError, "pairs of a name and a parameter"),
        ([{"params": [("w", torch.ones(2, 2))]}], {}, TypeError, "must hold parameters, got Tensor for w"),
        ([{"params": []}], {}, ValueError, "hold no parameters"),
        ([{"params": [("w", W)]}] * 2, {}, ValueError, "hold w twice"),
        ([{"params": {"w": W}}, {"params": {"w": nn.Parameter(W)}}], {}, ValueError, "two parameters with the name w"),
        ([{"params": [("w", W)]}], {"curvature": "kfac"}, ValueError, "without a model"),
        ([{"params": [("w", W)]}], {"model": nn.Linear(2, 2)}, TypeError, "no argument model"),
        ([{"params": [("w", W)], "wd_mult": 1.0}], {}, ValueError, "no setting wd_mult"),
    ],
    ids=range(9),
)
def test_groups_that_are_refused(groups, settings, error, message):
    with pytest.raises(error, match=message):
        INGD.from_groups(groups, **settings)


# ---------------------------------------------------------------------- four ranks
@functools.cache
def alone(factory):
    model = Transformer().to(F64)
    optimizer = for_titan(model) if factory == "titan" else for_megatron(list(model.named_parameters()))
    train(model, optimizer)
    return weights(model)


def _titan(rank, count):
    """fully_shard(), then a factory as torchtitan has it; the state goes through names into a new optimizer midway."""
    model = Transformer().to(F64)
    for part in (model.up, model.down, model):
        fully_shard(part)
    optimizer = for_titan(model)
    train(model, optimizer, rank, count, batches()[:3])
    saved = get_optimizer_state_dict(model, optimizer, options=FLAT)
    model.zero_grad()
    optimizer = for_titan(model)
    set_optimizer_state_dict(model, optimizer, saved, options=FLAT)
    ranks = optimizer._strategy.ranks
    ranks.received.clear()
    train(model, optimizer, rank, count, batches()[3:])
    return weights(model), dict(ranks.received), optimizer.memory_usage()


@pytest.mark.spawns
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
def test_a_factory_of_torchtitan_s_shape():
    found = on_ranks(4, _titan)
    for trained, _, _ in found:
        for name, value in alone("titan").items():
            torch.testing.assert_close(trained[name], value, rtol=1e-6, atol=1e-6)
    layers, steps = sum(8 * p.numel() for p in Transformer().parameters() if p.ndim > 1), len(batches()[3:])
    received = [sum(counted.values()) / steps for _, counted, _ in found]
    assert all(set(counted) == {"gradients", "directions"} for _, counted, _ in found)
    assert max(received) <= 2 * layers / 4
    planned = plan(for_titan(Transformer().to(F64)), 4, "full")
    # Parts are not quite equal, and each layer has two numbers more.
    assert received == pytest.approx(planned.received_if_sharded, abs=0.03 * layers)


def _at_the_defaults(rank, count):
    """INGD of a model that fully_shard() has divided, with what it does if nothing is said."""
    model = Transformer().to(F64)
    for part in (model.up, model.down, model):
        fully_shard(part)
    optimizer = INGD(model, update_every=2)
    train(model, optimizer, rank, count)
    return weights(model), dict(optimizer._strategy.ranks.received), plan(optimizer, count)


@pytest.mark.spawns
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
def test_gradients_go_to_owners_by_default_where_parameters_are_sharded():
    model = Transformer().to(F64)
    optimizer = INGD(model, update_every=2)
    train(model, optimizer)
    layers = sum(8 * p.numel() for layer in optimizer._layers.values() for p in layer.layer.parameters)
    for trained, received, planned in on_ranks(4, _at_the_defaults):
        for name, value in weights(model).items():
            torch.testing.assert_close(trained[name], value, rtol=1e-6, atol=1e-6)
        assert set(received) == {"gradients", "directions"}
        assert sum(received.values()) / STEPS <= 2 * layers / 4
        assert planned.shard == "full"
        assert max(planned.received_if_sharded) <= 2 * layers / 4
    gathered = plan(optimizer, 4)
    assert (gathered.shard, gathered.received_if_sharded) == ("none", (layers * 3 // 4,) * 4)


def _tensor_parallel(rank, count):
    """Matrices along dimension 0 or 1, a stack of experts along its first, others at all ranks."""
    mesh = init_device_mesh("cpu", (count,))
    reference = Transformer().to(F64)
    ways = {
        "up.weight": Shard(0),
        "up.bias": Shard(0),
        "down.weight": Shard(1),
        "experts": Shard(0),
        "output.weight": Shard(1),
    }
    named = {
        name: nn.Parameter(distribute_tensor(p.detach(), mesh, [ways.get(name, Replicate())]))
        for name, p in reference.named_parameters()
    }
    optimizer = for_megatron(list(named.items()))
    for tokens in batches():
        reference.load_state_dict({name: whole(p) for name, p in named.items()})
        reference.zero_grad()
        loss_of(reference, tokens).backward()
        for name, p in reference.named_parameters():
            named[name].grad = distribute_tensor(p.grad, mesh, named[name].placements)
        optimizer.step()
    return {name: whole(p) for name, p in named.items()}


@pytest.mark.spawns
def test_a_factory_of_megatron_s_shape():
    for trained in on_ranks(4, _tensor_parallel):
        for name, value in alone("megatron").items():
            torch.testing.assert_close(trained[name], value, rtol=1e-6, atol=1e-6)


PARTS = {"up.weight": 0, "up.bias": 0, "down.weight": 1, "output.weight": 0, "experts": 2, "tok_embeddings.weight": 0}
"""The dimensions along which the tests below divide parameters."""


def _plain_parts(rank, count, ways):
    """Plain tensors that hold a rank's part and say so by attributes, and a group of ranks that hold the others."""
    groups = [dist.new_group(list(range(first, first + ways))) for first in range(0, count, ways)]
    group, place = groups[rank // ways], rank % ways
    reference = Transformer(width=16).to(F64)
    divided = {name: dim for name, dim in PARTS.items() if reference.get_parameter(name).shape[dim] % ways == 0}
    named = {}
    for name, p in reference.named_parameters():
        dim = divided.get(name)
        part = p.detach().clone() if dim is None else p.detach().chunk(ways, dim)[place].clone()
        named[name] = nn.Parameter(part)
        named[name].tensor_model_parallel, named[name].partition_dim = dim is not None, -1 if dim is None else dim
    optimizer = for_megatron(list(named.items()), tensor_parallel_group=group)
    assert all(any(p is q for q in named.values()) for g in optimizer.param_groups for p in g["params"])
    for tokens in batches():
        for name, p in reference.named_parameters():
            p.detach().copy_(_joined(named[name].detach(), divided.get(name), group))
        reference.zero_grad()
        loss_of(reference, tokens).backward()
        for name, p in reference.named_parameters():
            dim = divided.get(name)
            named[name].grad = p.grad if dim is None else p.grad.chunk(ways, dim)[place].contiguous()
        optimizer.step()
    received = sum(optimizer._strategy.ranks.received.values()) / STEPS
    saved = copy.deepcopy(optimizer.state_dict())
    again = for_megatron(list(named.items()), tensor_parallel_group=group)
    again.load_state_dict(saved)
    for each in (optimizer, again):
        assert {key for state in each.state.values() for key in state} >= {"momentum_buffer", "exp_avg"}
    return {name: _joined(p.detach(), divided.get(name), group) for name, p in named.items()}, received


def _joined(part, dim, group):
    if dim is None:
        return part
    parts = [torch.empty_like(part) for _ in range(group.size())]
    dist.all_gather(parts, part.contiguous(), group=group)
    return torch.cat(parts, dim)


def _all_plain_parts(rank, count):
    return [_plain_parts(rank, count, ways) for ways in (4, 2)]


@pytest.mark.spawns
def test_plain_tensors_that_hold_parts():
    """As Megatron hands them over: all four ranks have parts, or two ranks have parts and there are two copies."""
    model = Transformer(width=16).to(F64)
    train(model, for_megatron(list(model.named_parameters())))
    layers = sum(8 * p.numel() for p in model.parameters() if p.ndim > 1)
    for found in on_ranks(4, _all_plain_parts):
        for trained, received in found:
            for name, value in weights(model).items():
                torch.testing.assert_close(trained[name], value, rtol=1e-6, atol=1e-6)
            assert 0 < received <= layers


def _refused_parts(rank, count):
    part = nn.Parameter(torch.ones(4, 2))
    part.tensor_model_parallel, part.partition_dim = True, 0
    found = []
    for settings in [{}, {"tensor_parallel_group": dist.group.WORLD, "shard": "none"}, {"tensor_parallel_group": 3}]:
        with pytest.raises((ValueError, TypeError)) as error:
            INGD.from_groups([{"params": [("w", part)]}], **settings)
        found.append(str(error.value))
    part.partition_dim = 2
    with pytest.raises(ValueError, match="partition_dim must be one of its 2 dimensions, got 2"):
        INGD.from_groups([{"params": [("w", part)]}], tensor_parallel_group=dist.group.WORLD)
    return found


@pytest.mark.spawns
def test_parts_that_are_refused():
    for missing, shard, group in on_ranks(2, _refused_parts):
        assert "w has tensor_model_parallel=True" in missing
        assert "tensor_parallel_group=..." in missing
        assert shard == "shard must be 'auto' or 'full' with tensor_parallel_group, got 'none'"
        assert group == "tensor_parallel_group must be a process group, got int"


class Perceptron(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 4)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


def _perceptron_steps(model, rank, count, **settings):
    optimizer = INGD.from_groups([{"params": model.named_parameters()}], update_every=2, **settings)
    generator = torch.Generator().manual_seed(3)
    for _ in range(STEPS):
        x = torch.randn(8, 6, generator=generator, dtype=F64)
        optimizer.zero_grad()
        model(x.chunk(count)[rank]).sin().square().mean().backward()
        optimizer.step()
    return weights(model)


def _sharded_twice(rank, count, settings):
    """Tensor parallelism within fully_shard(): the first dimension of a weight may be divided twice."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = Perceptron().to(F64)
    parallelize_module(model, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=mesh["data"])
    return _perceptron_steps(model, mesh["data"].get_local_rank(), 2, **settings)


@pytest.mark.spawns
@pytest.mark.parametrize("settings", [{}, {"step_rms": None, "lr": 1e-3, "weight_decay": 0.1}], ids=["rms", "natural"])
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
def test_tensor_parallelism_within_fully_shard(settings):
    wanted = _perceptron_steps(Perceptron().to(F64), 0, 1, **settings)
    for trained in on_ranks(4, _sharded_twice, settings):
        for name, value in wanted.items():
            torch.testing.assert_close(trained[name], value, rtol=1e-6, atol=1e-6)
