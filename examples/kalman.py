"""A Kalman filter whose noise covariances are learned as SPD points, by the likelihood of what it observes.

python examples/kalman.py
"""

import matplotlib.pyplot as plt
import torch
from pictures import COLORS, ellipse, options, save
from torch import Tensor, nn

import gnomon

STEP = torch.tensor([[1.0, 0.0, 1.0, 0.0], [0.0, 1.0, 0.0, 1.0], [0.0, 0.0, 1.0, 0.0], [0.0, 0.0, 0.0, 1.0]])
"""Positions (x, y) move by the velocities, which change by the noise alone."""
LOOK = torch.eye(4)[:2]
"""Positions are observed."""
TRUE_PROCESS = torch.block_diag(0.02 * torch.eye(2), torch.tensor([[0.3, -0.2], [-0.2, 0.2]]))
TRUE_SENSOR = torch.tensor([[1.0, 0.7], [0.7, 0.8]])


class Tracker(nn.Module):
    """The two covariances that a filter needs: of the process, and of the sensor."""

    def __init__(self) -> None:
        super().__init__()
        self.process = gnomon.SPD(4, init=0.1)
        self.sensor = gnomon.SPD(2, init=3.0)


def simulate(process: Tensor, sensor: Tensor, tracks: int, length: int) -> Tensor:
    """Observations of ``tracks`` targets, (length, tracks, 2)."""
    A, B = torch.linalg.cholesky(process), torch.linalg.cholesky(sensor)
    state, seen = torch.zeros(tracks, 4), []
    for _ in range(length):
        state = state @ STEP.T + torch.randn(tracks, 4) @ A.T
        seen.append(state @ LOOK.T + torch.randn(tracks, 2) @ B.T)
    return torch.stack(seen)


def surprise(process: Tensor, sensor: Tensor, observations: Tensor) -> Tensor:
    """Minus the mean log-likelihood of an observation, up to a constant."""
    mean, cov = torch.zeros(observations.shape[1], 4), torch.eye(4)
    total = torch.zeros(())
    for seen in observations:
        mean, cov = mean @ STEP.T, STEP @ cov @ STEP.T + process
        innovation, spread = seen - mean @ LOOK.T, LOOK @ cov @ LOOK.T + sensor
        total = total + 0.5 * (spread.logdet() + (innovation @ spread.inverse() * innovation).sum(-1).mean())
        gain = cov @ LOOK.T @ spread.inverse()
        mean, cov = mean + innovation @ gain.T, cov - gain @ spread @ gain.T
    return total / len(observations)


def main() -> None:
    arguments = options(__doc__, "kalman")
    torch.manual_seed(0)
    observations = simulate(TRUE_PROCESS, TRUE_SENSOR, tracks=20 if arguments.quick else 100, length=30)
    tracker, losses = Tracker(), []
    solution = gnomon.problems.solve(
        lambda t: surprise(t.process.matrix(), t.sensor.matrix(), observations),
        tracker,
        tolerance=1e-3,
        max_iterations=10 if arguments.quick else 60,
        callback=lambda _, loss: losses.append(loss),
    )
    process, sensor = tracker.process.matrix().detach(), tracker.sensor.matrix().detach()
    truth = surprise(TRUE_PROCESS, TRUE_SENSOR, observations).item()
    print(f"loss {solution.loss:.4f} after {solution.iterations} iterations, {truth:.4f} with the true covariances")

    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.4), constrained_layout=True)
    left.plot(losses, label="learned covariances")
    left.axhline(truth, color=COLORS[4], linestyle="--", label="true covariances")
    left.set(xlabel="iteration", ylabel="- log-likelihood of an observation")
    left.legend(frameon=False)
    for found, true, color, label in (
        (sensor, TRUE_SENSOR, COLORS[0], "sensor"),
        (process[2:, 2:], TRUE_PROCESS[2:, 2:], COLORS[1], "velocity"),
    ):
        ellipse(right, true, color=color, linestyle="--", label=f"{label}, true")
        ellipse(right, found, color=color, label=f"{label}, learned")
    right.set(title="two standard deviations", aspect="equal", ylim=(-2.2, 3.4))
    right.legend(frameon=False, fontsize=8, loc="upper left")
    save(figure, arguments.picture)


if __name__ == "__main__":
    main()
