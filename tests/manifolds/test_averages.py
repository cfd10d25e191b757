"""Running averages of points, and points that are moved to a given place."""

import copy

import pytest
import torch
from torch.optim.swa_utils import AveragedModel

import gnomon
from gnomon import groups as g
from support.points import random_point
from support.structures import STRUCTURES


def nearest_to(matrices, group, form):
    """The point nearest to the average in divergence, by L-BFGS."""
    point = gnomon.SPD(group, factor=form, dtype=torch.float64)
    optimizer = gnomon.optim.LBFGS(point.parameters())

    def closure():
        optimizer.zero_grad()
        loss = (torch.linalg.inv(point.matrix()) * matrices.mean(0)).sum() + point.logdet()
        loss.backward()
        return loss

    for _ in range(40):
        optimizer.step(closure)
    return point.matrix().detach()


@pytest.mark.parametrize("form", ["outer", "inner", "inverse"])
@pytest.mark.parametrize("group", STRUCTURES, ids=repr)
def test_the_average_of_two_is_the_nearest_point_of_the_submanifold(group, form):
    first, second = random_point(group, form), random_point(group, form)
    average = gnomon.averaged(first)
    average.update_parameters(first)
    average.update_parameters(second)
    wanted = nearest_to(torch.stack([first.matrix(), second.matrix()]).detach(), group, form)
    torch.testing.assert_close(average.module.matrix().detach(), wanted, rtol=1e-5, atol=1e-5)


def test_on_the_full_manifold_it_is_the_average():
    points = [random_point(g.Dense(4), batch=(2,)) for _ in range(5)]
    average = gnomon.averaged(points[0])
    for point in points:
        average.update_parameters(point)
    wanted = torch.stack([point.matrix() for point in points]).mean(0)
    torch.testing.assert_close(average.module.matrix(), wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("form", ["covariance", "precision"])
@pytest.mark.parametrize("group", [g.Arrow(5), g.LowRank(5, 2)], ids=repr)
def test_gaussians_in_a_model(group, form):
    model = torch.nn.ModuleDict({"q": gnomon.Gaussian(group, form=form), "linear": torch.nn.Linear(2, 2)})
    average = gnomon.averaged(model, decay=0.5)
    for i in (1.0, 3.0):
        model["q"].assign_(i, loc=torch.full((5,), i), project=True)
        torch.nn.init.constant_(model["linear"].weight, i)
        average.update_parameters(model)
    q = average.module["q"]
    torch.testing.assert_close(q.loc.detach(), torch.full((5,), 2.0))
    torch.testing.assert_close(q.covariance().diagonal().detach(), torch.full((5,), 2.0), rtol=2e-2, atol=0.0)
    torch.testing.assert_close(average.module["linear"].weight.detach(), torch.full((2, 2), 2.0))
    assert q.is_folded()


def test_an_average_costs_as_the_structure_does():
    point = gnomon.SPD(g.Arrow(100_000))
    average = gnomon.averaged(point)
    for value in (1.0, 2.0):
        average.update_parameters(point.assign_(value))
    torch.testing.assert_close(average.module.quad(torch.eye(1, 100_000)).item(), 1.5, rtol=1e-3, atol=0.0)


@pytest.mark.parametrize("form", ["outer", "inner", "inverse"])
def test_assigning_moves_a_point(form):
    point = random_point(g.Triangular(3), form)
    with torch.no_grad():
        point.eta.add_(0.1)
    matrix = random_point(g.Dense(3)).matrix().detach()
    assert point.assign_(matrix) is point
    torch.testing.assert_close(point.matrix().detach(), matrix)
    assert point.is_folded()


def test_assigning_what_is_not_on_the_submanifold_changes_nothing():
    point, matrix = gnomon.SPD(g.Diagonal(2)), torch.tensor([[2.0, 1.0], [1.0, 2.0]])
    before = copy.deepcopy(point.state_dict())
    with pytest.raises(ValueError, match="not on the submanifold"):
        point.assign_(matrix)
    assert torch.equal(point.frame, before["frame"])
    torch.testing.assert_close(point.assign_(matrix, project=True).matrix().diagonal(), torch.tensor([2.0, 2.0]))


@pytest.mark.parametrize("form", ["covariance", "precision"])
def test_assigning_parts_of_a_gaussian(form):
    q = gnomon.Gaussian(2, form=form, loc=torch.tensor([1.0, 2.0]), init=3.0)
    q.assign_(torch.tensor([[2.0, 1.0], [1.0, 2.0]]))
    torch.testing.assert_close(q.loc.detach(), torch.tensor([1.0, 2.0]))
    q.assign_(loc=torch.tensor([5.0, 6.0]))
    torch.testing.assert_close(q.loc.detach(), torch.tensor([5.0, 6.0]))
    torch.testing.assert_close(q.covariance().detach(), torch.tensor([[2.0, 1.0], [1.0, 2.0]]))


@pytest.mark.parametrize("decay", [None, 0.7])
def test_an_average_function_for_a_model_of_torch(decay):
    """As the averaged model, for whoever builds torch's own."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    model.q = gnomon.Gaussian(g.Arrow(3))
    model.tau = gnomon.SPD(g.Triangular(3), factor="inverse")
    mine = AveragedModel(model, avg_fn=gnomon.get_avg_fn(decay), use_buffers=True)
    wanted = gnomon.averaged(model, decay=decay)
    for i in (1.0, 4.0, 2.0):
        model.q.assign_(i, loc=torch.full((3,), i))
        model.tau.assign_(random_point(g.Triangular(3)).matrix().detach())
        torch.nn.init.constant_(model[0].weight, i)
        model[1](torch.randn(5, 2))
        mine.update_parameters(model)
        wanted.update_parameters(model)
    for point in ("q", "tau"):
        torch.testing.assert_close(getattr(mine.module, point).frame, getattr(wanted.module, point).frame)
        assert getattr(mine.module, point).is_folded()
    torch.testing.assert_close(mine.module[0].weight, wanted.module[0].weight)
    assert int(mine.module[1].num_batches_tracked) == 3


def test_an_average_function_without_buffers_is_noticed():
    point = gnomon.SPD(2)
    average = AveragedModel(point, avg_fn=gnomon.get_avg_fn())
    average.update_parameters(point)  # a copy
    average.update_parameters(point)
    with pytest.raises(ValueError, match="AveragedModel needs use_buffers=True"):
        average.update_parameters(point)


def test_bad_arguments_of_averages():
    with pytest.raises(ValueError, match=r"decay must be None or a number from 0 to below 1, got -1\.0"):
        gnomon.get_avg_fn(-1.0)
    with pytest.raises(ValueError, match=r"decay must be None or a number from 0 to below 1, got 1\.0"):
        gnomon.averaged(gnomon.SPD(2), decay=1.0)
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got list"):
        gnomon.averaged([gnomon.SPD(2)])


def test_errors_of_assignments_name_their_argument():
    with pytest.raises(ValueError, match="value is not on the submanifold"):
        gnomon.SPD(g.Diagonal(2)).assign_([[2.0, 1.0], [1.0, 2.0]])
    with pytest.raises(ValueError, match="covariance is not positive definite"):
        gnomon.Gaussian(2).assign_([[1.0, 2.0], [2.0, 1.0]])
