"""Checks that a user can run on a group of their own, and that the project runs on every group."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.func import jacfwd, jvp

from .frames import FORMS, Chart, Form
from .groups import Element, Group, SymmetricOperator

__all__ = ["check_group", "random_algebra", "random_element"]

_ORDERS = (1, 2, None)


def check_group(
    group: Group,
    *,
    batch_shape: Sequence[int] = (2,),
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> None:
    """Hold a group to everything that the library assumes of one; an AssertionError says what fails.

    Use a small member of the family (k up to 8 or so): each operation is compared with its dense twin, and
    derivatives are taken by automatic differentiation. Elements are random and **not symmetric**. Checked are

    - storage: identity, flattening, projection from dense and back, factorization of ``A A^T``;
    - every operation against its dense twin, transposes and congruences included, the adjoint identities of
      ``restrict`` and ``pullback``, and gradients through elements;
    - closure under products and under the truncated exponential, and the second order of the latter, as a slope;
    - the identity metric at the origin of all three factorizations, and the pull-back of gradients;
    - third order of the corrected transport, as a slope against integrated parallel transport;
    - batches against loops, and that float64, float32, bfloat16 and the device are kept.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        check_storage(group, device)
        check_dense_twins(group, device)
        check_adjoints(group, device)
        check_congruence(group, device)
        check_gradients(group, device)
        check_truncation_order(group, device)
        for form in FORMS:
            check_metric(group, form, device)
            check_pullback(group, form, device)
            check_transport_order(group, form, device)
        check_batch(group, tuple(batch_shape), device)
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            check_dtype(group, dtype, device)


# ---------------------------------------------------------------------- random elements
def random_algebra(
    group: Group,
    batch_shape: Sequence[int] = (),
    *,
    size: float = 1.0,
    dtype: torch.dtype = torch.float64,
    device: torch.device | str = "cpu",
) -> Element:
    """A random algebra element of Frobenius norm about ``size``, not symmetric."""
    blocks = [torch.randn(*batch_shape, *s, dtype=torch.float64, device=device) for s in group.shapes]
    frozen = group.scale(group.unflatten(torch.ones(group.numel, dtype=torch.float64, device=device)))
    blocks = [b * (f != 0) for b, f in zip(blocks, frozen, strict=True)]
    return tuple((b * (size / math.sqrt(group.k))).to(dtype) for b in blocks)


def random_element(
    group: Group,
    batch_shape: Sequence[int] = (),
    *,
    dtype: torch.dtype = torch.float64,
    device: torch.device | str = "cpu",
) -> Element:
    """A random, well-conditioned group element, not symmetric."""
    n = random_algebra(group, batch_shape, size=0.5, device=device)
    return tuple(block.to(dtype) for block in group.exp(n))


def _random_coordinates(group: Group, device: torch.device | str) -> Element:
    return group.unscale(group.scale(random_algebra(group, device=device)))


def _close(group: Group, what: str, actual: Tensor, wanted: Tensor, tol: float = 1e-10) -> None:
    assert actual.shape == wanted.shape, f"{group}: {what} has shape {tuple(actual.shape)}, not {tuple(wanted.shape)}"
    scale = max(1.0, float(wanted.detach().abs().max()))
    error = float((actual - wanted).detach().abs().max()) / scale
    assert error <= tol, f"{group}: {what} is off by {error:.1e} (relative; allowed {tol:.0e})"


def _dense_algebra(group: Group, n: Element) -> Tensor:
    """The matrix of an algebra element: the derivative of ``to_dense(exp(t n))`` at 0, whatever the storage."""
    zero = tuple(torch.zeros_like(block) for block in n)
    return jvp(lambda *m: group.to_dense(group.exp(m, 1)), zero, n)[1]


def _pair(group: Group, covector: Element, n: Element) -> Tensor:
    return (group.flatten(covector) * group.flatten(n)).sum()


def _pieces(group: Group, n: Element) -> list[Element]:
    """n with all but one coordinate set zeroed, for each set."""
    return [
        tuple(b if i in blocks else torch.zeros_like(b) for i, b in enumerate(n)) for blocks in group.coordinate_sets
    ]


# ---------------------------------------------------------------------- structure
def check_storage(group: Group, device: torch.device | str = "cpu") -> None:
    """Shapes, identity, flattening, projection and factorization."""
    a = random_element(group, device=device)
    eye = torch.eye(group.k, dtype=torch.float64, device=device)
    assert tuple(b.shape for b in a) == group.shapes, f"{group}: blocks do not have the shapes it announces"
    assert group.flatten(a).numel() == group.numel, f"{group}: numel is wrong"
    assert group.dim <= group.numel, f"{group}: dim exceeds numel"
    _close(group, "unflatten(flatten(a))", group.to_dense(group.unflatten(group.flatten(a))), group.to_dense(a), 0)
    _close(group, "identity", group.to_dense(group.identity(dtype=torch.float64, device=device)), eye)
    _close(group, "from_dense(to_dense(a))", group.to_dense(group.from_dense(group.to_dense(a))), group.to_dense(a))
    dense = group.to_dense(a)
    factor = group.to_dense(group.factor(dense @ dense.mT))
    _close(group, "factor(A A^T)", factor @ factor.mT, dense @ dense.mT)
    both = torch.stack([dense @ dense.mT, eye])
    factors = group.to_dense(group.factor(both))
    _close(group, "factor of a batch", factors @ factors.mT, both)
    diagonal = group.to_dense(group.from_diagonal(torch.ones(group.k, dtype=torch.float64, device=device)))
    _close(group, "from_diagonal(1)", diagonal, eye)


def check_dense_twins(group: Group, device: torch.device | str = "cpu") -> None:
    """Every operation against the same on dense matrices."""
    a, b = random_element(group, device=device), random_element(group, device=device)
    n, m = random_algebra(group, device=device), random_algebra(group, device=device)
    A, B = group.to_dense(a), group.to_dense(b)
    N, M = _dense_algebra(group, n), _dense_algebra(group, m)
    x = torch.randn(3, group.k, dtype=torch.float64, device=device)

    _close(group, "mul", group.to_dense(group.mul(a, b)), A @ B)
    _close(group, "closure of mul", group.to_dense(group.from_dense(A @ B)), A @ B)
    _close(group, "ldiv", group.to_dense(group.ldiv(a, b)), torch.linalg.solve(A, B))
    _close(group, "matvec", group.matvec(a, x), x @ A.mT)
    _close(group, "rmatvec", group.rmatvec(a, x), x @ A)
    _close(group, "solve", group.solve(a, x), torch.linalg.solve(A, x.mT).mT)
    _close(group, "rsolve", group.rsolve(a, x), torch.linalg.solve(A.mT, x.mT).mT)
    _close(group, "matvec of one vector", group.matvec(a, x[0]), A @ x[0])
    _close(group, "logabsdet", group.logabsdet(a), torch.linalg.slogdet(A).logabsdet)
    _close(group, "squared_norm", group.squared_norm(a), A.square().sum())
    _close(group, "bracket", _dense_algebra(group, group.bracket(n, m)), N @ M - M @ N)

    eye = torch.eye(group.k, dtype=torch.float64, device=device)
    if group.has_matrix_exp:
        _close(group, "exp", group.to_dense(group.exp(n)), torch.linalg.matrix_exp(N))
    if group.is_algebra and group.has_matrix_exp:
        _close(group, "exp of order 1", group.to_dense(group.exp(n, 1)), eye + N)
        _close(group, "exp of order 2", group.to_dense(group.exp(n, 2)), eye + N + N @ N / 2)
    eta = _random_coordinates(group, device)
    for order in _ORDERS:
        for left in (False, True):
            for sign in (1, -1):
                wanted = group.move(a, tuple(sign * block for block in group.scale(eta)), order, left)
                actual = group.retract(a, eta, order, left, sign)
                _close(group, f"retract at order {order}", group.to_dense(actual), group.to_dense(wanted))
        E = group.to_dense(group.exp(n, order))
        _close(group, f"closure of exp at order {order}", group.to_dense(group.from_dense(E)), E)
        _close(group, f"move at order {order}", group.to_dense(group.move(a, n, order)), A @ E)
        _close(group, f"left move at order {order}", group.to_dense(group.move(a, n, order, left=True)), E @ A)


def check_adjoints(group: Group, device: torch.device | str = "cpu") -> None:
    """``restrict``, ``gram``, ``pullback`` and ``dual`` are adjoint to what they must be adjoint to."""
    a, grad = random_element(group, device=device), random_algebra(group, device=device)
    x, y = torch.randn(2, 3, group.k, dtype=torch.float64, device=device).unbind()
    A = group.to_dense(a)
    m = random_algebra(group, device=device)
    for _ in range(3):
        n = random_algebra(group, device=device)
        N = _dense_algebra(group, n)
        _close(group, "restrict", _pair(group, group.restrict(x, y), n), (N * (x.mT @ y)).sum())
        xa = x @ A
        _close(group, "gram", _pair(group, group.gram(a, x), n), (N * (xa.mT @ xa)).sum())
        _close(group, "length", group.length(n) ** 2, _squared_length(group, n))
        bound = torch.linalg.matrix_norm(N, 2)
        assert group.norm_bound(n) >= bound * (1 - 1e-9), f"{group}: norm_bound is below the spectral norm"
        for left in (False, True):
            zero = tuple(torch.zeros_like(block) for block in n)
            moved = jvp(lambda *e, left=left: group.move(a, e, 1, left=left), zero, n)[1]
            _close(
                group,
                f"pullback (left={left})",
                _pair(group, group.pullback(a, grad, left), n),
                _pair(group, grad, moved),
            )
        for n_piece, m_piece in zip(_pieces(group, n), _pieces(group, m), strict=True):
            wanted = (_dense_algebra(group, n_piece) * _dense_algebra(group, m_piece)).sum()
            _close(group, "dual", _pair(group, group.dual(m_piece), n_piece), wanted)


def check_congruence(group: Group, device: torch.device | str = "cpu") -> None:
    """``A^T`` as an element, and ``<E_j, A^T H A>`` from products with H against the dense one."""
    a = random_element(group, device=device)
    _close(group, "transpose", group.transposed.to_dense(group.transpose(a)), group.to_dense(a).mT)
    half = torch.randn(group.k, group.k, dtype=torch.float64, device=device)
    h = half + half.mT
    operator = SymmetricOperator(group.k, lambda rows: rows @ h, lambda part: h.diagonal()[part.where], shift=0.3)
    dense = group.to_dense(a)
    wanted = group.restrict(dense, h @ dense + 0.3 * dense)
    _close(group, "congruence", group.flatten(group.congruence(a, operator)), group.flatten(wanted))


def _squared_length(group: Group, eta: Element) -> Tensor:
    """Lengths add up over coordinate sets that are not orthonormal together."""
    return sum((group.flatten(piece).norm() for piece in _pieces(group, eta)), torch.zeros(())) ** 2


def check_gradients(group: Group, device: torch.device | str = "cpu") -> None:
    """Elements are differentiable through what losses use."""
    a = tuple(block.requires_grad_() for block in random_element(group, device=device))
    x = torch.randn(2, group.k, dtype=torch.float64, device=device)

    def loss(*blocks: Tensor) -> Tensor:
        y = group.solve(blocks, group.matvec(blocks, x).sin()) + group.rsolve(blocks, group.rmatvec(blocks, x).sin())
        return y.sum() + group.logabsdet(blocks)

    assert torch.autograd.gradcheck(loss, a, raise_exception=False), f"{group}: gradients through elements are wrong"


def _slope(error: Callable[[float], float], sizes: tuple[float, float] = (0.08, 0.02)) -> float:
    """The order of an error in the size of its argument; infinite where there is none to speak of."""
    large, small = (error(size) for size in sizes)
    if small <= 1e-13:
        return math.inf
    return math.log(large / small) / math.log(sizes[0] / sizes[1])


def check_truncation_order(group: Group, device: torch.device | str = "cpu") -> None:
    """``exp`` at order p has an error of order p + 1, and derivative N at 0."""
    n = group.scale(_random_coordinates(group, device))
    for order in (1, 2):

        def error(size: float, order: int = order) -> float:
            scaled = tuple(size * block for block in n)
            gap = group.to_dense(group.exp(scaled, order)) - group.to_dense(group.exp(scaled))
            return float(gap.norm())

        slope = _slope(error)
        assert slope > order + 0.7, f"{group}: exp at order {order} has an error of order {slope:.2f}, not {order + 1}"
    if not group.has_matrix_exp:

        def distance(size: float) -> float:
            scaled = tuple(size * block for block in n)
            return float((group.to_dense(group.exp(scaled)) - torch.linalg.matrix_exp(size * N)).norm())

        N = _dense_algebra(group, n)
        slope = _slope(distance)
        assert slope > 1.7, f"{group}: exp differs from the matrix exponential at order {slope:.2f}, before 2"


# ---------------------------------------------------------------------- geometry
def _bases(group: Group, device: torch.device | str) -> list[Tensor]:
    """Orthonormal bases, as columns, of the coordinates in each coordinate set."""
    bases = []
    for unit in _pieces(group, group.unflatten(torch.eye(group.numel, dtype=torch.float64, device=device))):
        projected = group.flatten(group.unscale(group.scale(unit)))
        values, vectors = torch.linalg.eigh(0.5 * (projected + projected.mT))
        assert bool(((values < 1e-9) | ((values - 1).abs() < 1e-9)).all()), (
            f"{group}: unscale(scale(eta)) is not an orthogonal projection onto the coordinates"
        )
        bases.append(vectors[:, values > 0.5])
    return bases


class _SubChart:
    """tau as a function of coordinates in one basis, the rest frozen, with the metric that it induces."""

    def __init__(self, chart: Chart, a: Element, basis: Tensor) -> None:
        self.chart, self.a, self.basis = chart, a, basis

    def factor(self, c: Tensor) -> Element:
        return self.chart.retract(self.a, self.chart.group.unflatten(self.basis @ c))

    def tau(self, c: Tensor) -> Tensor:
        return self.chart.matrix(self.factor(c))

    def tangents(self, c: Tensor) -> Tensor:
        """Columns: the derivative of vec(tau) along each coordinate."""
        return jacfwd(self.tau)(c).flatten(0, 1)

    def metric(self, c: Tensor) -> Tensor:
        tau = self.tau(c)
        d_tau = jacfwd(self.tau)(c).movedim(-1, 0)
        whitened = torch.linalg.solve(tau, d_tau)
        return torch.einsum("aij,bji->ab", whitened, whitened)

    def transport_rate(self, c: Tensor, velocity: Tensor) -> Tensor:
        """The matrix R of ``dw/dt = R w`` for a covector along a curve with this velocity (Eq. parallel_trans_eucl)."""
        f, df = self.metric(c), jacfwd(self.metric)(c)  # df[b, d, c] = d_c F_bd
        lowered = 0.5 * (df.permute(1, 2, 0) + df.permute(1, 0, 2) - df.permute(2, 0, 1))  # [d, c, b]
        return torch.einsum("ad,dcb,b->ca", torch.linalg.inv(f), lowered, velocity)


def check_metric(group: Group, form: Form, device: torch.device | str = "cpu") -> None:
    """The metric ``tr(tau^-1 u tau^-1 v)`` is the identity at the origin, wherever the frame is."""
    chart = Chart(group, form)
    a = random_element(group, device=device)
    bases = _bases(group, device)
    redundant = len(bases) - 1  # factors share one scale
    count = sum(basis.shape[1] for basis in bases) - redundant
    assert count == group.dim, f"{group}: dim is {group.dim}, but there are {count} independent coordinates"
    for basis in bases:
        c = torch.zeros(basis.shape[1], dtype=torch.float64, device=device)
        metric = _SubChart(chart, a, basis).metric(c)
        _close(group, f"metric ({form})", metric, torch.eye(len(c), dtype=torch.float64, device=device))


def check_pullback(group: Group, form: Form, device: torch.device | str = "cpu") -> None:
    """``Chart.pullback`` is the gradient of ``f(A(eta))`` at 0, and ``logdet_gradient`` that of ``log det tau``."""
    chart = Chart(group, form)
    a = random_element(group, device=device)
    grad = random_algebra(group, device=device)
    eta = torch.zeros(group.numel, dtype=torch.float64, device=device, requires_grad=True)
    moved = chart.retract(a, group.unflatten(eta))
    (wanted,) = torch.autograd.grad(_pair(group, grad, moved), eta, retain_graph=True)
    _close(group, f"Chart.pullback ({form})", group.flatten(chart.pullback(a, grad)), wanted)
    (wanted,) = torch.autograd.grad(chart.logdet(moved), eta)
    _close(group, f"Chart.logdet_gradient ({form})", group.flatten(chart.logdet_gradient(a)), wanted)
    _close(group, f"Chart.logdet ({form})", chart.logdet(a), torch.logdet(chart.matrix(a)))


def check_transport_order(group: Group, form: Form, device: torch.device | str = "cpu") -> None:
    """The corrected transport of a vector as long as the step is right to third order.

    The oracle integrates the transport equation with Christoffel symbols from automatic differentiation of
    the metric, and changes coordinates by the Jacobian between the two charts.
    """
    chart = Chart(group, form)
    a = random_element(group, device=device)
    for basis in _bases(group, device):
        old = _SubChart(chart, a, basis)
        s, v = torch.randn(2, basis.shape[1], dtype=torch.float64, device=device).unbind()
        s, v = s / s.norm(), v / v.norm()

        def error(size: float, old: _SubChart = old, s: Tensor = s, v: Tensor = v) -> float:
            step, vector = size * s, size * v
            wanted = _integrated_transport(old, step, vector)
            carried = chart.carry(
                group.unflatten(old.basis @ step), group.unflatten(old.basis @ vector), corrected=True
            )
            return float((old.basis.mT @ group.flatten(carried) - wanted).norm())

        slope = _slope(error)
        assert slope > 2.7, f"{group}: the corrected transport ({form}) has an error of order {slope:.2f}, not 3"


def _integrated_transport(old: _SubChart, step: Tensor, vector: Tensor) -> Tensor:
    """A covector carried along the coordinate line to ``step`` (one Runge-Kutta step), in the new frame."""
    start, middle, end = (old.transport_rate(t * step, step) for t in (0.0, 0.5, 1.0))
    k1 = start @ vector
    k2 = middle @ (vector + 0.5 * k1)
    k3 = middle @ (vector + 0.5 * k2)
    k4 = end @ (vector + k3)
    carried = vector + (k1 + 2 * k2 + 2 * k3 + k4) / 6
    new = _SubChart(old.chart, old.factor(step), old.basis)
    jacobian = torch.linalg.lstsq(old.tangents(step), new.tangents(torch.zeros_like(step))).solution
    return jacobian.mT @ carried


# ---------------------------------------------------------------------- batches, dtypes
def _operations(group: Group, a: Element, n: Element, x: Tensor) -> dict[str, Element]:
    """One call of everything, on the last batch dimensions."""
    return {
        "identity_like": group.identity_like(a),
        "mul": group.mul(a, a),
        "apply": (group.apply(a, x), group.apply(a, x, transpose=True)),
        "apply_inverse": (group.apply_inverse(a, x), group.apply_inverse(a, x, transpose=True)),
        "ldiv": group.ldiv(a, group.mul(a, a)),
        "logabsdet": (group.logabsdet(a),),
        "restrict": group.restrict(x, 2 * x),
        "gram": group.gram(a, x),
        "pullback": group.pullback(a, n) + group.pullback(a, n, left=True),
        "scale": group.scale(n) + group.unscale(n),
        "dual": group.dual(n),
        "bracket": group.bracket(n, a),
        "squared_norm": (group.squared_norm(a),),
        "exp": group.exp(n, 1) + group.exp(n, 2) + group.exp(n),
        "move": group.move(a, n, 2) + group.move(a, n, 2, left=True),
        "retract": group.retract(a, n, 2),
        "to_dense": (group.to_dense(a),),
        "from_dense": group.from_dense(group.to_dense(a)),
        "from_diagonal": group.from_diagonal(x[..., 0, :].abs() + 1),
    }


def check_batch(group: Group, batch_shape: tuple[int, ...], device: torch.device | str = "cpu") -> None:
    """A batch is a loop."""
    a = random_element(group, batch_shape, device=device)
    n = random_algebra(group, batch_shape, device=device)
    x = torch.randn(*batch_shape, 3, group.k, dtype=torch.float64, device=device)
    together = _operations(group, a, n, x)
    for index in torch.cartesian_prod(*(torch.arange(size) for size in batch_shape)).reshape(-1, len(batch_shape)):
        i = tuple(index.tolist())
        alone = _operations(group, tuple(b[i] for b in a), tuple(b[i] for b in n), x[i])
        for name, blocks in alone.items():
            for batched, single in zip(together[name], blocks, strict=True):
                _close(group, f"{name} of a batch", batched[i], single)
    y = torch.randn(4, *batch_shape, group.k, dtype=torch.float64, device=device)
    A = group.to_dense(a)
    _close(group, "matvec of samples of a batch", group.matvec(a, y), (A @ y.unsqueeze(-1)).squeeze(-1))
    one = y[(0,) * (len(batch_shape) + 1)]
    _close(group, "matvec of one vector for a batch", group.matvec(a, one), A @ one)


def check_dtype(group: Group, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
    """Precision and device are kept, and results agree with float64 to the precision."""
    a, n = random_element(group, device=device), random_algebra(group, device=device)
    a = tuple(block.to(dtype) for block in a)
    n = tuple(block.to(dtype) for block in n)
    x = torch.randn(3, group.k, dtype=dtype, device=device)
    results = _operations(group, a, n, x)
    wanted = _operations(group, tuple(b.double() for b in a), tuple(b.double() for b in n), x.double())
    for name, blocks in results.items():
        for block, exact in zip(blocks, wanted[name], strict=True):
            assert block.dtype == dtype, f"{group}: {name} turns {dtype} into {block.dtype}"
            assert block.device.type == torch.device(device).type, f"{group}: {name} moves to {block.device}"
            _close(group, f"{name} in {dtype}", block.double(), exact, 64 * torch.finfo(dtype).eps)
