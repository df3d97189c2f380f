"""The mesh: where each rank lies, and that its groups divide the ranks as pipelines, replicas and shards must."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.plan.mesh import Mesh
from phalanx.plan.plan import Plan

GROUPS: list[Callable[[Mesh, int], tuple[int, ...]]] = [
    Mesh.column, Mesh.dp_group, Mesh.tp_group, Mesh.zero_group, Mesh.replica_group,
]  # fmt: skip


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    shards, groups = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    return Mesh(draw(st.integers(1, 4)), shards * groups, shards, draw(st.integers(1, 4)))


@given(meshes())
def test_coordinates_lead_back_to_the_rank(mesh: Mesh) -> None:
    assert [mesh.rank(*mesh.coordinates(rank)) for rank in mesh.world] == list(mesh.world)
    assert len({mesh.coordinates(rank) for rank in mesh.world}) == mesh.pp * mesh.dp * mesh.tp


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.__name__)
@given(mesh=meshes())
def test_the_groups_of_a_kind_divide_the_ranks(group: Callable[[Mesh, int], tuple[int, ...]], mesh: Mesh) -> None:
    for rank in mesh.world:
        members = group(mesh, rank)
        assert rank in members and list(members) == sorted(set(members))
        assert {group(mesh, member) for member in members} == {members}


@given(meshes())
def test_a_zero_group_and_a_replica_group_meet_in_one_rank_and_span_the_dp_group(mesh: Mesh) -> None:
    for rank in mesh.world:
        assert set(mesh.zero_group(rank)) & set(mesh.replica_group(rank)) == {rank}
        spanned = {other for member in mesh.zero_group(rank) for other in mesh.replica_group(member)}
        assert spanned == set(mesh.dp_group(rank))
        assert len(mesh.zero_group(rank)) == mesh.shards


@given(meshes())
def test_a_pipeline_a_dp_group_and_a_tp_group_meet_in_one_rank(mesh: Mesh) -> None:
    for rank in mesh.world:
        assert set(mesh.column(rank)) & set(mesh.dp_group(rank)) == {rank}
        assert set(mesh.column(rank)) & set(mesh.tp_group(rank)) == {rank}
        assert set(mesh.dp_group(rank)) & set(mesh.tp_group(rank)) == {rank}
        assert [mesh.coordinates(member)[0] for member in mesh.column(rank)] == list(range(mesh.pp))


@given(meshes())
def test_a_tp_group_is_of_consecutive_ranks_with_the_same_stages_and_samples(mesh: Mesh) -> None:
    for rank in mesh.world:
        group = mesh.tp_group(rank)
        assert group == tuple(range(group[0], group[0] + mesh.tp)) and group[0] % mesh.tp == 0
        assert {mesh.coordinates(member)[:2] for member in group} == {mesh.coordinates(rank)[:2]}
        assert mesh.beside(rank, [mesh.coordinates(rank)[2]]) == (rank,)


@given(meshes(), st.data())
def test_every_place_of_a_pipeline_has_the_same_replica_and_tp_index(mesh: Mesh, data: st.DataObject) -> None:
    rank, pp_index = data.draw(st.sampled_from(mesh.world)), data.draw(st.integers(0, mesh.pp - 1))
    assert mesh.coordinates(mesh.at_stage(rank, pp_index)) == (pp_index, *mesh.coordinates(rank)[1:])


def test_a_mesh_of_two_stages_two_replicas_and_two_tensor_parallel_ranks() -> None:
    mesh = Mesh.of(Plan(pp=2, dp=2, tp=2, zero=1))
    assert (mesh.rank(1, 0, 1), mesh.coordinates(5)) == (5, (1, 0, 1))
    assert (mesh.column(5), mesh.tp_group(5), mesh.dp_group(5)) == ((1, 5), (4, 5), (5, 7))
    assert (mesh.zero_group(5), mesh.replica_group(5)) == ((5, 7), (5,))


def test_a_mesh_of_two_stages_and_four_replicas_in_two_zero_groups() -> None:
    mesh = Mesh.of(Plan(pp=2, dp=4, zero=1, zero_degree=2))
    assert mesh.world == tuple(range(8))
    assert (mesh.rank(1, 2), mesh.coordinates(6)) == (6, (1, 2, 0))
    assert mesh.column(6) == (2, 6)
    assert mesh.dp_group(6) == (4, 5, 6, 7)
    assert mesh.zero_group(6) == (6, 7)
    assert mesh.replica_group(6) == (4, 6)


def test_without_zero_every_rank_is_a_zero_group_of_its_own() -> None:
    mesh = Mesh.of(Plan(dp=3))
    assert (mesh.zero_group(1), mesh.replica_group(1)) == ((1,), (0, 1, 2))
