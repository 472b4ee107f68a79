"""Checkpoints: Lightning's own file with a header of ours. Loaded with weights only; no pickle is read from a user's file."""

from __future__ import annotations

import hashlib
import subprocess
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import yaml

import seqdiff

KEY = "seqdiff"
FORMAT = 1


class CheckpointError(ValueError):
    """A file that is not a checkpoint of ours, or of another format."""


@lru_cache(1)
def commit() -> str:
    """The commit of the code that runs, with "+" where files were changed; "unknown" outside a checkout."""
    here = Path(__file__).resolve().parent
    try:
        run = subprocess.run(
            ["git", "describe", "--always", "--dirty=+", "--abbrev=12", "--exclude=*"],
            cwd=here, capture_output=True, text=True, timeout=10, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return run.stdout.strip() or "unknown"


def header(config: str) -> dict[str, Any]:
    """What is written beside the weights: format, version, commit, and the resolved config as yaml text."""
    return {"format": FORMAT, "version": seqdiff.__version__, "commit": commit(), "config": config}


def find(path: Path) -> Path:
    """The checkpoint file meant by `path`: itself, or the newest of a run's folder.

    Raises:
        CheckpointError: there is none.
    """
    if path.is_file():
        return path
    if not path.exists():
        raise CheckpointError(
            f"no checkpoint at {path}: give a .ckpt file or the folder of a run (`seqdiff fit` prints it)"
        )
    found = sorted(path.rglob("*.ckpt"), key=lambda p: (p.name == "last.ckpt", p.stat().st_mtime))
    if not found:
        raise CheckpointError(f"no *.ckpt file under {path}: was the run stopped before its first checkpoint?")
    return found[-1]


def read(path: Path) -> dict[str, Any]:
    """The checkpoint's content, tensors and plain values only.

    Raises:
        CheckpointError: unreadable, not ours, or of another format.
    """
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(f"{path} is not a checkpoint that can be read with weights only: {error}") from error
    if not isinstance(content, dict) or KEY not in content or "state_dict" not in content:
        raise CheckpointError(f"{path} was not written by seqdiff: it has no {KEY!r} header")
    if content[KEY]["format"] != FORMAT:
        raise CheckpointError(f"{path} has format {content[KEY]['format']}; this version of seqdiff reads {FORMAT}")
    return content


def config_of(content: dict[str, Any]) -> dict[str, Any]:
    """The resolved config of the run that wrote the checkpoint."""
    config = yaml.safe_load(content[KEY]["config"])
    if not isinstance(config, dict) or "model" not in config:
        raise CheckpointError(
            "the checkpoint holds no config to rebuild the model from: it was not trained through `seqdiff fit`"
        )
    return config


def load_start(task: Any, path: Path) -> None:
    """Weights to start a training from. What the model has beyond them (further inputs of the net, parts of the objective)
    keeps its initial value.

    Raises:
        CheckpointError: weights of other sizes, or of another model.
    """
    state = {name: value for name, value in read(path)["state_dict"].items() if not name.startswith("objective.")}
    try:
        missing, extra = task.load_state_dict(state, strict=False)
    except RuntimeError as error:
        raise CheckpointError(f"init={path} has weights of other sizes: {error}") from error
    optional = ("objective.", "net.known.", "net.guidance.")
    wrong = [name for name in missing if not name.startswith(optional)] + list(extra)
    if wrong:
        raise CheckpointError(f"init={path} is of another model: {', '.join(wrong[:5])} do not match")


def sha256(path: Path) -> str:
    """Hash of the file, hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def load_task(path: Path) -> tuple[Any, dict[str, Any]]:
    """The model with its averaged weights, in eval mode, and the resolved config.

    Raises:
        CheckpointError: see `read`; weights that do not fit the config.
    """
    from jsonargparse import ArgumentParser

    from seqdiff.task import Task

    content = read(path)
    config = config_of(content)
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(Task, "model")
    task = parser.instantiate(parser.parse_object({"model": config["model"]})).model
    try:
        task.load_state_dict(content["state_dict"])
    except RuntimeError as error:
        raise CheckpointError(f"{path}: weights and config do not fit: {error}") from error
    task.config_text = content[KEY]["config"]
    task.grids = content[KEY].get("grids", {})
    return task.eval(), config
