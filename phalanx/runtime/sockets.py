"""The sockets that gloo opened, so that an abort can shut them: nothing else makes a blocked gloo wait let go."""

from __future__ import annotations

import os
import socket
import stat
from contextlib import suppress

Sockets = dict[int, int]  # file descriptor → inode, which tells a descriptor from a later one of the same number


def open_sockets() -> Sockets:
    """Every socket this process has open."""
    found: Sockets = {}
    for name in os.listdir("/dev/fd"):
        with suppress(OSError):
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                found[int(name)] = status.st_ino
    return found


def opened_since(before: Sockets) -> Sockets:
    return {number: inode for number, inode in open_sockets().items() if before.get(number) != inode}


def shut(sockets: Sockets, *, spare_port: int) -> None:
    """End the connections of these sockets that still exist; whoever waits on either end gets an error.

    Connections from or to `spare_port` stay: the store's, which others may open on other threads at any time.
    """
    for number, inode in sockets.items():
        with suppress(OSError):
            if os.fstat(number).st_ino != inode:
                continue
            with socket.socket(fileno=os.dup(number)) as one:
                if one.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                peer = one.getpeername()  # raises for a listening socket, which must be left alone
                if spare_port not in (peer[1], one.getsockname()[1]):
                    one.shutdown(socket.SHUT_RDWR)
