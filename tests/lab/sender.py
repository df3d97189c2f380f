"""Run by two ranks in a lab: rank 1 sends to rank 0 over plain TCP, which writes the rate in bits per second.

Arguments: the file to write to, megabytes to send.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from pathlib import Path

PORT = 4000
CHUNK = 1 << 16


def receive(result: Path, num_bytes: int) -> None:
    with socket.create_server((os.environ["MASTER_ADDR"], PORT)) as server:
        connection, _ = server.accept()
    with connection:
        connection.settimeout(3)
        # What was under way before the first measured byte does not count.
        left, began = num_bytes - len(connection.recv(CHUNK)), time.perf_counter()
        total = left
        while left > 0:
            left -= len(connection.recv(CHUNK))
        seconds = time.perf_counter() - began
    result.write_text(str(total * 8 / seconds))


def send(num_bytes: int) -> None:
    while True:
        try:
            connection = socket.create_connection((os.environ["MASTER_ADDR"], PORT), timeout=60)
            break
        except ConnectionRefusedError:
            time.sleep(0.05)
    with connection:
        connection.sendall(bytes(num_bytes))


if __name__ == "__main__":
    size = int(sys.argv[2]) * 10**6
    receive(Path(sys.argv[1]), size) if os.environ["RANK"] == "0" else send(size)
