"""Records from files, stores and sockets: JSON that is read into dataclasses, with every name and type checked.

What comes from outside a process is never unpickled: a pickle may run any code, JSON none. Whatever is wrong with a
text is a `Malformed`; nothing else is raised, however the text was made.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

T = TypeVar("T")


class Malformed(ValueError):
    """A text that is not the record it should be."""


def read_record(kind: type[T], text: str | bytes) -> T:
    """The record in a JSON text; `kind` is a dataclass, or a type made of such."""
    try:
        return _adapter(kind).validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise Malformed(f"{where}: {first['msg']}" if where else first["msg"]) from None


def read_json(text: str | bytes) -> Any:
    """Whatever a JSON text holds; Malformed also where it is nested too deeply to be read."""
    try:
        return json.loads(text)
    except RecursionError:
        raise Malformed("nested too deeply") from None
    except ValueError as error:
        raise Malformed(str(error)) from None


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)
