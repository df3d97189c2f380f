"""The store of a job: what strangers write is not read as ours, it listens where it must and nowhere else, and ranks
that a launcher started come to share a secret."""

from __future__ import annotations

import os
import pickle
import random
import socket
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from phalanx.errors import ConfigError, RankError
from phalanx.launch import store as job_store
from phalanx.launch.context import RankContext
from phalanx.launch.monitor import Monitor
from phalanx.launch.status_board import StatusBoard
from phalanx.launch.store import ForgedValue, JobStore, forget_secrets, host_store, share_secret

SECRET = b"s" * 32
DEADLINE = timedelta(seconds=5)


class Bomb:
    """What unpickling runs."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


@pytest.fixture
def server() -> Any:
    return host_store("127.0.0.1", 0, DEADLINE)


def stranger(server: Any) -> Any:
    return dist.TCPStore("127.0.0.1", server.port, is_master=False, timeout=DEADLINE)


def context(store: JobStore, rank: int, world: int = 2) -> RankContext:
    board = StatusBoard.private(world)
    board.reset()
    return RankContext(rank, world, rank, world, 0, "cpu", store, 0, 0, board, board.slots[rank])


def test_what_a_rank_writes_another_reads(server: Any):
    one, other = JobStore(server, SECRET, "job"), JobStore(stranger(server), SECRET, "job")
    one.set("a", "grüße ✓")
    assert other.get("a") == "grüße ✓" and other.check(["a"])  # asked first: setting is not waited for
    assert other.set_once("a", "late") == "grüße ✓" and other.set_once("b", "first") == one.get("b") == "first"
    assert not one.part("x").check(["a"]) and not one.check(["c"])
    other.delete_key("a")
    assert not one.clone().check(["a"])


@pytest.mark.parametrize("secret, name", [(b"x" * 32, "job"), (SECRET, "job2")], ids=["secret", "job"])
def test_another_job_or_secret_has_other_keys(server: Any, secret: bytes, name: str):
    JobStore(server, SECRET, "job").set("a", "1")
    assert not JobStore(server, secret, name).check(["a"])


def test_a_strangers_pickle_is_neither_run_nor_read(server: Any, tmp_path: Path):
    """Strangers can list all keys and write where they like."""
    own = JobStore(server, SECRET, "job")
    for key in ("notice", "life/1", "checkpoint/0/begin/0", "prepared"):
        own.set(key, "mine")
    outside = stranger(server)
    for key in outside.list_keys():
        outside.set(key, pickle.dumps(Bomb(tmp_path / "ran")))
    for key in ("notice", "life/1", "checkpoint/0/begin/0", "prepared"):
        with pytest.raises(ForgedValue, match=rf"key '{key}' holds a value that no rank .* wrote\n.*docs/security.md"):
            own.get(key)
    assert own.set_once("notice", "true") == "true" == own.get("notice")
    assert not (tmp_path / "ran").exists()


def test_a_value_moved_to_another_key_is_refused(server: Any):
    own = JobStore(server, SECRET, "job")
    own.set("a", "yes")
    own.for_torch.set("b", own.for_torch.get("a"))
    with pytest.raises(ForgedValue):
        own.get("b")


def test_forged_notices_and_signs_of_life_do_not_end_a_job(server: Any):
    store = JobStore(server, SECRET, "job")
    monitor = Monitor(context(store, 0))
    store.for_torch.set("notice", '{"rank": 1, "message": "leave"}')
    store.for_torch.set("life/1", "{}")
    store.for_torch.set("finished/1", "")
    assert monitor._look() is None
    assert monitor._num_reports("finished") == 0


def test_thousands_of_forged_values_are_refused():
    random_bytes, own = random.Random(0), JobStore(dist.HashStore(), SECRET, "job")
    own.set("a", '{"rank": 1, "message": "m"}')
    good = own.for_torch.get("a")
    for number in range(6000):
        value = bytearray(good)
        for _ in range(random_bytes.randint(1, 4)):
            value[random_bytes.randrange(len(value))] = random_bytes.randrange(256)
        value = value if number % 2 else random_bytes.randbytes(random_bytes.randrange(200))
        if bytes(value) != good:
            with pytest.raises(ForgedValue):
                own._opened("a", bytes(value))


def listening(port: int) -> set[str]:
    """The local addresses on which this machine listens at a port."""
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, address, _, state, *_ = line.split()
            if state == "0A" and int(address.split(":")[1], 16) == port:
                found.add(address.split(":")[0])
    return found


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="needs Linux")
def test_a_store_that_one_machine_needs_is_reached_from_it_alone(server: Any):
    assert listening(server.port) == {"0100007F"}
    by_name = host_store("localhost", 0, DEADLINE)
    assert listening(by_name.port) == {"0100007F"}


def test_a_lost_answer_of_the_name_server_costs_a_second_unless_a_user_says_else(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RES_OPTIONS", "rotate")
    job_store.ask_names_sooner()
    assert os.environ["RES_OPTIONS"] == "rotate"
    monkeypatch.delenv("RES_OPTIONS")
    server = host_store("127.0.0.1", 0, timedelta(seconds=30))
    job_store.connect_store("127.0.0.1", server.port)
    assert os.environ["RES_OPTIONS"] == "timeout:1 attempts:5"


def test_a_name_that_means_another_address_to_others_is_listened_for_everywhere(monkeypatch: pytest.MonkeyPatch):
    known = {"own": "127.0.1.1", "translated": "203.0.113.7"}
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *_: [(2, 1, 6, "", (known[host], 0))])
    assert job_store.listening_address("own") == "" == job_store.listening_address("translated")


def shared(folder: Path | None, variables: dict[str, str]) -> list[bytes]:
    """What two ranks take for the secret."""
    store, found = dist.HashStore(), {}
    threads = [
        threading.Thread(target=lambda rank=rank: found.update({rank: share_secret(store, rank, folder, variables)}))
        for rank in (1, 0)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    return [found[rank] for rank in range(2)]


def test_ranks_share_a_secret_through_their_folder(tmp_path: Path):
    first, second = shared(tmp_path / "run", {}), shared(tmp_path / "run", {})
    assert first[0] == first[1] != second[0] == second[1] and len(first[0]) == 32
    files = list((tmp_path / "run").iterdir())
    assert len(files) == 2 and all(file.stat().st_mode & 0o777 == 0o600 for file in files)
    forget_secrets(tmp_path / "run")
    assert not list((tmp_path / "run").iterdir())


def test_a_secret_in_the_environment_stands_before_the_folder(tmp_path: Path):
    one, other = shared(None, {"PHALANX_SECRET": "0123456789abcdef"})
    assert one == other and not list(tmp_path.iterdir())


def test_a_short_secret_is_refused():
    with pytest.raises(ConfigError, match=r"PHALANX_SECRET has 5 characters, at least 16 .*\n.*openssl rand"):
        share_secret(dist.HashStore(), 0, None, {"PHALANX_SECRET": "12345"})


def test_ranks_of_several_machines_without_a_folder_are_told_what_to_set():
    with pytest.raises(ConfigError, match=r"no folder in which to share a secret\n.*export PHALANX_SECRET="):
        share_secret(dist.HashStore(), 0, None, {})


def test_a_folder_that_is_not_shared_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(job_store, "_SEE_SECONDS", 0.2)
    store = dist.HashStore()
    share_secret(store, 0, tmp_path / "here", {})
    with pytest.raises(RankError, match=r"rank 1 does not see the secret .*\n.*must share that folder .*SECRET"):
        share_secret(store, 1, tmp_path / "there", {})


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"rank 0 cannot share a secret with the others in .*\n.*--out"):
        share_secret(dist.HashStore(), 0, tmp_path / "file", {})


@pytest.mark.parametrize("number", [b"../../etc/passwd", b"", b"0" * 17, b"\xff" * 16])
def test_the_store_cannot_lead_a_rank_to_another_file(tmp_path: Path, number: bytes):
    store = dist.HashStore()
    store.set("hello", number.decode("latin-1"))
    with pytest.raises(ForgedValue, match="rank 0 did not write"):
        share_secret(store, 1, tmp_path, {})
