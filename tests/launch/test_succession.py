"""Who leads after the first supervisor: two of them claim one term, and one store comes after the other."""

from __future__ import annotations

import dataclasses
import socket
from datetime import timedelta
from pathlib import Path

import pytest

from phalanx.errors import ConfigError, LinkError, RankError
from phalanx.launch.join import join
from phalanx.launch.store import JobStore, host_store
from phalanx.launch.succession import Claim, Succession, forget_claims, is_gone, live_claim, newest_claim


@pytest.fixture
def root() -> JobStore:
    return JobStore(host_store("127.0.0.1", 0, timedelta(seconds=30)), b"secret" * 4, "run")


def test_a_term_is_claimed_once(root: JobStore, tmp_path: Path) -> None:
    first, second = (Succession(tmp_path, node, {}) for node in (0, 1))
    assert first.affirm(root, 1, 1) and second.succeed(root, 1, 0) is None
    assert second.succeed(root, 2, 0) is not None and not first.affirm(root, 2, 1)
    claim = newest_claim(tmp_path)
    assert claim is not None and (claim.term, claim.node) == (2, 1)


def test_what_somebody_is_about_to_claim_is_no_claim(root: JobStore, tmp_path: Path) -> None:
    """It is written beside, and another may be the first to give it the name that counts."""
    assert Succession(tmp_path, 1, {}).affirm(root, 1, 0)
    claimed = (tmp_path / ".leader-1").read_text()
    (tmp_path / ".leader-1").rename(tmp_path / ".leader-1.0a1b2c3d4e5f6071")
    assert newest_claim(tmp_path) is None
    (tmp_path / ".leader-1").write_text(claimed)
    assert newest_claim(tmp_path) is not None


def test_who_follows_finds_the_store_of_who_leads_now_with_what_the_first_one_had(
    root: JobStore, tmp_path: Path
) -> None:
    leads = Succession(tmp_path, 1, {"guards/0": "here"}).succeed(root, 1, 0)
    assert leads is not None
    leads.set("told", "something")
    found = Succession(tmp_path, 2, {}).successor(root, 1)
    assert found is not None and (found.get("guards/0"), found.get("told")) == ("here", "something")
    assert Succession(tmp_path, 2, {}).successor(root, 2) is None  # nobody has claimed that
    assert live_claim(tmp_path) == newest_claim(tmp_path) is not None


def test_a_claim_whose_store_is_gone_or_another_is_no_live_one(root: JobStore, tmp_path: Path) -> None:
    assert Succession(tmp_path, 0, {}).affirm(root, 1, 0) and live_claim(tmp_path) is not None
    root.torch_store.delete_key(f"leads/{getattr(newest_claim(tmp_path), 'token', '')}")
    assert live_claim(tmp_path) is None
    (tmp_path / ".leader-1").write_text("half a cl")
    assert newest_claim(tmp_path) is None and live_claim(tmp_path) is None


def test_claims_are_forgotten_when_the_run_is_over_but_not_by_a_node_that_no_longer_leads(
    root: JobStore, tmp_path: Path
) -> None:
    assert Succession(tmp_path, 1, {}).affirm(root, 1, 0)
    forget_claims(tmp_path, node=0)
    assert newest_claim(tmp_path) is not None
    forget_claims(tmp_path, node=1)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_named(root: JobStore, tmp_path: Path) -> None:
    with pytest.raises(LinkError) as refused:
        Succession(tmp_path / "nowhere", 1, {}).affirm(root, 1, 0)
    assert refused.value.message == (
        f"a node was lost, and node 1 cannot say in {tmp_path / 'nowhere'} that it leads: No such file or directory"
    )


def test_a_machine_comes_back_only_with_the_secret_and_to_a_run_that_is_there(root: JobStore, tmp_path: Path) -> None:
    assert Succession(tmp_path, 1, {}).affirm(root, 1, 0)
    claim, variables = newest_claim(tmp_path), {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_PORT": "1"}
    variables |= {"MASTER_ADDR": "10.0.0.1", "LOCAL_WORLD_SIZE": "1"}
    with pytest.raises(ConfigError, match="only with the run's secret, and PHALANX_SECRET is not set"):
        join("cpu", folder=tmp_path, claim=claim, variables=variables)
    guard = join("cpu", folder=tmp_path, claim=claim, variables={**variables, "PHALANX_SECRET": "x" * 16})
    assert guard is not None and guard.rank == 0 and guard.store.address == root.address
    gone = Claim(1, 1, 0, "127.0.0.1", 1, "run", "token")
    with pytest.raises(RankError, match="the supervisor on node 1, which led the run, is gone"):
        join("cpu", folder=tmp_path, claim=gone, variables=variables)


def test_a_supervisor_has_ended_when_nobody_is_at_its_port_any_more(root: JobStore, tmp_path: Path) -> None:
    assert Succession(tmp_path, 0, {}).affirm(root, 1, 1)
    claim = Succession(tmp_path, 1, {}).claimed(1)
    assert claim is not None and not is_gone(claim) and Succession(tmp_path, 1, {}).claimed(2) is None
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    assert is_gone(dataclasses.replace(claim, port=port))
