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


def read_settings(path: str, sections: Collection[str]) -> dict[str, Any]:
    """Flag without dashes in front -> None, a bool, a number, a text, or a list of such.

    Raises ValueError, without the file's name, where it is neither JSON nor YAML, or no such mapping.
    """
    text = Path(path).read_text(encoding="utf-8")
    told = _json(text) if path.endswith(".json") or text.lstrip().startswith("{") else _yaml(text)
    found: dict[str, Any] = {}
    for name, value in _mapping(told, "the file").items():
        inner = _mapping(value, name) if name in sections else {name: value}
        for key, entry in inner.items():
            if isinstance(entry, dict) or (isinstance(entry, list) and any(isinstance(e, (list, dict)) for e in entry)):
                raise ValueError(f"{key}: must be a value or a list of values")
            if key in found:
                raise ValueError(f"{key} stands there twice")
            found[key] = entry
    return found


def _mapping(value: object, what: str) -> dict[str, Any]:
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise ValueError(f"{what} must be a mapping of flags to values")
    return value


def _json(text: str) -> object:
    try:
        return json.loads(text)
    except json.JSONDecodeError as wrong:
        raise ValueError(f"no JSON: {wrong.msg} in line {wrong.lineno}, column {wrong.colno}") from wrong


def _yaml(text: str) -> object:
    if yaml is None:
        raise ValueError("YAML needs the package PyYAML: pip install pyyaml, or write JSON")
    try:
        return yaml.safe_load(text)
    except YAML_ERRORS as wrong:
        raise ValueError(f"no YAML: {' '.join(str(wrong).split())}") from wrong
