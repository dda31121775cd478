"""The command line: argv -> Config, in the spellings of Megatron-LM and of Megatron-DeepSpeed.

Which flags there are is in the fields of the configuration and in flag_tables.py. What --config FILE says is read in
the same way, and counts less than the command line; what the file of --deepspeed_config says must agree with both.
Where all are silent a family's defaults count (--defaults), and then those of the fields.
"""

from __future__ import annotations

import difflib
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, replace
from pathlib import Path
from typing import Any

from . import ds_config
from .config import SECTIONS, Config
from .config_data import NUMBER
from .config_schedule import needs_lr
from .ds_keys import WITHOUT_DEFAULT
from .flag_families import NAMES, clipping_by_default, defaults, told_by
from .flag_file import read_settings
from .flag_idle import idle_fields
from .flag_tables import (
    ACCEPTED,
    ACCEPTED_FLAGS,
    ANSWERED,
    LEADERS,
    REFUSED,
    REFUSED_FLAGS,
    RENAMED,
    REPEATABLE,
    SETS,
    VALUES,
    WORDS_OF_SWITCHES,
)
from .settings import Setting, flag_name, section_settings

# Flags of the command line itself, which are no settings of a run.
READING = {
    "config": "FILE: JSON or YAML of these names, alone or in sections as --print-config prints them; flags count more",
    "defaults": "{megatron,megatron-deepspeed,megazero}: whose silence counts; default: as flags of one family tell",
    "help": "all flags, and leave",
}


class UsageError(ValueError):
    """The command line asks for something that cannot be; the message is one line."""


@dataclass(frozen=True)
class Given:
    """One flag as it was typed and the words that follow it."""

    typed: str
    words: list[str]

    @property
    def name(self) -> str:
        """The flag without dashes in front, underscores read as dashes."""
        return self.typed[2:].replace("_", "-")

    def one_word(self) -> str:
        if len(self.words) != 1:
            got = f"got {' '.join(self.words)}" if self.words else "got none"
            raise UsageError(f"{self.typed} takes one value, but {got}")
        return self.words[0]

    def no_word(self) -> None:
        if self.words:
            raise UsageError(f"{self.typed} is a switch and takes no value, but got {' '.join(self.words)}")


@dataclass
class Reading:
    """What the flags of one source say: field -> value, and the flag that said so."""

    given: list[Given] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    weak: dict[str, Any] = field(default_factory=dict)
    accepted: dict[str, str] = field(default_factory=dict)      # as typed -> reason
    refused: dict[str, tuple[str, str]] = field(default_factory=dict)      # name -> as typed, reason
    unknown: list[str] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        return [flag.name for flag in self.given]

    def set(self, name: str, value: Any, source: str) -> None:
        """The last of several equal flags counts; two different flags must agree."""
        before = self.sources.get(name)
        if before not in (None, source) and self.values[name] != value:
            raise UsageError(f"{before} and {source} contradict each other about {flag_name(name)}")
        self.values[name], self.sources[name] = value, source

    def last(self, name: str) -> Given | None:
        """The flag of the command line itself, as it was given last."""
        return next((flag for flag in reversed(self.given) if flag.name == name), None)

    def over(self, other: Reading) -> Reading:
        """What both say; where they differ, this one."""
        kept = {name: told for name, told in other.refused.items() if name not in self.names}
        return Reading(
            other.given + self.given, self.values, other.sources | self.sources,
            other.weak | other.values | self.weak, other.accepted | self.accepted, kept | self.refused, self.unknown,
        )


def parse(
    argv: Sequence[str], base: Config | None = None, *, shape: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict
) -> tuple[Config, list[str]]:
    """The configuration that a command line asks for, and notices to be printed once.

    With `base` (a checkpoint's configuration, say) the flags change that one, and none is required. Where
    --use-checkpoint-args is given, `shape` is called with the fields that are, and gives more. Raises UsageError.
    `--help` prints the flags and raises SystemExit.
    """
    settings = all_settings()
    given = split_words(argv)
    if any(flag.name == "help" for flag in given):
        print(help_text())
        raise SystemExit(0)
    reading = read(given, settings)
    if (file := reading.last("config")) is not None:
        reading = reading.over(read_file(file.one_word(), settings))
    read_deepspeed(reading, settings)
    if reading.unknown:
        raise UsageError("; ".join(reading.unknown))
    if refused := refusals(reading):
        raise UsageError("; ".join(refused))
    values = reading.weak | reading.values
    if values.get("use_checkpoint_args"):
        values = {**shape(values), **values}
    told = []
    if base is None:
        silent, told = family_defaults(reading, values)
        values = silent | values
        told += clipping_by_default(values, settings["clip_grad"].default)
    check_combinations(values, reading.names)
    if base is None:
        require(values, settings)
    sections = {}
    try:
        for section, kind in SECTIONS.items():
            start = vars(vars(base)[section]) if base is not None else {}
            own = {name: values[name] for name in values if settings[name].section == section}
            sections[section] = kind(**(start | own))
        config = Config(**sections)
    except ValueError as wrong:
        raise UsageError(in_keys(as_typed(str(wrong), reading.names), reading)) from wrong
    return config, [*told, *notices(reading, config)]


def read(given: list[Given], settings: dict[str, Setting]) -> Reading:
    """What these flags say."""
    reading = Reading(given)
    for flag in given:
        read_flag(flag, settings, reading)
    return reading


def read_file(path: str, settings: dict[str, Setting]) -> Reading:
    """What a file of --config says: null is a field without value, false a switch that is off. UsageError names it."""
    try:
        given, silent = [], {}
        for name, value in read_settings(path, SECTIONS, settings).items():
            dashed, field_name = name.replace("_", "-"), name.replace("-", "_")
            setting = settings.get(RENAMED.get(dashed, field_name))
            if setting is not None and (value is None or value == [] or (value is False and setting.kind is bool)):
                if value is None and not setting.optional:
                    raise ValueError(f"{name} must have a value")
                silent[setting.name] = () if setting.many else value
                continue
            switch = value is None or isinstance(value, bool)
            words = value if isinstance(value, list) else [] if switch else [value]
            negated = settings.get(field_name.removeprefix("no_"))
            known = dashed in {*ACCEPTED_FLAGS, *REFUSED_FLAGS, *SETS} or negated is not None and negated.kind is bool
            if value or not switch or not known:
                given.append(Given(f"--{name}", [str(word) for word in words]))
        reading = read(given, settings)
        if unknown := [f"unknown flag --{name}" for name in ("config", "help") if name in reading.names]:
            raise ValueError("; ".join(unknown))
        if reading.unknown:
            raise ValueError("; ".join(reading.unknown))
    except (ValueError, OSError) as wrong:
        raise UsageError(f"--config {path}: {wrong}") from wrong
    reading.values |= silent
    told = {name: source for name, source in reading.sources.items() if reading.values[name] != settings[name].default}
    return replace(reading, sources=told)


def read_deepspeed(reading: Reading, settings: dict[str, Setting]) -> None:
    """Put what the file of --deepspeed_config says into `reading`. UsageError where flags say otherwise."""
    known = reading.weak | reading.values
    path = known.get("deepspeed_config")
    if path is None:
        if known.get("deepspeed"):
            raise UsageError("--deepspeed needs --deepspeed_config FILE")
        return
    try:
        file = ds_config.translate(Path(path))
        for asked in file.asked:
            try:
                own = read([Given(f"--{asked.flag}", list(asked.words))], settings).values
            except UsageError as wrong:
                raise UsageError(f"{path}: {asked.key}: {wrong}") from wrong
            for name, value in own.items():
                if asked.weak:
                    reading.weak.setdefault(name, value)
                    continue
                if name in reading.sources and known[name] != value:
                    told = f"{flag_name(name)} {value}, but {reading.sources[name]} {known[name]} is given"
                    raise UsageError(f"{path}: {asked.key} says {told}")
                known[name] = reading.values[name] = value
                reading.sources.setdefault(name, asked.key)
    except ValueError as wrong:
        raise UsageError(str(wrong)) from wrong
    for key, flag in ((key, flag) for key, flags in file.auto.items() for flag in flags):
        if flag in WITHOUT_DEFAULT and flag.replace("-", "_") not in known:
            raise UsageError(f'{path}: {key} is "auto", but there is no --{flag}, which has no default')
    reading.accepted |= {key: reason for reason, keys in file.accepted.items() for key in keys}


def in_keys(message: str, reading: Reading) -> str:
    """The message with the keys of the file of --deepspeed_config in place of the flags that they stand for."""
    told = message
    for name, key in reading.sources.items():
        if not key.startswith("--"):
            told = re.sub(rf"{flag_name(name)}(?![\w-])", key, told)
    return told if told == message else f"{reading.values['deepspeed_config']}: {told}"


def family_defaults(reading: Reading, values: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """What the family's silence sets, and the line that says whose family it is."""
    asked = reading.last("defaults")
    if asked is not None:
        family, why = asked.one_word().casefold().replace("_", "-"), "asked for by --defaults"
        if family not in NAMES:
            raise UsageError(f"--defaults {asked.one_word()}: must be one of {', '.join(NAMES)}")
    else:
        told = told_by(reading.names)
        own = ", ".join(f"--{name}" for names in told.values() for name in names)
        if not told:
            return {}, []
        family = next(iter(told)) if len(told) == 1 else "megazero"
        whose = "guessed from" if len(told) == 1 else "for there are flags of both families,"
        why = f"{whose} {own}; --defaults says another"
    found = defaults(family, values)
    shown = [flag_name(name) if value is True else f"{flag_name(name)} {value}" for name, value in found.items()]
    return found, [f"defaults of {NAMES[family]} ({why}): {', '.join(shown) or 'they are those of megazero here'}"]


def split_words(argv: Sequence[str]) -> list[Given]:
    """Flags with the words up to the next flag, without quotes that a script has left around one."""
    found: list[Given] = []
    for word in argv:
        if word == "-h":
            found.append(Given("--help", []))
        elif word.startswith("--") and len(word) > 2:
            typed, equals, value = word.partition("=")
            found.append(Given(typed, [unquoted(value)] if equals else []))
        elif found:
            found[-1].words.append(unquoted(word))
        else:
            raise UsageError(f"unexpected word {word!r} before the first flag")
    return found


def unquoted(word: str) -> str:
    return word[1:-1] if len(word) > 1 and word[0] == word[-1] and word[0] in "'\"" else word


def read_flag(flag: Given, settings: dict[str, Setting], reading: Reading) -> None:
    """Put what one flag says into `reading`."""
    name, renamed = flag.name, RENAMED.get(flag.name)
    target = renamed or name.replace("-", "_")
    negated = target.removeprefix("no_")
    if target in settings:
        value = field_value(flag, settings[target])
        if target in REPEATABLE:
            value = reading.values.get(target, ()) + value
        reading.set(target, value, f"--{name}")
    elif negated in settings and settings[negated].kind is bool:
        flag.no_word()
        reading.set(negated, False, flag_name(negated))
    elif name in ACCEPTED_FLAGS:
        reason, arity = ACCEPTED_FLAGS[name]
        if arity == "":
            flag.no_word()
        elif arity == "=":
            flag.one_word()
        reading.accepted[flag.typed] = reason
    elif name in REFUSED_FLAGS:
        read_refused(flag, reading)
    elif name not in SETS and name not in READING:
        near = difflib.get_close_matches(name, all_names(settings), n=1)
        reading.unknown.append(f"unknown flag {flag.typed}" + (f"; did you mean --{near[0]}?" if near else ""))
    if name in SETS:
        if not renamed:
            flag.no_word()
        strong, weak = SETS[name]
        for target, value in strong.items():
            reading.set(target, value, f"--{name}")
        reading.weak |= weak


def read_refused(flag: Given, reading: Reading) -> None:
    """A flag of REFUSED: what its value sets, that it asks for nothing, or what is missing."""
    name, word = flag.name, " ".join(flag.words)
    known = VALUES.get(name, {})
    if is_number(word) and float(word).is_integer():
        word = str(int(float(word)))
    reading.refused.pop(name, None)
    if word.casefold() not in known:
        reading.refused[name] = " ".join([flag.typed, *flag.words]), REFUSED_FLAGS[name][0]
    for target, value in known.get(word.casefold(), {}).items():
        reading.set(target, value, f"--{name}")
    if known.get(word.casefold()) == {}:
        reading.accepted[flag.typed] = "this value asks for nothing"


def refusals(reading: Reading) -> list[str]:
    """A line of each capability that is missing, with the flags that ask for it. What says something only beside a flag
    that is not given becomes accepted."""
    reasons: dict[str, list[str]] = {}
    names = set(reading.names)
    for name, (shown, reason) in reading.refused.items():
        leader = LEADERS.get(name, name)
        if leader not in names:
            reading.accepted[shown.split()[0]] = f"it says nothing without --{leader}"
        elif ANSWERED.get(name) in names:
            reading.accepted[shown.split()[0]] = f"--{ANSWERED[name]} says what it asks for"
        else:
            reasons.setdefault(reason, []).append(shown)
    return [f"{', '.join(shown)}: not available yet: {reason}" for reason, shown in reasons.items()]


def field_value(flag: Given, setting: Setting) -> Any:
    """The value of a field from the words after its flag."""
    if setting.kind is bool:
        if flag.words not in WORDS_OF_SWITCHES.get(flag.name, ()):
            flag.no_word()
        return True
    if setting.many:
        apart = setting.kind is not str or setting.choices      # other texts may have a comma or a space in them
        words = re.split(r"[,\s]+", " ".join(flag.words).strip(" ,'\"")) if apart else flag.words
        if not flag.words or words == [""]:
            raise UsageError(f"{flag.typed} takes values, but got none")
        return tuple(one_value(flag, word, setting) for word in words)
    if setting.name == "split" and flag.words:
        return " ".join(flag.words).strip(" '\"")
    return one_value(flag, flag.one_word(), setting)


def one_value(flag: Given, word: str, setting: Setting) -> Any:
    """The value that one word gives to a field, or to one item of it."""
    if setting.choices:
        same = [choice for choice in setting.choices if choice.casefold() == word.casefold()]
        value: Any = same[0] if same else word
    elif setting.kind in (int, float):
        word = re.sub(r"(?<=\d)_(?=\d)", "", word)          # 9_765_625, as Python has it
        if not is_number(word) or (setting.kind is int and not float(word).is_integer()):
            kind = "a whole number" if setting.kind is int else "a number"
            raise UsageError(f"{flag.typed} {word}: must be {kind}")
        whole = re.fullmatch(r"[-+]?\d+", word)
        value = int(word) if whole and setting.kind is int else setting.kind(float(word))
    elif not word:
        raise UsageError(f"{flag.typed} takes a value, but it is empty")
    else:
        value = word
    try:
        setting.check((value,) if setting.many else value)
    except ValueError as wrong:
        raise UsageError(as_typed(str(wrong), [flag.name])) from wrong
    return value


def is_number(word: str) -> bool:
    return NUMBER.fullmatch(word) is not None


def check_combinations(values: dict[str, Any], names: list[str]) -> None:
    """Flags that a Config no longer shows."""
    if "no-position-embedding" in names and values["position_embedding_type"] == "learned_absolute":
        raise UsageError("--no-position-embedding and --position-embedding-type learned_absolute contradict each other")
    stages = values.get("pipeline_model_parallel_size", 1)
    if "no-pipeline-parallel" in names and stages > 1:
        raise UsageError(f"--no-pipeline-parallel and --pipeline-model-parallel-size {stages} contradict each other")
    if values.get("grad_reduce_in_bf16") and "accumulate-allreduce-grads-in-fp32" in names:
        raise UsageError("--grad-reduce-in-bf16 and --accumulate-allreduce-grads-in-fp32 contradict each other")
    printing = {"print_layout", "print_lr", "print_config"} & set(values)
    if "world_size" in values and not printing:
        raise UsageError("--world-size goes with --print-layout or --print-lr: a run takes its size from its launcher")


def require(values: dict[str, Any], settings: dict[str, Setting]) -> None:
    """UsageError that lists every flag that is missing. A command that only prints needs less."""
    layout, lr, config = (bool(values.get(name)) for name in ("print_layout", "print_lr", "print_config"))
    if layout:
        values.setdefault("micro_batch_size", 1)  # no layout depends on it
    required = [name for name, setting in settings.items() if setting.default is MISSING]
    missing = [flag_name(name) for name in required if name not in values]
    if not layout and not config:
        if "lr" not in values and needs_lr(values.get("lr_scheduler"), values.get("warmup_max_lr")):
            missing.append("--lr")
        if not {"train_iters", "train_samples", "train_tokens"} & set(values):
            missing.append("--train-iters (or --train-samples)")
        if not lr and not any(values.get(name) for name in ("data_path", "train_data_path", "mock_data")):
            missing.append("--data-path (or --mock-data)")
    if not lr and not config and "vocab_size" not in values:
        null = values.get("tokenizer_type", "").casefold().startswith("null")
        sources = {"data_path", "train_data_path", "tokenizer_type", "tokenizer_model", "vocab_file"}
        if null or not sources & set(values):
            missing.append("--vocab-size")
    if missing:
        raise UsageError(f"missing: {', '.join(missing)}")


def notices(reading: Reading, config: Config) -> list[str]:
    """One line about all flags that were accepted and change nothing."""
    reasons: dict[str, list[str]] = {}
    for typed, reason in reading.accepted.items():
        reasons.setdefault(reason, []).append(typed)
    for reason, fields in idle_fields(config):
        reasons.setdefault(reason, []).extend(said(reading, fields))
    words = [f"{', '.join(flags)} ({reason})" for reason, flags in reasons.items() if flags]
    return [f"accepted without effect: {'; '.join(words)}"] if words else []


def said(reading: Reading, fields: Iterable[str]) -> list[str]:
    """The flags that gave these fields a value."""
    return list(dict.fromkeys(reading.sources[name] for name in fields if name in reading.sources))


def as_typed(message: str, names: Iterable[str]) -> str:
    """The message with the flags of RENAMED that are among `names` in place of the fields' own, but where these are
    among them too."""
    typed = dict.fromkeys(names)
    for name in typed:
        own = flag_name(RENAMED.get(name, ""))
        if name in RENAMED and own[2:] not in typed:
            message = re.sub(rf"{own}(?![\w-])", f"--{name}", message)
    return message


def in_words_of(argv: Sequence[str], message: str) -> str:
    """The message with the flags that were typed in place of the fields' own names."""
    try:
        return as_typed(message, [flag.name for flag in split_words(argv)])
    except UsageError:      # this is what the message is about
        return message


def all_settings() -> dict[str, Setting]:
    """Every field of every section by name."""
    return {setting.name: setting for name, kind in SECTIONS.items() for setting in section_settings(name, kind)}


def all_names(settings: dict[str, Setting]) -> list[str]:
    """Every known flag without its dashes, honoured ones first."""
    own = [name.replace("_", "-") for name in settings]
    return [*own, *READING, *RENAMED, *SETS, *ACCEPTED_FLAGS, *REFUSED_FLAGS]


def help_text() -> str:
    """Every flag by section, and what is accepted, another spelling, or not available yet."""
    told = textwrap.TextWrapper(120, initial_indent=" " * 8, subsequent_indent=" " * 8, break_on_hyphens=False)
    lines = ["Flags, with _ for - as you like, and = or a space before a value. A switch FLAG has its --no-FLAG."]
    lines += ["", "reading: what is read, and how"]
    for name, text in READING.items():
        lines += [f"  --{name}", told.fill(text)]
    for section, kind in SECTIONS.items():
        lines += ["", f"{section}: {kind.__doc__}"]
        for setting in section_settings(section, kind):
            value = "" if setting.kind is bool else "{" + ",".join(setting.choices) + "}"
            if value == "{}":
                value = setting.name.upper() if setting.kind is str else setting.kind.__name__.upper()
            shown = "" if setting.default in (None, False, ()) or setting.kind is bool else f" [{setting.default}]"
            shown = " [required]" if setting.default is MISSING else shown
            lines += [f"  {flag_name(setting.name)} {value}".rstrip(), told.fill(setting.help + shown)]
    lines += ["", "other spellings:"]
    lines += [f"  --{name} = {flag_name(target)}" for name, target in RENAMED.items()]
    for name, (strong, weak) in SETS.items():
        lines.append(f"  --{name}: " + ", ".join(f"{flag_name(k)} {v}" for k, v in (strong | weak).items()))
    for title, table in (("accepted without effect:", ACCEPTED), ("not available yet:", REFUSED)):
        lines += ["", title]
        for reason, words in table.items():
            names = " ".join("--" + word.rstrip("=*") for word in words.split())
            text = textwrap.TextWrapper(100, initial_indent="  ", subsequent_indent="        ", break_on_hyphens=False)
            lines.append(text.fill(f"{reason}: {names}"))
    return "\n".join(lines)
