"""Life of a point as a module: copies, moves, loads, autocast, compilation."""

import copy
import io

import pytest
import torch

import gnomon
from gnomon import groups as g
from gnomon.manifolds import point_of
from support.points import FORMS, random_point


class Model(torch.nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)
        self.cov = gnomon.SPD(g.Arrow(3), **options)

    def forward(self, x):
        return self.cov.quad(self.linear(x)).mean() - self.cov.logdet()


def test_points_are_found_through_copies_moves_and_loads():
    model = Model()
    assert point_of(model.cov.eta) is model.cov
    assert point_of(model.linear.weight) is None
    twin = copy.deepcopy(model)
    assert point_of(twin.cov.eta) is twin.cov
    assert point_of(model.double().cov.eta) is model.cov
    loaded = Model().double()
    loaded.load_state_dict(model.state_dict(), assign=True)
    assert point_of(loaded.cov.eta) is loaded.cov
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    restored = torch.load(buffer, weights_only=False)
    assert point_of(restored.cov.eta) is restored.cov
    torch.testing.assert_close(restored.cov.matrix(), model.cov.matrix())


def test_a_frame_is_loaded_only_into_its_own_structure():
    for saved, other in (
        (gnomon.SPD(3), gnomon.SPD(3, factor="inverse")),
        (gnomon.SPD(g.Toeplitz(3)), gnomon.SPD(g.Diagonal(3))),
        (gnomon.SPD(g.Triangular(3)), gnomon.SPD(g.Triangular(3, upper=True))),
    ):
        buffer = io.BytesIO()
        torch.save(saved.state_dict(), buffer)
        buffer.seek(0)
        state = torch.load(buffer)
        with pytest.raises(RuntimeError, match=r"frame was saved for .* but this point is"):
            other.load_state_dict(state)
        saved.load_state_dict(state)


def test_a_shallow_copy_does_not_take_the_coordinates_over():
    point = gnomon.SPD(3)
    copy.copy(point)
    assert point_of(point.eta) is point


def test_autocast_leaves_the_geometry_alone():
    for group in (g.Dense(4), g.Triangular(4), g.Heisenberg(4, 1, 1)):
        for form in FORMS:
            point = random_point(group, form, dtype=torch.float32)
            tau = point.matrix().detach()
            optimizer = gnomon.moving_frame(torch.optim.SGD(point.parameters(), lr=0.1, momentum=0.9))
            with torch.autocast("cpu", torch.bfloat16):
                loss = point.matrix().sum() + point.logdet() + point.quad(torch.ones(4))
                torch.testing.assert_close(point.matrix().detach(), tau, rtol=0.02, atol=0.02)
                loss.backward()
                optimizer.step()
            assert point.frame.dtype == torch.float32
            assert not torch.allclose(point.matrix(), tau)


@torch.no_grad()
def slope(point, direction, h=1e-5):
    """The derivative of the sum of a point's entries, by differences."""
    ends = []
    for t in (h, -h):
        moved = copy.deepcopy(point)
        moved.eta.add_(direction, alpha=t)
        ends.append(moved.matrix().sum())
    return (ends[0] - ends[1]) / (2 * h)


def test_inference_mode():
    """A point made in it has its value; what was stored then serves a point that is trained later."""
    for group in (g.Triangular(17), g.Toeplitz(17)):  # of sizes whose index tables no other test has asked for
        with torch.inference_mode():
            point = gnomon.SPD(group, init=2.0, dtype=torch.float64)
            copied = copy.deepcopy(point).matrix()
        torch.testing.assert_close(copied.clone(), 2 * torch.eye(17, dtype=torch.float64))
        trained = gnomon.SPD(group, init=2.0, dtype=torch.float64)
        with torch.no_grad():
            trained.eta.add_(0.01)
        trained.matrix().sum().backward()
        direction = torch.randn_like(trained.eta)
        torch.testing.assert_close((trained.eta.grad * direction).sum(), slope(trained, direction))


def test_points_are_freed():
    import gc
    import weakref

    point = gnomon.SPD(3)
    eta, reference = point.eta, weakref.ref(point)
    del point
    gc.collect()
    assert reference() is None
    assert point_of(eta) is None


def test_state_dict_names_and_shapes():
    assert {k: tuple(v.shape) for k, v in gnomon.SPD(3, batch_shape=(2,)).state_dict().items()} == {
        "eta": (2, 3, 3),
        "frame": (2, 3, 3),
    }
    assert tuple(gnomon.SPD(g.Arrow(5)).eta.shape) == (9,)


@pytest.mark.slow
@pytest.mark.spawns
def test_compiled_model_equals_eager():
    if not _has_compiler():
        pytest.skip("torch.compile needs a C++ compiler, and there is none here")
    torch.manual_seed(0)
    model = Model(dtype=torch.float32)
    x = torch.randn(4, 3)
    eager = model(x)
    eager.backward()
    wanted = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    compiled = torch.compile(model)
    value = compiled(x)
    value.backward()
    torch.testing.assert_close(value, eager)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name], rtol=1e-4, atol=1e-5)
    optimizer = gnomon.moving_frame(torch.optim.SGD(model.parameters(), lr=0.1))
    before = compiled(x).item()
    optimizer.step()
    assert compiled(x).item() != before
    torch.testing.assert_close(compiled(x), model(x))


def _has_compiler():
    import shutil

    return any(shutil.which(name) for name in ("g++", "clang++", "c++"))


@pytest.mark.slow
@pytest.mark.parametrize("group", [g.Dense(3), g.Triangular(3), g.Toeplitz(3), g.Arrow(3), g.LowRank(3, 1)], ids=repr)
def test_a_fresh_point_compiles_to_one_graph(group):
    torch._dynamo.reset()
    point, q = gnomon.SPD(group, dtype=torch.float64), gnomon.Gaussian(group, form="precision", dtype=torch.float64)
    x = torch.randn(4, 3, dtype=torch.float64)

    def loss():
        return point.quad(x).sum() + point.inv_quad(x).sum() - point.logdet() - q.log_prob(x).sum()

    torch.compile(loss, fullgraph=True, backend="aot_eager")().backward()
    found = point.eta.grad.clone(), q.eta.grad.clone()
    point.zero_grad(), q.zero_grad()
    loss().backward()
    torch.testing.assert_close(found, (point.eta.grad, q.eta.grad))
