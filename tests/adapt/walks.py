"""The formation matrix: for every kind of model, plans that follow each other in one session, a step under each. Every
value of every field of a plan comes and goes.

What must be on a walk is asked of the product (`covering.py`), not written here. Random walks take every field's values
from the written ones.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields

from phalanx.errors import PlanError
from phalanx.plan.complete import complete, usable_ranks
from phalanx.plan.fields import write
from phalanx.plan.plan import AXES, Plan
from phalanx.prepare.deterministic import changes_bits

RANKS, WIDE_RANKS, SAMPLES = 4, 8, 8
SECONDS = 900  # for a walk on a busy machine: of T5 on two cores with ten others that want them it took 250


@dataclass(frozen=True)
class Kind:
    """A kind of model, as its tiny one is. units, layers: degrees by unit, alike in all layers and not. policies: what
    is computed again of each layer. uneven: blocks of two stages. cannot: fields that such a model does not take, each
    with a plan that is refused for it and what is said then."""

    name: str
    blocks: int
    units: str
    layers: str
    policies: str
    uneven: tuple[str, str]
    cannot: Mapping[str, tuple[str, str]] = field(default_factory=dict[str, tuple[str, str]])


_FOUR_LAYERS = (6, "2:1", "4:2+1:4+2*2", "none+light+unit+block", ("4-2", "2-4"))
KINDS = {
    "Llama": Kind("meta-llama/Llama-3.2-1B", *_FOUR_LAYERS),
    "GPT-2": Kind("gpt2", *_FOUR_LAYERS),
    "BERT": Kind("bert-base-cased", *_FOUR_LAYERS, cannot={
        "slices": ("slices=2,mb=2", "slices need causal attention, and in bert.encoder.layer.0 tokens see later ones"),
    }),
    "T5": Kind(  # layers of the decoder have one unit more, which attends to the encoder
        "google-t5/t5-small", 11, "2:1*4+2:1:2*4", "4:2*2+2*2+1:4:2*4", "none*2+light*2+unit*2+block*2", ("7-4", "4-7"),
    ),
}  # fmt: skip

_WALK = (
    "pp=2,dp=2,mb=2", "pp=4,mb=4,schedule=gpipe", "pp=3,mb=4", "pp=4,mb=2,schedule=zb-h1,sums=exact",
    "pp=2,dp=2,mb=2,schedule=interleaved", "pp=2,dp=2,mb=2,schedule=interleaved,v=3",
    "pp=2,dp=2,mb=4,schedule=zb-v,recompute=block", "pp=2,dp=2,mb=2,schedule=eager-1f1b,zero=1,stages={uneven[0]}",
    "pp=2,dp=2,mb=2,schedule=eager-1f1b,zero=1,stages={uneven[1]}",
    "pp=2,dp=2,mb=2,schedule=block-major,zero=2,recompute={policies}", "dp=4,recompute=unit", "dp=4,zero=1",
    "dp=4,zero=3,gather=step", "dp=4,zero=2,zero_degree=2,reduce=step,mb=2", "dp=3,zero=3,mb=2", "tp=4,mb=2", "dp=4",
    "tp=3", "tp=2,dp=2,sequence=yes,save=input,zero=3", "tp=2,dp=2,sequence=yes,overlap=optim_comm_checkpoint",
    "pp=2,tp=2,mb=2,degrees={units}", "tp=4,degrees=2,overlap=oases",
    "tp=4,degrees={layers},overlap=default_checkpoint", "tp=4,mb=2,pairs=yes,overlap=halves",
    "tp=2,dp=2,mb=2,overlap=overlap_checkpoint", "pp=1,dp=2,zero=1,offload=optimizer",
    "pp=2,dp=2,mb=2,offload=optimizer-step",
    "pp=2,dp=2,zero=3,mb=2,offload=parameters", "dp=4,offload=activations+parameters:1",
    "pp=2,dp=2,mb=2,offload=activations:1+optimizer:0.4+optimizer-step:0.6,recompute=light",
    "tp=2,dp=2,mb=2,sequence=yes,offload=optimizer:0.4+optimizer-step:0.6", "pp=1,dp=1",
    "pp=2,dp=2,mb=2",
)  # fmt: skip
_SLICED = ("pp=2,dp=2,mb=2,slices=2", "tp=2,dp=2,slices=3-5", "pp=4,mb=2,schedule=gpipe,slices=3-2-1/4", "pp=4,mb=2")
# On eight ranks: all three axes at once, and more ranks than most of these models have heads.
_WIDE = (
    "pp=2,dp=2,tp=2,mb=2,zero=3,sequence=yes", "dp=8,zero=2,zero_degree=4", "tp=8,replicate=yes",
    "pp=4,dp=2,mb=2,zero=1", "pp=2,tp=4,mb=2,degrees=2", "dp=8",
)  # fmt: skip


def walk(kind: Kind) -> list[str]:
    """Plans for four ranks."""
    plans = _WALK if "slices" in kind.cannot else (*_WALK, *_SLICED)
    return [plan.format(**vars(kind)) for plan in plans]


def wide() -> list[str]:
    """Plans for eight."""
    return list(_WIDE)


def planned(text: str, kind: Kind, ranks: int = RANKS) -> Plan:
    """As ranks complete it, but that all blocks cost the same."""
    costs = [1.0] * kind.blocks
    return complete(text, world=usable_ranks(text, ranks), batch_size=SAMPLES, costs=costs).plan


# What a deterministic run decides itself; and what changes bits all the same, or needs what does.
SLOTS_DECIDE = ("mb", "sums")
CHANGES_BITS = ("tp", "degrees", "sequence", "save", "overlap", "pairs", "replicate", "slices")


def same_bits(texts: Iterable[str]) -> list[str]:
    """Of some plans those between which a deterministic run keeps every bit, written for such a run."""
    kept = [text for text in texts if not changes_bits(Plan(), Plan.parse(text)) and not SAMPLES % Plan.parse(text).dp]
    return [",".join(word for word in text.split(",") if word.partition("=")[0] not in SLOTS_DECIDE) for text in kept]


def random_walk(kind: Kind, seed: int, length: int) -> list[str]:
    """Plans that no walk has but for the first, of any of its meshes and any of its values that go together; whether
    they go with the model's own graph is found where they are made."""
    chance, written = random.Random(seed), walk(kind)
    known = [planned(text, kind) for text in written]
    values = {each.name: {getattr(plan, each.name) for plan in known} - {each.default} for each in fields(Plan)}
    others = {name: sorted(values[name], key=repr) for name in values if name not in AXES and values[name]}
    meshes = sorted({tuple(getattr(plan, axis) for axis in AXES) for plan in known})
    drawn = (_random_plan(chance, chance.choice(meshes), others, kind) for _ in range(1, length))
    return [written[0], *drawn]


def _random_plan(chance: random.Random, mesh: Sequence[int], others: Mapping[str, Sequence[object]], kind: Kind) -> str:
    """Twice through the fields, as some go only with others."""
    given: dict[str, object] = dict(zip(AXES, mesh, strict=True))
    for name in 2 * chance.sample(list(others), len(others)):
        tried = {**given, name: chance.choice(others[name])}
        if name not in given and chance.random() < 0.3 and _is_plan(tried, kind):
            given = tried
    return write(given)


def _is_plan(given: Mapping[str, object], kind: Kind) -> bool:
    try:
        return bool(planned(write(given), kind))
    except PlanError:
        return False
