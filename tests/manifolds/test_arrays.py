"""Arrays of any stride and type, and data frames, where a person would pass them."""

import numpy as np
import pytest
import torch

import gnomon
from gnomon import groups as g

ROWS = np.random.RandomState(0).standard_normal((5, 4))


class Frame:
    """What a data frame is for those who read it as an array."""

    def __init__(self, values):
        self.values, self.shape = values, values.shape

    def __array__(self, dtype=None, copy=None):
        return np.asarray(self.values, dtype)


def read_only(array):
    result = array.copy()
    result.flags.writeable = False
    return result


ARRAYS = {
    "rows": ROWS,
    "reversed columns": ROWS[:, ::-1],
    "reversed rows": ROWS[::-1],
    "every second row": ROWS[::2],
    "columns first": np.asfortranarray(ROWS),
    "other byte order": ROWS.astype(">f8"),
    "long double": ROWS.astype(np.longdouble),
    "objects": ROWS.astype(object),
    "integers": (10 * ROWS).astype(np.int32),
    "unsigned": np.abs(10 * ROWS).astype(np.uint16),
    "read-only": read_only(ROWS),
    "data frame": Frame(ROWS),
    "data frame of objects": Frame(ROWS.astype(object)),
    "lists": ROWS.tolist(),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ARRAYS)
@pytest.mark.filterwarnings("error")
def test_vectors(name, dtype):
    given = ARRAYS[name]
    plain = torch.from_numpy(np.array(given, dtype=np.float64, order="C")).to(dtype)
    S = gnomon.SPD(g.Arrow(4), init=2.0, dtype=dtype)
    for method in (S.inv_quad, S.quad, S.matvec, S.solve):
        torch.testing.assert_close(method(given), method(plain))
    q = gnomon.Gaussian(g.LowRank(4), dtype=dtype)
    torch.testing.assert_close(q.log_prob(given), q.log_prob(plain))


@pytest.mark.parametrize("change", [lambda a: a, lambda a: a[::-1, ::-1], Frame, lambda a: a.astype(">f4"), read_only])
def test_starts(change):
    covariance = np.cov(ROWS.T)
    given = change(covariance)
    S = gnomon.SPD(4, init=given)
    np.testing.assert_allclose(S.matrix().detach(), np.asarray(given), rtol=1e-6)
    np.testing.assert_allclose(
        gnomon.Gaussian(4, loc=change(covariance)[0] if change is not Frame else None, init=given)
        .covariance()
        .detach(),
        np.asarray(given),
        rtol=1e-6,
    )


def test_what_is_not_a_number_is_named():
    with pytest.raises(TypeError, match="x must be a number, or a tensor or an array of numbers, got a ndarray"):
        gnomon.SPD(2).inv_quad(np.array([["a", 1.0]], dtype=object))


def test_what_is_not_real_is_named():
    with pytest.raises(TypeError, match=r"x must be real, got torch\.complex128"):
        gnomon.SPD(4).inv_quad(ROWS + 1j)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_distances(dtype):
    covariance = np.cov(ROWS.T)
    S = gnomon.SPD(4, init=2.0, dtype=dtype)
    wanted = S.distance(torch.from_numpy(covariance))
    for given in (covariance, covariance[::-1, ::-1].T[::-1, ::-1], Frame(covariance), covariance.tolist()):
        torch.testing.assert_close(S.distance(given), wanted)


def test_numbers_of_python_keep_their_digits():
    S = gnomon.SPD(1, dtype=torch.float64)
    assert S.matvec([0.1]).item() == S.matvec((0.1,)).item() == 0.1
    q = gnomon.Gaussian(g.Arrow(2), init=torch.eye(2) + 0.5, project=True, dtype=torch.float64)
    found = q.conditional([0], [0.1]).mean
    assert torch.equal(found, q.conditional([0], torch.tensor([0.1], dtype=torch.float64)).mean)
    assert torch.equal(q.marginal([0]).log_prob([0.1]), q.marginal([0]).log_prob(np.array([0.1])))
