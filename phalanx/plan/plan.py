"""The plan: every decision about how a model is trained, as frozen data with a one-line text form.

Text: `pp=2,mb=4,schedule=gpipe`; what is not written has its default. A field exists only once the runtime obeys it.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from phalanx.errors import PlanError
from phalanx.plan import fields
from phalanx.plan.fields import Degrees, Policies, Slicings, bounds, check_layers, degrees_of_layer, write_policies
from phalanx.plan.offload import ROUNDING, Offload, spread
from phalanx.plan.rules import OVERLAPS, VIRTUAL_STAGES, validate
from phalanx.records import read_json

SCHEDULES = tuple(VIRTUAL_STAGES)
AXES = ("pp", "dp", "tp")
EXACT_SUM_BYTES = 16  # two numbers of float64 (`params/exact.py`)

CHUNK = 1 << 25  # elements of state on the host that come to the device at once: with masters and two moments 400 MB


@dataclass(frozen=True)
class Plan:
    """How one step is carried out.

    pp: ranks in a pipeline. dp: replicas of the pipeline, each with its part of the samples.
    tp: ranks that split the tensors of each block between them.
    mb: micro-batches per replica; the global batch never changes with it.
    slices: how the tokens of a micro-batch are cut, by relative lengths; several slicings take turns over the
        micro-batches. Empty: they are not cut.
    schedule: the order of forward and backward (`program/schedules/`).
    v: virtual stages per rank. 0, as given, stands for what the schedule needs; a plan never holds it.
    stages: blocks per stage, first to last; empty while that is not decided.
    recompute: what of a forward is computed again in the backward: `none`; `light`, everything but products and
        attention; a `unit` or a whole `block`, of which only inputs are kept. One word stands for every block;
        several are those of the model's layers, and other blocks (embedding, head) keep everything. Empty: see
        `policies`.
    zero: what is sharded over dp: 0 nothing, 1 optimizer state, 2 gradients as well, 3 parameters as well.
    zero_degree: shard over this many consecutive dp ranks and replicate across such groups; 0 stands for all dp ranks.
    gather: how long parameters stay gathered under zero=3: for a `micro-batch` or a `step`. Empty: see `gathers`.
    reduce: when gradients are reduced: after each `micro-batch` or once per `step`. Empty: see `reduces`.
    degrees: over how many of the tp ranks each unit of each layer is split; tp / degree such groups run different
        samples. One layer stands for all layers, one number for all units of its layer. Empty: tp for all.
    sequence: between units, split activations along the tokens.
    save: what is kept of the gather that sequence=yes puts before a unit: its `result` or `input`. Empty: see `saves`.
    overlap: how communication is hidden and, by some of its names, what is computed again (`rules.OVERLAPS`).
    pairs: the backward of a micro-batch and the forward of the next take turns, each hiding the other's communication.
    replicate: a unit with fewer heads than its degree lies whole on every rank, where it would be refused otherwise.
    offload: what lies in the memory of the host (`offload.py`).
    sums: `exact` where gradients, losses and norms are added up so that the order does not matter. Empty: as they come.
    """

    pp: int = 1
    dp: int = 1
    tp: int = 1
    mb: int = 1
    slices: Slicings = ()
    schedule: str = "1f1b"
    v: int = 0
    stages: tuple[int, ...] = ()
    recompute: Policies = ()
    zero: int = 0
    zero_degree: int = 0
    gather: str = ""
    reduce: str = ""
    degrees: Degrees = ()
    sequence: bool = False
    save: str = ""
    overlap: str = "none"
    pairs: bool = False
    replicate: bool = False
    offload: Offload = ()
    sums: str = ""

    def __post_init__(self) -> None:
        own: dict[str, object] = vars(self)
        for name, default in _DEFAULTS.items():
            kind = type(value := own[name])
            if value is not default and (kind is tuple or kind is not type(default)):
                object.__setattr__(self, name, fields.take_value(name, value))
        if self.v == 0:
            object.__setattr__(self, "v", VIRTUAL_STAGES.get(self.schedule, 1))
        validate(self)
        if self.recompute == self._implied or set(self.recompute) == {"none"}:
            object.__setattr__(self, "recompute", ())

    # What follows from the fields.

    @property
    def world(self) -> int:
        """The number of ranks."""
        return self.pp * self.dp * self.tp

    @property
    def num_stages(self) -> int:
        return self.pp * self.v

    def num_slices(self, micro_batch: int) -> int:
        """In how many slices the tokens of a micro-batch are computed; 1 where they are not cut."""
        return len(self._slicing(micro_batch))

    def slice_bounds(self, micro_batch: int, tokens: int) -> tuple[int, ...]:
        """Where a micro-batch of `tokens` is cut: the edges of its slices, from 0 to `tokens`."""
        return bounds(self._slicing(micro_batch), tokens)

    def _slicing(self, micro_batch: int) -> tuple[int, ...]:
        assert micro_batch >= 0
        return self.slices[micro_batch % len(self.slices)] if self.slices else (1,)

    @property
    def shards(self) -> int:
        """The number of ranks over which ZeRO shards."""
        return (self.zero_degree or self.dp) if self.zero else 1

    @property
    def gathers(self) -> str:
        """How long parameters stay gathered: `micro-batch` or `step`; empty where they are never gathered."""
        return (self.gather or "micro-batch") if self.zero == 3 else ""

    @property
    def reduces(self) -> str:
        """When gradients are reduced. Sharded gradients save memory only if no micro-batch leaves its own behind."""
        return self.reduce or ("micro-batch" if self.zero >= 2 else "step")

    @property
    def saves(self) -> str:
        """What is kept of the gather before a unit: `result` or `input`; empty where nothing is gathered."""
        return (self.save or "result") if self.sequence else ""

    @property
    def halves(self) -> int:
        """In how many interleaved parts a micro-batch is computed: 1 or 2."""
        return OVERLAPS[self.overlap].halves

    @property
    def policies(self) -> Policies:
        """What is computed again: one word for every block, or one for each layer."""
        return self.recompute or self._implied

    @property
    def _implied(self) -> Policies:
        return (OVERLAPS[self.overlap].recompute or "none",)

    def recompute_of(self, block: int, layers: Sequence[int]) -> str:
        """What of a block is computed again; a PlanError where the model has other `layers` than the plan."""
        if len(self.policies) == 1:
            return self.policies[0]
        check_layers(f"recompute={write_policies(self.policies)}", len(self.policies), len(layers))
        return self.policies[layers.index(block)] if block in layers else "none"

    def offloaded_blocks(self, stage: int, layers: Sequence[int]) -> tuple[int, ...]:
        """The blocks of a stage of which what the backward needs lies on the host in between: of its layers, or of all
        its blocks where a model has none."""
        count = dict(self.offload).get("activations")
        own = [block for block in self.stage_blocks(stage) if not layers or block in layers]
        return () if count is None else spread(own, int(count))

    def uses_to_leave(self, stage: int, layers: Sequence[int]) -> int:
        """While so many blocks are computed, what left one has the way to the host for itself."""
        own = [block for block in self.stage_blocks(stage) if not layers or block in layers]
        return -(-len(own) // max(1, len(self.offloaded_blocks(stage, layers))))

    @property
    def hosts_parameters(self) -> bool:
        """Whether parameters lie on the host and are fetched for each use."""
        return "parameters" in dict(self.offload)

    @property
    def hosted_share(self) -> float:
        """Of the elements, those whose optimizer state lies on the host."""
        found = dict(self.offload)
        return float(min(1.0, found.get("optimizer", 0.0) + found.get("optimizer-step", 0.0)))

    @property
    def steps_on_host(self) -> bool:
        """Whether the host also updates what it keeps the state of, or a part of that."""
        return "optimizer-step" in dict(self.offload)

    @property
    def device_updates(self) -> float:
        """Of what the host keeps, the share that the device updates while the host updates the rest."""
        return float(dict(self.offload).get("optimizer", 0.0)) / self.hosted_share if self.steps_on_host else 0.0

    def updates_on_device(self, bucket: int, part: int) -> bool:
        """Whether that is so for a part of a bucket: evenly over all parts."""
        before = (bucket + part) * self.device_updates
        return int(before + self.device_updates + ROUNDING) > int(before + ROUNDING)

    @property
    def adds_gradients(self) -> bool:
        """Whether what one backward gives for a parameter is added to that of other micro-batches, parts of them or
        replicas."""
        return self.mb * self.halves * self.dp > 1 or bool(self.slices) or self.sums_exactly

    @property
    def sums_exactly(self) -> bool:
        return self.sums == "exact"

    def sum_bytes(self, wide: float) -> float:
        """Of the sum of an element's gradients. wide: where it is one number."""
        return EXACT_SUM_BYTES if self.sums_exactly else wide

    @property
    def multiple(self) -> int:
        """Every micro-batch has a multiple of so many samples: equal halves, each in equal parts for every degree."""
        return self.halves * math.lcm(*(self.tp // degree for units in self.degrees for degree in units))

    def degrees_of(self, layer: int, num_units: int, num_layers: int) -> tuple[int, ...]:
        """The degrees of the units of one of the model's layers; a PlanError where the plan gives more or fewer."""
        if not self.degrees:
            return (self.tp,) * num_units
        return degrees_of_layer(self.degrees, layer, num_units, num_layers)

    def pp_index(self, stage: int) -> int:
        """Which rank of the pipeline holds a stage: round and round, or down and up again for the V of `zb-v`."""
        assert 0 <= stage < self.num_stages
        if self.schedule == "zb-v" and stage >= self.pp:
            return self.num_stages - 1 - stage
        return stage % self.pp

    def stages_of(self, pp_index: int) -> tuple[int, ...]:
        """The stages that one rank of the pipeline holds, first to last."""
        assert 0 <= pp_index < self.pp
        if self.schedule == "zb-v":
            return pp_index, self.num_stages - 1 - pp_index
        return tuple(range(pp_index, self.num_stages, self.pp))

    def stage_blocks(self, stage: int) -> range:
        """The blocks of a stage, as indices into the model's blocks."""
        assert self.stages, "the plan's stages are not decided: complete it first"
        assert 0 <= stage < self.num_stages
        start = sum(self.stages[:stage])
        return range(start, start + self.stages[stage])

    # How it is written.

    @property
    def text(self) -> str:
        """The shortest text that `parse` reads back: only what differs from the defaults."""
        return fields.write(self._unlike_default())

    @property
    def shown(self) -> str:
        """The text for people: never empty, and without the stages that they did not ask for."""
        return dataclasses.replace(self, stages=()).text or "mb=1"

    @property
    def full_text(self) -> str:
        """Like `text`, but also says every default that `complete` would otherwise decide anew."""
        unlike = self._unlike_default()
        return fields.write({name: value for name, value in self._values().items() if name in (*_COMPLETED, *unlike)})

    @property
    def kept(self) -> str:
        """What happens to activations between forward and backward, in words."""
        count = dict(self.offload).get("activations")
        moved = "" if count is None else f"; on the host in between: of {count or 'all'} layers per stage"
        return self._kept_here + moved

    @property
    def _kept_here(self) -> str:
        if len(self.policies) == 1:
            return _KEPT[self.policies[0]]
        counts = Counter(self.policies)
        layers = [f"of {count} layer{'s' * (count > 1)} {_KEPT[policy]}" for policy, count in counts.items()]
        return "; ".join([*layers, f"of other blocks {_KEPT['none']}"])

    def to_json(self) -> str:
        return json.dumps(self._values())

    @staticmethod
    def from_json(text: str) -> Plan:
        """Reads what `to_json` wrote; the error names the field and what may stand there."""
        try:
            content: object = read_json(text)
        except ValueError as error:
            raise PlanError(f"plan: not JSON: {error}", f"write for example {Plan().to_json()}") from error
        if not isinstance(content, dict):
            raise PlanError("plan: not a JSON object", f"write for example {Plan().to_json()}")
        return Plan(**fields.take(cast(dict[str, Any], content)))

    @staticmethod
    def parse(text: str) -> Plan:
        """Reads the one-line form; the error names the word and what may stand there."""
        return Plan(**fields.read(text))

    def _values(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _DEFAULTS}

    def _unlike_default(self) -> dict[str, Any]:
        default = {**_DEFAULTS, "v": VIRTUAL_STAGES[self.schedule]}
        return {name: value for name, value in self._values().items() if value != default[name]}


_DEFAULTS = {field.name: field.default for field in dataclasses.fields(Plan)}
_KEPT = {
    "none": "kept for the backward",
    "light": "recomputed in the backward but for products and attention",
    "unit": "recomputed in the backward, a unit at a time",
    "block": "recomputed in the backward, a block at a time",
}
_COMPLETED = ("pp", "dp", "mb", "schedule")
