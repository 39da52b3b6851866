"""What the schema says about a place in a file: known keys, near misses and faults in plain words.

Pydantic reports every fault with a location that mixes our keys with its own union tags, and with
messages about Python types. Here they become one :class:`ConfigError` that speaks of the file: the
dotted key as the user wrote it, what is needed there and what was found.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from types import UnionType
from typing import Annotated, Any, NamedTuple, NoReturn, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from dspark.errors import ConfigError


class _Place(NamedTuple):
    """A type annotation and the raw data at the same spot."""

    schema: Any
    data: Any


class _Fault(NamedTuple):
    key: str
    need: str
    found: str


def _alternatives(annotation: Any) -> list[Any]:
    """The types an annotation allows, without ``Annotated`` and unions around them."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return _alternatives(get_args(annotation)[0])
    if origin in (Union, UnionType):
        return [one for arg in get_args(annotation) for one in _alternatives(arg)]
    return [annotation]


def known_keys(annotation: Any, data: Any = None) -> dict[str, Any]:
    """Field name -> annotation of the model at this place; empty when it is no model.

    Where several models are possible, the ``kind`` written in ``data`` decides, if it is there.
    """
    models: list[type[BaseModel]] = [
        one
        for one in _alternatives(annotation)
        if isinstance(one, type) and issubclass(one, BaseModel)
    ]
    kind = data.get("kind") if isinstance(data, dict) else None
    tagged = [m for m in models if "kind" in m.model_fields]
    chosen = [m for m in tagged if kind in get_args(m.model_fields["kind"].annotation)] or models
    return {name: field.annotation for m in chosen for name, field in m.model_fields.items()}


def item_type(annotation: Any) -> Any:
    """The annotation of a list's elements (``None`` when no list is allowed here)."""
    for one in _alternatives(annotation):
        if get_origin(one) is tuple:
            return get_args(one)[0]
    return None


def nearest(key: str, known: Iterable[str]) -> str:
    """Existing keys spelled like ``key``, joined by "or"; empty when none comes close."""
    return " or ".join(difflib.get_close_matches(key, list(known), n=3, cutoff=0.5))


def leading_key(message: str, schema: Any, data: Any) -> str:
    """The dotted key a validator's message starts with (empty when it starts with plain words).

    A model validator sees several fields, so pydantic cannot say which one is at fault; ours name
    the key first ("vocabulary_size is folded ...").
    """
    first = message.split(maxsplit=1)[0].rstrip(":,") if message.strip() else ""
    place = _Place(schema, data)
    for key in first.split("."):
        if key not in known_keys(*place):
            return ""
        place = _step(place, key)
    return first


def show(value: Any) -> str:
    """A short ``repr`` in the words of the file (lists, not tuples)."""
    text = repr(list(value)) if isinstance(value, tuple) else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def refuse(
    error: ValidationError,
    data: dict[str, Any],
    model: type[BaseModel],
    file: str,
    touched: Sequence[str] = (),
) -> NoReturn:
    """Raise the one :class:`ConfigError` for all faults of ``data``.

    Args:
        error: what pydantic found in ``data``.
        data: the raw mapping, after overrides.
        model: the schema it was read with.
        file: named in ``where``.
        touched: dotted keys that overrides set, so that the user looks in the right place.
    """
    raws: list[dict[str, Any]] = [dict(e) for e in error.errors(include_url=False)]
    # A faulty element also makes its list "too short"; only the element is the user's mistake.
    holders = {raw["loc"][:n] for raw in raws for n in range(len(raw["loc"]))}
    raws = [r for r in raws if r["type"] != "too_short" or r["loc"] not in holders]
    faults = [_fault(raw, data, model) for raw in raws]
    first = faults[0]
    by_override = any(first.key == t or first.key.startswith(f"{t}.") for t in touched)
    origin = " (set by an override)" if by_override else ""
    count = "the fault" if len(faults) == 1 else f"the {len(faults)} faults"
    raise ConfigError(
        expected=first.need,
        found="; ".join(f"{f.key}: {f.found}" if f.key else f.found for f in faults),
        where=f"{file}: {first.key}{origin}" if first.key else file,
        fix=f"Correct {count} in {'the override' if by_override else 'the file'}.",
    ) from error


def _fault(raw: dict[str, Any], data: dict[str, Any], model: type[BaseModel]) -> _Fault:
    keys, parent, place = _locate(raw["loc"], data, model)
    kind = raw["type"]
    if kind == "extra_forbidden":
        known = known_keys(*parent)
        near = nearest(keys[-1], known)
        hint = f"did you mean {near}?" if near else f"known: {', '.join(known)}"
        return _Fault(".".join(keys), f"one of {', '.join(known)}", f"unknown key ({hint})")
    if kind == "missing":
        return _Fault(".".join(keys), "a value", "missing (is required)")
    if kind == "value_error":
        message = str(raw["ctx"]["error"])
        own = leading_key(message, *place)
        message = message.removeprefix(f"{own}: ")
        return _Fault(".".join([*keys, *([own] if own else [])]), "settings that agree", message)
    if kind.startswith("union_tag"):
        tags = "one of " + ", ".join(_tags(place.schema))
        found = place.data.get("kind", "missing") if isinstance(place.data, dict) else place.data
        return _Fault(".".join([*keys, "kind"]), tags, f"{show(found)} (must be {tags})")
    need = raw["msg"].split(" should ", 1)[-1].split(" after validation")[0]
    need = "be a mapping of keys" if kind.startswith("model_") else need
    need = need.replace("a valid tuple", "a list")
    found = f"{show(raw['input'])} (must {need})"
    expected = need[3:] if need.startswith("be ") else f"a value to {need}"
    return _Fault(".".join(keys), expected, found)


def _tags(schema: Any) -> list[str]:
    fields = [one.model_fields["kind"] for one in _alternatives(schema)]
    return [tag for field in fields for tag in get_args(field.annotation)]


def _step(place: _Place, key: str | int) -> _Place:
    if isinstance(key, int):
        inside = isinstance(place.data, (list, tuple)) and key < len(place.data)
        return _Place(item_type(place.schema), place.data[key] if inside else None)
    below = place.data.get(key) if isinstance(place.data, dict) else None
    return _Place(known_keys(*place).get(key), below)


def _locate(
    loc: Sequence[str | int], data: Any, model: type[BaseModel]
) -> tuple[list[str], _Place, _Place]:
    """Dotted keys of a pydantic location, the place that holds the last key, and its own place.

    Pydantic puts the tag of a union after the list index; people write no such key.
    """
    keys: list[str] = []
    parent = place = _Place(model, data)
    after_index = False
    for key in loc:
        tag = after_index and isinstance(place.data, dict) and place.data.get("kind") == key
        after_index = isinstance(key, int)
        if tag:
            continue
        keys.append(str(key))
        parent, place = place, _step(place, key)
    return keys, parent, place
