"""The training tasks: they build, step and measure; data that is missing says where it is looked for."""

import pytest
import tasks
import torch

from gnomon.experiments.data import idx
from gnomon.optim import INGD


@pytest.mark.slow
@pytest.mark.parametrize("name", tasks.TASKS)
def test_a_few_steps_lower_the_loss(name):
    try:
        task = tasks.TASKS[name]()
    except tasks.DataMissingError as missing:
        pytest.skip(str(missing))
    if name == "cnn":
        task.batch_size, task.test_images, task.test_labels = 32, task.test_images[:200], task.test_labels[:200]
    history = tasks.train(task, lambda model: INGD(model), steps=16, every=8)
    assert list(history.measured) == [8, 16]
    assert sum(history.loss[-4:]) < sum(history.loss[:4])
    assert history.final == history.measured[16]
    assert history.seconds > 0


def test_runs_repeat():
    task = tasks.Autoencoder()
    runs = [tasks.train(task, lambda m: torch.optim.AdamW(m.parameters()), steps=3).loss for _ in range(2)]
    assert runs[0] == runs[1]


@pytest.mark.slow
def test_the_schedule():
    task = tasks.Text()
    assert task.rate(0, 400) == pytest.approx(1 / 20)
    assert task.rate(20, 400) == pytest.approx(1.0)
    assert task.rate(400, 400) == pytest.approx(0.0, abs=1e-12)
    assert sum(p.numel() for p in task.model().parameters()) == 470_784


def test_missing_data(tmp_path, monkeypatch):
    monkeypatch.setenv("GNOMON_DATA", str(tmp_path))
    monkeypatch.setattr(idx, "DEBIAN", tmp_path / "absent")
    with pytest.raises(tasks.DataMissingError, match="set GNOMON_DATA, or --data-dir, to the folder that holds it"):
        tasks.Cifar()
    assert tasks.Autoencoder().images.shape == (1797, 784)  # scikit-learn's digits
    with pytest.raises(tasks.DataMissingError, match="install Debian's dataset-fashion-mnist"):
        tasks.task_with_its_data("autoencoder")
