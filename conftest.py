"""Set-up of every test process: one torch thread, and Triton kernels run in Triton's interpreter on the CPU.

The variable must stand before triton is first imported, so it is set here and not in a fixture.
"""

import gc
import os

os.environ.setdefault("TRITON_INTERPRET", "1")

import torch  # noqa: E402

torch.set_num_threads(1)


def pytest_collection_finish() -> None:
    """No test's garbage is among what has been imported and collected until here."""
    gc.freeze()
