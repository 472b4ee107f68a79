"""Hydra's part of the command line: group=choice and key=value to a plain, resolved config; wrong keys get the nearest name."""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

GROUPS = ("domain", "model", "objective", "sampler", "trainer", "experiment")


class UsageError(Exception):
    """Something the user wrote that cannot be run; printed without a traceback."""


def _resolvers() -> None:
    from omegaconf import OmegaConf

    def frames(seconds: float, dt: float, extra: int) -> int:
        n = round(float(seconds) / float(dt))
        if abs(n * float(dt) - float(seconds)) > 1e-6 * max(1.0, float(seconds)):
            raise UsageError(f"{seconds} s is not a whole number of steps of dt = {dt} s; change windows.* or dt")
        return n + int(extra)

    def stamp(_: str = "") -> str:  # through the environment, so that DDP's re-run of the command finds the same folder
        return os.environ.setdefault("SEQDIFF_RUN_STAMP", datetime.now().strftime("%Y-%m-%d_%H-%M-%S"))

    OmegaConf.register_new_resolver("frames", frames, replace=True)
    OmegaConf.register_new_resolver("run_stamp", stamp, replace=True)


def leaves(node: Any, prefix: str = "") -> list[str]:
    """Dotted keys of a composed config, and those that the signature behind each class_path would also take."""
    keys: list[str] = []
    if not isinstance(node, dict):
        return keys
    for name, value in node.items():
        keys.append(prefix + name)
        keys += leaves(value, prefix + name + ".")
    if "class_path" in node:
        try:
            known = inspect.signature(find_object(node["class_path"]).__init__).parameters
        except UsageError:
            known = {}  # type: ignore[assignment]
        keys += [f"{prefix}init_args.{name}" for name in known if name not in ("self", "kwargs")]
    return keys


def trainer_keys() -> list[str]:
    from lightning import Trainer

    return ["trainer." + name for name in inspect.signature(Trainer.__init__).parameters if name != "self"]


def compose(overrides: Sequence[str]) -> dict[str, Any]:
    """The resolved config.

    Args:
        overrides: Hydra's. A key that the config does not list but the class behind it takes may be set without a "+".

    Raises:
        UsageError: an unknown key or choice; the text suggests the nearest one.
    """
    from hydra import compose as hydra_compose
    from hydra import initialize_config_module
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    _resolvers()
    choices = [o for o in overrides if o.split("=", 1)[0] in GROUPS]
    rest = [o for o in overrides if o not in choices]
    try:
        with initialize_config_module("seqdiff.configs", version_base="1.3"):
            base = OmegaConf.to_container(hydra_compose("config", overrides=list(choices)), resolve=False)
            known = dict.fromkeys([*leaves(base), *trainer_keys()])
            forced = [_checked(o, known) for o in rest]
            config = hydra_compose("config", overrides=[*choices, *forced])
        out = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except (HydraException, OmegaConfBaseException) as error:
        raise UsageError(_first_lines(error)) from error
    assert isinstance(out, dict)
    return {str(key): value for key, value in out.items()}


def _first_lines(error: Exception) -> str:
    text = str(error).strip()
    return text if len(text) < 1500 else text[:1500] + " ..."


def _checked(override: str, known: dict[str, None]) -> str:
    """The override, forced in where the class takes a key that the config does not list."""
    if override[:1] in ("+", "~"):
        return override
    if "=" not in override:
        raise UsageError(f"got {override!r}; expected key=value, group=choice or a --flag")
    key = override.split("=", 1)[0]
    if key in known:
        return "++" + override
    near = nearest(key, known)
    raise UsageError(
        f"unknown key {key!r}."
        + (f" Did you mean {near}?" if near else " See `seqdiff fit --print_config` for all keys.")
    )


def nearest(word: str, words: Iterable[str]) -> str:
    """The closest known words, for error texts; whole keys first, then by their last part."""
    words = list(words)
    close = difflib.get_close_matches(word, words, n=2, cutoff=0.66)
    last = word.rsplit(".", 1)[-1]
    if not close:
        close = [w for w in words if w.rsplit(".", 1)[-1] == last][:2]
    if not close:
        ends = {w.rsplit(".", 1)[-1]: w for w in words}
        close = [ends[e] for e in difflib.get_close_matches(last, list(ends), n=2, cutoff=0.66)]
    return " or ".join(close)


def find_object(path: str) -> Any:
    """The class or function named by a dotted path.

    Raises:
        UsageError: there is none.
    """
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(f"cannot import {path}: {error}") from error


def group_choices() -> dict[str, list[str]]:
    """Group -> the choices that there are."""
    from hydra import initialize_config_module
    from hydra.core.global_hydra import GlobalHydra

    with initialize_config_module("seqdiff.configs", version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        return {group: loader.get_group_options(group) for group in GROUPS}
