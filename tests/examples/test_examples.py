"""The examples run as they stand, each in a process of its own with few steps, and need no network."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch
from torch import nn

from gnomon.optim import INGD
from support.repository import ROOT

EXAMPLES = ROOT / "examples"
TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]


def needs(*packages):
    missing = [package for package in packages if find_spec(package) is None]
    return pytest.mark.skipif(
        bool(missing), reason=f"{', '.join(missing)} not installed: pip install 'gnomon[examples]'"
    )


def shown(name, *arguments, launcher=()):
    """The numbers in the last line that begins with a word of ours."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [sys.executable, *launcher, EXAMPLES / name, *map(str, arguments)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr
    lines = [line for line in ended.stdout.splitlines() if line.startswith(("loss ", "test error ", "weights "))]
    return [[float(number) for number in re.findall(r"\d+\.?\d*(?:e-\d+)?", line)] for line in lines]


@pytest.mark.spawns
@needs("lightning", "sklearn")
def test_lightning():
    ((error, steps),) = shown("lightning_digits.py", "--steps", 40, "--precision", "bf16-mixed")
    assert error < 10
    assert steps == 40


@pytest.mark.spawns
@needs("transformers", "accelerate")
def test_trainer():
    ((first, last, steps),) = shown("trainer_tiny_gpt.py", "--steps", 15, "--bf16")
    assert last < first - 1
    assert steps == 15


@pytest.mark.spawns
@needs("accelerate")
def test_accelerate():
    (first, last, steps), (processes, apart) = shown("accelerate_loop.py", "--steps", 30, launcher=TORCHRUN)
    assert last < first
    assert (steps, processes, apart) == (30, 2, 0)


@pytest.mark.slow
@needs("lightning")
def test_lightning_takes_the_steps_of_a_plain_loop():
    """It clears gradients between the forward and the backward pass, and steps with a closure."""
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.network = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 2))

        def training_step(self, batch, index):
            return self.network(batch).square().mean()

        def configure_optimizers(self):
            return INGD(self, update_every=2)

    batches = list(torch.randn(8, 16, 6, generator=torch.Generator().manual_seed(1)))
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = lightning.Trainer(accelerator="cpu", devices=1, max_epochs=1, **quiet)
    by_trainer, alone = Module(), Module()
    trainer.fit(by_trainer, torch.utils.data.DataLoader(batches, batch_size=None))
    optimizer = INGD(alone, update_every=2)
    for batch in batches:
        optimizer.zero_grad()
        alone.training_step(batch, 0).backward()
        optimizer.step()
    for one, other in zip(by_trainer.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(one, other)
