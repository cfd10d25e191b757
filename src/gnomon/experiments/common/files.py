"""Files that are written completely or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Give a stream whose content replaces ``path`` once all of it is on the disk. Until then the old file stays.

    The content is written to a file in the same folder, so that the last move stays within one file system.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".part")
    try:
        with temporary.open("wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)  # noqa: PTH105  # Path.replace says less clearly that it is atomic
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_atomically(path: Path, text: str) -> None:
    """Write the text completely, or leave the old file, whenever the process ends."""
    with atomic_file(path) as stream:
        stream.write(text.encode())
