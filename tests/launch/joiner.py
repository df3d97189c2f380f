"""A program that other launchers start in tests: joins, runs one of the jobs, prints what came of it."""

from __future__ import annotations

import json
import os
import sys

from phalanx.errors import PhalanxError
from phalanx.launch.join import join, leave, run_joined
from tests.launch import jobs


def main(name: str, *arguments: str) -> int:
    context = join("cpu")
    if context is None:
        print(json.dumps("no launcher"))
        return 0
    os.environ["OMP_NUM_THREADS"] = "1"
    values = [json.loads(argument) for argument in arguments]
    try:
        result = run_joined(context, getattr(jobs, name), *values, silence=float(os.environ.get("SILENCE", "15")))
    except PhalanxError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        leave(2)
    sys.stdout.write(json.dumps([context.rank, context.node, result]) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
