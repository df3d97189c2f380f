"""Runs of the soak on two nodes of a lab, each with a supervisor of its own: a node is lost and comes back, the one
that leads or the other; its link is slow or cut; a rank is killed on one of them."""

from __future__ import annotations

import faulthandler
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from soak_checks import Followed, runs
from soak_job import Samples, Struck, config, hold

from phalanx.lab.run import Lab
from phalanx.lab.script import CutLink, RestoreLink, SlowLink
from phalanx.lab.session import Session
from phalanx.training.trainer import Trainer

if TYPE_CHECKING:
    from soak_settings import Setting

_LONGEST = 400.0  # seconds, however busy the machine is: a node that comes back imports everything twice
_SILENCE = 6.0


def run(setting: Setting, out: Path) -> tuple[list[Struck], list[str]]:
    orders = out.with_name(f"{out.name}-orders")
    options = {"plan": setting.plan, "on_loss": setting.on_loss, "silence": _SILENCE, **setting.options}
    command = [sys.executable, __file__, str(out), str(orders), json.dumps(options)]
    with Lab("nodes=2,device=cpu:1thread", logs=orders) as lab, lab.start(command) as session:
        nodes, struck = _Nodes(session, out, orders), list[Struck]()
        try:
            for fault in setting.faults:
                if not nodes.trains(fault.gap, struck[-1] if struck else None):
                    break
                time.sleep(fault.delay)
                struck.append(Struck(fault.kind, nodes.step, setting.world, time.time()))
                KINDS[fault.kind](nodes, random.Random(fault.seed))
            codes = [rank.process.wait(_LONGEST) for rank in session.ranks]
        except Exception as error:
            return struck, [f"{type(error).__name__}: {error}"]
    said = {node: (orders / f"node{node}.txt").read_text(errors="replace").splitlines()[-3:] for node in (0, 1)}
    left = (
        f"node {node}'s command left with exit code {code}: {' '.join(said[node])}"
        for node, code in enumerate(codes)
        if code
    )
    return struck, list(left)


class _Nodes:
    """What can be done to both. leader: the one whose supervisor leads."""

    leader = 0

    def __init__(self, session: Session, out: Path, orders: Path) -> None:
        self.session, self.orders, self.log = session, orders, Followed(out)

    @property
    def step(self) -> int:
        return max((record["step"] for record in self.log.read() if record["kind"] == "step"), default=0)

    @property
    def ranks(self) -> list[int]:
        """Processes that have read samples, and still run."""
        found = (int(path.stem) for path in self.orders.glob("*.reads"))
        return sorted(pid for pid in found if runs(pid))

    def until(self, condition: Callable[[], Any], what: str) -> bool:
        """Waits; False when the run is over."""
        deadline = time.monotonic() + _LONGEST
        while not condition():
            ended = [rank for rank in self.session.ranks if not rank.running and not rank.ended]
            if failed := [rank for rank in ended if rank.exit_code]:
                raise RuntimeError(f"node {failed[0].place.node}'s command left with exit code {failed[0].exit_code}")
            if ended:
                return False
            if time.monotonic() > deadline:
                raise TimeoutError(f"{_LONGEST:.0f} s were not enough {what}")
            time.sleep(0.005)
        return True

    def trains(self, num_steps: int, after: Struck | None) -> bool:
        """Waits for so many steps after a fault; False when the run is over."""
        since = after.time if after is not None else 0.0
        return self.until(lambda: self.log.num_steps(since) >= num_steps, f"to train on after {after}")

    def loses(self) -> bool:
        """Waits until one more loss, or return, is told of."""
        before = self.log.num_losses
        return self.until(lambda: self.log.num_losses > before, "to tell of it")

    def bring_back(self, node: int) -> None:
        """A node's command, started again; waits until its rank takes part."""
        self.session.ranks[node].end()
        self.session.ranks[node] = self.session._start_rank(node, 2, node, 0)
        self.loses()

    def lose(self, node: int) -> None:
        """It is lost, and comes back."""
        with hold(self.orders):
            if not self.both_train():
                return
            self.session.ranks[node].end()
            if self.loses():
                self.bring_back(node)

    def both_train(self) -> bool:
        """Waits until a rank that was lost before has come back; without it the other node's would be the only one."""

        def have_come() -> bool:
            told = [record["ranks"] for record in self.log.read() if record["kind"] == "loss"]
            return not told or told[-1] == 2

        return self.until(have_come, "to have two ranks again")


def _lose_node(nodes: _Nodes, draw: random.Random) -> None:
    nodes.lose(1 - nodes.leader)


def _lose_leader(nodes: _Nodes, draw: random.Random) -> None:
    lost, nodes.leader = nodes.leader, 1 - nodes.leader
    nodes.lose(lost)


def _slow_link(nodes: _Nodes, draw: random.Random) -> None:
    nodes.session.disturb(SlowLink(1, draw.choice([500_000, 2_000_000, 8_000_000])))
    time.sleep(draw.random() * 3.0)
    nodes.session.disturb(RestoreLink(1))


def _cut_link(nodes: _Nodes, draw: random.Random) -> None:
    """For a moment: nobody need be lost."""
    nodes.session.disturb(CutLink(1))
    time.sleep(draw.random() * 0.5 * _SILENCE)
    nodes.session.disturb(RestoreLink(1))


def _cut_off(nodes: _Nodes, draw: random.Random) -> None:
    """For so long that the node that does not lead is lost."""
    cut = 1 - nodes.leader
    with hold(nodes.orders):
        if not nodes.both_train():
            return
        nodes.session.disturb(CutLink(cut))
        lost = nodes.loses()
        nodes.session.disturb(RestoreLink(cut))
        if lost:
            nodes.bring_back(cut)


def _kill_rank(nodes: _Nodes, draw: random.Random) -> None:
    if ranks := nodes.ranks:
        with hold(nodes.orders):
            os.kill(draw.choice(ranks), signal.SIGKILL)
            nodes.loses()


KINDS: Mapping[str, Callable[[_Nodes, random.Random], None]] = {
    "node lost and back": _lose_node, "leading node lost and back": _lose_leader, "link slow": _slow_link,
    "link cut": _cut_link, "node cut off": _cut_off, "rank of a node": _kill_rank,
}  # fmt: skip


def main() -> None:
    """One node's part."""
    out, orders, options = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])
    said = (orders / f"node{os.environ['RANK']}.txt").open("a")
    for output in (1, 2):
        os.dup2(said.fileno(), output)
    faulthandler.dump_traceback_later(_LONGEST / 4, repeat=True, file=said)  # where it stands, should it hang
    Trainer("gpt2", Samples(orders, seconds=0.01), config(out, **options)).fit()


if __name__ == "__main__":
    main()
