"""What tests of labs have in common."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import children

ROOT = Path(__file__).parents[2]
NAMESPACES = Path("/run/netns")


def can_make_namespaces() -> bool:
    from phalanx.lab import owned
    from phalanx.lab.network import Network, NoNetworkError

    try:
        Network(owned.new_name(), 1, 10**9).close()
    except NoNetworkError:
        return False
    return True


needs_namespaces = pytest.mark.skipif(
    not can_make_namespaces(), reason="network namespaces need root (CAP_NET_ADMIN, CAP_SYS_ADMIN), ip and tc"
)


def python(code: str, *arguments: object) -> list[str]:
    """A command that every rank runs."""
    return [sys.executable, "-c", f"import os, sys, time; rank = int(os.environ['RANK'])\n{code}", *map(str, arguments)]


def wait_for(condition: Callable[[], bool], what: str, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def is_gone(pid: int) -> bool:
    """Dead, or dead and not yet collected by whoever inherited it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def namespaces_of(pid: int) -> list[str]:
    """The namespaces that the labs of a process made."""
    return [path.name for path in NAMESPACES.glob(f"phalanx-lab.*.{pid}.*")]


def start_cli(*arguments: str, **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "phalanx", "lab", *arguments], cwd=ROOT, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, env=children.environment(**variables),
    )  # fmt: skip
