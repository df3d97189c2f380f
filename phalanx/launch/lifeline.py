"""Connections between the supervisors of a run that say nothing: one that closes tells of a supervisor that ended.

The system closes the connections of a process that dies, however it does, so its death is seen at once; that nothing is
heard from a machine says so only after a while. A cut link closes nothing. Who connects proves that it knows the
secret of the run.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import socket

from phalanx.launch.store import JobStore, listening_address

_KEY = "lifeline"  # in the store of the supervisors: host, port
_CONNECT_SECONDS = 1.0
_LONGEST = 1000  # bytes of an answer


def _proof(secret: bytes, nonce: str, name: str) -> str:
    return hmac.digest(secret, f"lifeline {nonce} {name}".encode(), "sha256").hex()


class Lifelines:
    """Of the supervisor that leads. A name is that of one start of another supervisor."""

    def __init__(self, store: JobStore) -> None:
        assert store.address is not None
        host = store.address[0]
        self._secret, self._open, self._strangers = store.secret, dict[str, socket.socket](), dict[socket.socket, str]()
        self._listener = socket.create_server((listening_address(host), 0), backlog=1024)
        self._listener.setblocking(False)
        store.set(_KEY, json.dumps([host, self._listener.getsockname()[1]]))

    def closed(self, name: str) -> bool:
        """Whether there was a connection of this name when it was last looked, and it is closed."""
        line = self._open.get(name)
        return line is not None and line.fileno() < 0

    def look(self) -> None:
        """Takes connections, and finds those that were closed; often, for who connects waits for it."""
        self._take()
        for line in self._open.values():
            if line.fileno() >= 0 and _received(line) == b"":
                line.close()

    def close(self) -> None:
        for line in (self._listener, *self._open.values(), *self._strangers):
            line.close()

    def _take(self) -> None:
        while (line := self._accepted()) is not None:
            nonce = self._strangers[line] = secrets.token_hex(16)
            with contextlib.suppress(OSError):  # who is gone again is found below
                line.send(f"{nonce}\n".encode())
        for line, nonce in tuple(self._strangers.items()):
            if (said := _received(line)) is not None:
                del self._strangers[line]
                proof, _, name = said.decode(errors="replace").strip().partition(" ")
                if hmac.compare_digest(proof.encode(), _proof(self._secret, nonce, name).encode()):
                    self._open[name] = line
                else:
                    line.close()

    def _accepted(self) -> socket.socket | None:
        """The next connection; one that broke before it was taken comes no more."""
        while True:
            try:
                line, _ = self._listener.accept()
            except BlockingIOError:
                return None
            except ConnectionError:
                continue
            line.setblocking(False)
            return line


def _received(line: socket.socket) -> bytes | None:
    """None where nothing has come; b"" from one that is closed."""
    try:
        return line.recv(_LONGEST)
    except BlockingIOError:
        return None
    except OSError:
        return b""


class Lifeline:
    """Of another supervisor, to the one that leads; opened anew where it broke."""

    def __init__(self, store: JobStore, name: str) -> None:
        self._store, self._name = store, name
        self._line: socket.socket | None = None

    def hold(self) -> None:
        """Sees to it that it is open; answers when it is asked for the proof."""
        if self._line is None and self._store.check([_KEY]):
            with contextlib.suppress(OSError):
                self._line = socket.create_connection(json.loads(self._store.get(_KEY)), timeout=_CONNECT_SECONDS)
                self._line.setblocking(False)
        said = _received(self._line) if self._line is not None else None
        if self._line is not None and said:
            proof = _proof(self._store.secret, said.decode(errors="replace").strip(), self._name)
            with contextlib.suppress(OSError):  # where it broke, nothing more is received
                self._line.send(f"{proof} {self._name}\n".encode())
        elif said == b"":
            self.close()

    def close(self) -> None:
        if self._line is not None:
            self._line.close()
        self._line = None
