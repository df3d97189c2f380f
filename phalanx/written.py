"""How options are written: texts and files as values, and what pydantic found wrong in our words.

It knows no option by its name but those whose text has a form of its own (`config.py` has them all).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, cast, get_args, get_origin

import yaml
from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from phalanx.errors import ConfigError, PhalanxError, nearest
from phalanx.plan import fields as plan_fields
from phalanx.spellings import said_here

AUTO, SIMPLE = "auto", "simple"  # words that stand for a plan
_OF_OTHERS = ("optimizer_options", "model_options")  # options whose value holds options of something else


def parse_steps(text: str) -> tuple[int, int]:
    """'A:B' → (A, B), both included."""
    match = re.fullmatch(r"(\d+):(\d+)", text.strip())
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise ConfigError(f"option profile_steps = {text!r} is not of the form A:B with 1 ≤ A ≤ B", "write e.g. 10:12")
    return int(match[1]), int(match[2])


_UNITS = {"": 1} | {f"{u}{i}": (1024 if i else 1000) ** n for n, u in enumerate("kmgt", start=1) for i in ("", "i")}


def parse_bytes(option: str, text: str) -> int:
    """'16GiB' → 17179869184; GB are 10⁹ bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?", text.strip().lower())
    if not match or match[2] not in _UNITS or not float(match[1]):
        raise ConfigError(f"option {option} = {text!r} is not an amount of memory", "write e.g. 16GiB, 500MiB or 16GB")
    return int(float(match[1]) * _UNITS[match[2]])


def plain_value(value: Any) -> Any:
    """'0.9' → 0.9, 'true' → True: YAML reads 1e-3 as text, and the command line has nothing but texts."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value.lower())
    except ValueError:
        return value


_EXAMPLES = {"optimizer_options": "momentum=0.9", "model_options": "num_hidden_layers=4"}


def named_values(option: str, items: Sequence[str]) -> dict[str, str]:
    """['momentum=0.9'] → {'momentum': '0.9'}: an option that is a mapping, as the command line gives it."""
    for item in items:
        if "=" not in item:
            flag = "--" + option.replace("_", "-")
            raise ConfigError(
                f"{flag} {item!r} is not of the form NAME=VALUE", f"write e.g. {flag} {_EXAMPLES[option]}"
            )
    return dict(item.split("=", 1) for item in items)


def is_searched(plan: str) -> bool:
    return plan.partition(",")[0].strip() == AUTO


def given_fields(plan: str) -> str:
    """`auto,tp=2` gives `tp=2`."""
    return plan.partition(",")[2] if is_searched(plan) else plan


def plan_text(given: str | Path) -> str:
    """A plan as text, which may also stand in a file."""
    return read_plan(Path(given)) if Path(given).suffix in (".json", ".yaml", ".yml") else str(given)


def read_plan(path: Path) -> str:
    """The text of the plan in a file."""
    try:
        text = plan_fields.write(plan_fields.take(read_mapping(path)))
        plan_fields.read(text)  # refuses in a file what it refuses in a text
    except PhalanxError as error:
        raise type(error)(f"option plan: {path}: {error.message}", error.hint) from None
    return text


def read_mapping(path: Path) -> dict[str, Any]:
    """What a YAML or JSON file says, by name."""
    try:
        text = path.read_text(encoding="utf-8")
        content: Any = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", "give the path of a YAML or JSON file") from None
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"is neither YAML nor JSON: {error}", "correct the line that is named") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"holds a {type(content).__name__}, not options", "write one 'option: value' per line")
    return {str(name): value for name, value in cast(dict[Any, Any], content).items()}


def explain(error: ValidationError, options: Mapping[str, FieldInfo]) -> ConfigError:
    """What is wrong with which options, and what to do about it."""
    # A value that fits no member of a union is reported once per member; the first one stands for all.
    details = {_place(detail, options): detail for detail in reversed(error.errors(include_url=False))}
    problems = [_explain_one(detail, options) for detail in reversed(details.values())]
    if len(problems) == 1:
        return ConfigError(*problems[0])
    return ConfigError("\n  ".join([f"{len(problems)} options are wrong:", *(f"{m}; {hint}" for m, hint in problems)]))


def _place(detail: ErrorDetails, options: Mapping[str, FieldInfo]) -> tuple[int | str, ...]:
    """What a finding is about. Of a number or a word, the second part says which of the two it is not."""
    name = str(detail["loc"][0])
    return detail["loc"][:1] if name in options and _words(options[name]) else detail["loc"][:2]


def _words(field: FieldInfo) -> list[str]:
    """Where a number may stand or one of some words: these."""
    members = get_args(field.annotation)
    plain = [get_args(member)[0] if get_origin(member) is Annotated else member for member in members]
    if int not in plain and float not in plain:
        return []
    return [str(word) for member in members if get_origin(member) is Literal for word in get_args(member)]


def _explain_one(detail: ErrorDetails, options: Mapping[str, FieldInfo]) -> tuple[str, str]:
    """(what is wrong, what to do) for one of pydantic's findings."""
    name, *inner = (str(part) for part in detail["loc"])
    if detail["type"] == "extra_forbidden":
        return f"unknown option {name!r}", said_here(name, flags=False) or nearest(name, options)
    field = options[name]
    if words := _words(field):
        inner = []
        if detail["type"].endswith("_parsing"):
            given = str(detail["input"])
            return f"option {name} = {given!r} is neither a number nor one of {', '.join(words)}", nearest(given, words)
    shown = f"option {'.'.join([name, *inner[:1]])} = {detail['input']!r}"
    if detail["type"] == "literal_error":
        allowed = [str(value) for value in get_args(field.annotation)]
        return f"{shown} is not one of {', '.join(allowed)}", nearest(str(detail["input"]), allowed)
    if name in _OF_OTHERS and inner:
        return f"{shown} must be a number, a text, true, false or a list of numbers", f"{name}: {field.description}"
    if detail["type"] == "missing":
        return f"option {name} = {detail['input']!r} lacks a value", f"{name}: {field.description}"
    said = re.sub(r"^(Value error, must|\w+ should) ", "must ", detail["msg"])
    return f"{shown} {said}", f"{name}: {field.description}"
