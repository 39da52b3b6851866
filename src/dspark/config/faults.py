"""What the schema says about a place in a file: known keys, near misses and faults in plain words.

Pydantic reports every fault with a location that mixes our keys with its own union tags, and with
messages about Python types. Here they become one :class:`ConfigError` that speaks of the file: the
dotted key as the user wrote it, what is needed there and what was found.
"""

from __future__ import annotations

import difflib
import json
import re
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
    """What to do is ``mend``, or else follows from what the value ``must`` be and an example."""

    key: str
    need: str
    found: str
    mend: str = ""
    must: str = ""
    example: str = ""


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


def spelled_like(word: str, known: Iterable[str], cutoff: float = 0.7) -> list[str]:
    """What of ``known`` is spelled like ``word``, the likeliest first."""
    return difflib.get_close_matches(word, list(known), n=3, cutoff=cutoff)


def nearest(key: str, known: Iterable[str]) -> str:
    """Existing keys spelled like ``key``, joined by "or"; empty when none comes close."""
    return " or ".join(spelled_like(key, known, cutoff=0.5))


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """What to do about a ``word`` that is none of ``known``."""
    known = tuple(known)
    likely = nearest(word, known)
    return f"Did you mean {likely}?" if likely else f"Choose one of: {', '.join(known)}."


def unknown_choice(word: str, known: Iterable[str], where: str, more: str = "") -> ConfigError:
    """The error for a ``word`` that is none of ``known``; ``more`` is said behind the advice."""
    known = tuple(known)
    return ConfigError(
        expected=f"one of {', '.join(known)}",
        found=repr(word),
        where=where,
        fix=f"{did_you_mean(word, known)} {more}".rstrip(),
    )


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
    raise ConfigError(
        expected=first.need,
        found="; ".join(f"{f.key}: {f.found}" if f.key else f.found for f in faults),
        where=f"{file}: {first.key}{origin}" if first.key else file,
        fix=_fix(faults, by_override=by_override),
    ) from error


def _fix(faults: Sequence[_Fault], *, by_override: bool) -> str:
    """What to do about the first fault, and how many others are told of in ``found``."""
    first = faults[0]
    key, sign = first.key, "=" if by_override else ": "
    text = first.mend
    if not text:
        text = f"Write the override as {key}=VALUE" if by_override else f"Set {key} in the file"
        text += f"; {'VALUE' if by_override else 'it'} must {first.must}"
        text += f", for example {key}{sign}{first.example}" if first.example else ""
    text += "" if text.endswith("?") else "."
    others = len(faults) - 1
    more = "the other fault" if others == 1 else f"the {others} other faults"
    return f"{text} Mend {more} named above too." if others else text


def _fault(raw: dict[str, Any], data: dict[str, Any], model: type[BaseModel]) -> _Fault:
    keys, parent, place = _locate(raw["loc"], data, model)
    kind = raw["type"]
    if kind == "extra_forbidden":
        known = known_keys(*parent)
        near = nearest(keys[-1], known)
        hint = f"did you mean {near}?" if near else f"known: {', '.join(known)}"
        mend = f"Did you mean {near}?" if near else f"Leave {keys[-1]} out, or write a known key"
        return _Fault(".".join(keys), f"one of {', '.join(known)}", f"unknown key ({hint})", mend)
    if kind == "missing":
        mend = f"Add {'.'.join(keys)}: it has no usual value"
        return _Fault(".".join(keys), "a value", "missing (is required)", mend)
    if kind == "value_error":
        message = str(raw["ctx"]["error"])
        own = leading_key(message, *place)
        message = message.removeprefix(f"{own}: ")
        key = ".".join([*keys, *([own] if own else [])])
        mend = f"Set {key or 'the keys named above'} to what the others allow, or change those"
        return _Fault(key, "settings that agree", message, mend)
    if kind.startswith("union_tag"):
        tags = "one of " + ", ".join(_tags(place.schema))
        found = place.data.get("kind", "missing") if isinstance(place.data, dict) else place.data
        near = nearest(str(found), _tags(place.schema))
        mend = f"Did you mean {near}?" if near else ""
        return _Fault(".".join([*keys, "kind"]), tags, f"{show(found)} (must be {tags})", mend)
    need = raw["msg"].split(" should ", 1)[-1].split(" after validation")[0]
    need = "be a mapping of keys" if kind.startswith("model_") else need
    need = need.replace("a valid tuple", "a list")
    found = f"{show(raw['input'])} (must {need})"
    expected = need[3:] if need.startswith("be ") else f"a value to {need}"
    near = (
        nearest(str(raw["input"]), re.findall("'([^']*)'", need)) if kind == "literal_error" else ""
    )
    mend = f"Did you mean {near}?" if near else ""
    return _Fault(".".join(keys), expected, found, mend, need, _usual(parent.schema, keys[-1:]))


def _usual(schema: Any, key: Sequence[str]) -> str:
    """The usual value of a key in models of ``schema``, as a recipe writes it; else empty."""
    for one in _alternatives(schema):
        fields = getattr(one, "model_fields", {})
        if key and key[0] in fields and not fields[key[0]].is_required():
            value = fields[key[0]].get_default(call_default_factory=True)
            if not isinstance(value, BaseModel):
                return json.dumps(value, default=list, separators=(",", ":")).strip('"')
    return ""


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
