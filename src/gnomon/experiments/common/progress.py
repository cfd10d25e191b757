"""Progress on a terminal and on pages."""

from __future__ import annotations

import math
import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


def counting_progress(console: Console) -> Progress:
    """Return a display that counts finished pieces of work. It disappears when it ends."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True)


class Pace:
    """Allows something now and then: at first, and again when some seconds have passed since it was last allowed."""

    def __init__(self, seconds: float = 15.0) -> None:
        self._seconds, self._last = seconds, -math.inf

    def allows(self) -> bool:
        """Return whether it is time. If so, the seconds count from now on."""
        now = time.monotonic()
        if now - self._last < self._seconds:
            return False
        self._last = now
        return True
