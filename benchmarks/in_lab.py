"""A function on every rank of a lab, and what each of them saw.

    seen = run(lab, measure, task, variables=…)

Ranks of a lab are processes of their own: the function and its arguments reach them in a file, and so does the answer.
"""

from __future__ import annotations

import pickle
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from phalanx.lab.run import Lab
from phalanx.launch.join import join, run_joined

_TASK = "task"


def run(
    lab: str, measure: Callable[..., Any], *arguments: Any, device: str, variables: Sequence[str] = ()
) -> list[Any]:
    """`measure(context, *arguments)` of each rank, from its start to its end. variables: NAME=value of the ranks."""
    with tempfile.TemporaryDirectory(prefix="phalanx-lab-") as name, Lab(lab, say=say) as opened:
        if opened.effective != opened.spec:
            raise SystemExit(f"links of a known rate are needed: {'; '.join(opened.notes)}")
        folder = Path(name)
        (folder / _TASK).write_bytes(pickle.dumps((device, measure, arguments)))
        code = opened.run(["env", *variables, sys.executable, __file__, name])
        if code:
            raise SystemExit(f"a rank failed with exit code {code}")
        return [pickle.loads((folder / f"rank-{rank}").read_bytes()) for rank in range(opened.spec.ranks)]


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(folder: Path) -> None:
    device, measure, arguments = pickle.loads((folder / _TASK).read_bytes())
    context = join(device)
    assert context is not None, "a lab starts this"
    seen = run_joined(context, measure, *arguments)
    (folder / f"rank-{context.rank}").write_bytes(pickle.dumps(seen))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
