"""The quality of optimizers on unlike training tasks: ``gnomon bench quality``."""

from .suite import DEVELOPMENT, JUDGEMENT, TASKS
from .task import History, Task, train

__all__ = ["DEVELOPMENT", "JUDGEMENT", "TASKS", "History", "Task", "train"]
