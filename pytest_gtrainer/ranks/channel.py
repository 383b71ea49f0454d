"""The channel between the parent and a rank: a pipe for each direction, and messages of any length.

A socket pair would do with half as many files. But whoever waits to read from a socket is woken, for nothing, each time
that the other side has read from it: every rank once more in every test, in the middle of another rank's. And a
``multiprocessing.connection.Connection`` reads the length of a message by itself, for the price of a second read.
"""

from __future__ import annotations

import os
import struct

_LENGTH = struct.Struct("=Q")
_AT_ONCE = 2**16


class Channel:
    """One end: messages in both directions, as bytes."""

    def __init__(self, incoming: int, outgoing: int) -> None:
        """Take over two file descriptors: to read from, and to write to."""
        self._incoming, self._outgoing = incoming, outgoing
        self._read = bytearray()

    def fileno(self) -> int:
        """The file that has something to read when a message has come, or the other end is closed."""
        return self._incoming

    def has_message(self) -> bool:
        """Whether a message has been read already, with the one before: the file says nothing of it any more."""
        return len(self._read) >= _LENGTH.size and len(self._read) >= self._end()

    def send(self, message: bytes) -> None:
        """Send a message; waits while the pipe is full.

        Raises:
            OSError: the other end is closed.
        """
        rest = memoryview(_LENGTH.pack(len(message)) + message)
        while rest:
            rest = rest[os.write(self._outgoing, rest) :]

    def receive(self) -> bytes:
        """The next message; waits for it.

        Raises:
            EOFError: the other end is closed, and there is no whole message any more.
        """
        while not self.has_message():
            self.read()
        end = self._end()
        message = bytes(memoryview(self._read)[_LENGTH.size : end])
        del self._read[:end]
        return message

    def read(self) -> None:
        """Read what there is, at the most as much as fits into a pipe; waits only if there is nothing.

        Raises:
            EOFError: the other end is closed.
        """
        some = os.read(self._incoming, _AT_ONCE)
        if not some:
            raise EOFError
        self._read += some

    def _end(self) -> int:
        """Where the message ends that ``_read`` begins with."""
        return _LENGTH.size + int(_LENGTH.unpack_from(self._read)[0])

    def close(self) -> None:
        """Close this end."""
        for fd in {self._incoming, self._outgoing} - {-1}:
            os.close(fd)
        self._incoming = self._outgoing = -1


def fd_pairs() -> tuple[tuple[int, int], tuple[int, int]]:
    """The file descriptors of both ends of a new channel."""
    one_in, other_out = os.pipe()
    other_in, one_out = os.pipe()
    return (one_in, one_out), (other_in, other_out)
