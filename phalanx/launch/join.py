"""Joining what another launcher started: this process takes its seat among ranks that nobody of ours supervises.

Each rank then watches out for itself (monitor.py): it shows the others that it lives, and a rank that fails tells them
why before it leaves.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from phalanx.errors import ConfigError, PhalanxError, RankError
from phalanx.launch.board import Board
from phalanx.launch.monitor import Monitor, Notice
from phalanx.launch.place import Place, find_place
from phalanx.launch.seat import Seat, local_device

_MEET_SECONDS = 120.0
# A script may train several times. All ranks count alike, so that the keys of one job never meet another's.
_jobs = itertools.count()


def join(device: str = "auto", *, variables: Mapping[str, str] | None = None) -> Seat | None:
    """The seat that a launcher gave this process, None when there is no launcher."""
    place = find_place(os.environ if variables is None else variables)
    if place is None:
        return None
    board = Board.private(place.world)
    board.reset()
    return Seat(
        place.rank, place.world, place.local_rank, place.node, local_device(device, place.local_rank, place.world),
        _meet(place), place.port, generation=0, board=board, slot=board.slots[place.rank],
        address="127.0.0.1" if place.one_machine else "",
    )  # fmt: skip


def run_joined(
    seat: Seat, target: Callable[..., Any], *arguments: Any, on_event: Callable[[str, Any], None] | None = None
) -> Any:
    """`target(seat, *arguments)` on this rank, among others that do the same.

    When a rank fails, all end within seconds; rank 0 raises the error that names it, the others leave with exit code 1.
    """
    seat = dataclasses.replace(seat, on_event=on_event)
    with Monitor(seat) as monitor:
        try:
            result = target(seat, *arguments)
        except Exception as error:
            notice = monitor.tell(error)
            raise _closing(seat, notice, error) from error
        except BaseException:
            monitor.finish()  # Ctrl-C or SIGTERM: the launcher sends it to all
            raise
        monitor.finish()
        if seat.rank == 0 and not monitor.wait_for_all():
            raise _as_error(monitor.heard())
        return result


def _closing(seat: Seat, notice: Notice, error: Exception) -> BaseException:
    debug = os.environ.get("PHALANX_DEBUG", "0") not in ("", "0")
    if notice.rank == seat.rank and (debug or (seat.rank == 0 and isinstance(error, PhalanxError))):
        return error
    # Rank 0 speaks for all, unless it is the one that is gone.
    return _as_error(notice) if seat.rank == 0 or (notice.rank == 0 and notice.lost) else SystemExit(1)


def _as_error(notice: Notice) -> RankError:
    return RankError(notice.message, notice.hint)


def _meet(place: Place) -> Any:
    """The keys of this job in the launcher's store or, where it has none, in one that rank 0 hosts."""
    import torch.distributed as dist

    return dist.PrefixStore(f"phalanx/{place.attempt}/{next(_jobs)}", _reach(place))


@functools.cache  # one that is hosted here lives as long as the process
def _reach(place: Place) -> Any:
    import torch.distributed as dist

    hosts = place.rank == 0 and not place.store_exists
    where, began = f"{place.host}:{place.port}", time.monotonic()
    try:
        return dist.TCPStore(
            place.host, place.port, is_master=hosts, timeout=timedelta(seconds=_MEET_SECONDS), wait_for_workers=False
        )
    except RuntimeError as error:
        if hosts:
            raise ConfigError(
                f"rank 0 cannot host the store at {where}: {str(error).splitlines()[0]}",
                "set MASTER_PORT to a free port, the same for all ranks",
            ) from None
        raise RankError(
            f"rank {place.rank} ({place.launcher}) could not reach the store at {where} "
            f"in {time.monotonic() - began:.0f} s",
            "rank 0 must run, and its host and port be reachable; MASTER_ADDR and MASTER_PORT say where",
        ) from None
