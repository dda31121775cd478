"""Writes docs/flags.md from the tables that the command line is read by: `python scripts/flag_table.py`."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import MISSING
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from megazero.config import SECTIONS  # noqa: E402
from megazero.flag_families import DEFAULTS, EVIDENCE, NAMES  # noqa: E402
from megazero.flag_tables import ACCEPTED, ANSWERED, BESIDE, REFUSED, RENAMED, SETS, VALUES  # noqa: E402
from megazero.flags import READING  # noqa: E402
from megazero.settings import Setting, flag_name, section_settings  # noqa: E402

PAGE = ROOT / "docs" / "flags.md"
HEAD = """# Flags

Made by `python scripts/flag_table.py` from the tables that the command line is read by. Underscores may stand for
dashes, `=` or a space before a value, and a choice may be in either case; a flag is never abbreviated. The last of
several equal flags counts; two that contradict each other are refused. A switch `--x` has its `--no-x`. A list of
numbers or choices may be one word, with spaces or commas; 9_765_625 is a number. A flag that says nothing beside the
others (`--save-interval` without `--save`) is told at the start, as are those without effect. Coming from Megatron-LM,
Megatron-DeepSpeed or DeepSpeed: see [migration.md](migration.md)."""


def main() -> int:
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)}")
    return 0


def page() -> str:
    """The whole page."""
    return "\n".join([HEAD, *reading(), *honoured(), *spellings(), *accepted(), *refused(), ""])


def reading() -> Iterator[str]:
    """What is read, and whose defaults count."""
    yield from ("", "## What is read", "", "| flag | meaning |", "|---|---|")
    yield from (f"| `--{name}` | {cell(text)} |" for name, text in READING.items())
    yield ""
    for family, words in EVIDENCE.items():
        silent = ", ".join(said(DEFAULTS[family])) or "its silence means what megazero's does"
        yield f"- {NAMES[family]}: {silent}; told by {flags(words.split())}."
    yield "- Both: with `--disable-bias-linear` and no activation named, the exact GELU, as theirs is not fused then."


def honoured() -> Iterator[str]:
    """Every field of every section."""
    for section, kind in SECTIONS.items():
        yield from ("", f"## Honoured: {section}", "", f"{kind.__doc__}".strip(), "")
        yield from ("| flag | value | default | also | meaning |", "|---|---|---|---|---|")
        for setting in section_settings(section, kind):
            also = flags(name for name, target in RENAMED.items() if target == setting.name)
            yield (
                f"| `{flag_name(setting.name)}` | {value(setting)} | {default(setting)} | {also} | "
                f"{cell(setting.help)} |"
            )


def spellings() -> Iterator[str]:
    """Flags that set fields, some only where no other flag does."""
    yield from ("", "## Honoured: flags that set others", "", "| flag | sets | and where nothing else does |")
    yield "|---|---|---|"
    for name, (strong, weak) in SETS.items():
        own = said(strong) + ([f"`{flag_name(RENAMED[name])}`"] if name in RENAMED else [])
        yield f"| `--{name}` | {', '.join(own)} | {', '.join(said(weak))} |"
    for name, values in VALUES.items():
        for word, sets in values.items():
            if sets:
                yield f"| `--{name} {word}` | {', '.join(said(sets))} | |"


def accepted() -> Iterator[str]:
    """Reason, flags."""
    yield from ("", "## Accepted without effect", "", "A run lists those that were given, with the reason.", "")
    yield from ("| because | flags |", "|---|---|")
    yield from (f"| {cell(reason)} | {flags(word.rstrip('=*') for word in words.split())} |"
                for reason, words in ACCEPTED.items())


def refused() -> Iterator[str]:
    """Capability, flags; then what is taken all the same."""
    yield from ("", "## Refused", "", "| not available yet | flags |", "|---|---|")
    yield from (f"| {cell(reason)} | {flags(words.split())} |" for reason, words in REFUSED.items())
    yield from ("", "Of these, the following ask for nothing, or for what there is, and are taken:", "")
    for name, values in VALUES.items():
        yield f"- `--{name}` {', '.join(f'`{word}`' for word in values)}"
    for leader, words in BESIDE.items():
        yield f"- without `--{leader}`: {flags(words.split())}"
    for name, other in ANSWERED.items():
        yield f"- with `--{other}`: `--{name}`"


def flags(names: Iterable[str]) -> str:
    return " ".join(f"`--{name}`" for name in names)


def said(fields: dict[str, object]) -> list[str]:
    """Fields with values as flags."""
    words = {True: flag_name, False: lambda name: flag_name(f"no_{name}")}
    return [f"`{words[v](n)}`" if isinstance(v, bool) else f"`{flag_name(n)} {v}`" for n, v in fields.items()]


def value(setting: Setting) -> str:
    """What follows a flag."""
    if setting.kind is bool:
        return ""
    kind = " \\| ".join(setting.choices) or {int: "whole number", float: "number", str: "text"}[setting.kind]
    return f"{kind} ..." if setting.many else kind


def default(setting: Setting) -> str:
    if setting.default is MISSING:
        return "required"
    if setting.kind is bool:
        return "on" if setting.default else "off"
    if setting.default in (None, ()):
        return ""
    return " ".join(map(str, setting.default)) if setting.many else f"{setting.default}"


def cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main())
