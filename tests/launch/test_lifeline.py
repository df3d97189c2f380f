"""Connections that tell of a supervisor that ended, here between two sides in one process."""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest

from phalanx.launch.lifeline import Lifeline, Lifelines, _received
from phalanx.launch.store import JobStore, host_store


@pytest.fixture
def store() -> JobStore:
    return JobStore(host_store("127.0.0.1", 0, timedelta(seconds=30)), b"secret" * 4, "lifelines")


@pytest.fixture
def lines(store: JobStore) -> Iterator[Lifelines]:
    opened = Lifelines(store)
    yield opened
    opened.close()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30.0
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def known(lines: Lifelines, name: str) -> bool:
    lines.look()
    return name in lines._open


def closed(lines: Lifelines, name: str) -> bool:
    lines.look()
    return lines.closed(name)


def test_one_that_closes_is_seen_and_one_that_was_never_opened_is_not(store: JobStore, lines: Lifelines) -> None:
    line = Lifeline(store, "one")
    until(lambda: line.hold() is None and known(lines, "one"))
    assert not lines.closed("one") and not lines.closed("other")
    line.close()
    until(lambda: closed(lines, "one"))
    assert not lines.closed("other")


def test_one_that_broke_is_opened_anew(store: JobStore, lines: Lifelines) -> None:
    line = Lifeline(store, "one")
    until(lambda: line.hold() is None and known(lines, "one"))
    lines._open["one"].close()
    until(lambda: line.hold() is None and not closed(lines, "one"))


def test_who_does_not_know_the_secret_has_no_line(store: JobStore, lines: Lifelines) -> None:
    with socket.create_connection(json.loads(store.get("lifeline"))) as stranger:
        stranger.sendall(b"0123456789abcdef one\n")
        stranger.setblocking(False)
        until(lambda: known(lines, "one") or _received(stranger) == b"")  # what is asked for first comes before that
        assert not known(lines, "one")


def test_who_connects_and_is_gone_at_once_does_no_harm(store: JobStore, lines: Lifelines) -> None:
    """A scan of ports, or a check of health that resets the connection."""
    host, port = json.loads(store.get("lifeline"))
    for _ in range(3):
        stranger = socket.create_connection((host, port))
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        stranger.close()
    time.sleep(0.05)
    lines.look()
    line = Lifeline(store, "one")
    for _ in range(3):
        line.hold()
        lines.look()
    assert not lines.closed("one")
    line.close()
    lines.look()
    assert lines.closed("one")
