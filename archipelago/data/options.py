"""Options that functions declare: the dataclass that annotates their parameter `options`.

    @dataclass
    class MineOptions:
        size: int = setting(100, "how many samples", at_least=1)

    def mine(settings: DataSettings, options: MineOptions, seed: int) -> Dataset: ...

The annotation is the only place that names them: what a function is given is what the schema has (`data.size=50`).
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from archipelago.core.errors import UserError
from archipelago.core.registry import NoOptions
from archipelago.core.settings import setting


def options_of(what: str, function: Callable[..., Any], signature: tuple[str, ...]) -> type:
    """The options that a function with these parameters declares; a `UserError` if it does not take them.

    >>> options_of("data set 'mine'", lambda settings, options, seed: None, ("settings", "options", "seed"))
    <class 'archipelago.core.registry.NoOptions'>
    """
    taken = inspect.signature(function)
    wanted = f"{what} to be a function ({', '.join(signature)})"
    try:
        bound = taken.bind(*signature).arguments
    except TypeError as error:
        raise UserError(
            f"Expected {wanted}, got one that takes {taken}: give it these parameters.",
            code="wrong-signature", taken=taken,
        ) from error  # fmt: skip
    names = [name for name, given in bound.items() if given == "options"]
    annotation = taken.parameters[names[0]].annotation if names else inspect.Parameter.empty
    if annotation is inspect.Parameter.empty:
        return NoOptions
    if isinstance(annotation, str):
        try:
            annotation = eval(annotation, function.__globals__)  # as typing.get_type_hints does
        except NameError as error:
            raise UserError(
                f"Expected {wanted} with a dataclass for the type of its options, got '{annotation}' ({error}): define "
                "it above the function.",
                code="wrong-signature", annotation=annotation,
            ) from error  # fmt: skip
    if not (isinstance(annotation, type) and dataclasses.is_dataclass(annotation)):
        raise UserError(
            f"Expected {wanted} with a dataclass for the type of its options, got {annotation!r}: write a dataclass of "
            "`setting` fields, or leave the type out where there are none.",
            code="wrong-signature", annotation=annotation,
        )  # fmt: skip
    return annotation


# Options that several data sets share: two entries may have one of the same name only if they mean the same by it.


@dataclass
class AttributeOptions:
    """`data.attribute=...`: for sets with several yes/no answers to each image."""

    attribute: str | None = setting(
        None,
        "sets with several yes/no answers to an image: the one to predict (default: the set's own choice)",
    )


@dataclass
class ImageSizeOptions:
    """`data.image_size=...`: for sets whose images are resized."""

    image_size: int | None = setting(
        None, "sets of resized images: side in pixels (default: the set's own, or that of the first image)",
        at_least=1, largest=4096,
    )  # fmt: skip


@dataclass
class TargetOptions:
    """`data.targets=classes`, of data sets that a user brings."""

    targets: str = setting(
        "auto", "labels of your own data: classes, or numbers to predict; auto: by their type, refused where floats "
        "are all whole numbers", choices=("auto", "classes", "numbers"),
    )  # fmt: skip
