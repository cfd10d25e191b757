"""A lock on a folder, so that two processes do not write the same run."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

try:
    import fcntl
except ImportError:  # Windows has no such locks
    fcntl = None  # type: ignore[assignment]

NAME = "lock"


class LockedError(Exception):
    """Another process has the lock. The message says which one."""


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder. The folder is made, and removed again where it stays empty.

    The lock is the operating system's: it ends with its process, however that ends, so that a file that is left behind
    does not block. The file holds the process for the message of others.
    """
    made = _make(folder)
    try:
        stream = _acquired(folder / NAME)
        try:
            yield
        finally:
            (folder / NAME).unlink(missing_ok=True)  # before it is released: who waits looks for another file
            stream.close()
    finally:
        for path in made:
            if not any(path.iterdir()):
                path.rmdir()


def _make(folder: Path) -> list[Path]:
    """Make a folder and its parents. Return those that were missing, the innermost first."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    return missing


def _acquired(path: Path) -> IO[str]:
    """Open the file with the lock on it."""
    while True:
        stream = path.open("a+")
        try:
            if fcntl is not None:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            stream.seek(0)
            owner = stream.read().strip() or "its number is not known"
            stream.close()
            if isinstance(error, BlockingIOError):
                raise LockedError(owner) from None
            raise
        if _is_there(stream, path):
            stream.truncate(0)
            stream.write(f"pid {os.getpid()} on {socket.gethostname()}")
            stream.flush()
            return stream
        stream.close()  # the process that had the lock has removed the file in between


def _is_there(stream: IO[str], path: Path) -> bool:
    """Return whether an open file is still the one of this path."""
    try:
        return os.path.samestat(os.fstat(stream.fileno()), path.stat())
    except FileNotFoundError:
        return False
