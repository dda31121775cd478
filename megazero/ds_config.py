"""A DeepSpeed configuration file as flags: what ds_config.json says becomes words of the command line, so that there is
one path from a setting to the run. ds_keys.py has the keys.

Raises ValueError with one line that names the file, and the key or the line and column.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from .ds_keys import (
    ACCEPTED_KEYS,
    KNOWN,
    OF_A_PLACE,
    PLACES,
    REFUSED_KEYS,
    SECTIONS,
    SETS,
    SWITCHED,
    WEAK,
    WORKED_OUT,
)

AUTO = "auto"
SWITCHES = ("wall_clock_breakdown", *(f"{section}.enabled" for section in SWITCHED))
KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a string", list: "numbers in a list"}
OPTIMIZERS = {"adam": "adam", "adamw": "adam", "sgd": "sgd", "lamb": "lamb", "muon": "muon"}


@dataclass(frozen=True)
class Asked:
    """A flag that a key stands for, without dashes, and its words; `weak`: the command line's own counts before it."""

    key: str
    flag: str
    words: tuple[str, ...] = ()
    weak: bool = False


@dataclass
class Translation:
    """What a file says. `auto`: key -> the flags that say it in its stead; `accepted`: reason -> keys."""

    asked: list[Asked] = field(default_factory=list)
    auto: dict[str, tuple[str, ...]] = field(default_factory=dict)
    accepted: dict[str, list[str]] = field(default_factory=dict)


def translate(path: Path) -> Translation:
    """The flags that a file stands for."""
    try:
        return translated(read(path))
    except ValueError as wrong:
        raise ValueError(f"{path}: {wrong}") from wrong


def read(path: Path) -> dict[str, Any]:
    """The object in a JSON file. ValueError with line and column where it is none, or has a name twice."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as wrong:
        raise ValueError(f"cannot be read: {wrong.strerror}") from wrong
    try:
        found = json.loads(text, object_pairs_hook=_once, parse_constant=_no_constant)
    except json.JSONDecodeError as wrong:
        raise ValueError(f"line {wrong.lineno} column {wrong.colno}: not JSON: {_reason(text, wrong)}") from wrong
    if not isinstance(found, dict):
        raise ValueError(f"must hold one JSON object, not {json.dumps(found)[:40]}")
    return found


def _reason(text: str, wrong: json.JSONDecodeError) -> str:
    """What is wrong, in the words of those who write such files."""
    before, here = text[: wrong.pos].rstrip(), text[wrong.pos :].lstrip()
    if here.startswith(("//", "/*", "#")):
        return "it has no comments"
    if before.endswith(",") and here[:1] in ("}", "]") or here.startswith(",") and here[1:].lstrip()[:1] in ("}", "]"):
        return "a comma stands before the end"
    return wrong.msg


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f'"{twice}" stands twice in one section')
    return dict(pairs)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


def translated(file: dict[str, Any]) -> Translation:
    """The flags that the object stands for. ValueError names every key that is unknown, or else what is missing."""
    found, unknown, refused = Translation(), [], []
    if isinstance(file.get("zero_optimization"), bool):         # the stage, before there were several
        file = file | {"zero_optimization": {"stage": int(file["zero_optimization"])}}
    leaves = dict(_leaves(file, "", unknown))
    if unknown:
        raise ValueError("; ".join(unknown))
    for key, value in leaves.items():
        if key in SWITCHES and value not in (None, AUTO):
            _word(key, value, bool)
        if not _counts(key, leaves):
            continue
        if key in REFUSED_KEYS or key in SECTIONS:
            refused += _refusals(key, value)
        elif key in ACCEPTED_KEYS:
            if value not in (None, False, AUTO):
                found.accepted.setdefault(ACCEPTED_KEYS[key], []).append(key)
        elif key in WORKED_OUT:
            _WORK.get(key, _nothing)(found, key, value, leaves)
        elif value == AUTO:
            found.auto[key] = (SETS[key][0],)
        elif value is not None:
            found.asked.append(_asked(key, *SETS[key], value))
    if refused:
        raise ValueError("; ".join(refused))
    if leaves.get("fp16.enabled") is True:
        found.asked.append(Asked("fp16.enabled", "loss-scaler", ("deepspeed",), weak=True))
    if any(asked.key.startswith("moe.") for asked in found.asked):
        found.asked.append(Asked("moe", "moe-family", ("megatron-deepspeed",), weak=True))
    if leaves.get("curriculum_learning.enabled") is True and "curriculum_learning.schedule_type" not in leaves:
        raise ValueError("curriculum_learning needs schedule_type")
    return found


def _leaves(section: dict[str, Any], prefix: str, unknown: list[str]) -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of all known keys; `unknown` gets a line for each that is not."""
    for name, value in section.items():
        key = prefix + name
        if key in KNOWN:
            if key in PLACES and isinstance(value, dict):
                strange = (name for name in value if name not in OF_A_PLACE)
                unknown += [_unknown(f"{key}.", name, value[name], OF_A_PLACE) for name in strange]
            yield key, value
        elif not any(known.startswith(f"{key}.") for known in KNOWN):
            unknown.append(_unknown(prefix, name, value, _names(prefix) or _names("")))
        elif isinstance(value, dict):
            yield from _leaves(value, f"{key}.", unknown)
        elif value is not None and value != AUTO and value is not False:
            raise ValueError(f"{key} {json.dumps(value)}: must be a section, as {{...}}")


def _unknown(prefix: str, name: str, value: Any, names: Sequence[str]) -> str:
    """The line about a name that is not one of `names` below a prefix."""
    near = difflib.get_close_matches(name, names, n=1)
    kind = "section" if isinstance(value, dict) else "key"
    return f'unknown {kind} "{prefix}{name}"' + (f'; did you mean "{prefix}{near[0]}"?' if near else "")


def _names(prefix: str) -> list[str]:
    """The known names below a prefix."""
    return list({known[len(prefix) :].partition(".")[0] for known in KNOWN if known.startswith(prefix)})


def _counts(key: str, leaves: dict[str, Any]) -> bool:
    """Whether the section of a key is on, or the key is what says that."""
    section, _, rest = key.partition(".")
    on = leaves.get(f"{section}.enabled", section == "moe")
    return section not in SWITCHED or rest == "enabled" or on in (True, AUTO)


def _refusals(key: str, value: Any) -> list[str]:
    """One line where the value asks for what is missing."""
    if key in SECTIONS:
        return [f"{key}: not available yet: {SECTIONS[key]}"] if _is_on(value) else []
    capability, harmless = REFUSED_KEYS[key]
    nothing = (None, False) if harmless is None else (None, harmless)
    told = f"{key} {json.dumps(value)}"
    if isinstance(value, dict) and harmless == "none":
        value = value.get("device", "none")
        told = f'{key}.device "{value}"'
    return [] if value == AUTO or value in nothing else [f"{told}: not available yet: {capability}"]


def _is_on(value: Any) -> bool:
    """Whether a section asks for anything: something in it is enabled, or nothing says whether."""
    if not isinstance(value, dict):
        return value not in (None, False, AUTO)
    if "enabled" in value:                  # then nothing within counts by itself
        return value["enabled"] not in (None, False, AUTO)
    switches = list(_switches(value))
    return any(switches) if switches else bool(value)


def _switches(section: dict[str, Any]) -> Iterator[bool]:
    for name, value in section.items():
        if name == "enabled":
            yield value not in (None, False, AUTO)
        elif isinstance(value, dict):
            yield from _switches(value)


def _asked(key: str, flag: str, kind: type, value: Any) -> Asked:
    """The flag with this value. ValueError where the type is another one."""
    if kind is list:
        return Asked(key, flag, tuple(_word(key, part, float, list) for part in _as_list(value)))
    if kind is bool:
        _word(key, value, bool)
        return Asked(key, flag if value else f"no-{flag}")
    return Asked(key, flag, (_word(key, value, kind),), weak=key in WEAK)


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _word(key: str, value: Any, kind: type, told: type | None = None) -> str:
    """A value as a word of the command line; whole numbers may be written as 5e8."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    fits = {bool: isinstance(value, bool), int: number and float(value).is_integer(), float: number}
    if not fits.get(kind, isinstance(value, str)):
        raise ValueError(f"{key} {json.dumps(value)}: must be {KINDS[told or kind]}")
    return str(int(value)) if number and float(value).is_integer() else str(value)


# ------------------------------------------------------------------------------------- keys that are worked out

Rule = Callable[[Translation, str, Any, dict[str, Any]], None]


def _nothing(found: Translation, key: str, value: Any, leaves: dict[str, Any]) -> None:
    """The key says only what other keys are worked out with."""


def _communication(found: Translation, key: str, value: Any, leaves: dict[str, Any]) -> None:
    if value in (None, AUTO):
        return
    if value not in ("fp32", "bf16", "bfp16"):
        raise ValueError(f"{key} {json.dumps(value)}: gradients are reduced in fp32 or bf16")
    found.asked.append(_asked(key, "grad-reduce-in-bf16", bool, value != "fp32"))


def _optimizer(found: Translation, key: str, value: Any, leaves: dict[str, Any]) -> None:
    if value in (None, AUTO):
        return
    name = _word(key, value, str).lower()
    if name not in OPTIMIZERS:
        raise ValueError(f'{key} "{value}": not available yet; there are Adam, AdamW, SGD, Lamb and Muon')
    found.asked.append(Asked(key, "optimizer", (OPTIMIZERS[name],)))
    if name in ("adam", "adamw"):
        decoupled = name == "adamw" or leaves.get("optimizer.params.adam_w_mode", True) is not False
        found.asked.append(_asked(key, "decoupled-weight-decay", bool, decoupled))


def _adam_w_mode(found: Translation, key: str, value: Any, leaves: dict[str, Any]) -> None:
    if value not in (None, AUTO):
        _word(key, value, bool)


def _betas(found: Translation, key: str, value: Any, leaves: dict[str, Any]) -> None:
    if value == AUTO:
        found.auto[key] = WORKED_OUT[key]
    elif value is not None:
        if not isinstance(value, list) or len(value) != 2:
            raise ValueError(f"{key} {json.dumps(value)}: must be two numbers in a list")
        for flag, beta in zip(WORKED_OUT[key], value):
            found.asked.append(_asked(key, flag, float, beta))


def _momentum(found: Translation, key: str, value: Any, leaves: dict[str, Any]) -> None:
    if value not in (None, AUTO):
        name = str(leaves.get("optimizer.type")).lower()
        if name not in ("sgd", "muon"):
            raise ValueError(f"{key} {json.dumps(value)}: goes with the types SGD and Muon")
        found.asked.append(_asked(key, f"{name}-momentum", float, value))


def _curriculum_type(found: Translation, key: str, value: Any, leaves: dict[str, Any]) -> None:
    if value not in (None, AUTO, "seqlen"):
        raise ValueError(f"{key} {json.dumps(value)}: not available yet; there is seqlen")


def _partition(found: Translation, key: str, value: Any, leaves: dict[str, Any]) -> None:
    if value not in (None, AUTO, "best"):
        method = _word(key, value, str)
        found.asked.append(Asked(key, "pipeline-split", (method if method == "uniform" else f"deepspeed-{method}",)))


def _checkpoint_interval(found: Translation, key: str, value: Any, leaves: dict[str, Any]) -> None:
    if value not in (None, AUTO, 0):
        words = ("full", "uniform", _word(key, value, int))
        found.asked += [Asked(key, flag, (word,)) for flag, word in zip(WORKED_OUT[key], words)]


def _tensor_size(found: Translation, key: str, value: Any, leaves: dict[str, Any]) -> None:
    if value == AUTO:
        found.auto[key] = WORKED_OUT[key]
    elif value not in (None, 0):
        found.asked.append(_asked(key, WORKED_OUT[key][0], int, value))


def _mlp_type(found: Translation, key: str, value: Any, leaves: dict[str, Any]) -> None:
    if value not in (None, AUTO):
        kind = value if key == "moe.type" else "residual" if value is True else "standard"
        found.asked.append(Asked(key, "mlp-type", (_word(key, kind, str),)))


def _unless(found: Translation, key: str, value: Any, leaves: dict[str, Any]) -> None:
    """A key whose flag says the opposite."""
    if value not in (None, AUTO):
        _word(key, value, bool)
        found.asked.append(_asked(key, WORKED_OUT[key][0], bool, not value))


def _text(key: str, leaves: dict[str, Any], default: str) -> str:
    """What a key says, or the default."""
    value = leaves.get(key)
    return default if value in (None, "", AUTO) else _word(key, value, str)


def _tensorboard(found: Translation, key: str, value: Any, leaves: dict[str, Any]) -> None:
    if value is True:
        folder = PurePosixPath(
            _text("tensorboard.output_path", leaves, ""), _text("tensorboard.job_name", leaves, "DeepSpeedJobName")
        )
        found.asked.append(Asked(key, "tensorboard-dir", (str(folder),), weak=True))


def _wandb(found: Translation, key: str, value: Any, leaves: dict[str, Any]) -> None:
    if value is True:
        project = _text("wandb.project", leaves, "deepspeed")
        found.asked.append(Asked(key, "wandb-project", (project,), weak=True))


def _timers(found: Translation, key: str, value: Any, leaves: dict[str, Any]) -> None:
    if value is True:
        found.asked.append(Asked(key, "timing-log-level", ("1",), weak=True))


def _flops_profiler(found: Translation, key: str, value: Any, leaves: dict[str, Any]) -> None:
    if value is True:
        step = leaves.get(told := "flops_profiler.profile_step")
        found.asked.append(_asked(told, "flops-profiler", int, 1 if step in (None, AUTO) else step))


_WORK: dict[str, Rule] = {
    "communication_data_type": _communication,
    "optimizer.type": _optimizer,
    "optimizer.params.adam_w_mode": _adam_w_mode,
    "optimizer.params.betas": _betas,
    "optimizer.params.momentum": _momentum,
    "curriculum_learning.curriculum_type": _curriculum_type,
    "pipeline.partition": _partition,
    "pipeline.activation_checkpoint_interval": _checkpoint_interval,
    "tensor_parallel.autotp_size": _tensor_size,
    "tensor_parallel.tp_size": _tensor_size,
    "tensor_parallel.tp.tp_size": _tensor_size,
    "moe.type": _mlp_type,
    "moe.use_residual": _mlp_type,
    "moe.drop_tokens": _unless,
    "moe.top2_2nd_expert_sampling": _unless,
    "tensorboard.enabled": _tensorboard,
    "wandb.enabled": _wandb,
    "wall_clock_breakdown": _timers,
    "flops_profiler.enabled": _flops_profiler,
}
