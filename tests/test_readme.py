"""Every `seqdiff ...` and `make ...` line in the bash blocks of the README and the docs is one that runs: the command exists,
its keys are known and its values have the right type. Nothing is trained here."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from seqdiff.cli import COMMANDS, LIGHTNING, REQUESTS, parse
from seqdiff.compose import UsageError, compose, leaves
from seqdiff.fit import split_arguments

ROOT = Path(__file__).resolve().parents[1]
FILES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def lines_of(text: str) -> list[str]:
    """Command lines of the ```bash blocks: continued ones joined, comments, prompts and variables before them left out."""
    found = []
    for block in re.findall(r"^ *```(?:bash|sh|console)\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE):
        for line in block.replace("\\\n", " ").splitlines():
            for part in re.split(r"&&|;", line):
                words = shlex.split(part.strip().removeprefix("$ "), comments=True)
                while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                    words.pop(0)
                if words and Path(words[0]).name in ("seqdiff", "make"):
                    found.append(shlex.join([Path(words[0]).name, *words[1:]]))
    return found


def check(line: str) -> None:
    """Raises UsageError for a line that would be refused."""
    program, *words = shlex.split(line)
    if program == "make":
        targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
        for word in words:
            if "=" not in word and word not in targets:
                raise UsageError(f"no target {word} in the Makefile; it has {', '.join(sorted(targets))}")
        return
    command, args = words[0] if words else "--help", words[1:]
    if command == "--help" or "--help" in args:
        return
    overrides, flags = split_arguments(args)
    if command == "fit" and not any(f.startswith("--config") for f in flags):
        compose(overrides)
    elif command in LIGHTNING:
        known = {*leaves(compose([])), *leaves(compose(["experiment=eth_ucy"]))}
        for override in overrides:
            if override.split("=")[0] not in known:
                raise UsageError(f"unknown key in {override!r}")
        if command != "fit" and not any(o.startswith("run=") for o in overrides):
            raise UsageError(f"{command} needs run=")
    elif command in COMMANDS:
        parse(command, [a for a in args if not a.startswith("domain=")] + ([] if command == "bench" else ["domain=trajectory"])
              if command not in REQUESTS else args)  # fmt: skip
    else:
        raise UsageError(f"no command {command}")


def cases() -> list[tuple[str, str]]:
    return [
        (path.name, line) for path in FILES if path.is_file() for line in lines_of(path.read_text(encoding="utf-8"))
    ]


@pytest.mark.parametrize("name, line", cases())
def test_a_documented_command_is_one_that_runs(name, line):
    check(line)


def test_the_readme_shows_the_main_ways():
    found = lines_of((ROOT / "README.md").read_text(encoding="utf-8"))
    assert {"make demo", "make test"} <= set(found)
    for command in ("prepare", "fit", "sample", "evaluate", "review"):
        assert any(line.startswith(f"seqdiff {command} ") for line in found), f"no example of seqdiff {command}"


TEXT = r"""
```bash
$ seqdiff fit \
  a=1  # why
OUT=x make demo && .venv/bin/seqdiff sample k='[1, 2]'
pip install .
```
```
seqdiff no
```
"""


def test_lines_are_found():
    assert lines_of(TEXT) == ["seqdiff fit a=1", "make demo", "seqdiff sample 'k=[1, 2]'"]


@pytest.mark.parametrize(
    "line",
    [
        "make nothing",
        "seqdiff smaple ckpt=a out=b",
        "seqdiff fit trainer.max_step=3",
        "seqdiff fit model=dit_x",
        "seqdiff sample ckpt=a out=b k=many",
        "seqdiff evaluate sample=a",
        "seqdiff review samples=a",
        "seqdiff test store=a",
    ],
)
def test_a_wrong_line_is_noticed(line):
    with pytest.raises(UsageError):
        check(line)
