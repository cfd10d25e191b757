"""The picture docs/results/vi.png: how many posteriors a method has reached, by what it has spent."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gnomon.experiments.common import palette
from gnomon.experiments.common.plots import save_png

PARTS = {"evaluations_to_target": "gradient evaluations", "seconds_to_target": "CPU seconds"}
Spent = dict[str, dict[str, list[float]]]
"""For each method, for each part of a record, what it took where the method reached the target."""


def draw(spent: Spent, posteriors: int, path: Path) -> None:
    """Draw a panel for gradient evaluations and one for time. The first method has the widest line."""
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    panels: list[Axes] = list(figure.subplots(1, 2, sharey=True))
    for panel, (part, label) in zip(panels, PARTS.items(), strict=True):
        _stairs(panel, {method: values[part] for method, values in spent.items()})
        panel.set(xscale="log", xlabel=label, ylim=(0, posteriors + 1))
        panel.axhline(posteriors, color=palette.SOFT.light, linewidth=0.8, linestyle=":")
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel(f"posteriors of {posteriors} within 0.2")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right center", frameon=False, fontsize=8)
    save_png(figure, path)


def _stairs(panel: Axes, spent: dict[str, list[float]]) -> None:
    """A line for each method that rises by one wherever it reaches a posterior, and goes on to the right end."""
    right = 1.5 * max(max(values, default=0.0) for values in spent.values())
    for place, (method, values) in enumerate(spent.items()):
        x = [*sorted(values), right]
        y = [*range(1, len(values) + 1), len(values)]
        color = palette.HUES[place % len(palette.HUES)].light
        panel.step(x, y, where="post", label=method, color=color, linewidth=2.6 if place == 0 else 1.5)
