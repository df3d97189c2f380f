"""What the environment says about this process's place."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.errors import ConfigError
from phalanx.launch.join import find_place, first_host

TORCHRUN = {
    "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "GROUP_RANK": "1", "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "head", "MASTER_PORT": "29500", "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "2",
}  # fmt: skip
SLURM = {
    "SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_NODEID": "1",
    "SLURM_STEP_NODELIST": "gpu[07-08]", "SLURM_JOB_ID": "4242",
}  # fmt: skip
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}  # fmt: skip
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}


def without(variables: dict[str, str], *names: str) -> dict[str, str]:
    return {name: text for name, text in variables.items() if name not in names}


def test_torchrun_gives_the_place_and_the_agents_store_with_the_restart_in_its_keys():
    place = find_place(TORCHRUN)
    assert place is not None and place.store_exists and place.attempt == "none/2" and not place.one_machine
    assert (place.rank, place.world, place.local_rank, place.node) == (5, 8, 1, 1)
    assert (place.host, place.port) == ("head", 29500)


def test_variables_set_by_hand_make_rank_0_host_the_store():
    place = find_place(without(TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE"))
    assert place is not None and not place.store_exists


def test_slurm_ranks_meet_on_the_first_host_at_a_port_of_their_job():
    place = find_place(SLURM)
    other = find_place({**SLURM, "SLURM_JOB_ID": "4243"})
    assert place is not None and other is not None
    assert (place.rank, place.world, place.local_rank, place.node, place.host) == (5, 8, 1, 1, "gpu07")
    assert 20000 <= place.port < 32000 and place.port != other.port


def test_a_batch_script_and_an_interactive_step_are_left_to_our_own_ranks():
    assert find_place(without(SLURM, "SLURM_STEP_NODELIST")) is None
    assert find_place({**SLURM, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}) is None


def test_mpi_ranks_of_one_machine_need_no_address():
    place = find_place(MPICH)
    assert place is not None and place.launcher == "MPICH"
    assert (place.rank, place.world, place.local_rank, place.node, place.host) == (1, 2, 1, 0, "127.0.0.1")


def test_mpi_ranks_of_several_machines_are_told_to_set_an_address():
    with pytest.raises(ConfigError, match=r"several machines \(2 of 4 ranks are here\).*MASTER_ADDR"):
        find_place(OPEN_MPI)
    with pytest.raises(ConfigError, match=r"several machines \(1 of 4 ranks is here\)"):
        find_place({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"})
    place = find_place({**OPEN_MPI, "MASTER_ADDR": "head", "MASTER_PORT": "29500"})
    assert place is not None and (place.node, place.host, place.port) == (1, "head", 29500)


@pytest.mark.parametrize(
    ("variables", "missing", "launcher"),
    [
        (TORCHRUN, "WORLD_SIZE", "torchrun"), (TORCHRUN, "RANK", "torchrun"), (TORCHRUN, "LOCAL_RANK", "torchrun"),
        (TORCHRUN, "MASTER_ADDR", "torchrun"), (SLURM, "SLURM_LOCALID", "SLURM"), (SLURM, "SLURM_JOB_ID", "SLURM"),
        (OPEN_MPI, "OMPI_COMM_WORLD_SIZE", "Open MPI"), (MPICH, "MPI_LOCALNRANKS", "MPICH"),
    ],
)  # fmt: skip
def test_a_half_set_environment_is_refused_naming_what_is_missing(
    variables: dict[str, str], missing: str, launcher: str
):
    with pytest.raises(ConfigError, match=rf"looks like {launcher}'s .* but lacks {missing}\n  → "):
        find_place(without(variables, missing))


def test_places_that_cannot_be_are_refused():
    with pytest.raises(ConfigError, match="RANK = 8 is not below WORLD_SIZE = 8"):
        find_place({**TORCHRUN, "RANK": "8"})
    with pytest.raises(ConfigError, match="MASTER_PORT = 'http' is not a number"):
        find_place({**TORCHRUN, "MASTER_PORT": "http"})
    with pytest.raises(ConfigError, match=r"SLURM_STEP_NODELIST = ',' names no host"):
        find_place({**SLURM, "SLURM_STEP_NODELIST": ","})


@given(st.from_regex(r"[a-z]{1,5}", fullmatch=True), st.lists(st.integers(0, 999), min_size=1), st.booleans())
def test_the_first_host_of_a_node_list_is_found(name: str, numbers: list[int], ranges: bool):
    texts = [f"{number:03}-{number + 2:03}" if ranges else f"{number:03}" for number in numbers]
    assert first_host(f"{name}[{','.join(texts)}],other[1-2]") == f"{name}{numbers[0]:03}"
    assert first_host(f"{name}{numbers[0]},{name}9") == f"{name}{numbers[0]}"
