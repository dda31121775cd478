"""The rules of the house, each a function from the product's sources to its complaints ("file:line what").

Only the syntax tree is read, nothing is imported. test_house.py applies them, and proves that each can fail.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

SCANNED = ("megazero", "data_tools", "scripts", "benchmarks", "examples", "pretrain_gpt.py")

# A file imports only from floors below its own, or from its own floor in its own folder. The longest entry that
# fits a path counts; a trailing slash means the whole folder.
FLOORS = (
    ("megazero/settings.py", "megazero/checksum.py", "megazero/tensor_file.py", "megazero/batch_sizes.py",
     "megazero/layout_string.py", "megazero/allocator.py", "megazero/ds_keys.py", "megazero/memory.py",
     "megazero/stopping.py", "megazero/signals.py", "megazero/spikes.py", "megazero/cores.py"),
    ("megazero/config.py", "megazero/config_data.py", "megazero/config_moe.py", "megazero/config_parallel.py",
     "megazero/config_precision.py", "megazero/config_checkpoint.py", "megazero/config_schedule.py",
     "megazero/config_distill.py", "megazero/config_curriculum.py", "megazero/config_operations.py",
     "megazero/config_watching.py", "megazero/lr_curves.py",
     "megazero/ds_config.py", "megazero/tensor_stream.py"),
    ("megazero/flags.py", "megazero/flag_tables.py", "megazero/flag_families.py", "megazero/flag_file.py",
     "megazero/flag_idle.py", "megazero/resume.py", "megazero/lr_schedule.py", "megazero/precision.py",
     "megazero/loss_scale.py", "megazero/hf_config.py", "megazero/flops.py"),
    ("megazero/kernels/", "megazero/data/", "megazero/products.py"),
    ("megazero/parallel/topology.py", "megazero/parallel/weights.py", "megazero/parallel/meeting.py",
     "megazero/parallel/shared_memory.py", "megazero/parallel/activity.py", "megazero/parallel/watch.py"),
    ("megazero/parallel/shard.py",),
    ("megazero/parallel/groups.py", "megazero/parallel/params.py"),
    ("megazero/parallel/collectives.py",),
    ("megazero/parallel/",),
    ("megazero/parallel/buckets.py",),
    ("megazero/parallel/reducer.py", "megazero/parallel/rules.py", "megazero/parallel/lamb.py",
     "megazero/parallel/muon.py"),
    ("megazero/parallel/zero.py",),
    ("megazero/parallel/replicas.py",),
    ("megazero/attention_core.py",),
    ("megazero/pipe/", "megazero/attention.py", "megazero/mlp.py", "megazero/metrics.py", "megazero/screen.py",
     "megazero/profiling.py"),
    ("megazero/watching.py", "megazero/layer_profile.py"),
    ("megazero/forward.py", "megazero/evaluation.py"),
    ("megazero/checkpoint_index.py", "megazero/hf_names.py"),
    ("megazero/checkpoint.py",),
    ("megazero/retention.py", "megazero/moe/students.py"),
    ("megazero/moe/", "megazero/hf.py", "megazero/trainer.py", "megazero/snapshot.py",
     "megazero/saver.py", "megazero/machine.py", "megazero/generation.py", "megazero/summary.py",
     "megazero/weights_only.py", "megazero/hang.py", "megazero/faults.py"),
    ("megazero/gpt.py", "megazero/own.py", "megazero/teacher.py", "megazero/upcycle.py", "megazero/parts.py",
     "megazero/starting.py", "megazero/lookout.py"),
    ("megazero/planner/",),
    ("megazero/plan.py",),
    ("benchmarks/kernel_list.py", "benchmarks/gpu_check.py"),
    ("pretrain_gpt.py", "scripts/", "data_tools/", "examples/", "benchmarks/"),
)

# A module that is heavy, worldly or risky -> where it may be named.
ONLY_IN = {
    "torch.distributed": (
        "megazero/parallel/groups.py",
        "megazero/parallel/collectives.py",
        "megazero/pipe/p2p.py",
        "megazero/pipe/engine.py",
        "benchmarks/",
    ),
    "triton": ("megazero/kernels/dispatch.py", "benchmarks/"),
    "argparse": ("megazero/flags.py", "data_tools/", "scripts/", "benchmarks/", "examples/"),
    "os.environ": (
        "megazero/parallel/groups.py", "pretrain_gpt.py", "benchmarks/", "examples/", "scripts/report_environment.py",
        "scripts/ranks.py",
    ),
    "os.getenv": ("megazero/parallel/groups.py", "pretrain_gpt.py", "benchmarks/", "examples/"),
    "pickle": (),
    "torch.load": ("benchmarks/",),
    "torch.save": ("benchmarks/",),
    "typing.TYPE_CHECKING": (),
}

# Arithmetic: neither torch nor, but for those under PURE_WITH_NUMPY, numpy; nor any of our files that is not.
PURE = (
    "megazero/settings.py",
    "megazero/allocator.py",
    "megazero/spikes.py",
    "megazero/stopping.py",
    "megazero/signals.py",
    "megazero/batch_sizes.py",
    "megazero/config.py",
    "megazero/config_checkpoint.py",
    "megazero/config_curriculum.py",
    "megazero/config_data.py",
    "megazero/config_distill.py",
    "megazero/config_operations.py",
    "megazero/config_moe.py",
    "megazero/config_watching.py",
    "megazero/ds_config.py",
    "megazero/ds_keys.py",
    "megazero/flags.py",
    "megazero/flag_families.py",
    "megazero/flag_file.py",
    "megazero/flag_idle.py",
    "megazero/flag_tables.py",
    "megazero/flops.py",
    "megazero/resume.py",
    "megazero/lr_schedule.py",
    "megazero/lr_curves.py",
    "megazero/loss_scale.py",
    "megazero/config_precision.py",
    "megazero/config_schedule.py",
    "megazero/hf_config.py",
    "megazero/hf_names.py",
    "megazero/parallel/topology.py",
    "megazero/parallel/shard.py",
    "megazero/pipe/instructions.py",
    "megazero/layout_string.py",
    "megazero/config_parallel.py",
    "megazero/moe/pyramid.py",
    "megazero/pipe/schedule.py",
    "megazero/pipe/split.py",
    "megazero/pipe/zero_bubble.py",
    "megazero/pipe/lower.py",
    "megazero/pipe/simulate.py",
    "megazero/planner/layout.py",
    "megazero/planner/footprint.py",
    "megazero/planner/devices.py",
    "megazero/planner/seconds.py",
    "megazero/planner/step.py",
    "megazero/planner/search.py",
)
PURE_WITH_NUMPY = (
    "megazero/checksum.py",
    "megazero/data/documents.py",
    "megazero/data/samples.py",
    "megazero/data/blend.py",
    "megazero/data/legacy.py",
    "megazero/data/indexed.py",
    "megazero/data/corpora.py",
)

FILE_LINES = 500
FUNCTION_LINES, KERNEL_LINES = 60, 80
PARAMETERS = 7
# Of megazero/ and the front door; 14,000 until Hugging Face folders, experts, students and ten kernels came in.
PACKAGE_LINES = 26_000
GETATTR_PER_LINES = 1000  # one call of getattr is tolerated in so many lines of the whole

BANNED_FIRST = ("get", "do", "handle")  # words that say nothing, at the start of a function's name
BANNED_WORDS = ("util", "utils", "helper", "helpers", "manager", "base", "common")  # anywhere in a name
BASE_CLASSES = ("Module", "Function", "Exception", "NamedTuple", "TypedDict", "Protocol", "Enum", "IntEnum", "Action")
MUTABLE_CALLS = ("list", "dict", "set", "bytearray", "deque", "defaultdict", "Counter", "OrderedDict")
MUTATING_METHODS = ("append", "extend", "insert", "add", "update", "setdefault", "pop", "popitem", "remove", "clear")

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class Source(NamedTuple):
    """One file: its path from the repository's root, its text, its syntax tree."""

    path: str
    text: str
    tree: ast.Module


House = dict[str, Source]  # by path


class Import(NamedTuple):
    """`module` as it is written, made absolute; `name` is what is taken from it, if anything."""

    module: str
    name: str
    line: int
    hidden: bool  # inside a function


def read_house(root: Path) -> House:
    """Every Python file of the product under `root`."""
    files = [f for name in SCANNED for f in (root / name, *sorted((root / name).rglob("*.py")))]
    texts = {f.relative_to(root).as_posix(): f.read_text() for f in files if f.is_file()}
    return {path: Source(path, text, ast.parse(text, path)) for path, text in texts.items()}


# --------------------------------------------------------------------------------------------------------- reading


def _imports(source: Source) -> Iterator[Import]:
    package = source.path.split("/")[:-1]
    inside = {id(n) for f in ast.walk(source.tree) if isinstance(f, (*FUNCTIONS, ast.Lambda)) for n in ast.walk(f)}
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, "", node.lineno, id(node) in inside)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                yield Import(module, alias.name, node.lineno, id(node) in inside)


def _own_imports(house: House, source: Source) -> Iterator[tuple[str, Import]]:
    """(path of the imported file, import) for imports of the product's own files."""
    for found in _imports(source):
        stem = found.module.replace(".", "/")
        for path in (f"{stem}/{found.name}.py", f"{stem}.py", f"{stem}/__init__.py"):
            if path in house and path != source.path:
                yield path, found
                break


def _floor(path: str) -> int | None:
    entries = [(len(entry), number, entry) for number, floor in enumerate(FLOORS) for entry in floor]
    fits = [e for e in entries if path == e[2] or e[2].endswith("/") and path.startswith(e[2])]
    return max(fits)[1] if fits else None


def _dotted(node: ast.AST) -> str:
    """"a.b.c" of such an attribute or name; "" of anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        left = _dotted(node.value)
        return f"{left}.{node.attr}" if left else ""
    return ""


def _functions(source: Source) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(source.tree) if isinstance(node, FUNCTIONS))


def _is_mutable(value: ast.expr | None) -> bool:
    if isinstance(value, ast.Call):
        return _dotted(value.func).rpartition(".")[2] in MUTABLE_CALLS
    return isinstance(value, (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp))


def _assignments(body: list[ast.stmt]) -> Iterator[tuple[str, ast.expr | None, int]]:
    """(name, value, line) of assignments in a body, looking into if, for, with and try but not into definitions."""
    for node in body:
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            continue
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name):
                    yield target.id, node.value, node.lineno
        for inner in ("body", "orelse", "finalbody"):
            yield from _assignments(vars(node).get(inner, []))
        for handler in vars(node).get("handlers", []):
            yield from _assignments(handler.body)


def _parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.arg]:
    """Of a signature, without self, cls and autograd's ctx, and without * and **."""
    given = function.args.posonlyargs + function.args.args
    if given and given[0].arg in ("self", "cls", "ctx"):
        given = given[1:]
    return given + function.args.kwonlyargs


def _words(name: str) -> list[str]:
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]


# ----------------------------------------------------------------------------------------------------------- rules


def imports_go_down(house: House) -> Iterator[str]:
    for source in house.values():
        if _floor(source.path) is None and not source.path.endswith("__init__.py"):
            yield f"{source.path}:1 stands on no floor: give it one in FLOORS"
            continue
        for target, found in _own_imports(house, source):
            own, other = _floor(source.path), _floor(target)
            neighbours = own == other and PurePosixPath(source.path).parent == PurePosixPath(target).parent
            if other is not None and other >= own and not neighbours:
                yield f"{source.path}:{found.line} looks up to {target}"


def no_circle(house: House) -> Iterator[str]:
    graph = {path: {target for target, _ in _own_imports(house, source)} for path, source in house.items()}
    done: set[str] = set()
    while ready := {path for path in graph if path not in done and graph[path] <= done}:
        done |= ready
    if left := sorted(graph.keys() - done):
        yield f"{left[0]}:1 imports in a circle among {', '.join(left)}"


def no_hidden_import(house: House) -> Iterator[str]:
    for source in house.values():
        for target, found in _own_imports(house, source):
            if found.hidden:
                yield f"{source.path}:{found.line} hides an import of {target} in a function"


def modules_keep_their_place(house: House) -> Iterator[str]:
    """ONLY_IN, whether a module is imported, taken from its parent, or reached through it."""
    for source in house.values():
        named = {(f"{i.module}.{i.name}" if i.name else i.module, i.line) for i in _imports(source)}
        named |= {(_dotted(node), node.lineno) for node in ast.walk(source.tree) if isinstance(node, ast.Attribute)}
        seen = set()
        for name, line in sorted(named, key=lambda pair: pair[1]):
            for module, places in ONLY_IN.items():
                inside = name == module or name.startswith(module + ".")
                if inside and not source.path.startswith(places) and (line, module) not in seen:
                    seen.add((line, module))
                    yield f"{source.path}:{line} names {module}, which belongs in {', '.join(places) or 'no file'}"


def arithmetic_is_pure(house: House) -> Iterator[str]:
    for path in (*PURE, *PURE_WITH_NUMPY):
        if path not in house:
            continue
        numpy = path in PURE_WITH_NUMPY
        for found in _imports(house[path]):
            if found.module.split(".")[0] in ("torch", "triton", "numpy")[: 2 if numpy else 3]:
                yield f"{path}:{found.line} is arithmetic and imports {found.module}"
        for target, found in _own_imports(house, house[path]):
            if target not in (*PURE, *(PURE_WITH_NUMPY if numpy else ())) and not target.endswith("__init__.py"):
                yield f"{path}:{found.line} is arithmetic and imports {target}, which is not"


def packages_are_empty(house: House) -> Iterator[str]:
    for source in house.values():
        if source.path.endswith("__init__.py") and source.text.strip():
            yield f"{source.path}:1 is not empty: a name has one address"


def no_state_in_modules(house: House) -> Iterator[str]:
    for source in house.values():
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Global):
                yield f"{source.path}:{node.lineno} writes a global"
        for name, value, line in _assignments(source.tree.body):
            if _is_mutable(value) and not name.isupper():
                yield f"{source.path}:{line} {name} is mutable and not a constant"


def constants_stay_constant(house: House) -> Iterator[str]:
    for source in house.values():
        constants = {name for name, _, _ in _assignments(source.tree.body) if name.isupper()}
        for node in (n for function in _functions(source) for n in ast.walk(function)):
            changed = None
            if isinstance(node, ast.Subscript) and isinstance(node.ctx, (ast.Store, ast.Del)):
                changed = node.value
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                changed = node.func.value if node.func.attr in MUTATING_METHODS else None
            if isinstance(changed, ast.Name) and changed.id in constants:
                yield f"{source.path}:{node.lineno} changes the constant {changed.id}"


def no_state_in_classes(house: House) -> Iterator[str]:
    for source in house.values():
        for node in ast.walk(source.tree):
            if isinstance(node, ast.ClassDef):
                for name, value, line in _assignments(node.body):
                    if _is_mutable(value):
                        yield f"{source.path}:{line} {node.name}.{name} is mutable and shared by all instances"


def no_catch_all(house: House) -> Iterator[str]:
    for source in house.values():
        for node in ast.walk(source.tree):
            if isinstance(node, ast.ExceptHandler):
                caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
                names = {"everything" if c is None else _dotted(c) for c in caught}
                last = node.body[-1]
                if isinstance(last, ast.Raise) and last.exc is None:
                    names.discard("BaseException")  # cleans up, also after a signal, and passes it on
                for name in {"everything", "Exception", "BaseException"} & names:
                    yield f"{source.path}:{node.lineno} catches {name}: name the errors you expect"


def attributes_are_known(house: House) -> Iterator[str]:
    """Another library's module may be asked what its version has; an object may not."""
    calls: dict[str, list[str]] = {"hasattr": [], "getattr": []}
    for source in house.values():
        aliases = [alias for node in ast.walk(source.tree) if isinstance(node, ast.Import) for alias in node.names]
        modules = {alias.asname or alias.name for alias in aliases}
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Call) and _dotted(node.func) in calls and _dotted(node.args[0]) not in modules:
                calls[_dotted(node.func)].append(f"{source.path}:{node.lineno}")
    for place in calls["hasattr"]:
        yield f"{place} asks hasattr: know what you are handed"
    budget = sum(source.text.count("\n") for source in house.values()) // GETATTR_PER_LINES
    if len(calls["getattr"]) > budget:
        yield f"{calls['getattr'][-1]} is one getattr too many: {len(calls['getattr'])}, and the budget is {budget}"


def files_are_short(house: House) -> Iterator[str]:
    lines = {path: source.text.count("\n") for path, source in house.items()}
    for path, count in lines.items():
        if count > FILE_LINES:
            yield f"{path}:1 has {count} lines, and a file at most {FILE_LINES}"
    package = {path: count for path, count in lines.items() if path.startswith(("megazero/", "pretrain_gpt.py"))}
    if sum(package.values()) > PACKAGE_LINES:
        total = sum(package.values())
        yield f"{next(iter(package))}:1 and the rest of the package have {total} lines, at most {PACKAGE_LINES} in all"


def functions_are_short(house: House) -> Iterator[str]:
    for source in house.values():
        limit = KERNEL_LINES if source.path.startswith("megazero/kernels/") else FUNCTION_LINES
        for function in _functions(source):
            lines = function.end_lineno - function.lineno + 1
            if lines > limit:
                yield f"{source.path}:{function.lineno} {function.name} has {lines} lines, at most {limit} are allowed"


def signatures_are_short(house: House) -> Iterator[str]:
    for source in house.values():
        if source.path.startswith("megazero/kernels/"):
            continue
        for function in _functions(source):
            count = len(_parameters(function))
            if count > PARAMETERS:
                yield f"{source.path}:{function.lineno} {function.name} takes {count} parameters, at most {PARAMETERS}"


def signatures_have_types(house: House) -> Iterator[str]:
    for source in house.values():
        for function in _functions(source):
            if any(_dotted(decorator) == "jit" for decorator in function.decorator_list):
                continue  # Triton gives its arguments their types
            bare = [a.arg for a in _parameters(function) if a.annotation is None]
            if bare or function.returns is None and function.name != "__init__":
                what = f"{', '.join(bare)} without type" if bare else "no return type"
                yield f"{source.path}:{function.lineno} {function.name} has {what}"


def files_say_what_they_are(house: House) -> Iterator[str]:
    for source in house.values():
        if not source.path.endswith("__init__.py") and not ast.get_docstring(source.tree):
            yield f"{source.path}:1 has no docstring that says what it is"


def names_say_something(house: House) -> Iterator[str]:
    """Of files, classes and functions; a field may be called as its flag is."""
    for source in house.values():
        named = [(PurePosixPath(source.path).stem, 1, False)]
        for node in ast.walk(source.tree):
            if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
                named.append((node.name, node.lineno, isinstance(node, FUNCTIONS)))
        for name, line, is_function in named:
            words = _words(name)
            empty = [word for word in words if word in BANNED_WORDS]
            empty += [word for word in words[:1] if is_function and word in BANNED_FIRST]
            if empty:
                yield f"{source.path}:{line} {name}: {empty[0]!r} says nothing"


def classes_compose(house: House) -> Iterator[str]:
    for source in house.values():
        for node in ast.walk(source.tree):
            if isinstance(node, ast.ClassDef):
                for above in node.bases:
                    name = _dotted(above).rpartition(".")[2]
                    if name not in BASE_CLASSES and not name.endswith("Error"):
                        yield f"{source.path}:{node.lineno} {node.name} inherits from {ast.unparse(above)}: compose"


def nothing_is_left_open(house: House) -> Iterator[str]:
    for source in house.values():
        for number, line in enumerate(source.text.splitlines(), 1):
            if re.search(r"#.*\b(TODO|FIXME)\b", line):
                yield f"{source.path}:{number} leaves something to do"
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Raise) and node.exc is not None and "NotImplementedError" in ast.dump(node.exc):
                yield f"{source.path}:{node.lineno} is a stub"


RULES: tuple[Callable[[House], Iterator[str]], ...] = (
    imports_go_down,
    no_circle,
    no_hidden_import,
    modules_keep_their_place,
    arithmetic_is_pure,
    packages_are_empty,
    no_state_in_modules,
    constants_stay_constant,
    no_state_in_classes,
    no_catch_all,
    attributes_are_known,
    files_are_short,
    functions_are_short,
    signatures_are_short,
    signatures_have_types,
    files_say_what_they_are,
    names_say_something,
    classes_compose,
    nothing_is_left_open,
)


@functools.cache
def this_house() -> House:
    """The product of this repository, read once."""
    return read_house(Path(__file__).resolve().parent.parent)
