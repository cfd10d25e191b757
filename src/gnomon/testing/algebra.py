"""Checks of a group as an algebra: each operation beside the same on dense matrices, or its definition."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.func import jvp

from ..groups import Affine, Element, Group, SymmetricOperator
from ..groups.base import ORDERS
from .elements import dense_algebra, near_identity, pair, pieces, random_algebra, random_blocks, random_coordinates
from .memory import check_arguments_are_kept
from .verdict import TOLERANCE, close, distance, owner, require

Device = torch.device | str


def eye(group: Group, device: Device) -> Tensor:
    return torch.eye(group.k, dtype=torch.float64, device=device)


def check_representation(group: Group, device: Device = "cpu") -> None:
    """Check that ``to_dense``, ``apply`` and ``mul`` agree; two of them outvote the third."""
    a, b = (random_blocks(group, (), device) for _ in range(2))
    x = torch.randn(3, group.k, dtype=torch.float64, device=device)
    for member in ("mul", "apply", "to_dense"):
        check_arguments_are_kept(group, member, a, b, x)
    A, B, product = group.to_dense(a), group.to_dense(b), group.to_dense(group.mul(a, b))
    by_rows = group.apply(a, eye(group, device)).mT
    if distance(by_rows, A) > TOLERANCE:
        culprit = "apply" if distance(product, A @ B) <= TOLERANCE else "to_dense"
        close(group, culprit, by_rows, A, what="apply to the columns of I, beside to_dense,")
    # Without a to_dense of its own the matrix comes from apply.
    others = () if owner(group, "to_dense") else ("apply",)
    close(group, "mul", product, A @ B, *others)
    close(group, "apply", group.apply(a, x), x @ A.mT)
    close(group, "apply", group.apply(a, x, transpose=True), x @ A, what="apply(transpose=True)")
    close(group, "matvec", group.matvec(a, x), x @ A.mT)
    close(group, "matvec", group.matvec(a, x[0]), A @ x[0], what="matvec of one vector")
    close(group, "rmatvec", group.rmatvec(a, x), x @ A)


def check_identity(group: Group, device: Device = "cpu") -> None:
    """Check the neutral element, of any batch shape and dtype."""
    one = eye(group, device)
    close(group, "from_dense", group.to_dense(group.from_dense(one)), one, what="from_dense(I)")
    ones = torch.ones(group.k, dtype=torch.float64, device=device)
    close(group, "from_diagonal", group.to_dense(group.from_diagonal(ones)), one, what="from_diagonal(1)")
    close(group, "identity", group.to_dense(group.identity(dtype=torch.float64, device=device)), one)
    single = group.identity((2, 3), dtype=torch.float32, device=device)
    shaped = all(tuple(b.shape) == (2, 3, *s) for b, s in zip(single, group.shapes, strict=True))
    require(group, "identity", shaped, "identity((2, 3)) has blocks of the wrong shapes")
    require(group, "identity", single[0].dtype == torch.float32, "identity(dtype=torch.float32) has another dtype")
    pairs = zip(group.identity_like(single), single, strict=True)
    same = all(x.dtype == y.dtype and torch.equal(x, y) for x, y in pairs)
    require(group, "identity_like", same, "identity_like differs from the identity of that batch and dtype")


def check_projections(group: Group, device: Device = "cpu") -> None:
    """Check the projection of dense matrices, and of diagonal ones."""
    one = eye(group, device)
    ones = torch.ones(group.k, dtype=torch.float64, device=device)
    a = near_identity(group, (), device)
    A = group.to_dense(a)
    close(group, "from_dense", group.to_dense(group.from_dense(A)), A, what="from_dense(to_dense(a))")
    if not group.is_algebra:
        twice = group.to_dense(group.from_diagonal(2 * ones))
        close(group, "from_diagonal", twice, 2 * one, what="from_diagonal(2)")
        return
    matrix = torch.randn(group.k, group.k, dtype=torch.float64, device=device)
    rest = matrix - group.to_dense(group.from_dense(matrix))
    for _ in range(3):
        N = dense_algebra(group, random_algebra(group, device=device))
        zero = torch.zeros((), dtype=torch.float64, device=device)
        close(group, "from_dense", (N * rest).sum(), zero, what="from_dense, as an orthogonal projection,")
    diagonal = 1 + torch.rand(group.k, dtype=torch.float64, device=device)
    nearest = group.to_dense(group.from_dense(torch.diag_embed(diagonal)))
    close(group, "from_diagonal", group.to_dense(group.from_diagonal(diagonal)), nearest)


def check_inverses(group: Group, device: Device = "cpu") -> None:
    """Check inverses, determinants and the norm of an element."""
    a, b = near_identity(group, (), device), near_identity(group, (), device)
    A, B = group.to_dense(a), group.to_dense(b)
    x = torch.randn(3, group.k, dtype=torch.float64, device=device)
    solved, turned = torch.linalg.solve(A, x.mT).mT, torch.linalg.solve(A.mT, x.mT).mT
    if owner(group, "apply_inverse"):  # ldiv may be built on it; the default is built on ldiv
        close(group, "apply_inverse", group.apply_inverse(a, x), solved)
    close(group, "ldiv", group.to_dense(group.ldiv(a, b)), torch.linalg.solve(A, B))
    close(group, "apply_inverse", group.apply_inverse(a, x), solved)
    close(group, "apply_inverse", group.apply_inverse(a, x, True), turned, what="apply_inverse(transpose=True)")
    close(group, "solve", group.solve(a, x), solved)
    close(group, "rsolve", group.rsolve(a, x), turned)
    close(group, "logabsdet", group.logabsdet(a), torch.linalg.slogdet(A).logabsdet)


def check_linearity(group: Group, device: Device = "cpu") -> None:
    """Check that ``is_algebra`` is true only of linear spaces of matrices.

    In these ``mul`` multiplies algebra elements too.
    """
    if group.is_algebra:
        n, m = random_algebra(group, device=device), random_algebra(group, device=device)
        N, M, both = (dense_algebra(group, e) for e in (n, m, group.mul(n, m)))
        error = max(distance(both, N @ M), distance(group.to_dense(n), N))
        complaint = f"is_algebra is True, but mul and to_dense of algebra elements are off by {error:.1e}"
        require(group, "is_algebra", error <= TOLERANCE, complaint)


def check_covectors(group: Group, device: Device = "cpu") -> None:
    """Check ``trace``, and that ``restrict``, ``dual``, ``pullback`` and ``gram`` are the right adjoints."""
    a = near_identity(group, (), device)
    grad, m = random_blocks(group, (), device), random_algebra(group, device=device)
    x, y = torch.randn(2, 3, group.k, dtype=torch.float64, device=device).unbind()
    A, one = group.to_dense(a), group.identity(dtype=torch.float64, device=device)
    for _ in range(3):
        n = random_algebra(group, device=device)
        N = dense_algebra(group, n)
        close(group, "restrict", pair(group, group.restrict(x, y), n), (N * (x.mT @ y)).sum())
        for n_piece, m_piece in zip(pieces(group, n), pieces(group, m), strict=True):
            wanted = (dense_algebra(group, n_piece) * dense_algebra(group, m_piece)).sum()
            close(group, "dual", pair(group, group.dual(m_piece), n_piece), wanted)
        for left in (False, True):
            times_a = (lambda *e: group.mul(e, a)) if left else (lambda *e: group.mul(a, e))
            wanted = pair(group, grad, jvp(times_a, one, n)[1])
            actual = pair(group, group.pullback(a, grad, left), n)
            close(group, "pullback", actual, wanted, what=f"pullback (left={left})")
        xa = x @ A
        close(group, "gram", pair(group, group.gram(a, x), n), (N * (xa.mT @ xa)).sum())
    close(group, "trace", group.trace(group.restrict(x, y)), (x * y).sum())
    close(group, "squared_norm", group.squared_norm(a), A.square().sum())
    close(group, "square_diagonal", group.square_diagonal(a), A.square().sum(-1))
    M = dense_algebra(group, m)
    close(group, "bracket", dense_algebra(group, group.bracket(n, m)), N @ M - M @ N)


# ---------------------------------------------------------------------- coordinates
def check_coordinates(group: Group, device: Device = "cpu") -> None:
    """Check that there are ``dim`` coordinates, and that ``scale`` is orthonormal.

    ``scale`` is also its own adjoint, and ``unscale`` undoes it.
    """
    units = group.unflatten(torch.eye(group.numel, dtype=torch.float64, device=device))
    count = 0
    for unit in pieces(group, units):
        D = group.flatten(group.scale(unit))
        close(group, "scale", D, D.mT, what="scale, as its own adjoint,")
        matrices = dense_algebra(group, unit)
        symmetric = (matrices + matrices.mT).flatten(-2)
        metric = symmetric @ symmetric.mT  # <E_i + E_i^T, E_j + E_j^T>
        projection = D @ metric @ D
        what = "scale: the metric in its coordinates, which should project onto them,"
        close(group, "scale", projection @ projection, projection, what=what)
        close(group, "scale", projection @ D, D, what="scale, along directions that change A A^T,")
        close(group, "unscale", group.flatten(group.unscale(unit)), metric @ D)
        count += round(float(projection.diagonal().sum()))
    count -= len(group.coordinate_sets) - 1  # factors share one scale
    counted = f"dim is {group.dim}, but there are {count} independent coordinates"
    require(group, "dim", count == group.dim, counted)


def check_norms(group: Group, device: Device = "cpu") -> None:
    """Check lengths, the dual in the metric, and that norms of algebra elements are within their documented ranges."""
    half = torch.randn(3, group.k, dtype=torch.float64, device=device)
    wanted = tuple(2 * block for block in group.scale(group.scale(group.restrict(half, half))))
    dual = group.metric_dual(group.restrict(half, half))
    close(group, "metric_dual", group.flatten(dual), group.flatten(wanted))
    for _ in range(3):
        eta = random_coordinates(group, device)
        lengths = [torch.linalg.vector_norm(group.flatten(piece)) for piece in pieces(group, eta)]
        close(group, "length", group.length(eta), torch.stack(lengths).sum())
        for piece in pieces(group, eta):
            n = group.scale(piece)
            true = float(torch.linalg.matrix_norm(dense_algebra(group, n), 2))
            for member, found, (low, high) in (
                ("norm_estimate", group.norm_estimate(n), (0.5, 3.0)),
                ("norm_bound", group.norm_bound(n), (1 - 1e-9, 2 * group.k)),
                ("reach", group.reach(piece) / 2, (1 - 1e-9, 2 * group.k)),
            ):
                within = low * true <= float(found) <= high * true
                ratio = f"{member} is {float(found) / true if true else math.inf:.2f} times the spectral norm"
                require(group, member, within, f"{ratio}, not between {low:.2g} and {high:.2g}")
        check_stretch(group, eta)
    single = tuple(block.float() for block in eta)
    wide = group.length(single).dtype == torch.float64
    require(group, "length", wide, f"length of float32 coordinates is in {group.length(single).dtype}, not in float64")


def check_stretch(group: Group, eta: Element) -> None:
    """Check that ``stretch`` is at least ``||N + N^T||_2``, but for the mean of a Gaussian, and not far above it.

    ``quick_stretch`` is about as large, or larger.
    """
    N = torch.stack([dense_algebra(group, group.scale(piece)) for piece in pieces(group, eta)]).sum(0)
    true, found = float(torch.linalg.matrix_norm(N + N.mT, 2)), float(group.stretch(eta))
    low = group.k**-0.5 if isinstance(group, Affine) else 1 - 1e-9  # a largest coordinate for a length
    ratio = f"stretch is {found / true if true else math.inf:.2f} times the spectral norm of N + N^T"
    require(group, "stretch", low * true <= found <= 2 * group.k * true, f"{ratio}, not between {low:.2g} and 2 k")
    if (quick := group.quick_stretch(eta)) is not None:
        ratio = f"quick_stretch is {float(quick) / found if found else math.inf:.2f} times the stretch"
        require(group, "quick_stretch", 0.9 * found <= float(quick) <= 3 * found, f"{ratio}, not between 0.9 and 3")


# ---------------------------------------------------------------------- exponentials
def check_exponentials(group: Group, device: Device = "cpu") -> None:
    """Check ``exp`` and its truncations, ``move`` and ``retract``."""
    a, n = near_identity(group, (), device), random_algebra(group, device=device)
    A, N, one = group.to_dense(a), dense_algebra(group, n), eye(group, device)
    if group.has_matrix_exp:
        close(group, "exp", group.to_dense(group.exp(n)), torch.linalg.matrix_exp(N), "has_matrix_exp")
    if group.is_algebra and group.has_matrix_exp:
        close(group, "exp", group.to_dense(group.exp(n, 1)), one + N, what="exp of order 1")
        close(group, "exp", group.to_dense(group.exp(n, 2)), one + N + N @ N / 2, what="exp of order 2")
    check_truncation_order(group, device)
    eta = random_coordinates(group, device)
    for order in ORDERS:
        E = group.to_dense(group.exp(n, order))
        close(group, "exp", group.to_dense(group.from_dense(E)), E, what=f"exp at order {order}, in the structure,")
        close(group, "move", group.to_dense(group.move(a, n, order)), A @ E, what=f"move at order {order}")
        moved = group.to_dense(group.move(a, n, order, left=True))
        close(group, "move", moved, E @ A, what=f"move at order {order} from the left")
        for left, sign in ((False, 1), (False, -1), (True, 1), (True, -1)):
            wanted = group.move(a, tuple(sign * block for block in group.scale(eta)), order, left)
            actual = group.to_dense(group.retract(a, eta, order, left, sign))
            close(group, "retract", actual, group.to_dense(wanted), what=f"retract at order {order}")


def slope(error: Callable[[float], float], sizes: tuple[float, float] = (0.08, 0.02)) -> float:
    """Return the order of an error in the size of its argument; infinite where there is none to speak of."""
    large, small = (error(size) for size in sizes)
    if small <= 1e-13:
        return math.inf
    return math.log(large / small) / math.log(sizes[0] / sizes[1])


def check_truncation_order(group: Group, device: Device = "cpu") -> None:
    """Check that ``exp`` at order p has an error of order p + 1, and derivative N at 0."""
    n = group.scale(random_coordinates(group, device))
    N = dense_algebra(group, n)

    def error(size: float, order: int) -> float:
        scaled = tuple(size * block for block in n)
        return float((group.to_dense(group.exp(scaled, order)) - group.to_dense(group.exp(scaled))).norm())

    def distance_to_exponential(size: float) -> float:
        scaled = tuple(size * block for block in n)
        return float((group.to_dense(group.exp(scaled)) - torch.linalg.matrix_exp(size * N)).norm())

    for order in (1, 2):
        found = slope(lambda size, order=order: error(size, order))  # type: ignore[misc]
        complaint = f"exp at order {order} has an error of order {found:.2f}, not {order + 1}"
        require(group, "exp", found > order + 0.7, complaint)
    if not group.has_matrix_exp:
        found = slope(distance_to_exponential)
        require(group, "exp", found > 1.7, f"exp differs from the matrix exponential at order {found:.2f}, before 2")


# ---------------------------------------------------------------------- factors, transposes, congruences
def check_factor(group: Group, device: Device = "cpu") -> None:
    """Check that ``A A^T = tau`` on the submanifold, also in a batch, and that the factor is finite elsewhere."""
    dense, one = group.to_dense(near_identity(group, (), device)), eye(group, device)
    tau = dense @ dense.mT
    factor = group.to_dense(group.factor(tau))
    close(group, "factor", factor @ factor.mT, tau, what="factor(A A^T)")
    both = torch.stack([tau, one])
    factors = group.to_dense(group.factor(both))
    close(group, "factor", factors @ factors.mT, both, what="factor of a batch")
    half = torch.randn(group.k, group.k, dtype=torch.float64, device=device)
    elsewhere = group.to_dense(group.factor(half @ half.mT + one))
    require(group, "factor", bool(elsewhere.isfinite().all()), "factor off the submanifold is not finite")


def check_transposes(group: Group, device: Device = "cpu") -> None:
    """Check ``A^T`` as an element of ``transposed``, and that covectors and coordinates are transposed alike."""
    turned, a = group.transposed, near_identity(group, (), device)
    A = group.to_dense(a)
    held = turned.to_dense(turned.from_dense(A.mT))
    close(group, "transposed", held, A.mT, what="the projection of A^T onto the group `transposed`")
    close(group, "transpose", turned.to_dense(group.transpose(a)), A.mT)
    back = group.to_dense(turned.transpose(group.transpose(a)))
    close(group, "transpose", back, A, what="transpose of transpose")
    x, y = torch.randn(2, 3, group.k, dtype=torch.float64, device=device).unbind()
    wanted = turned.flatten(turned.restrict(y, x))  # <E^T, Y^T X> = <E, X^T Y>
    actual = turned.flatten(group.transpose(group.restrict(x, y)))
    close(group, "transpose", actual, wanted, what="transpose of a covector")
    eta = random_coordinates(group, device)
    wanted = turned.flatten(group.transpose(group.scale(eta)))
    actual = turned.flatten(turned.scale(group.transpose(eta)))
    close(group, "transpose", actual, wanted, what="transpose of coordinates")


def check_congruence(group: Group, device: Device = "cpu") -> None:
    """Check ``<E_j, A^T H A>`` from products with H against the dense one, and how many products that takes."""
    a = near_identity(group, (), device)
    half = torch.randn(group.k, group.k, dtype=torch.float64, device=device)
    h, taken = half + half.mT, 0

    def product(rows: Tensor) -> Tensor:
        nonlocal taken
        taken += rows.shape[:-1].numel()
        return rows @ h

    operator = SymmetricOperator(group.k, product, lambda part: h.diagonal()[part.where], shift=0.3)
    dense = group.to_dense(a)
    wanted = group.flatten(group.restrict(dense, h @ dense + 0.3 * dense))
    close(group, "congruence", group.flatten(group.congruence(a, operator)), wanted)
    complaint = f"products is {group.products}, but congruence takes {taken} products"
    require(group, "products", taken == group.products, complaint, "congruence")
