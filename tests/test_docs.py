"""What README, docs and examples say is true: commands parse and run, links and paths lead somewhere.

A fenced block after a line `<!-- runs -->` is really run, page by page, in one folder per page, and what a block
without a language right after it shows is compared with what was printed: line by line, `…` for what may be anything,
numbers with a point to two per cent. After `<!-- runs long -->` that is done in the long run of the tests, together
with what else runs on the page, as is what the README shows of the demo. All other commands are parsed as the program
would. `python tests/test_docs.py` renews the options table in the guide and the picture in the README.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import inspect
import io
import re
import runpy
import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer

from phalanx.cli.main import app, main
from phalanx.cli.train import FLAGS, metavar
from phalanx.config import RunConfig
from phalanx.verification import plain_side
from phalanx.verification.plain_side import PlainProcess

ROOT = Path(__file__).parents[1]
GUIDE = ROOT / "docs" / "guide.md"
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
OPTIONS = re.compile(r"<!-- options -->\n(.*)<!-- /options -->", re.S)


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str
    text: str
    runs: str  # the mark before it: "", "runs" or "runs long"
    shows: str = ""  # what the block after it says is printed

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page."""
    text = page.read_text(encoding="utf-8")
    found: list[Block] = []
    for match in re.finditer(
        r"^(?:<!-- (runs|runs long) -->\n)?```(\w*)\n(.*?)^```$(?:\n```\n(.*?)^```$)?", text, re.S | re.M
    ):
        line = text.count("\n", 0, match.start()) + 1
        found.append(Block(page, line, match[2], match[3], runs=match[1] or "", shows=match[4] or ""))
    return found


BLOCKS = [block for page in PAGES for block in blocks(page)]
BASH = [block for block in BLOCKS if block.language == "bash"]
PYTHON = [block for block in BLOCKS if block.language == "python"]


def commands(block: Block) -> list[str]:
    """The lines of a shell block, with continued ones joined and comments left out."""
    joined = block.text.replace("\\\n", " ")
    return [line for line in map(str.strip, joined.splitlines()) if line and not line.startswith("#")]


def arguments(line: str) -> list[str] | None:
    """What `phalanx` is called with on this line; None if the line calls something else."""
    words = shlex.split(line, comments=True)
    return words[1:] if words[0] in ("phalanx", ".venv/bin/phalanx") else None


PHALANX = [(block, line) for block in BASH for line in commands(block) if arguments(line) is not None]


def parse(words: list[str]) -> None:
    """As the command line would, without running anything; raises what it would raise."""
    group: Any = typer.main.get_command(app)
    assert words[0] in group.commands, f"there is no verb {words[0]!r}"
    given = group.commands[words[0]].make_context(words[0], words[1:]).params
    if words[0] == "train":
        mapped = {"optimizer_options": dict(item.split("=", 1) for item in given["optimizer_options"] or ())}
        options = {**given, **mapped}
        RunConfig.create(**{k: v for k, v in options.items() if k != "config" and v not in (None, [], (), {})})


@pytest.mark.parametrize(("block", "line"), PHALANX, ids=lambda value: str(value) if isinstance(value, Block) else "")
def test_every_command_in_the_docs_parses(block: Block, line: str):
    words = arguments(line)
    assert words is not None
    parse(words)


def test_a_command_that_the_program_does_not_take_is_found():
    with pytest.raises(Exception, match="modle"):
        parse(["verify", "--modle", "gpt2"])
    with pytest.raises(Exception, match="lr_schedule"):
        parse(["train", "--lr-schedule", "cosin"])
    with pytest.raises(AssertionError, match="no verb 'plot'"):
        parse(["plot", "gpt2"])


@pytest.mark.parametrize("block", PYTHON, ids=str)
def test_every_python_call_in_the_docs_uses_options_that_exist(block: Block):
    from phalanx.training.trainer import train
    from phalanx.verification.case import Case

    options = {
        "phalanx.train": {*RunConfig.model_fields, *inspect.signature(train).parameters},
        "phalanx.RunConfig": set(RunConfig.model_fields),
        "phalanx.verify": set(inspect.signature(Case).parameters),
    }
    for node in ast.walk(ast.parse(block.text)):
        if isinstance(node, ast.Call) and (allowed := options.get(ast.unparse(node.func))) is not None:
            assert {keyword.arg for keyword in node.keywords} <= allowed, f"{block}: {ast.unparse(node)}"


@pytest.mark.parametrize("block", PYTHON, ids=str)
def test_everything_of_ours_that_python_in_the_docs_imports_exists(block: Block):
    for node in ast.walk(ast.parse(block.text)):
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.module.startswith("phalanx"):
            module = importlib.import_module(node.module)
            missing = [own.name for own in node.names if not hasattr(module, own.name) and not _is_module(node, own)]
            assert not missing, f"{block}: {ast.unparse(node)}"
        elif isinstance(node, ast.Import):
            for own in node.names:
                if own.name.startswith("phalanx"):
                    importlib.import_module(own.name)


def _is_module(node: ast.ImportFrom, name: ast.alias) -> bool:
    return importlib.util.find_spec(f"{node.module}.{name.name}") is not None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_relative_link_leads_somewhere(page: Path):
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.S | re.M)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"\w+:", target):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors(linked), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "CONTRIBUTING.md", GUIDE], ids=lambda page: page.name)
def test_every_path_of_the_project_that_is_named_exists(page: Path):
    for path in re.findall(r"`((?:phalanx|tests|docs|benchmarks|examples)/[\w./]*)`", page.read_text(encoding="utf-8")):
        assert (ROOT / path).exists(), f"{page.name} names {path}"


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def options_table() -> str:
    """Every option of RunConfig as a Markdown table."""
    rows = ["| option | value | default | meaning |", "|---|---|---|---|"]
    group = ""
    for name, field in RunConfig.model_fields.items():
        extra = field.json_schema_extra
        assert isinstance(extra, dict) and field.description
        if extra["group"] != group:
            group = str(extra["group"])
            rows.append(f"| **{group}** | | | |")
        value = "on or off" if field.annotation is bool else metavar(field.annotation).replace("|", ", ")
        rows.append(f"| `{name}` | {value} | {_default(field.default)} | {field.description} |")
    return "\n".join(rows) + "\n"


def _default(value: Any) -> str:
    if value in (None, "", (), {}):
        return ""
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"`{' '.join(map(str, value)) if isinstance(value, tuple) else value}`"


def test_the_options_table_in_the_guide_is_what_run_config_says():
    found = OPTIONS.search(GUIDE.read_text(encoding="utf-8"))
    assert found is not None
    assert found[1] == options_table(), "run python tests/test_docs.py to renew it"


def test_the_guide_names_every_flag_that_is_not_its_options_name():
    text = GUIDE.read_text(encoding="utf-8")
    for name, flag in FLAGS.items():
        assert f"`{name}` as `{flag}`" in text


def run(block: Block) -> None:
    """In this process, because starting Python and torch costs more than these commands do."""
    if block.language == "python":
        file = Path(f"block_{block.line}.py")
        file.write_text(block.text, encoding="utf-8")
        runpy.run_path(str(file), run_name="__main__")
        return
    for line in commands(block):
        words = arguments(line)
        if words is None:
            subprocess.run(["bash", "-c", line], check=True)
        else:
            assert main(words) == 0, f"{block}: {line}"


@pytest.mark.parametrize(
    ("name", "mark"),
    [
        ("README.md", "runs"), ("docs/guide.md", "runs"), ("docs/own_loop.md", "runs"), ("docs/planning.md", "runs"),
        pytest.param("README.md", "runs long", marks=pytest.mark.long),
        pytest.param("docs/guide.md", "runs long", marks=pytest.mark.long),
    ],
)  # fmt: skip
def test_what_is_marked_as_running_runs(name: str, mark: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    marked = [block for block in blocks(ROOT / name) if block.runs in ("runs", mark)]
    assert mark in {block.runs for block in marked}
    for block in marked:
        with contextlib.redirect_stdout(io.StringIO()) as said:
            run(block)
        absent = missing(block.shows, said.getvalue())
        assert not absent, f"{block}: not printed: {absent}"


@pytest.mark.long
def test_the_demo_prints_what_the_readme_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (command,) = re.findall(r"^\t\$\(BIN\)/phalanx (train .*runs/demo)$", (ROOT / "Makefile").read_text(), re.M)
    shown = next(
        block.text for block in blocks(ROOT / "README.md") if block.text.startswith("model       phalanx-demo")
    )
    with contextlib.redirect_stdout(io.StringIO()) as said:
        assert main(shlex.split(command)) == 0
    shown = re.sub(
        r"(loss|grad) [0-9.]+( \(smoothed.*?\))?", r"\1 …", shown
    )  # other Pythons have another library to learn
    absent = missing(f"…\n{shown}…\n", said.getvalue())
    assert not absent, f"not printed: {absent}"


def missing(shown: str, said: str) -> str:
    """The first line that is shown and was not printed in its place; `…` alone stands for any number of lines."""
    left = iter(said.splitlines())
    skips = False
    for line in shown.splitlines():
        if line.strip() == "…":
            skips = True
            continue
        if skips and any(alike(line, printed) for printed in left):
            skips = False
        elif skips or not alike(line, next(left, "")):
            return line
    return "" if skips or not shown or next(left, None) is None else "the end, and more was printed"


def alike(shown: str, printed: str) -> bool:
    return same_words(shown.split(), printed.split())


def same_words(shown: list[str], printed: list[str]) -> bool:
    if not shown:
        return not printed
    if shown[0] == "…":
        return any(same_words(shown[1:], printed[start:]) for start in range(len(printed) + 1))
    if not printed or not (shown[0] == printed[0] or close(shown[0], printed[0])):
        return False
    return same_words(shown[1:], printed[1:])


def close(shown: str, printed: str) -> bool:
    """Two numbers with a point that differ by two per cent at most."""
    one, other = (re.fullmatch(r"\(?(\d+\.\d+(?:e[+-]\d+)?)\)?", word) for word in (shown, printed))
    return bool(one and other) and float(one[1]) == pytest.approx(float(other[1]), rel=0.02)


def test_what_is_shown_is_compared_with_what_is_printed():
    assert missing("a 1.50 b\n…\nend\n", "a 1.51 b\nx\ny\nend\n") == ""
    assert missing("a … z\n", "a b c z\n") == "" and missing("a …\n", "a b c\n") == ""
    assert missing("a … b … z\n", "a … b c d z\n") == "" and missing("a … b\n", "a b c\n") == "a … b"
    assert missing("a 1.50 b\n", "a 1.60 b\n") == "a 1.50 b"
    assert missing("a 15 b\n", "a 16 b\n") == "a 15 b"
    assert missing("…\nend\n", "x\ny\n") == "end"
    assert missing("a\n", "a\nb\n") == "the end, and more was printed"


PICTURE = ["program", "--model", "meta-llama/Llama-3.2-1B", "--plan", "pp=4,mb=6,schedule=zb-h1", "--batch-size", "24"]


def test_the_picture_in_the_readme_is_what_the_command_below_it_draws(tmp_path: Path):
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f".venv/bin/phalanx {shlex.join(PICTURE)} --svg" in readme
    with contextlib.redirect_stdout(io.StringIO()):
        assert main([*PICTURE, "--svg", str(tmp_path / "step.svg")]) == 0
    drawn, kept = ((folder / "step.svg").read_text(encoding="utf-8") for folder in (tmp_path, ROOT / "docs"))
    assert drawn == kept, "run python tests/test_docs.py to renew it"


def test_every_mark_stands_before_a_block():
    for page in PAGES:
        marks = re.findall(r"^<!-- runs(?: long)? -->$", page.read_text(encoding="utf-8"), re.M)
        assert len(marks) == sum(bool(block.runs) for block in blocks(page)), page.name


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_every_example_runs(
    example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, plain_process: PlainProcess
):
    """With the plain process that there is, where an example starts one."""
    monkeypatch.setattr(plain_side, "PlainProcess", lambda: contextlib.nullcontext(plain_process))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", [str(example)])
    runpy.run_path(str(example), run_name="__main__")
    said = capsys.readouterr().out
    assert "loss " in said or said.count(" exact ") == 4


if __name__ == "__main__":
    GUIDE.write_text(OPTIONS.sub(lambda _: f"<!-- options -->\n{options_table()}<!-- /options -->", GUIDE.read_text()))
    main([*PICTURE, "--svg", str(ROOT / "docs" / "step.svg")])
