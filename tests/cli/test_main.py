from __future__ import annotations

import os
import re
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
import typer

import phalanx
from phalanx.cli.main import VERBS, app, main
from phalanx.config import RunConfig
from phalanx.errors import ConfigError, DataError, PhalanxError
from phalanx.launch.torch_defaults import torch_defaults
from phalanx.plan import fields
from phalanx.spellings import SAID_HERE, said_here


@pytest.fixture
def failing_verb(monkeypatch: pytest.MonkeyPatch) -> None:
    """`phalanx env` that raises a user's error; the environment is restored because --debug writes to it."""

    def fail() -> None:
        raise DataError("file [bold]x.txt[/bold] is broken", "repair it")

    monkeypatch.setenv("PHALANX_DEBUG", "0")
    monkeypatch.setattr("phalanx.cli.env.gather", fail)


def test_help_imports_neither_torch_nor_transformers_and_starts_fast():
    code = (
        "import sys; from phalanx.cli.main import main; code = main(sys.argv[1:]);"
        "print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules], code)"
    )
    for arguments in (["--help"], ["train", "--help"], ["--version"]):
        begin = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60)
        seconds = time.perf_counter() - begin
        assert done.stdout.splitlines()[-1] == "[] 0", done.stdout + done.stderr
        assert seconds < 5, "1 s is the aim; the rest is room for a busy machine"


def test_python_dash_m_phalanx_is_the_command():
    done = subprocess.run([sys.executable, "-m", "phalanx", "--version"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, f"phalanx {phalanx.__version__}")


def test_every_verb_is_in_the_help(capsys: pytest.CaptureFixture[str]):
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    for verb in VERBS:
        assert verb.__name__.rpartition(".")[2] in shown


@pytest.mark.parametrize(("asked", "heard"), [(None, "FATAL"), ("INFO", "INFO")])
def test_every_command_keeps_torch_quiet_unless_it_is_asked_to_speak(
    asked: str | None, heard: str, monkeypatch: pytest.MonkeyPatch
):
    """Before torch is imported."""
    monkeypatch.setattr(os, "environ", {"TORCH_CPP_LOG_LEVEL": asked} if asked else {})
    seen = list[str]()

    def look() -> None:
        seen.append(os.environ["TORCH_CPP_LOG_LEVEL"])
        raise ConfigError("no more")

    monkeypatch.setattr("phalanx.cli.env.gather", look)
    assert main(["env"]) == 2 and seen == [heard]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "expandable_segments:True"),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:512"}, None),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512"}, None),
    ],
)
def test_torch_allocates_segments_that_grow_unless_the_user_says_how(given: dict[str, str], expected: str | None):
    assert torch_defaults(given).get("PYTORCH_ALLOC_CONF") == expected


def test_ranks_of_a_launched_script_are_quiet_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("TORCH_CPP_LOG_LEVEL", raising=False)
    script = tmp_path / "script.py"
    script.write_text("import os; print(os.environ['TORCH_CPP_LOG_LEVEL'])")
    command = [sys.executable, "-m", "phalanx", "launch", "--ranks", "2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout.count("FATAL") == 2, done.stderr  # both may write at the same time


def test_a_users_error_is_one_red_message_with_its_hint_and_exit_code_2(
    failing_verb: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert main(["env"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err == "\x1b[1;31merror: \x1b[0mfile [bold]x.txt[/bold] is broken\n  → repair it\n"


@pytest.mark.parametrize("arguments", [["--debug", "env"], ["env", "--debug"]])
def test_debug_anywhere_on_the_line_shows_the_traceback(failing_verb: None, arguments: list[str]):
    with pytest.raises(PhalanxError):
        main(arguments)


def test_the_environment_can_ask_for_the_traceback(failing_verb: None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PHALANX_DEBUG", "1")
    with pytest.raises(PhalanxError):
        main(["env"])


@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        (["trian"], "'train'", "phalanx --help"),
        (["zzz"], "No such command 'zzz'", "phalanx --help"),
        (["train", "--batchsize", "3"], "--batch-size", "phalanx train --help"),
        (["train", "--seq-len"], "--seq-len", "--help"),
        (["train", "surplus"], "surplus", "phalanx train --help"),
        (["train", "--plan", "pp=2,", "mb=4"], "mb=4", "a plan is one word, without spaces (--plan pp=2,mb=4)"),
        (["train", "--learning-rate", "1"], "--learning-rate", "here it is --lr"),
        (["train", "--bf16"], "--bf16", "here it is --dtype bfloat16"),
        (["train", "--gradient-checkpointing"], "--gradient-checkpointing", "here it is --plan recompute=yes"),
        (["train", "--output-dir", "x"], "--output-dir", "here it is --out"),
        (["train", "--per_device_train_batch_size", "8"], "batch_size", "here it is --batch-size (the global batch"),
        (["train", "--gradient-accumulation-steps", "4"], "--gradient", "here it is --plan mb=N; --batch-size stays"),
        (["train", "--mirror", "s3://a/b"], "--mirror", "here it is --remote URL (--mirror-every keeps copies in"),
        (["program", "--model", "gpt2", "--tokens", "8"], "--tokens", "here it is --seq-len"),
        (["verify", "--model", "gpt2", "--batch", "8"], "--batch", "here it is --batch-size"),
    ],
)
def test_a_mistyped_line_names_the_mistake_and_the_help(
    arguments: list[str], message: str, hint: str, capsys: pytest.CaptureFixture[str]
):
    assert main(arguments) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("error: ") and message in first
    assert second.startswith("  → ") and hint in second


def test_the_command_alone_is_its_help(capsys: pytest.CaptureFixture[str]):
    assert main([]) == 0
    shown = capsys.readouterr()
    assert "Commands" in shown.out and shown.err == ""


def test_what_others_call_an_option_leads_to_one_that_exists():
    flags = {"--" + name.replace("_", "-") for name in RunConfig.model_fields}
    for name in SAID_HERE:
        assert name not in RunConfig.model_fields, f"{name} is an option of ours"
        words = said_here(name, flags=True)
        assert words is not None and set(re.findall(r"--[a-z-]+", words)) <= flags | {"--json"}, words
        for plan in re.findall(r"--plan (\w+=\w+)", words):
            fields.read(plan.replace("=N", "=2"))


def test_python_gets_the_same_hint_in_its_own_spelling():
    with pytest.raises(ConfigError, match="unknown option 'per_device_train_batch_size'") as caught:
        RunConfig.create(per_device_train_batch_size=3)
    assert caught.value.hint.startswith("here it is batch_size (the global batch: ")


def test_one_thing_has_one_name_in_all_verbs():
    group = typer.main.get_command(app)
    for verb in ("train", "verify", "inspect", "program"):
        options = {word for option in group.commands[verb].params for word in option.opts}  # type: ignore[attr-defined]
        assert {"--model", "--batch-size", "--seq-len", "--dtype", "--task"} <= options, verb
        assert not {"--batch", "--tokens"} & options, verb


def test_ctrl_c_is_exit_code_130(monkeypatch: pytest.MonkeyPatch):
    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("phalanx.cli.env.gather", interrupt)
    assert main(["env"]) == 130


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="what is always full is a file of Linux")
@pytest.mark.parametrize("line", [["inspect"], ["inspect", "gpt2"], ["inspect", "gpt2", "--json"]])
def test_a_full_disk_is_told_in_two_lines(line: list[str]):
    command = [sys.executable, "-c", "import sys; from phalanx.cli.main import main; sys.exit(main())", *line]
    with open("/dev/full", "w") as full:
        run = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120)
    assert run.returncode == 2
    assert run.stderr.splitlines() == [
        "error: nothing more can be written: No space left on device", "  → make room, or print to another place",
    ]  # fmt: skip


def test_a_verb_chooses_its_exit_code():
    def leave() -> None:
        raise typer.Exit(3)

    verb = types.SimpleNamespace(register=lambda app: app.command("leave")(leave))
    verb.register(app)
    try:
        assert main(["leave"]) == 3
    finally:
        app.registered_commands.pop()


def test_an_exact_hint_stands_without_guesses(capsys: pytest.CaptureFixture[str]):
    assert main(["train", "--output-dir", "x"]) == 2
    assert capsys.readouterr().err.splitlines() == ["error: No such option: --output-dir", "  → here it is --out"]
