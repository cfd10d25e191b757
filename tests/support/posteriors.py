"""What tests of posteriors share: independent twins of a log density, in numpy and SciPy."""

import numpy as np
import pytest
import torch
from torch import Tensor

from gnomon.problems.posteriors import is_available, load
from gnomon.problems.posteriors.store import folder, read

needs_posteriordb = pytest.mark.skipif(not is_available(), reason=f"posteriordb is not in {folder()}: set GNOMON_DATA")


def log_determinant(posterior, x):
    """The log-determinant of the map to the parameters, from its Jacobian; a simplex counts without its last entry."""

    def free_entries(row):
        values = posterior.to_constrained(row[None])
        return torch.cat([values[p.name].flatten()[: p.size] for p in posterior.parameters])

    return float(torch.linalg.slogdet(torch.autograd.functional.jacobian(free_entries, x)).logabsdet)


def assert_twin_agrees(name, twin, center=0.0, scale=0.5, tolerance=1e-9):
    """Compare differences of log densities between random points with those of a twin: constants drop out.

    The twin takes the data and the parameters of one draw, in numpy, and returns the log density on the model's scale.
    """
    posterior = load(name)
    data = {
        key: value.numpy() if isinstance(value, Tensor) else value for key, value in read(name.split("-")[0]).items()
    }
    x = center + scale * torch.randn(4, posterior.dim, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ours = posterior.log_density(x).numpy()
    values = posterior.to_constrained(x)
    theirs = [
        twin(data, {key: value[i].numpy() for key, value in values.items()}) + log_determinant(posterior, x[i])
        for i in range(len(x))
    ]
    np.testing.assert_allclose(np.diff(ours), np.diff(theirs), rtol=tolerance)
