"""Joining what another launcher started: this process takes its place among ranks that nobody of ours supervises.

The environment says where torchrun, MPI or SLURM put the process; one that is half set is an error, because a rank that
guesses wrong waits for ever. Each rank then watches out for itself (monitor.py): it shows the others that it lives, and
a rank that fails tells them why before it leaves.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import itertools
import os
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

from phalanx.errors import BeginAnew, ConfigError, PhalanxError, RankError
from phalanx.launch.context import RankContext, local_device
from phalanx.launch.hosts import slurm_counts, slurm_hosts
from phalanx.launch.monitor import Monitor, Notice
from phalanx.launch.status_board import SILENCE, StatusBoard
from phalanx.launch.store import SECRET_VARIABLE, JobStore, ask_names_sooner, host_store, share_secret
from phalanx.launch.succession import Claim, reach

_MEET_SECONDS = 120.0
# A script may train several times. All ranks count alike, so that the keys of one job never meet another's.
_jobs = itertools.count()


@dataclass(frozen=True)
class Place:
    """Where a launcher put this process, and where its ranks meet."""

    launcher: str
    rank: int
    world: int
    local_rank: int
    local_world: int  # of all ranks, where the launcher does not say how many of them are on this machine
    node: int
    host: str
    port: int
    store_exists: bool  # the launcher hosts the store; else rank 0 does
    attempt: str  # tells this start of the job from earlier ones that used the same store
    one_machine: bool


def join(
    device: str = "auto", *, folder: Path | None = None, claim: Claim | None = None,
    variables: Mapping[str, str] | None = None,
) -> RankContext | None:  # fmt: skip
    """The context that a launcher gave this process, None when there is no launcher.

    folder: one that all ranks share, where rank 0 leaves the job's secret unless PHALANX_SECRET gives it. claim: of who
    leads a run that goes on, to which this process comes back.
    """
    variables = os.environ if variables is None else variables
    place = find_place(variables)
    if place is None:
        return None
    board = StatusBoard.private(place.world)
    board.reset()
    store = _meet(place, folder, variables) if claim is None else _come_back(claim, variables)
    return RankContext(
        place.rank, place.world, place.local_rank, place.local_world, place.node,
        local_device(device, place.local_rank, place.world), store, place.port, generation=0, board=board,
        slot=board.slots[place.rank], address="127.0.0.1" if place.one_machine else "",
    )  # fmt: skip


def run_joined(
    context: RankContext,
    target: Callable[..., Any],
    *arguments: Any,
    on_event: Callable[[str, Any], None] | None = None,
    silence: float = SILENCE,
    begins_anew: bool = False,
) -> Any:
    """`target(context, *arguments)` on this rank, among others that do the same.

    When a rank fails, all end within seconds; rank 0 raises the error that names it, the others leave with exit code 1.
    A rank that shows no sign of life for `silence` seconds of a step counts as lost. begins_anew: after an error that
    says so (`PhalanxError.again`), all ranks raise `BeginAnew` instead, and may join again.
    """
    context = dataclasses.replace(context, on_event=on_event)
    with Joined(context, silence, begins_anew):
        return target(context, *arguments)


class Joined:
    """This rank among others that do the same, for as long as it is entered."""

    def __init__(self, context: RankContext, silence: float = SILENCE, begins_anew: bool = False) -> None:
        self._context, self._monitor, self._begins_anew = context, Monitor(context, silence), begins_anew

    def __enter__(self) -> Joined:
        self._monitor.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            self._part(error)
        except BeginAnew:
            self._context.abort.set("all ranks begin anew")  # also here, where it went wrong: whoever waits lets go
            raise
        except BaseException as closing:
            _end_at_once(closing)
            raise
        finally:
            self._monitor.__exit__(kind, error, at)

    def _part(self, error: BaseException | None) -> None:
        if isinstance(error, Exception):
            notice = self._monitor.tell(error)
            if notice.again and self._begins_anew:
                raise BeginAnew(notice.message, notice.hint, notice.again) from None
            raise _closing(self._context, notice, error) from error
        self._monitor.finish()
        if error is not None:
            raise error  # Ctrl-C or SIGTERM: the launcher sends it to all
        if self._context.rank == 0 and not self._monitor.wait_for_all():
            raise _as_error(self._monitor.heard())


def leave(code: int) -> None:
    """End this process at once, with this exit code, if its job failed; else do nothing.

    Links that were given up, taken apart with the interpreter, would wait for what is still on its way.
    """
    if not _job_failed:
        return
    for output in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            output.flush()
    os._exit(code)


_job_failed = False


def _end_at_once(error: BaseException) -> None:
    """The process does not take itself apart when it ends."""
    global _job_failed
    _job_failed = True
    code = 130 if isinstance(error, KeyboardInterrupt) else getattr(error, "code", None)
    atexit.register(leave, code if isinstance(code, int) else 1)


def _closing(context: RankContext, notice: Notice, error: Exception) -> BaseException:
    debug = os.environ.get("PHALANX_DEBUG", "0") not in ("", "0")
    if notice.rank == context.rank and (debug or (context.rank == 0 and isinstance(error, PhalanxError))):
        return error
    # Rank 0 speaks for all, unless it is the one that is gone.
    return _as_error(notice) if context.rank == 0 or (notice.rank == 0 and notice.lost) else SystemExit(1)


def _as_error(notice: Notice) -> RankError:
    return RankError(notice.message, notice.hint)


def _meet(place: Place, folder: Path | None, variables: Mapping[str, str]) -> JobStore:
    """The keys of this job in the launcher's store or, where it has none, in one that rank 0 hosts."""
    import torch.distributed as dist

    store, name = _reach(place), f"phalanx/{place.attempt}/{next(_jobs)}"
    if folder is None and place.one_machine:
        folder = Path(tempfile.gettempdir())
    secret = share_secret(dist.PrefixStore(name, store), place.rank, folder, variables)
    return JobStore(store, secret, name)


def _come_back(claim: Claim, variables: Mapping[str, str]) -> JobStore:
    """To the store of a run whose first node is lost."""
    store = reach(claim)
    if store is None:
        raise RankError(f"the supervisor on node {claim.node}, which led the run, is gone", "go on with --resume auto")
    if SECRET_VARIABLE not in variables:
        raise ConfigError(
            f"a machine comes back to a run only with the run's secret, and {SECRET_VARIABLE} is not set",
            f"set {SECRET_VARIABLE} for all processes when the run begins, and the same when one comes back",
        )
    return JobStore(store, share_secret(store, 1, None, variables), claim.name)


@functools.cache  # one that is hosted here lives as long as the process
def _reach(place: Place) -> Any:
    import torch.distributed as dist

    hosts = place.rank == 0 and not place.store_exists
    # A store of ours that only this machine needs is one that only this machine reaches, whatever its name.
    host = "127.0.0.1" if place.one_machine and not place.store_exists else place.host
    where, began = f"{host}:{place.port}", time.monotonic()
    deadline = timedelta(seconds=_MEET_SECONDS)
    try:
        if hosts:
            return host_store(host, place.port, deadline)
        ask_names_sooner()
        return dist.TCPStore(host, place.port, is_master=False, timeout=deadline, wait_for_workers=False)
    except (RuntimeError, OSError) as error:
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


def find_place(variables: Mapping[str, str]) -> Place | None:
    """None when no launcher started this process."""
    if "RANK" in variables or "WORLD_SIZE" in variables:
        return _torchrun(variables)
    if "OMPI_COMM_WORLD_RANK" in variables or "OMPI_COMM_WORLD_SIZE" in variables:
        return _mpi(variables, "Open MPI", *(f"OMPI_COMM_WORLD_{part}" for part in _MPI_PARTS))
    # srun sets PMI_* too; what it says of nodes is better.
    if "SLURM_PROCID" in variables and "SLURM_STEP_NODELIST" in variables:
        return _slurm(variables)
    if "PMI_RANK" in variables or "PMI_SIZE" in variables:
        return _mpi(variables, "MPICH", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
    return None


_MPI_PARTS = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")


def _torchrun(variables: Mapping[str, str]) -> Place:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")
    hint = "start with torchrun, set all of them by hand, or unset RANK and WORLD_SIZE for ranks of our own"
    rank, world, local_rank, port = _numbers(variables, "torchrun", names, hint, also=("MASTER_ADDR",))
    _check_rank("RANK", rank, "WORLD_SIZE", world)
    run = f"{variables.get('TORCHELASTIC_RUN_ID', '')}/{variables.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    local_world = int(variables.get("LOCAL_WORLD_SIZE", "0"))
    return Place(
        "torchrun", rank, world, local_rank, local_world or world, int(variables.get("GROUP_RANK", "0")),
        variables["MASTER_ADDR"], port,
        store_exists=variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True", attempt=run,
        one_machine=local_world == world,
    )  # fmt: skip


def _mpi(
    variables: Mapping[str, str], launcher: str, rank_name: str, size_name: str, local_name: str, local_size_name: str
) -> Place:
    names = (rank_name, size_name, local_name, local_size_name)
    rank, world, local_rank, local_world = _numbers(variables, launcher, names, "start with mpirun or mpiexec")
    _check_rank(rank_name, rank, size_name, world)
    host, port = variables.get("MASTER_ADDR", ""), variables.get("MASTER_PORT", "")
    if local_world == world:
        # All ranks of one machine are children of one process, whose number tells this job from others.
        host, port = host or "127.0.0.1", port or str(_port(f"mpi.{os.getppid()}"))
    if not host or not port:
        here = f"{local_world} of {world} ranks {'is' if local_world == 1 else 'are'} here"
        raise ConfigError(
            f"an {launcher} job on several machines ({here}) does not say where its ranks meet: MASTER_ADDR or "
            "MASTER_PORT is missing",
            "mpirun -x MASTER_ADDR=<host of rank 0> -x MASTER_PORT=29500 …",
        )
    return Place(
        launcher, rank, world, local_rank, local_world, rank // local_world, host,
        _number("MASTER_PORT", port), store_exists=False, attempt="", one_machine=local_world == world,
    )  # fmt: skip


def _slurm(variables: Mapping[str, str]) -> Place | None:
    tasks = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in variables else "SLURM_NTASKS"
    names = ("SLURM_PROCID", tasks, "SLURM_LOCALID", "SLURM_NODEID")
    rank, world, local_rank, node = _numbers(variables, "SLURM", names, "start with srun", also=("SLURM_JOB_ID",))
    if world == 1:
        return None  # an interactive shell, or a step that leaves the ranks of its machine to us
    _check_rank("SLURM_PROCID", rank, tasks, world)
    job = f"{variables['SLURM_JOB_ID']}.{variables.get('SLURM_STEP_ID', '0')}"
    hosts, counts = variables["SLURM_STEP_NODELIST"], slurm_counts(variables.get("SLURM_STEP_TASKS_PER_NODE", ""))
    beside = counts[node] if node < len(counts) else world
    return Place(
        "SLURM", rank, world, local_rank, beside, node, variables.get("MASTER_ADDR") or first_host(hosts),
        _number("MASTER_PORT", variables.get("MASTER_PORT") or str(_port(job))), store_exists=False,
        attempt=f"{job}/{variables.get('SLURM_RESTART_COUNT', '0')}",
        one_machine="," not in hosts and "[" not in hosts,
    )  # fmt: skip


def first_host(nodes: str) -> str:
    """The first host of a SLURM node list: 'gpu[07-09,12],cpu3' → 'gpu07'."""
    found = slurm_hosts(nodes)
    if not found:
        raise ConfigError(f"SLURM_STEP_NODELIST = {nodes!r} names no host", "start with srun")
    return found[0]


def _port(job: str) -> int:
    """A port below those that the system hands out by itself, the same for all ranks of a job."""
    return 20000 + zlib.crc32(job.encode()) % 12000


def _numbers(
    variables: Mapping[str, str], launcher: str, names: tuple[str, ...], hint: str, also: tuple[str, ...] = ()
) -> list[int]:
    needed = (*names, *also)
    missing = [name for name in needed if not variables.get(name)]
    if missing:
        present = [name for name in needed if name in variables and name not in missing]
        raise ConfigError(
            f"the environment looks like {launcher}'s ({', '.join(present)} set) but lacks {', '.join(missing)}", hint
        )
    return [_number(name, variables[name]) for name in names]


def _number(name: str, text: str) -> int:
    if not text.isdecimal():
        raise ConfigError(f"environment variable {name} = {text!r} is not a number", "numbers start at 0")
    return int(text)


def _check_rank(rank_name: str, rank: int, world_name: str, world: int) -> None:
    if rank >= world:
        raise ConfigError(f"{rank_name} = {rank} is not below {world_name} = {world}", "ranks are numbered from 0")
