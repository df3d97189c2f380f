"""Who leads a run on several machines once the supervisor that did is gone: whoever claims the next term first.

A term is claimed by a file in the run's folder, which all machines share: making it either succeeds or finds another's,
so that two halves of a run that cannot hear each other never both go on. A supervisor that goes on without a machine of
which it only hears nothing claims a term for itself; one that has lost the first supervisor claims it with a store of
its own. The file says where the store of the run is from then on: to the other supervisors, to guards that only wait,
and to a machine that comes back.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from phalanx.errors import LinkError, StoreError
from phalanx.launch.store import WAIT_SECONDS, JobStore, connect_store, host_store
from phalanx.records import Malformed, read_record

_FILE = ".leader-{}"
_LOOK_SECONDS = 2.0  # for a store that a file names to take a connection
_IS_HERE = "leads/{}"  # a key of the store that a claim names


@dataclass(frozen=True)
class Claim:
    """without: the node that it was claimed to go on without. name: of the run's keys in that store. token: tells that
    store from another that came to be there."""

    term: int
    node: int
    without: int
    host: str
    port: int
    name: str
    token: str


def newest_claim(folder: Path) -> Claim | None:
    found = list[Claim]()
    for path in _claimed_terms(folder):
        with contextlib.suppress(OSError, Malformed):
            found.append(read_record(Claim, path.read_bytes()))
    return max(found, key=lambda claim: claim.term, default=None)


def _claimed_terms(folder: Path) -> list[Path]:
    """Not what somebody is about to claim, who may not be the first."""
    return [path for path in folder.glob(_FILE.format("*")) if path.name.rpartition("-")[2].isdecimal()]


def live_claim(folder: Path) -> Claim | None:
    """Of a run that goes on in the folder, and has another leader than the launcher says."""
    claim = newest_claim(folder)
    return claim if claim is not None and reach(claim) is not None else None


def is_gone(claim: Claim) -> bool:
    """Whether nobody is at the port of its store any more, which was there before the claim."""
    try:
        socket.create_connection((claim.host, claim.port), timeout=_LOOK_SECONDS).close()
    except OSError as error:
        return isinstance(error, ConnectionRefusedError)
    return False


def reach(claim: Claim) -> Any:
    """The store of torch that a claim names; None where there is none any more."""
    try:
        socket.create_connection((claim.host, claim.port), timeout=_LOOK_SECONDS).close()
        store = connect_store(claim.host, claim.port)
        return store if store.check([_IS_HERE.format(claim.token)]) else None
    except (OSError, RuntimeError):
        return None


def forget_claims(folder: Path, node: int | None = None) -> None:
    """Those of earlier runs in the folder; or of a run that is over, by the node that led it."""
    newest = newest_claim(folder)
    if node is not None and newest is not None and newest.node != node:
        return  # another node leads it
    for path in folder.glob(_FILE.format("*")):
        path.unlink(missing_ok=True)


@dataclass(frozen=True)
class Succession:
    """node: this one. known: keys that the store of the run has from its beginning."""

    folder: Path
    node: int
    known: Mapping[str, str]

    def affirm(self, root: JobStore, term: int, without: int) -> bool:
        """Claims a term for who leads already; False when another did."""
        assert root.address is not None
        return self._claim(root, term, without, *root.address)

    def succeed(self, root: JobStore, term: int, without: int) -> JobStore | None:
        """The run's store, which is with this supervisor from now on; None when another has claimed that. root: where
        it was, with the node that is lost."""
        assert root.address is not None
        address = own_address(*root.address)
        hosted = root.at(host_store(address, 0, timedelta(seconds=WAIT_SECONDS)))
        for key, text in self.known.items():
            hosted.set(key, text)
        assert hosted.address is not None
        return hosted if self._claim(hosted, term, without, *hosted.address) else None

    def claimed(self, term: int) -> Claim | None:
        """By whom this term was, or a later one."""
        claim = newest_claim(self.folder)
        return claim if claim is not None and claim.term >= term else None

    def successor(self, root: JobStore, term: int) -> JobStore | None:
        """The run's store after a term was claimed by another."""
        claim = self.claimed(term)
        store = None if claim is None else reach(claim)
        return None if store is None else root.at(store)

    def _claim(self, root: JobStore, term: int, without: int, host: str, port: int) -> bool:
        claim = Claim(term, self.node, without, host, port, root.name, secrets.token_hex(8))
        root.torch_store.set(_IS_HERE.format(claim.token), "yes")
        written = self.folder / f"{_FILE.format(term)}.{claim.token}"
        try:
            # Linked and not written in place: whoever sees the file sees all of it.
            written.write_text(json.dumps(dataclasses.asdict(claim)))
            os.link(written, self.folder / _FILE.format(term))
        except FileExistsError:
            return False
        except OSError as error:
            raise LinkError(
                f"a node was lost, and node {self.node} cannot say in {self.folder} that it leads: {error.strerror}",
                "the folder must be one that all machines can write to; go on with --resume auto",
            ) from error
        finally:
            written.unlink(missing_ok=True)
        return True


def own_address(host: str, port: int) -> str:
    """By which this machine is seen from the one that has this address."""
    try:
        with socket.socket(socket.getaddrinfo(host, port)[0][0], socket.SOCK_DGRAM) as asked:
            asked.connect((host, port))
            return asked.getsockname()[0]
    except OSError as error:
        raise StoreError(f"this machine has no way to {host}, where the job's store was: {error.strerror}") from None
