"""The house rules, checked by reading the code: a rule that is only written down is soon broken.

Each rule is also shown a planted fault, so that a rule that cannot fail is noticed.
"""

import pytest

from .house_rules import RULES, read_house, this_house

CLEAN = {
    "megazero/__init__.py": "",
    "megazero/config.py": (
        '"""Sections."""\n\nSIZES = {"small": 1}\n\n\ndef size(name: str) -> int:\n'
        "    try:\n        return SIZES[name]\n    except BaseException:\n        print(name)\n        raise\n"
    ),
    "megazero/parallel/__init__.py": "",
    "megazero/parallel/topology.py": '"""Ranks."""\n\nimport math\n\nWORLD = 2 if hasattr(math, "prod") else 3\n',
    "megazero/parallel/groups.py": (
        '"""Groups."""\n\nimport os\n\nimport torch.distributed as dist\n\nfrom ..config import size\n'
        "from .topology import WORLD\n\nRANK = (os.environ.get('RANK'), dist.get_rank, size, WORLD)\n"
    ),
    "megazero/gpt.py": (
        '"""A model."""\n\nfrom torch import nn\n\nfrom .parallel import groups\n\n\nclass Head(nn.Module):\n'
        "    def __init__(self, size: int):\n        self.group = groups\n"
    ),
    "pretrain_gpt.py": '"""The front door."""\n\nfrom megazero.gpt import Head\n\nHEAD = Head\n',
}

# (rule, file, its text after a docstring, where in the complaint, what in it)
FAULTS = (
    ("imports_go_down", "megazero/attention.py", "from .gpt import Head", 2, "looks up to megazero/gpt.py"),
    ("imports_go_down", "megazero/attention.py", "from megazero import gpt", 2, "looks up to megazero/gpt.py"),
    ("imports_go_down", "megazero/data/loader.py", "from ..kernels import softmax", 2, "looks up to megazero/kernels/"),
    ("imports_go_down", "megazero/parallel/topology.py", "from .groups import RANK", 2, "looks up to"),
    ("imports_go_down", "megazero/hf.py", "import pretrain_gpt", 2, "looks up to pretrain_gpt.py"),
    ("imports_go_down", "megazero/stray.py", "", 1, "stands on no floor"),
    ("no_circle", "megazero/parallel/topology.py", "from .groups import RANK", 1, "in a circle among"),
    ("no_hidden_import", "megazero/mlp.py", "def f() -> None:\n    from .config import size", 3, "hides an import"),
    ("modules_keep_their_place", "megazero/mlp.py", "import torch.distributed as dist", 2, "names torch.distributed"),
    ("modules_keep_their_place", "megazero/mlp.py", "from torch import distributed", 2, "names torch.distributed"),
    ("modules_keep_their_place", "megazero/mlp.py", "import torch\ntorch.distributed.barrier()", 3, "distributed"),
    ("modules_keep_their_place", "megazero/mlp.py", "import triton.language as tl", 2, "megazero/kernels/dispatch.py"),
    ("modules_keep_their_place", "megazero/mlp.py", "import argparse", 2, "names argparse"),
    ("modules_keep_their_place", "megazero/mlp.py", "import os\nX = os.environ['X']", 3, "names os.environ"),
    ("modules_keep_their_place", "scripts/x.py", "from os import getenv", 2, "names os.getenv"),
    ("modules_keep_their_place", "megazero/mlp.py", "import torch\ntorch.load('x')", 3, "belongs in benchmarks/"),
    ("modules_keep_their_place", "benchmarks/x.py", "import pickle", 2, "belongs in no file"),
    ("modules_keep_their_place", "megazero/mlp.py", "from typing import TYPE_CHECKING", 2, "TYPE_CHECKING"),
    ("modules_keep_their_place", "megazero/mlp.py", "import typing\nif typing.TYPE_CHECKING:\n    pass", 3, "typing"),
    ("arithmetic_is_pure", "megazero/pipe/lower.py", "from torch import Tensor", 2, "is arithmetic and imports torch"),
    ("arithmetic_is_pure", "megazero/pipe/lower.py", "import numpy as np", 2, "is arithmetic and imports numpy"),
    ("arithmetic_is_pure", "megazero/data/samples.py", "import numpy, torch", 2, "is arithmetic and imports torch"),
    ("arithmetic_is_pure", "megazero/pipe/lower.py", "from ..parallel.groups import RANK", 2, "which is not"),
    ("packages_are_empty", "megazero/parallel/__init__.py", "from .topology import WORLD", 1, "is not empty"),
    ("no_state_in_modules", "megazero/mlp.py", "def f() -> None:\n    global count", 3, "writes a global"),
    ("no_state_in_modules", "megazero/mlp.py", "seen: list = []", 2, "seen is mutable"),
    ("no_state_in_modules", "megazero/mlp.py", "if 1 < 2:\n    seen = dict()", 3, "seen is mutable"),
    ("constants_stay_constant", "megazero/mlp.py", "SEEN = []\ndef f() -> None:\n    SEEN.append(1)", 4, "SEEN"),
    ("constants_stay_constant", "megazero/mlp.py", "SEEN = {}\ndef f() -> None:\n    SEEN[1] = 1", 4, "SEEN"),
    ("no_state_in_classes", "megazero/mlp.py", "class A:\n    seen = []", 3, "A.seen is mutable"),
    ("no_catch_all", "megazero/mlp.py", "try:\n    pass\nexcept:\n    pass", 4, "catches everything"),
    ("no_catch_all", "megazero/mlp.py", "try:\n    pass\nexcept BaseException:\n    pass", 4, "BaseException"),
    ("no_catch_all", "megazero/mlp.py", "try:\n    pass\nexcept (ValueError, Exception):\n    pass", 4, "Exception"),
    ("attributes_are_known", "megazero/mlp.py", "hasattr(1, 'x')", 2, "asks hasattr"),
    ("attributes_are_known", "megazero/mlp.py", "getattr(1, 'x')", 2, "one getattr too many"),
    ("files_are_short", "megazero/mlp.py", "\n" * 500, 1, "has 502 lines"),
    ("files_are_short", "megazero/mlp.py", "\n" * 26_000, 1, "at most 26000 in all"),
    ("functions_are_short", "megazero/mlp.py", "def f() -> None:" + "\n" * 61 + "    pass", 2, "f has 62 lines"),
    ("functions_are_short", "megazero/kernels/x.py", "def f() -> None:" + "\n" * 80 + "    pass", 2, "at most 80"),
    (
        "signatures_are_short",
        "megazero/mlp.py",
        "class A:\n    def f(self, a: int, b: int, c: int, d: int, *, e: int, f: int, g: int, h: int) -> None: ...",
        3,
        "f takes 8 parameters",
    ),
    ("signatures_have_types", "megazero/mlp.py", "def f(a, b: int) -> None: ...", 2, "f has a without type"),
    ("signatures_have_types", "megazero/mlp.py", "def f(a: int): ...", 2, "f has no return type"),
    ("names_say_something", "megazero/mlp.py", "def get_size() -> None: ...", 2, "'get' says nothing"),
    ("names_say_something", "megazero/mlp.py", "class StageManager: ...", 2, "'manager' says nothing"),
    ("names_say_something", "megazero/data_utils.py", "", 1, "'utils' says nothing"),
    ("classes_compose", "megazero/mlp.py", "class A: ...\nclass B(A): ...", 3, "B inherits from A"),
    ("nothing_is_left_open", "megazero/mlp.py", "X = 1  # TODO more", 2, "leaves something to do"),
    ("nothing_is_left_open", "megazero/mlp.py", "def f() -> None:\n    raise NotImplementedError('later')", 3, "stub"),
)
NAMES = {rule.__name__: rule for rule in RULES}


def _house(folder, files):
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return read_house(folder)


@pytest.mark.parametrize("rule", NAMES)
def test_the_house_keeps(rule):
    complaints = list(NAMES[rule](this_house()))
    assert not complaints, "\n" + "\n".join(complaints)


def test_there_is_a_house():
    assert len(this_house()) > 20 and "megazero/kernels/dispatch.py" in this_house()


def test_a_clean_house_is_left_in_peace(tmp_path):
    house = _house(tmp_path, CLEAN)
    assert [complaint for rule in RULES for complaint in rule(house)] == []


@pytest.mark.parametrize("rule, path, text, line, words", FAULTS)
def test_a_planted_fault_is_found(tmp_path, rule, path, text, line, words):
    extra = {"megazero/kernels/softmax.py": '"""Softmax."""\n'}
    house = _house(tmp_path, {**CLEAN, **extra, path: f'"""What it is."""\n{text}\n'})
    complaints = list(NAMES[rule](house))
    assert any(c.split(" ")[0].endswith(f":{line}") and words in c for c in complaints), complaints


def test_a_file_without_docstring_is_found(tmp_path):
    house = _house(tmp_path, {**CLEAN, "megazero/mlp.py": "X = 1\n"})
    complaints = list(NAMES["files_say_what_they_are"](house))
    assert complaints == ["megazero/mlp.py:1 has no docstring that says what it is"]


def test_every_rule_has_a_planted_fault():
    assert {fault[0] for fault in FAULTS} | {"files_say_what_they_are"} == NAMES.keys()
