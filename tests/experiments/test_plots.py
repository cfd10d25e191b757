"""What plots of matplotlib share."""

import pytest

pytest.importorskip("matplotlib")

from matplotlib.figure import Figure

from gnomon.experiments.common.plots import style_panel


@pytest.mark.parametrize("epochs", [1, 2, 3, 12, 120])
def test_an_axis_of_epochs_has_whole_ticks(epochs):
    panel = Figure().subplots()
    panel.plot(range(1, epochs + 1), range(epochs), label="a run")
    style_panel(panel, "epoch", "loss", whole=True)
    ticks = [tick for tick in panel.get_xticks() if panel.get_xlim()[0] <= tick <= panel.get_xlim()[1]]
    assert len(ticks) >= 2
    assert all(tick == round(tick) for tick in ticks)
