"""The network of a lab: every node a network namespace, joined by rate-limited cables through a switch in another one.

The host's own network is neither used nor changed. A cable is a pair of virtual interfaces, with a token bucket at each
end, so that a node sends and receives at the given rate; there is no delay beyond the machine's own.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from phalanx.errors import ConfigError, PhalanxError
from phalanx.lab.owned import PREFIX, is_abandoned

INTERFACE = "eth0"
_NAMESPACES = Path("/run/netns")
_BURST_SECONDS = 0.004  # what may pass at once: too little to be felt; a quarter of it costs four times the processor
_QUEUE_SECONDS = 0.05
# Bytes. Two packets; and what a slow link needs so that TCP both ways loses nothing (128 kB cost a fifth of 8 Mbit/s).
_SMALLEST_BURST, _SMALLEST_QUEUE = 4_000, 1_000_000


class NoNetworkError(PhalanxError):
    """Namespaces or their links cannot be made or changed here, and why in one line."""


class Loopback:
    """All nodes on this machine's loopback, unthrottled: one node, or the fallback where namespaces cannot be made."""

    interface = "lo"

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def address(self, node: int) -> str:
        return "127.0.0.1"

    def enter(self, node: int) -> list[str]:
        return []

    def require_links(self) -> None:
        raise ConfigError(
            f"lab: links cannot be slowed or restored here: {self._reason}", "leave it out, or run as root"
        )

    def set_rate(self, node: int, rate: int | None) -> None:
        self.require_links()

    def plug(self, node: int, is_in: bool) -> None:
        self.require_links()

    def close(self) -> None:
        pass


class Network:
    """Namespaces `<name>.node0` …, joined through `<name>.switch`. Close it to remove them."""

    interface = INTERFACE

    def __init__(self, name: str, num_nodes: int, rate: int | None) -> None:
        self._switch, self._nodes = f"{name}.switch", [f"{name}.node{node}" for node in range(num_nodes)]
        self._limited: set[int] = set()
        self._handles = itertools.cycle(range(1, 0x7FFF))
        _require_tools()
        try:
            _ip("netns", "add", self._switch)
            _batch(self._switch, "link add bridge0 type bridge", "link set bridge0 up")
            for node in range(num_nodes):
                self._plug_in(node)
                self.set_rate(node, rate)
        except NoNetworkError:
            self.close()
            raise

    def address(self, node: int) -> str:
        # Reachable from the lab's namespaces only, so it may be used outside as well.
        return f"10.77.0.{node + 1}"

    def enter(self, node: int) -> list[str]:
        """What goes before a command so that it runs on a node."""
        return ["ip", "netns", "exec", self._nodes[node]]

    def require_links(self) -> None:
        """There are links that can be limited."""

    def set_rate(self, node: int, rate: int | None) -> None:
        """Limit a node's cable, both ways, in bits per second; None: not at all."""
        # Always a new bucket: in one that is changed, packets larger than the new burst are stuck, and all behind them.
        handle = f"{next(self._handles):x}:"
        for namespace, interface in ((self._nodes[node], INTERFACE), (self._switch, f"port{node}")):
            root = ["-n", namespace, "qdisc", "replace" if rate else "del", "dev", interface, "root"]
            if rate:
                _tool("tc", *root, "handle", handle, *_token_bucket(rate))
            elif node in self._limited:
                _tool("tc", *root)
        (self._limited.add if rate else self._limited.discard)(node)

    def plug(self, node: int, is_in: bool) -> None:
        """A node's cable, at the switch: the node does not see that it is out."""
        _batch(self._switch, f"link set port{node} {'up' if is_in else 'down'}")

    def close(self) -> None:
        for namespace in (*self._nodes, self._switch):
            remove(namespace)

    def _plug_in(self, node: int) -> None:
        namespace, port = self._nodes[node], f"port{node}"
        _ip("netns", "add", namespace)
        _batch(
            namespace,
            "link set lo up",
            f"link add {INTERFACE} type veth peer name {port} netns {self._switch}",
            f"addr add {self.address(node)}/24 dev {INTERFACE}",
            f"link set {INTERFACE} up",
        )
        _batch(self._switch, f"link set {port} master bridge0 up")


def remove(namespace: str) -> None:
    """Remove a namespace and end what still runs in it."""
    if not (_NAMESPACES / namespace).exists():
        return
    with suppress(NoNetworkError):
        for pid in _ip("netns", "pids", namespace).split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        _ip("netns", "del", namespace)


def sweep() -> None:
    """Remove the namespaces of labs whose process is gone."""
    for path in _NAMESPACES.glob(f"{PREFIX}.*"):
        if is_abandoned(path.name):
            remove(path.name)


def _token_bucket(rate: int) -> list[str]:
    burst = max(_SMALLEST_BURST, round(rate / 8 * _BURST_SECONDS))
    queue = max(_SMALLEST_QUEUE, round(rate / 8 * _QUEUE_SECONDS))
    return ["tbf", "rate", f"{rate}bit", "burst", str(burst), "limit", str(burst + queue)]


def _require_tools() -> None:
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise NoNetworkError(f"the program '{tool}' (iproute2) is not installed")


def _ip(*arguments: str) -> str:
    return _tool("ip", *arguments)


def _batch(namespace: str, *lines: str) -> None:
    _tool("ip", "-n", namespace, "-batch", "-", input="\n".join(lines))


def _tool(name: str, *arguments: str, input: str | None = None) -> str:
    command: Sequence[str] = (name, *arguments)
    done = subprocess.run(command, text=True, input=input or "", capture_output=True, check=False)
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise NoNetworkError(f"{' '.join(command[:3])}: {said[0]}")
    return done.stdout
