"""What is said where there is no plan can be done."""

from __future__ import annotations

import random

import pytest

from phalanx.planning.cluster import Cluster
from phalanx.planning.cost import Software
from phalanx.planning.problem import Problem
from phalanx.planning.space import meshes
from phalanx.planning.unfit import fewest_replicas
from phalanx.planning.work import Shape, transformer


@pytest.mark.parametrize("seed", range(20))
def test_the_batch_that_is_named_is_the_smallest_with_a_plan(seed: int) -> None:
    generator = random.Random(seed)
    heads = generator.choice([2, 3, 8])
    model = transformer("model", Shape(generator.randint(13, 40), 24 * heads, heads, heads, 96, 1000, 64))
    cluster = Cluster.read(f"{generator.choice([1, 3, 16, 40])}x{generator.choice([1, 4, 6])} A100")
    fewest = fewest_replicas(model, cluster)
    assert next(meshes(Problem(model, cluster, Software(), fewest), {}), None) is not None
    assert fewest == 1 or next(meshes(Problem(model, cluster, Software(), fewest - 1), {}), None) is None
