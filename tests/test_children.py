"""Processes that tests start get what they are given, as if Python itself had been started."""

from __future__ import annotations

import os
import sys

from tests import children


def test_a_descriptor_of_any_number_reaches_a_child() -> None:
    """Also of the number by which the process it is forked from hears us: here it is free for others."""
    _, number = children._zygote()
    reader, writer = os.pipe()
    is_free = not os.path.exists(f"/proc/self/fd/{number}")
    if is_free:
        os.dup2(writer, number)
    line = [sys.executable, "-c", f"import os; os.fstat({number})"]
    with children.Popen(line, pass_fds=[number]) as process:
        assert process.wait(timeout=60) == 0
    for opened in (reader, writer, *([number] if is_free else [])):
        os.close(opened)
