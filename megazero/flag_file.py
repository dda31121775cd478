"""What a file of --config says: a mapping of flags to values in JSON or YAML, alone or in sections of them."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

try:
    import yaml

    YAML_ERRORS: tuple[type[Exception], ...] = (yaml.YAMLError,)
except ImportError:
    yaml, YAML_ERRORS = None, ()


def read_settings(path: str, sections: Collection[str], flags: Collection[str]) -> dict[str, Any]:
    """Flag without dashes in front -> None, a bool, a number, a text, or a list of such.

    A name of `sections` holds a mapping of flags, or is itself one of `flags`. Raises ValueError, without the file's
    name, where it is neither JSON nor YAML, or no such mapping.
    """
    text = Path(path).read_text(encoding="utf-8")
    told = _json(text) if path.endswith(".json") or text.lstrip().startswith("{") else _yaml(text)
    found: dict[str, Any] = {}
    seen: set[str] = set()
    for name, value in _mapping(told, "the file").items():
        is_section = name in sections and (isinstance(value, dict) or name not in flags)
        inner = _mapping(value, name) if is_section else {name: value}
        for key, entry in inner.items():
            if isinstance(entry, dict) or (isinstance(entry, list) and any(isinstance(e, (list, dict)) for e in entry)):
                raise ValueError(f"{key}: must be a value or a list of values")
            if (spelt := key.replace("-", "_")) in seen:
                raise ValueError(f"{key} stands there twice")
            seen.add(spelt)
            found[key] = entry
    return found


def _mapping(value: object, what: str) -> dict[str, Any]:
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise ValueError(f"{what} must be a mapping of flags to values")
    return value


def _json(text: str) -> object:
    try:
        return json.loads(text, object_pairs_hook=_once)
    except json.JSONDecodeError as wrong:
        raise ValueError(f"no JSON: {wrong.msg} in line {wrong.lineno}, column {wrong.colno}") from wrong


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name} stands there twice")
        found[name] = value
    return found


def _yaml(text: str) -> object:
    if yaml is None:
        raise ValueError("YAML needs the package PyYAML: pip install pyyaml, or write JSON")
    try:
        _each_once(yaml.compose(text, yaml.SafeLoader))
        return yaml.safe_load(text)
    except YAML_ERRORS as wrong:
        raise ValueError(f"no YAML: {' '.join(str(wrong).split())}") from wrong


def _each_once(node: Any) -> None:
    """Raises ValueError where a name stands twice in a mapping of a YAML file, of which the last would count."""
    if not isinstance(node, yaml.MappingNode):
        return
    seen: set[str] = set()
    for key, value in node.value:
        if isinstance(key.value, str):
            if key.value in seen:
                raise ValueError(f"{key.value} stands there twice, in line {key.start_mark.line + 1} again")
            seen.add(key.value)
        _each_once(value)
