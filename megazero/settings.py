"""How one field of a configuration section becomes one flag: its type, choices, bounds and help.

A section is a frozen dataclass whose fields are made with `flag`. From the annotations alone follow the checks at
construction, the command line (flags.py) and the way back from JSON.
"""

from __future__ import annotations

import functools
import math
import operator
import types
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

Section = TypeVar("Section")

BOUNDS = {
    "at_least": (operator.ge, "at least"),
    "above": (operator.gt, "above"),
    "at_most": (operator.le, "at most"),
    "below": (operator.lt, "below"),
}


def flag(default: Any, help: str, **bounds: float) -> Any:
    """A field with its help text and its bounds (the keys of BOUNDS); `default` MISSING makes it required."""
    return field(default=default, metadata={"help": help, **bounds})


def flag_name(name: str) -> str:
    """The flag of a field: num_layers -> --num-layers."""
    return "--" + name.replace("_", "-")


@dataclass(frozen=True)
class Setting:
    """One field as the command line sees it: `kind` is bool, int, float or str; a choice is a str with `choices`."""

    section: str
    name: str
    kind: type
    choices: tuple[str, ...]
    optional: bool
    many: bool
    default: Any
    help: str
    bounds: dict[str, float]

    def check(self, value: Any) -> None:
        """Raise ValueError if `value` has the wrong type, is none of the choices or is out of bounds."""
        if value is None and self.optional:
            return
        name = flag_name(self.name)
        accepted = (int, float) if self.kind is float else self.kind
        for item in value if self.many else (value,):
            if not isinstance(item, accepted) or (isinstance(item, bool) and self.kind is not bool):
                raise ValueError(f"{name} {item!r}: must be of type {self.kind.__name__}")
            if self.choices and item not in self.choices:
                raise ValueError(f"{name} {item}: must be one of {', '.join(self.choices)}")
            if self.kind is float and not math.isfinite(item):
                raise ValueError(f"{name} {item}: must be a finite number")
            for key, bound in self.bounds.items():
                holds, words = BOUNDS[key]
                if not holds(item, bound):
                    raise ValueError(f"{name} {item}: must be {words} {bound}")


@functools.cache
def section_settings(section: str, kind: type) -> tuple[Setting, ...]:
    """The fields of one section, in order, with their types resolved."""
    hints, found = get_type_hints(kind), []
    for f in fields(kind):
        hint = hints[f.name]
        optional = get_origin(hint) in (Union, types.UnionType)
        if optional:
            (hint,) = [part for part in get_args(hint) if part is not type(None)]
        many = get_origin(hint) is tuple
        item = get_args(hint)[0] if many else hint
        choices = get_args(item) if get_origin(item) is Literal else ()
        value_kind = str if choices else item
        bounds = {key: f.metadata[key] for key in BOUNDS if key in f.metadata}
        found.append(
            Setting(section, f.name, value_kind, choices, optional, many, f.default, f.metadata["help"], bounds)
        )
    return tuple(found)


def check_fields(section: Any) -> None:
    """Types, choices and bounds of every field of a section: each __post_init__ starts here."""
    values = vars(section)
    for setting in section_settings("", type(section)):
        setting.check(values[setting.name])


def at_most_one(given: dict[str, Any]) -> None:
    """Raise ValueError if more than one of these flags has a value (None, False, 0 and () are none)."""
    words = []
    for name, value in given.items():
        if value:
            shown = " ".join(map(str, value)) if isinstance(value, tuple) else value
            words.append(name if value is True else f"{name} {shown}")
    if len(words) > 1:
        raise ValueError(f"{' and '.join(words)}: give one of them, not both")


def sections_from_dict(values: Any, kinds: dict[str, type]) -> dict[str, Any]:
    """Sections by name from a dict of dicts. ValueError names a section that does not exist."""
    if not isinstance(values, dict) or not set(values) <= set(kinds):
        raise ValueError(f"a configuration is a dict of the sections {', '.join(kinds)}, not {list(values)}")
    return {name: section_from_dict(name, kind, values.get(name, {})) for name, kind in kinds.items()}


def section_from_dict(section: str, kind: type[Section], values: Any) -> Section:
    """A section from a dict of its fields, as JSON gives it. ValueError names a field that does not exist or lacks."""
    if not isinstance(values, dict):
        raise ValueError(f"section {section} of the configuration: must be a dict of settings, not {values!r}")
    known = {setting.name: setting for setting in section_settings(section, kind)}
    for name in values:
        if name not in known:
            raise ValueError(f"section {section} of the configuration: unknown setting {name!r}")
    for name, setting in known.items():
        if setting.default is MISSING and name not in values:
            raise ValueError(f"section {section} of the configuration: setting {name!r} is missing")
    return kind(**{n: tuple(v) if known[n].many and isinstance(v, list) else v for n, v in values.items()})
