"""A checksum at the end of a file that torch saves, because torch does not notice all damage.

torch reads a checkpoint without looking at the checksums of its archive, and a changed bit in a header of the archive
may even make it read another part of the file. What comes after an archive is no part of it, so that ``torch.load``
reads a sealed file as any other.
"""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path
from typing import BinaryIO

MARK = b"\ngnomon-sha256:"
LENGTH = len(MARK) + 64
"""The bytes of a seal: the mark, and the checksum in hexadecimal digits."""
CHUNK = 2**20


class SealedStream:
    """Writes to a stream, and a checksum of all that was written at the end."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream, self._sum = stream, hashlib.sha256()

    def write(self, content: bytes) -> int:
        self._sum.update(content)
        return self._stream.write(content)

    def flush(self) -> None:
        self._stream.flush()

    def seal(self) -> None:
        """Write the checksum."""
        self._stream.write(MARK + self._sum.hexdigest().encode())


def check_whole(path: Path) -> None:
    """Raise an error if a file is not as it was saved. One without a seal is checked by what its archive has."""
    with path.open("rb") as stream:
        size = stream.seek(0, 2)
        stream.seek(max(size - LENGTH, 0))
        seal = stream.read()
        if not seal.startswith(MARK):
            _check_archive(path)
        elif seal[len(MARK) :] != _checksum(stream, size - LENGTH):
            raise ValueError("its checksum is another")


def _checksum(stream: BinaryIO, size: int) -> bytes:
    """Return the checksum of the first bytes of a file."""
    found = hashlib.sha256()
    stream.seek(0)
    while size:
        content = stream.read(min(CHUNK, size))
        found.update(content)
        size -= len(content)
    return found.hexdigest().encode()


def _check_archive(path: Path) -> None:
    """Check a file of an earlier version, which had no seals."""
    with zipfile.ZipFile(path) as archive:
        if (name := archive.testzip()) is not None:
            raise ValueError(f"the checksum of {name} in it is another")
