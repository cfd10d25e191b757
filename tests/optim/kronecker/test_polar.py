"""Polar factors of directions: the iteration, the layers that it serves, and steps along them."""

import copy

import pytest
import torch
from torch import nn

from gnomon.linalg import polar_factor, polar_factors_of_halves
from gnomon.optim import INGD
from support.teaching import teacher, train

F64 = torch.float64


def exact(matrix):
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    return u @ v


@pytest.mark.parametrize("shape", [(3, 8, 8), (2, 5, 40), (2, 40, 5), (1, 1, 7), (1, 300, 130)])
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_the_iteration_comes_near_the_orthogonal_factor(shape, scale):
    """Singular vectors are those of the matrix, and singular values above a hundredth of the norm come near 1."""
    torch.manual_seed(0)
    u, _, v = torch.linalg.svd(torch.randn(shape, dtype=F64), full_matrices=False)
    values = torch.logspace(-1.5, 0, u.shape[-1], dtype=F64)
    matrices = (u * values @ v * scale).float()
    found = polar_factor(matrices).double()
    turned = u.mT @ found @ v.mT
    near = turned.diagonal(dim1=-2, dim2=-1)
    assert (near > 0.65).all()
    assert (near < 1.3).all()
    assert (turned - torch.diag_embed(near)).abs().max() < 1e-3
    assert torch.nn.functional.cosine_similarity(found.flatten(), exact(u * values @ v).flatten(), dim=0) > 0.97


def test_zeros_and_numbers_that_are_not_finite():
    assert torch.equal(polar_factor(torch.zeros(1, 3, 4)), torch.zeros(1, 3, 4))
    assert not polar_factor(torch.full((1, 3, 4), float("nan"))).isfinite().any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(dtype):
    torch.manual_seed(0)
    matrix = torch.randn(1, 12, 30)
    half = polar_factor(matrix.to(dtype)).float()
    assert torch.nn.functional.cosine_similarity(half.flatten(), exact(matrix).flatten(), dim=0) > 0.97


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(24, 24), (16, 128), (128, 16), (96, 300)])
def test_half_precision_of_matrices_with_small_singular_values(shape, dtype):
    torch.manual_seed(0)
    u, _, v = torch.linalg.svd(torch.randn(shape), full_matrices=False)
    k = min(shape)
    for values in (torch.arange(1, k + 1.0) ** -1.5, torch.eye(k)[0] + 1e-2):
        found = polar_factor((u * values @ v)[None].to(dtype)).float()[0]
        assert torch.linalg.svdvals(found)[0] < 1.5
        assert ((u.mT @ found @ v.mT).diagonal()[values > 0.05] > 0.6).all()


def moved(model, optimizer, x):
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.zero_grad()
    model(x).square().sum().backward()
    optimizer.step()
    return [p.detach() - b for p, b in zip(model.parameters(), before, strict=True)]


def test_a_step_is_along_the_polar_factor_of_the_average():
    """Twin optimizers: the average B of the one without polar factors gives the step of the other."""
    torch.manual_seed(0)
    plain, polar = (nn.Linear(6, 4).double() for _ in range(2))
    polar.load_state_dict(plain.state_dict())
    optimizers = [INGD(m, 0.1, weight_decay=0.0, base_width=None, polar=p) for m, p in ((plain, False), (polar, True))]
    x = torch.randn(50, 6, dtype=F64)
    straight, turned = (
        torch.cat([w, b[:, None]], 1) for w, b in (moved(plain, optimizers[0], x), moved(polar, optimizers[1], x))
    )
    weight = polar_factor(straight[:, :-1].unsqueeze(0))[0]
    bias = straight[:, -1:] * weight.norm() / straight[:, :-1].norm()
    wanted = torch.cat([weight, bias], 1)
    wanted = wanted * (0.1 * 0.5 / wanted.square().mean().sqrt())
    torch.testing.assert_close(turned, wanted)
    averages = [o.state[m.weight]["momentum_buffer"] for o, m in zip(optimizers, (plain, polar), strict=True)]
    torch.testing.assert_close(*averages)


def kinds(optimizer):
    """The number of matrices that each layer's direction is made of; None for the average itself."""
    return {layer.name: layer.turn and layer.turn.keywords["count"] for layer in optimizer._layers.values()}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.qkv = nn.Linear(8, 24)
        self.wide = nn.Linear(24, 300)
        self.narrow = nn.Linear(300, 8, bias=False)
        self.conv = nn.Conv1d(8, 12, 3, groups=2)
        self.attn = nn.MultiheadAttention(12, 2, batch_first=True)

    def forward(self, tokens):
        hidden = self.narrow(self.wide(self.qkv(self.embed(tokens))).tanh())
        hidden = self.conv(hidden.mT).mT
        return self.attn(hidden, hidden, hidden)[0]


def test_which_layers_have_polar_factors():
    """Embeddings and layers that are larger than a batch have none; fused queries, keys and values have three."""
    torch.manual_seed(0)
    model = Net()
    optimizer = INGD(model)
    assert kinds(optimizer)["wide"] == 1  # nothing is known of the rows before the first step
    moved(model, optimizer, torch.randint(11, (5, 6)))
    few = {"embed": None, "qkv": 3, "wide": 1, "narrow": 1, "conv": 1}
    assert few.items() <= kinds(optimizer).items()
    assert {kinds(optimizer)[f"attn.{name}"] for name in ("in_proj_weight", "out_proj")} == {1}
    larger = nn.Sequential(nn.Linear(100, 90), nn.Linear(90, 3))
    optimizer = INGD(larger)
    moved(larger, optimizer, torch.randn(40, 100))
    assert kinds(optimizer) == {"0": None, "1": 1}
    asked = INGD(Net(), polar={"wide": 4, "q*": 0})
    assert {"wide": 4, "qkv": None, "narrow": 1}.items() <= kinds(asked).items()
    assert set(kinds(INGD(Net(), polar=False)).values()) == {None}
    assert set(kinds(INGD(Net(), structure="diagonal")).values()) == {None}


@pytest.mark.parametrize(
    ("polar", "message"),
    [
        ("yes", "polar must be True, False or a mapping"),
        ({"qkv": -1}, r"polar\['qkv'\] must be the number of matrices"),
        ({"other": 1}, "polar has the pattern 'other', which matches no layer"),
        ({"qkv": 7}, "polar asks for 7 matrices in qkv, which has 24 outputs"),
    ],
)
def test_errors(polar, message):
    with pytest.raises((TypeError, ValueError), match=message):
        INGD(Net(), polar=polar)


def test_three_matrices_side_by_side_have_a_factor_each():
    torch.manual_seed(0)
    model = nn.Linear(6, 18, bias=False).double()
    twin = copy.deepcopy(model)
    x = torch.randn(60, 6, dtype=F64)
    straight = moved(twin, INGD(twin, weight_decay=0.0, polar=False), x)[0]
    turned = moved(model, INGD(model, weight_decay=0.0), x)[0]
    wanted = polar_factor(straight.view(3, 6, 6)).reshape(18, 6)
    torch.testing.assert_close(turned, wanted * (turned.square().mean() / wanted.square().mean()).sqrt())


@pytest.mark.parametrize("shape", [(3, 8, 20), (2, 20, 8), (1, 6, 6)])
def test_halves_have_polar_factors_of_their_own(shape):
    """They are rows of a wide matrix and columns of a tall one: the first and the last, or every second one."""
    torch.manual_seed(0)
    matrices = torch.randn(shape, dtype=F64)
    wide = matrices if shape[-1] >= shape[-2] else matrices.mT
    h = wide.shape[-2] // 2
    for interleaved, places in ((False, (slice(h), slice(h, None))), (True, (slice(None, None, 2), slice(1, None, 2)))):
        found = polar_factors_of_halves(matrices, interleaved)
        assert found.shape == matrices.shape
        found = found if wide is matrices else found.mT
        for rows in places:
            torch.testing.assert_close(found[:, rows], polar_factor(wide[:, rows]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
def test_halves_in_half_precision(interleaved, dtype):
    torch.manual_seed(0)
    matrices = torch.randn(3, 8, 20)
    half, full = (polar_factors_of_halves(m, interleaved).float() for m in (matrices.to(dtype), matrices))
    assert torch.nn.functional.cosine_similarity(half.flatten(), full.flatten(), dim=0) > 0.99


def test_which_layers_are_halved():
    """Those whose smaller side is above a sixteenth of the number of rows, and is even and large enough."""

    def halved(rows, *sizes, **settings):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(*size) for size in sizes))
        optimizer = INGD(model, **settings)
        moved(model, optimizer, torch.randn(rows, sizes[0][0]))
        return [layer.turn.keywords["in_halves"] for layer in optimizer._layers.values()]

    assert halved(1000, (100, 96), (96, 94), (94, 288), (288, 97)) == [True, False, False, False]
    assert halved(1535, (96, 96)) == [True]
    assert halved(1536, (96, 96)) == [False]
    assert halved(1000, (100, 288), polar={"0": 3}) == [True]
    assert halved(10, (100, 96), curvature="gradient") == [True]  # the number of rows is not known


def test_steps_take_other_halves_in_turns():
    torch.manual_seed(0)
    model = nn.Linear(96, 96, bias=False).double()
    twin = copy.deepcopy(model)
    settings = {"weight_decay": 0.0, "momentum": 0.0, "structure": ("identity", "dense"), "update_every": 10}
    optimizers = [INGD(m, polar=polar, **settings) for m, polar in ((twin, False), (model, True))]
    for step in range(3):
        x = torch.randn(200, 96, dtype=F64)
        twin.load_state_dict(model.state_dict())
        straight, turned = (moved(m, o, x)[0] for m, o in zip((twin, model), optimizers, strict=True))
        wanted = polar_factors_of_halves(straight[None], step % 2 == 1)[0]
        torch.testing.assert_close(turned, wanted * (turned.norm() / wanted.norm()))


def test_resume_has_the_row_counts():
    """A run that is resumed knows how many rows there were, and takes the same steps."""
    (x, y), model = teacher(), nn.Sequential(nn.Linear(6, 200), nn.Tanh(), nn.Linear(200, 2))
    optimizer = INGD(model)
    train(optimizer, lambda: (model(x) - y).square().mean(), 5)
    other = copy.deepcopy(model)
    again = INGD(other)
    again.load_state_dict(optimizer.state_dict())
    assert kinds(again) == kinds(optimizer)
    for m, o in ((model, optimizer), (other, again)):
        train(o, lambda m=m: (m(x) - y).square().mean(), 4)
    for ours, theirs in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_resume_takes_the_halves_that_are_next():
    """After three steps the next halves are every second row, in the resumed run too."""
    torch.manual_seed(0)
    model, batches = nn.Linear(96, 96), torch.randn(6, 200, 96)
    optimizer = INGD(model)
    for x in batches[:3]:
        moved(model, optimizer, x)
    other = copy.deepcopy(model)
    again = INGD(other)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for m, o in ((model, optimizer), (other, again)):
        for x in batches[3:]:
            moved(m, o, x)
    assert torch.equal(model.weight, other.weight)
    assert torch.equal(model.bias, other.bias)
