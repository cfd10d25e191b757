"""Small training runs, the commands of them, and the folders that they leave."""

import signal

from typer.testing import CliRunner

from gnomon.cli import main
from gnomon.experiments.training.config import Config, completed
from gnomon.experiments.training.folder import RunFolder
from gnomon.experiments.training.report import Silent
from gnomon.experiments.training.trainer import Epoch

SMALL = {"train_limit": 320, "test_limit": 100, "batch_size": 32, "epochs": 2}


def small(**settings):
    return Config(**{**SMALL, **settings})


def command(*arguments, **environment):
    settings = {"COLUMNS": "200", "TERM": "dumb", **environment}
    return CliRunner().invoke(main, [str(argument) for argument in arguments], env=settings)


def options(**settings):
    return [part for name, value in settings.items() for part in (f"--{name.replace('_', '-')}", str(value))]


def assert_one_line(result, *words):
    assert result.exit_code not in (0, None)
    assert result.exception is None or isinstance(result.exception, SystemExit)
    lines = [line for line in result.output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("Error: ")]
    assert len(errors) == 1
    assert errors[0] == lines[-1]
    assert all(word in errors[0] for word in words), errors[0]


class StopAt(Silent):
    """Sends Ctrl-C to its own process after some steps or epochs."""

    def __init__(self, steps=None, epochs=None):
        self.steps, self.epochs = steps, epochs

    def step(self, trainer):
        if trainer.steps == self.steps:
            signal.raise_signal(signal.SIGINT)

    def epoch(self, epoch):
        if epoch.epoch == self.epochs:
            signal.raise_signal(signal.SIGINT)


def written(path, config, errors, seconds=2.0):
    run = RunFolder(path)
    config = completed(config)
    run.begin(config, "cpu")
    run.write_epochs(
        [Epoch(i + 1, i, 1.0, 50.0, 1.5, e, 0.1, seconds * (i + 1), seconds * (i + 1)) for i, e in enumerate(errors)]
    )
    return path
