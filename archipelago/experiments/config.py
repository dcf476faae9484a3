"""One experiment's config: defaults, a YAML file, overrides or keyword arguments, merged and typed.

The schema is `archipelago.core.settings.ExperimentSettings` with the options of every registered entry. Whatever is
wrong with what was asked for is one `UserError` sentence, found before Ray is imported: in `given.py` what one
setting shows, in `checks.py` what only a combination shows.
"""

from __future__ import annotations

import contextlib
import dataclasses
import typing
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]  # PyYAML ships no types
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from archipelago.core.errors import UserError
from archipelago.core.schema import Leaf, leaves, quote
from archipelago.core.settings import ExperimentSettings
from archipelago.experiments.checks import (
    check,
    check_network,
    check_settings_of_methods,
    gpu_count,
    options,
)
from archipelago.experiments.config_files import read_config
from archipelago.experiments.given import (
    EITHER_OR,
    Given,
    check_range,
    check_value,
    collect,
    core_sections,
    from_mapping,
    from_override,
    full_schema,
    import_named,
    import_named_in,
    leaf_of,
    one_line,
    parse_yaml,
    wrong_type,
)
from archipelago.experiments.readers import Unread, replaced, without_unread

__all__ = [
    "Given",
    "Leaf",
    "check",
    "check_network",
    "check_settings_of_methods",
    "config_from_yaml",
    "config_to_yaml",
    "fragment",
    "full_schema",
    "gpu_count",
    "layered",
    "leaves",
    "load_config",
    "method_parts",
    "methods_of",
    "options",
    "quote",
    "read_layers",
    "replaced",
]


def _merge(file: dict[str, Given], overrides: dict[str, Given]) -> dict[str, Given]:
    """Overrides win, also over the file's other way of saying the same thing."""
    merged = {**file, **overrides}
    for pair in EITHER_OR:
        for mine, theirs in (pair, pair[::-1]):
            if mine in overrides and overrides[mine].says_something and theirs not in overrides:
                merged.pop(theirs, None)
    return merged


def _without_foreign_options(
    file: dict[str, Given], overrides: dict[str, Given], default: str
) -> dict[str, Given]:
    """Refuse options of a method that is not run; a file's options go when an override changed its method."""
    own = _chosen(file) or Given("method", default)
    method = _chosen(overrides) or own
    if method.deferred:
        return file
    parts = method_parts(method.value)
    kept = dict(file)
    for key, given in {**file, **overrides}.items():
        section = key.split(".")[0]
        if section in core_sections() or section in parts or not _of_a_method(section):
            continue
        if key in overrides or own is method or section not in method_parts(own.value):
            from archipelago.strategies import ADDONS  # imports torch: only when it is needed

            base = method.value if method.key == "method" else "BASE"
            instead = f"{base}+{section}" if section in ADDONS else section
            raise UserError(
                f"Expected options of the {method.key} {quote(method.value)} only, got {key}={given.shown}: "
                f"leave it out, or write method={instead}.",
                code="unread", setting=key,
            )  # fmt: skip
        del kept[key]
    return kept


def _of_a_method(section: str) -> bool:
    """Whether a section holds options of a method or an add-on, and not of something that methods choose from."""
    from archipelago.strategies import ADDONS, METHODS

    return any(entry.section == section for registry in (METHODS, ADDONS) for entry in registry.values())


def _chosen(given: dict[str, Given]) -> Given | None:
    """What names the methods to run: the ensemble if it has members, else the method."""
    ensemble = given.get("ensemble")
    return ensemble if ensemble is not None and ensemble.says_something else given.get("method")


def method_parts(methods: Any) -> set[str]:
    """The option sections of the bases and add-ons of a method, or of the members of an ensemble."""
    from archipelago.strategies import ADDONS, METHODS, expand, parse_method

    if isinstance(methods, list):
        try:
            parsed = [parse_method(member) for member in expand([str(each) for each in methods])]
        except UserError as error:
            raise error.rephrased(f"A member of ensemble={quote(methods)} is wrong: {error}") from error
    else:
        parsed = [parse_method(str(methods))]
    bases = {METHODS.entry(base).section for base, _ in parsed}
    return bases | {ADDONS.entry(addon).section for _, addons in parsed for addon in addons}


# From what was given to a config --------------------------------------------------------------------------


Overrides = Sequence[str] | Mapping[str, Any]  # as they are typed (`local.lr=0.1`), or as Python holds them


def load_config(
    file: Path | None = None,
    overrides: Overrides = (),
    env: Mapping[str, str] | None = None,
    small: bool = False,
) -> ExperimentSettings:
    """Defaults, then the YAML file (or its small variant), then the overrides; every mistake is one sentence.

    >>> load_config(overrides=["method=fedprox", "fedprox.mu=0.5", "data=digits"]).data.name
    'digits'
    >>> load_config(overrides={"method": "fedprox", "local": {"lr": 0.5}}).local.lr
    0.5
    """
    content = read_config(file, small) if file is not None else {}
    import_named(content)
    _import_named_by(overrides)
    from_file, from_overrides = collect(from_mapping(content, str(file))), _given_by(overrides)
    default = leaves(ExperimentSettings)["method"].default
    given = _merge(_without_foreign_options(from_file, from_overrides, default), from_overrides)
    config = without_unread(_resolve(given), lambda found: _settled(found, from_file, from_overrides))
    check(config, env)
    return config


def _settled(found: Unread, file: Mapping[str, Given], overrides: Mapping[str, Given]) -> bool:
    """Whether a file's setting lost its reader by an override: it goes with it."""
    overruled = any(key in overrides for key in found.choosers)
    return overruled and found.key in file and found.key not in overrides


def _import_named_by(overrides: Overrides) -> None:
    if isinstance(overrides, Mapping):
        import_named(overrides)
    else:
        import_named_in(overrides)


def _given_by(overrides: Overrides) -> dict[str, Given]:
    if isinstance(overrides, Mapping):
        return collect(from_mapping(overrides, ""))
    return collect(from_override(text) for text in overrides)


def read_layers(
    file: Path | None, overrides: Overrides, small: bool = False
) -> tuple[dict[str, Given], dict[str, Given], dict[str, Any] | None]:
    """(settings of the file, settings of the overrides, what either says under `sweep`; None if nothing)."""
    content = read_config(file, small) if file is not None else {}
    import_named(content)
    _import_named_by(overrides)
    sweep = content.pop("sweep", None)
    if "sweep" in content or (sweep is not None and not isinstance(sweep, dict)):
        raise UserError(
            f"Expected settings inside 'sweep' in '{file}', got {quote(sweep)}: as in seeds: [0, 1].",
            code="wrong-type", setting="sweep", given=sweep,
        )  # fmt: skip
    if isinstance(overrides, Mapping):
        mine: Overrides = {key: value for key, value in overrides.items() if key != "sweep"}
        asked = overrides.get("sweep")
    else:
        mine = [text for text in overrides if not text.strip().startswith("sweep.")]
        asked = _sweep_typed(text for text in overrides if text not in mine)
    if asked:
        if "methods" in asked:  # options of methods that it replaces go with them, as an experiment's do
            gone = _sections_of((sweep or {}).get("methods")) - _sections_of(asked["methods"])
            content = {key: value for key, value in content.items() if key not in gone - core_sections()}
        sweep = {
            **(sweep or {}),
            **{name: _over((sweep or {}).get(name), value) for name, value in asked.items()},
        }
    return fragment(content, str(file)), _given_by(mine), sweep


def _sections_of(compared: Any) -> set[str]:
    """The option sections of a sweep's methods; what does not name any is refused later."""
    found: set[str] = set()
    for each in compared if isinstance(compared, list) else []:
        named = (each.get("ensemble") or each.get("method")) if isinstance(each, Mapping) else each
        members = [
            str(member).replace("{clusters}", "1")
            for member in (named if isinstance(named, list) else [named])
        ]
        with contextlib.suppress(UserError):
            found |= method_parts(members) if named is not None else set()
    return found


def _over(before: Any, value: Any) -> Any:
    """Settings inside an axis (`sweep.grid.local.lr=[...]`) join those that are there."""
    return {**before, **value} if isinstance(before, dict) and isinstance(value, dict) else value


def _sweep_typed(texts: Iterable[str]) -> dict[str, Any]:
    """What `sweep.NAME=VALUE` and `sweep.grid.KEY=VALUE` say, as a file would hold it."""
    sweep: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.strip().removeprefix("sweep.").partition("=")
        if not equals or not value:
            raise UserError(
                f"Expected sweep.NAME=VALUE, got '{text}': write it as in sweep.seeds=[0,1,2].",
                code="not-a-setting", word=text,
            )  # fmt: skip
        name, _, inner = key.partition(".")
        try:
            read: Any = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={value}"]))
        except (yaml.YAMLError, OmegaConfBaseException) as error:
            raise UserError(
                f"Expected a value after 'sweep.{key}=', got '{value}': {one_line(error)}.",
                code="wrong-form", setting=f"sweep.{key}", given=value,
            ) from error  # fmt: skip
        sweep[name] = {**(sweep.get(name) or {}), inner: read["value"]} if inner else read["value"]
    return sweep


def fragment(content: Mapping[Any, Any], source: str) -> dict[str, Given]:
    """Settings as YAML holds them, nested or dotted, checked one by one; `source` is named in sentences."""
    import_named(content)
    return collect(from_mapping(content, source))


def layered(layers: Sequence[dict[str, Given]], may_idle: frozenset[str] = frozenset()) -> ExperimentSettings:
    """One config from several layers, the later ones winning.

    Options of methods that this config does not run are a mistake, except those in `may_idle`: names of
    methods and add-ons that other trials of the same sweep run.
    """
    merged = _all_merged(layers)
    method = methods_of([merged])
    # `local` is a method, too, but local.lr belongs to all of them.
    foreign = may_idle - method_parts(method.value) - core_sections()
    idle = {key for key in merged if key.split(".")[0] in foreign}
    merged = {key: given for key, given in merged.items() if key not in idle}
    kept = _without_foreign_options(merged, {}, method.value if method.key == "method" else "")
    plain = all(
        not given.deferred and leaf_of(key, "").type not in (dict, object) for key, given in kept.items()
    )
    return _filled(kept) if plain else _resolve(kept)


def _all_merged(layers: Sequence[dict[str, Given]]) -> dict[str, Given]:
    nothing: dict[str, Given] = {}
    return reduce(_merge, layers, nothing)


def methods_of(layers: Sequence[dict[str, Given]]) -> Given:
    """The setting, method or ensemble, that says what several layers run together."""
    return _chosen(_all_merged(layers)) or Given("method", leaves(ExperimentSettings)["method"].default)


def _filled(given: Mapping[str, Given]) -> ExperimentSettings:
    """What `_resolve` gives for checked values without references, a hundred times faster: sweeps have many."""
    config: Any = full_schema()()
    for key, each in given.items():
        leaf = leaf_of(key, each.file)
        value = each.value
        if value is not None:
            value = [leaf.type(item) for item in value] if leaf.many else leaf.type(value)
        config = replaced(config, key, value)
    return typing.cast(ExperimentSettings, config)


def config_to_yaml(config: ExperimentSettings) -> str:
    """The whole config as YAML; `config_from_yaml` and `--config` give back an equal one.

    Left out, where they say nothing: the sections of methods that are not run, the steps of a config that
    counts in epochs, and the method beside an ensemble. All of them would read as contradictions if the file
    were given to `--config`.
    """
    tree = dataclasses.asdict(config)
    defaults = leaves(ExperimentSettings)
    for leaf in defaults.values():
        if leaf.auto:
            _say_auto(tree, leaf.key)
    parts = method_parts(config.ensemble or config.method)
    for name, section in options(config).items():
        if name not in parts and section == type(section)():
            del tree[name]
    if config.local.epochs is not None and config.local.steps == defaults["local.steps"].default:
        del tree["local"]["steps"]
    if config.ensemble and config.method == defaults["method"].default:
        del tree["method"]
    return OmegaConf.to_yaml(OmegaConf.create(tree))


def _say_auto(tree: dict[str, Any], key: str) -> None:
    name, _, rest = key.partition(".")
    if rest:
        _say_auto(tree[name], rest)
    elif tree[name] is None:
        tree[name] = "auto"


def config_from_yaml(text: str) -> ExperimentSettings:
    """A config from `config_to_yaml`: types and ranges are checked, not what this machine can do."""
    content = parse_yaml(text, "config.yaml")
    import_named(content)
    given = {each.key: each for each in from_mapping(content, "config.yaml")}
    for each in given.values():
        check_value(each)
    return _resolve(given)


def _resolve(given: Mapping[str, Given]) -> ExperimentSettings:
    """The typed config: defaults, the given values in place, references (`${...}`) filled in and checked."""
    filled = OmegaConf.structured(full_schema())
    for each in given.values():
        try:
            OmegaConf.update(filled, each.key, each.value)
        except OmegaConfBaseException as error:
            raise wrong_type(leaf_of(each.key, each.file), each) from error
    for each in given.values():
        if not each.deferred:
            continue
        try:
            value = OmegaConf.select(filled, each.key, throw_on_missing=True)
        except OmegaConfBaseException as error:
            raise UserError(
                f"Expected {each.key}={each.shown} to refer to a setting or, as ${{oc.env:NAME}}, to an "
                f"environment variable: {one_line(str(error).splitlines()[0])}.",
                code="wrong-reference", setting=each.key,
            ) from error  # fmt: skip
        if isinstance(value, str) and "${" in value:
            raise UserError(
                f"Expected {each.key} without '${{', got {each.shown}: use another value.",
                code="wrong-form", setting=each.key,
            )  # fmt: skip
        check_range(leaf_of(each.key, each.file), value, each)
    return typing.cast(ExperimentSettings, OmegaConf.to_object(filled))
