"""What programs reach of devices, as a file: shares by device with what they were fitted to, and how well."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any, cast

from phalanx.errors import ConfigError, nearest
from phalanx.plan.cost import Software

NAMES = tuple(field.name for field in fields(Software))


def read_software(mapping: Mapping[str, Any], device: str) -> Software:
    """Of the section about a device; a ConfigError where there is none, or it holds something else."""
    sections = mapping.get("devices")
    if not isinstance(sections, dict) or not sections:
        raise ConfigError("holds no `devices`", "write it with `phalanx calibrate RUNS.csv --out FILE`")
    known = cast(dict[str, Any], sections)
    if device not in known:
        message = f"is about {', '.join(known)}, and the cluster has {device}"
        raise ConfigError(message, "calibrate with runs on that device, or leave the calibration out")
    shares = known[device].get("software") if isinstance(known[device], dict) else None
    if not isinstance(shares, dict):
        raise ConfigError(
            f"devices: {device} has no `software`", "write it with `phalanx calibrate RUNS.csv --out FILE`"
        )
    given = cast(dict[str, Any], shares)
    for name, value in given.items():
        if name not in NAMES:
            raise ConfigError(f"devices: {device}: unknown share {name!r}", nearest(name, NAMES))
        if not isinstance(value, int | float) or not 0 <= value < float("inf"):
            raise ConfigError(f"devices: {device}: {name} = {value!r} is not a number of 0 or more", "calibrate anew")
    return Software(**given)


def software_data(software: Software) -> dict[str, float]:
    return asdict(software)
