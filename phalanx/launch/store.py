"""The store of a job as its ranks use it: keys under a secret of the job's own, and every value signed with it.

torch's stores ask nobody who they are, and whoever reaches one can list and write its keys. A value that is read here
was written by somebody who knows the secret, under this key and in this job; all else is a `ForgedValue`. What torch's
own groups exchange (addresses, NCCL's ids) goes through `for_torch`: there only the names of keys depend on the secret.
How ranks that nobody of ours started get to know the secret is `share_secret`'s work.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import hmac
import os
import re
import secrets
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from phalanx.errors import ConfigError, LinkError, PhalanxError, RankError, StoreError
from phalanx.launch.abort import AbortEvent

SECRET_VARIABLE = "PHALANX_SECRET"
_SHORTEST = 16  # characters of a secret that a user sets
_MAC_BYTES = hashlib.sha256().digest_size
_SECRET_BYTES = 32
_SECRET_FILE = ".secret-{}"
_HELLO = "hello"
_CONNECT_SECONDS = 30.0  # to a store that is there
WAIT_SECONDS = 300.0  # for a key, as torch's stores wait where nothing is said
_SEE_SECONDS = 60.0  # until a file that rank 0 wrote is seen on another machine
_EXAMPLE = f"{SECRET_VARIABLE}=$(openssl rand -hex 32)"
# torch asks the name server what each address is called that it connects to, 127.0.0.1 too, to have names in its logs.
# An answer that is lost (servers drop questions of those that ask often) holds the connection up for 5 seconds.
_RESOLVER, _ASK_SOONER = "RES_OPTIONS", "timeout:1 attempts:5"
_WHO_WRITES = "something else writes to this job's store: see who can reach its port (docs/security.md)"


class ForgedValue(PhalanxError):
    """A value in the store that nobody of this job wrote."""


class JobStore:
    """`for_torch` is the store of torch that lies beneath, with this job's prefix. abort: once it is set, nobody is to
    wait for keys any more."""

    def __init__(self, store: Any, secret: bytes, name: str, abort: AbortEvent | None = None) -> None:
        import torch.distributed as dist

        self._store, self._secret, self._name, self._abort = store, secret, name, abort
        hidden = hmac.digest(secret, b"keys of " + name.encode(), "sha256").hex()[:32]
        self.for_torch: Any = dist.PrefixStore(f"{name}/{hidden}", store)

    def part(self, name: str, abort: AbortEvent | None = None) -> JobStore:
        """Keys of its own, for a part of the job."""
        return JobStore(self._store, self._secret, f"{self._name}/{name}", abort)

    @property
    def address(self) -> tuple[str, int] | None:
        """Of the process that hosts it, where it is reached over a network."""
        import torch.distributed as dist

        return (self._store.host, self._store.port) if isinstance(self._store, dist.TCPStore) else None

    @property
    def ticket(self) -> tuple[str, int, str]:
        """Where it is and the name of its keys, for who knows the secret."""
        host, port = self.address or ("127.0.0.1", 0)
        return host, port, self._name

    @property
    def secret(self) -> bytes:
        return self._secret

    def clone(self) -> JobStore:
        """The same keys over a connection of its own."""
        return self.reached_at(None)

    def reached_at(self, address: tuple[str, int] | None) -> JobStore:
        """The same, where the keys are now; None: where they were."""
        where = address or self.address
        return self.at(self._store.clone() if where is None else connect_store(*where))

    def at(self, store: Any) -> JobStore:
        """The same keys in another store of torch."""
        return JobStore(store, self._secret, self._name)

    @property
    def torch_store(self) -> Any:
        """Without this job's prefix."""
        return self._store

    @property
    def name(self) -> str:
        return self._name

    def set(self, key: str, text: str) -> None:
        with _answering():
            self.for_torch.set(key, self._signed(key, text))

    def get(self, key: str) -> str:
        """Waits for the key as torch's stores do."""
        with _answering():
            return self._opened(key, self.for_torch.get(key))

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all these keys are there. That a rank wrote them is known when they are read."""
        if self._abort is not None and self._abort.reason is not None:
            raise LinkError(f"stopped waiting for what other ranks say: {self._abort.reason}")
        with _answering():
            return self.for_torch.check(list(keys))

    def set_once(self, key: str, text: str) -> str:
        """What the key holds from now on: what a rank wrote before, else `text`."""
        signed = self._signed(key, text)
        try:
            with _answering():
                return self._opened(key, self.for_torch.compare_set(key, "", signed))
        except ForgedValue:
            self.for_torch.set(key, signed)
            return text

    def delete_key(self, key: str) -> None:
        with _answering():
            self.for_torch.delete_key(key)

    def _signed(self, key: str, text: str) -> str:
        # Text throughout: not all of the store's calls take bytes.
        return self._mac(key, text.encode()) + text

    def _opened(self, key: str, value: bytes) -> str:
        mac, body = value[: 2 * _MAC_BYTES], value[2 * _MAC_BYTES :]
        if not hmac.compare_digest(mac, self._mac(key, body).encode()):
            raise ForgedValue(
                f"the store's key {key!r} holds a value that no rank of this job wrote",
                _WHO_WRITES,
            )
        return body.decode()

    def _mac(self, key: str, body: bytes) -> str:
        place = f"{self._name}/{key}".encode()
        return hmac.digest(self._secret, len(place).to_bytes(8, "big") + place + body, "sha256").hex()


@contextlib.contextmanager
def _answering() -> Iterator[None]:
    import torch.distributed as dist

    try:
        yield
    except dist.DistNetworkError as error:
        first = str(error).splitlines()[0]
        raise StoreError(
            f"the store of the job does not answer: {first}", "see what became of the process that has it"
        ) from error


def host_store(host: str, port: int, timeout: timedelta) -> Any:
    """A store of torch that is reached at this host's address and no other; port 0 lets the system choose."""
    import torch.distributed as dist

    ask_names_sooner()
    listener = socket.create_server((listening_address(host), port), backlog=1024)
    port = listener.getsockname()[1]
    return dist.TCPStore(
        host, port, is_master=True, timeout=timeout, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def connect_store(host: str, port: int) -> Any:
    """A client of a store of torch that is there. (torch would look for half a minute for one that is gone.)"""
    import torch.distributed as dist

    ask_names_sooner()
    try:
        socket.create_connection((host, port), _CONNECT_SECONDS).close()
    except ConnectionRefusedError:
        raise StoreError(f"there is no store of the job at {host}:{port} any more") from None
    except OSError:
        pass  # torch says what is wrong
    with _answering():
        found = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=_CONNECT_SECONDS))
    found.set_timeout(timedelta(seconds=WAIT_SECONDS))
    return found


def ask_names_sooner() -> None:
    """Before a store of torch is made in this process: a lost answer of the name server costs one second then."""
    os.environ.setdefault(_RESOLVER, _ASK_SOONER)


def listening_address(host: str) -> str:
    """The address of this machine that `host` stands for; all of them where that cannot be told.

    Many machines know their own name as a loopback address, and some are reached by an address that is not theirs.
    """
    if host == "localhost" or host.startswith("127."):
        return "127.0.0.1"
    with contextlib.suppress(OSError):
        address = socket.getaddrinfo(host, None, socket.AF_INET)[0][4][0]
        if isinstance(address, str) and not address.startswith("127."):
            with socket.create_server((address, 0)):
                return address
    return ""


def new_secret() -> bytes:
    return secrets.token_bytes(_SECRET_BYTES)


def share_secret(store: Any, rank: int, folder: Path | None, variables: Mapping[str, str]) -> bytes:
    """The secret of a job whose ranks a launcher started: from the environment, else from a file that rank 0 writes.

    store: of torch, with keys that are this job's alone. folder: one that all ranks see and strangers cannot read, if
    there is any.
    """
    if given := variables.get(SECRET_VARIABLE):
        if len(given) < _SHORTEST:
            raise ConfigError(
                f"environment variable {SECRET_VARIABLE} has {len(given)} characters, at least {_SHORTEST} are needed",
                f"export {_EXAMPLE}, the same for all ranks",
            )
        return hashlib.sha256(given.encode()).digest()
    if folder is None:
        raise ConfigError(
            "ranks on several machines have no folder in which to share a secret",
            f"export {_EXAMPLE} before the launcher, the same for all ranks",
        )
    return _publish(store, folder) if rank == 0 else _learn(store, folder, rank)


def forget_secrets(folder: Path) -> None:
    """Takes the files away that this job and killed ones left, when no rank can be looking for them any more."""
    for file in folder.glob(_SECRET_FILE.format("*")):
        with contextlib.suppress(OSError):
            file.unlink()


def _publish(store: Any, folder: Path) -> bytes:
    """Rank 0's part: the secret in a file that only this user can read, and the file's number in the store."""
    number, secret = secrets.token_hex(8), new_secret()
    file = folder / _SECRET_FILE.format(number)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as target:
            target.write(secret)
            target.flush()
            os.fsync(descriptor)
    except OSError as error:
        raise ConfigError(
            f"rank 0 cannot share a secret with the others in {folder}: {error.strerror}",
            f"choose another folder (--out), or export {_EXAMPLE} before the launcher",
        ) from None
    atexit.register(file.unlink, missing_ok=True)
    store.set(_HELLO, number)
    return secret


def _learn(store: Any, folder: Path, rank: int) -> bytes:
    """The others' part. What the store says is trusted for nothing but finding the file."""
    try:
        number = store.get(_HELLO)
    except RuntimeError:
        raise RankError(f"rank {rank} heard nothing from rank 0", "see what rank 0 wrote before it ended") from None
    if not re.fullmatch(rb"[0-9a-f]{16}", number):
        raise ForgedValue(f"the store's key {_HELLO!r} holds a value that rank 0 did not write", _WHO_WRITES)
    file, deadline = folder / _SECRET_FILE.format(number.decode()), time.monotonic() + _SEE_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), file.open("rb") as source:
            if os.fstat(source.fileno()).st_uid == os.geteuid() and len(secret := source.read(64)) == _SECRET_BYTES:
                return secret
        time.sleep(0.05)
    raise RankError(
        f"rank {rank} does not see the secret that rank 0 put into {folder}",
        f"all ranks must share that folder and run as the same user; or export {_EXAMPLE} before the launcher",
    )
