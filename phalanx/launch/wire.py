"""A wire: Python objects over a pair of connected sockets that two of our own processes inherited, each object with its
length in front. Nobody else can write there, so objects are pickled.

The ranks' end blocks; the supervisor's end never does, because the other side may stop in the middle of a message.
"""

from __future__ import annotations

import pickle
import socket
import struct
import threading
from typing import Any

_LENGTH = struct.Struct("<Q")


class Wire:
    """One end. `closed` says that the other end is gone and everything it said has been taken."""

    def __init__(self, end: socket.socket) -> None:
        self._socket, self._received, self.closed = end, bytearray(), False
        self._sending = threading.Lock()

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Any, descriptors: tuple[int, ...] = ()) -> None:
        """Say it. The message may carry open files along."""
        body = pickle.dumps(message)
        with self._sending:
            if descriptors:
                socket.send_fds(self._socket, [_LENGTH.pack(len(body))], list(descriptors))
                self._socket.sendall(body)
            else:
                self._socket.sendall(_LENGTH.pack(len(body)) + body)

    def receive_with_descriptors(self, most: int) -> tuple[Any, list[int]]:
        """Wait for the next message and the open files that came with it; EOFError when the other end is gone."""
        head, descriptors, _, _ = socket.recv_fds(self._socket, _LENGTH.size, most)
        if not head:
            raise EOFError
        (size,) = _LENGTH.unpack(head + self._exactly(_LENGTH.size - len(head)))
        return pickle.loads(self._exactly(size)), descriptors

    def take(self) -> list[Any]:
        """The complete messages that are here already."""
        while not self.closed:
            try:
                part = self._socket.recv(1 << 20, socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            except ConnectionError:
                part = b""
            self.closed = not part
            self._received += part
        return self._complete()

    def close(self) -> None:
        self._socket.close()

    def _complete(self) -> list[Any]:
        messages = []
        while len(self._received) >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._received)
            end = _LENGTH.size + size
            if len(self._received) < end:
                break
            messages.append(pickle.loads(bytes(self._received[_LENGTH.size : end])))
            del self._received[:end]
        return messages

    def _exactly(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            part = self._socket.recv(min(size - len(data), 1 << 20))
            if not part:
                raise EOFError
            data += part
        return bytes(data)
