"""What the fork server of tests/harness.py imports once, so that each worker starts with it in memory.

Importing must not compute: a process that ran a two-threaded operation leaves children that hang.
"""

import contextlib
import gc
import importlib
from pathlib import Path

import numpy  # noqa: F401
import pytest  # noqa: F401
import torch
import torch._dynamo  # noqa: F401  (recomputation by torch.utils.checkpoint imports it, which takes two seconds)
import torch.distributed  # noqa: F401
import torch.fx.experimental.symbolic_shapes  # noqa: F401  (or the first backward of each worker imports it)
import torch.utils.checkpoint  # noqa: F401

ROOT = Path(__file__).resolve().parent.parent

for path in (ROOT / "pretrain_gpt.py", *sorted((ROOT / "megazero").rglob("*.py"))):
    if path.name != "__init__.py":
        try:
            importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
        except Exception:  # a broken module is the affair of the test that imports it, with its own traceback
            pass

with contextlib.suppress(Exception):
    importlib.import_module("megazero.flags").all_settings()  # reads their types once
    # Ranks of tests are more than cores: one that watches for the others is in their way.
    importlib.import_module("megazero.parallel.shared_memory").SPIN_SECONDS = 0.0

gc.freeze()  # no worker looks through all this for garbage, and so copies it
