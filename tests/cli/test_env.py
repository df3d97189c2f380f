from __future__ import annotations

import json
import platform

import pytest
import torch

from phalanx.cli import env
from phalanx.cli.main import main


def test_json_names_versions_devices_backends_and_extras(capsys: pytest.CaptureFixture[str]):
    assert main(["env", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["python"] == platform.python_version()
    assert facts["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert len(facts["devices"]) == torch.cuda.device_count()
    assert facts["gloo"] is torch.distributed.is_gloo_available()
    assert facts["cores"] >= 1 and facts["memory_bytes"] > 2**28
    assert set(facts["extras"]) == {"plots"}


def test_the_table_says_how_to_install_a_missing_extra(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(env, "EXTRAS", {"web": ("no_such_module",), "plots": ("json",)})
    assert main(["env"]) == 0
    shown = capsys.readouterr().out
    assert "web no, plots yes" in shown
    assert "pip install 'phalanx[web]'" in shown


def test_a_device_is_shown_with_its_memory(monkeypatch: pytest.MonkeyPatch):
    device = {"name": "NVIDIA H200", "memory_bytes": 139 * 2**30}
    facts = {"memory_bytes": 2**34, "devices": [device], "extras": {}, "nccl": True, "cuda": None, "cores": 1}
    shown = dict(env._rows(facts))
    assert shown["devices"] == "NVIDIA H200, 139.0 GiB"
    assert (shown["memory"], shown["nccl"], shown["cuda"], shown["cores"]) == ("16.0 GiB", "yes", "no", "1")


def test_a_package_that_is_not_installed_has_no_version():
    assert env._version("no-such-package-anywhere") is None
