"""From a YAML file and ``key=value`` overrides to a recipe that may be run.

A run lasts hours, so everything that can be refused from text alone is refused here, in one error
that names the file, the dotted key and every fault at once.

YAML is read with plain-data rules closer to YAML 1.2 than to PyYAML's YAML 1.1, because the old
rules change values silently: ``5e-5`` became text, ``on`` a boolean, ``010`` eight and ``1:30``
ninety. Here ``5e-5`` is a float and the other three stay text, which a typed field then refuses.
Duplicate keys, aliases and tags beyond plain data are refused: a recipe is read by people.

Overrides go through the same reader, are applied before validation and must name keys that exist.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import yaml
from pydantic import ValidationError

from dspark.config.architecture import DraftConfig, Frozen, draft_class
from dspark.config.faults import did_you_mean, item_type, known_keys, refuse, show
from dspark.config.recipe import DataRecipe, Recipe
from dspark.config.strictjson import strict_json
from dspark.errors import ConfigError

Loaded = TypeVar("Loaded", Recipe, DataRecipe)


class _PlainLoader(yaml.SafeLoader):
    """Plain data only: text keys, no duplicates, no aliases, YAML 1.2 numbers and booleans."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 (PyYAML's own protocol)

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            mark = self.get_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.constructor.ConstructorError(None, None, "an alias (*name)", mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                problem = f"the key {key!r}, which is not text"
            elif key in seen:
                problem = f"the key {key!r} twice in one mapping"
            else:
                seen.add(key)
                continue
            raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
        return super().construct_mapping(node, deep)


for _tag, _pattern, _first in (
    ("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", "tTfF"),
    ("null", r"^(?:~|null|Null|NULL|)$", ["~", "n", "N", ""]),
    ("int", r"^[-+]?(?:0|[1-9][0-9]*)$", "-+0123456789"),
    (
        "float",
        r"^(?:[-+]?(?:[0-9]+\.[0-9]*(?:[eE][-+]?[0-9]+)?|\.[0-9]+(?:[eE][-+]?[0-9]+)?"
        r"|[0-9]+[eE][-+]?[0-9]+|\.(?:inf|Inf|INF))|\.(?:nan|NaN|NAN))$",
        "-+.0123456789",
    ),
):
    _PlainLoader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(_pattern), _first)


def parse_yaml(text: str, where: str) -> Any:
    """Plain data of one YAML document.

    Raises:
        ConfigError: broken YAML; ``where`` gets line and column when the reader knows them.
    """
    try:
        return yaml.load(text, Loader=_PlainLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        place = f"{where}, line {mark.line + 1}, column {mark.column + 1}" if mark else where
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
    except (RecursionError, ValueError) as error:
        place, problem = where, str(error)
    raise ConfigError(
        expected="plain YAML with each key once and no aliases",
        found=problem,
        where=place,
        fix="Correct the YAML there; quote text that holds ': ', '#', '*' or '{'.",
    )


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read, override and validate a recipe.

    Args:
        path: a YAML file.
        overrides: ``dotted.key=value`` texts; the value is YAML (``3e-3``, ``[1, 2]``, ``null``).

    Raises:
        ConfigError: unreadable file, broken YAML, unknown override or any fault of the schema.
    """
    return _load(Path(path), Recipe, overrides)


def load_prompts_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe | DataRecipe:
    """As :func:`load_recipe`, for a run's recipe or for one of prompts alone.

    The latter has neither a target nor a draft. Raises as :func:`load_recipe`.
    """
    path = Path(path)
    data = _mapping(path)
    whole = bool({"target", "draft"} & set(data))
    return _load(path, Recipe, overrides) if whole else _load(path, DataRecipe, overrides)


def _mapping(path: Path) -> dict[str, Any]:
    data = parse_yaml(_read_text(path, "a recipe file"), str(path))
    if not isinstance(data, dict):
        raise ConfigError(
            expected="a mapping of sections (name, output, target, prompts, draft, ...)",
            found="an empty file" if data is None else f"a {type(data).__name__}",
            where=str(path),
            fix="Start from one of the YAML files in recipes/.",
        )
    return data


def _load(path: Path, model: type[Loaded], overrides: Sequence[str]) -> Loaded:
    data = _mapping(path)
    touched = [apply_override(data, text, model) for text in overrides]
    try:
        return model.model_validate(data)
    except ValidationError as error:
        refuse(error, data, model, str(path), touched)


def read_json_object(path: Path, what: str) -> dict[str, Any]:
    """One JSON object from a file in which every key occurs once and every number is finite.

    Raises:
        ConfigError: unreadable, not UTF-8, not JSON, or no object; ``what`` says what it should be.
    """
    try:
        raw = strict_json(_read_text(path, what))
        if not isinstance(raw, dict):
            raise ValueError(f"a {type(raw).__name__} instead of an object")
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            expected="one JSON object with each key once",
            found=str(error),
            where=str(path),
            fix="Export the draft again.",
        ) from error
    return raw


def parse_draft_config(raw: dict[str, Any], where: str) -> DraftConfig:
    """The draft that the fields of a ``config.json`` describe; ``where`` names the file.

    Raises:
        ConfigError: sizes that do not make a draft, or fields that contradict each other.
    """
    try:
        return DraftConfig.from_json(raw)
    except ValidationError as error:
        refuse(error, raw, draft_class(raw), where, ())
    except ValueError as error:
        key = str(error).split(maxsplit=1)[0]  # from_json names the key first
        raise ConfigError(
            expected="a config.json whose fields agree with each other",
            found=str(error),
            where=f"{where}: {key}",
            fix="Export the draft again, or correct the field.",
        ) from error


# --- overrides -----------------------------------------------------------------------------------


def apply_override(data: dict[str, Any], text: str, model: type[Frozen] = Recipe) -> str:
    """Set one ``dotted.key=value`` of a ``model`` in ``data`` in place; return the dotted key.

    Sections that the file leaves out are created; list elements must exist already.

    Raises:
        ConfigError: no ``=``, no value, an unknown key, or an index outside its list.
    """
    where = f"override {text!r}"
    dotted, equals, value_text = text.partition("=")
    keys = dotted.strip().split(".")
    if not equals or not all(keys):
        _refuse_override(where, "key.path=value", "no key, or no '='", "Write train.epochs=2.")
    if not value_text.strip():
        _refuse_override(where, "a value after '='", "nothing", "Write =null, or ='' for no text.")
    value = parse_yaml(value_text, where)
    node: Any = data
    schema: Any = model
    for depth, key in enumerate(keys):
        last = depth == len(keys) - 1
        at = ".".join(keys[:depth]) or "the recipe"
        known = known_keys(schema, node)
        if known:
            if key not in known:
                _refuse_override(
                    where, f"a key of {at}", repr(key), _advice(key, known, keys[:depth])
                )
            if not isinstance(node, dict):
                found = f"{at} is {show(node)}, not a mapping"
                _refuse_override(where, "a section", found, f"Set {at} as a whole.")
            schema = known[key]
            # A section that the file leaves out starts empty: its defaults fill it later.
            if not last and key not in node and known_keys(schema, None):
                node[key] = {}
            slot: Any = key
        else:
            slot = _list_index(node, key, at, where)
            schema = item_type(schema)
        if last:
            node[slot] = value
        else:
            node = node[slot] if isinstance(node, list) else node.get(slot)
    return ".".join(keys)


def _advice(key: str, known: dict[str, Any], above: Sequence[str]) -> str:
    """What to write instead of an unknown ``key``: often it is that of a section, left out."""
    inside = [".".join([*above, name, key]) for name in known if key in known_keys(known[name])]
    return f"Did you mean {' or '.join(inside)}?" if inside else did_you_mean(key, known)


def _list_index(node: Any, key: str, at: str, where: str) -> int:
    if not isinstance(node, list):
        state = "the file does not set" if node is None else f"is {show(node)}"
        found = f"{key!r} inside {at}, which {state}"
        _refuse_override(where, "a section or a list", found, f"Set {at} as a whole: {at}=...")
    if not (key.isascii() and key.isdigit() and int(key) < len(node)):
        found = f"{key!r} for a list of {len(node)}"
        _refuse_override(where, f"an index of {at}", found, f"Indices are 0 to {len(node) - 1}.")
    return int(key)


def _refuse_override(where: str, expected: str, found: str, fix: str) -> NoReturn:
    raise ConfigError(expected=expected, found=found, where=where, fix=fix)


# --- files ---------------------------------------------------------------------------------------


def _read_text(path: Path, what: str) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        found, fix = "no such file", "Check the path; it is read from the current folder."
    except IsADirectoryError:
        found, fix = (
            "a folder",
            "Name a file; for a run's folder, the recipe (.yaml) it is made by.",
        )
    except UnicodeDecodeError as error:
        found, fix = f"bytes that are not UTF-8 ({error.reason})", "Save the file as UTF-8."
    except OSError as error:
        found, fix = error.strerror or str(error), "Check the path and its permissions."
    raise ConfigError(expected=what, found=found, where=str(path), fix=fix)
