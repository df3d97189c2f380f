from __future__ import annotations

import subprocess
import sys

import pytest

import phalanx


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_phalanx_and_its_config_load_neither_torch_nor_transformers():
    heavy = "[m for m in ('torch', 'transformers') if m in sys.modules]"
    assert run_python(f"import sys, phalanx; phalanx.RunConfig; phalanx.PhalanxError; print({heavy})") == "[]"


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'trian'"):
        phalanx.trian  # noqa: B018  # pyright: ignore


def test_dir_lists_the_public_names():
    assert {"train", "Trainer", "RunConfig", "Plan", "verify", "PhalanxError", "__version__"} <= set(dir(phalanx))
