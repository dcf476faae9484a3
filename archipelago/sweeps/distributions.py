"""Distributions that the values of `sweep.sample` are drawn from, as text: `loguniform(0.001, 1)`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from archipelago.core.errors import UserError
from archipelago.core.randomness import generator
from archipelago.core.schema import quote

_ARGUMENTS = {"uniform": 2, "loguniform": 2, "quniform": 3, "randint": 2, "lograndint": 2, "choice": 1}


def parse_distribution(key: str, text: str) -> tuple[str, list[Any]]:
    """(name, arguments) of `loguniform(0.001, 1)` or `choice([16, 32])`.

    >>> parse_distribution("local.lr", "loguniform(1e-3, 1)")
    ('loguniform', [0.001, 1])
    """
    from omegaconf import OmegaConf

    found = re.fullmatch(r"\s*(\w+)\s*\((.*)\)\s*", text)
    name = found.group(1) if found else ""
    try:
        listed: Any = OmegaConf.to_container(OmegaConf.create(f"value: [{found.group(2) if found else ''}]"))
        arguments = listed["value"]
    except Exception:  # whatever a YAML reader says about what is no YAML
        arguments = []
    numbers = name == "choice" or all(isinstance(each, int | float) for each in arguments)
    if len(arguments) != _ARGUMENTS.get(name, -1) or not numbers or (name == "choice" and not arguments[0]):
        raise UserError(
            f"Expected a distribution for sweep.sample.{key}, got {quote(text)}: one of uniform(low, high), "
            "loguniform(low, high), quniform(low, high, step), randint(low, high), lograndint(low, high), "
            "choice([...]).",
            code="wrong-form", setting=f"sweep.sample.{key}", given=text,
        )  # fmt: skip
    if name != "choice" and not arguments[0] < arguments[1]:
        raise UserError(
            f"Expected low < high in sweep.sample.{key}, got {quote(text)}.",
            code="out-of-range", setting=f"sweep.sample.{key}", given=text,
        )  # fmt: skip
    return name, arguments


def check_whole_numbers(key: str, text: str) -> None:
    """Refuse fractions for a setting that is a whole number: a trial is known by its values, and 5.37 would be 5."""
    name, arguments = parse_distribution(key, text)
    whole = name == "quniform" and all(float(each).is_integer() for each in arguments)
    if name in ("uniform", "loguniform", "quniform") and not whole:
        instead = "lograndint" if name == "loguniform" else "randint"
        raise UserError(
            f"Expected a distribution of whole numbers for sweep.sample.{key}, got {quote(text)}: use {instead}(low, "
            "high), whose high is left out, or choice([...]).",
            code="wrong-type", setting=f"sweep.sample.{key}", given=text,
        )  # fmt: skip


def domain(key: str, text: str) -> Any:
    """Ray Tune's object for a distribution."""
    try:
        return distribution(*parse_distribution(key, text))
    except (ValueError, ZeroDivisionError) as error:
        raise UserError(
            f"Expected a distribution that Ray Tune can draw from for sweep.sample.{key}, got {quote(text)}: "
            f"{' '.join(str(error).split())}",
            code="cannot-be-made", name=text,
        ) from error  # fmt: skip


def distribution(name: str, arguments: Sequence[Any]) -> Any:
    """Ray Tune's object for a distribution that was parsed."""
    from ray import tune

    return getattr(tune, name)(*arguments)


def draw(space: Mapping[str, str], count: int, seed: int, combination: int) -> list[dict[str, Any]]:
    """`count` points, drawn by Ray Tune's own distributions from a stream of the sweep's seed."""
    stream = generator(seed, "sweep samples", client=combination)
    domains = {key: domain(key, text) for key, text in space.items()}
    return [
        {key: _plain(each.sample(random_state=stream)) for key, each in domains.items()} for _ in range(count)
    ]


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value
