"""Which number types each precision flag means."""

from __future__ import annotations

import torch

from megazero.config import PrecisionConfig
from megazero.precision import Dtypes, dtypes


def test_masters_are_never_narrower_than_fp32():
    assert dtypes(PrecisionConfig()) == Dtypes(compute=torch.float32, master=torch.float32)
    assert dtypes(PrecisionConfig(bf16=True)) == Dtypes(compute=torch.bfloat16, master=torch.float32)
    assert dtypes(PrecisionConfig(fp16=True)) == Dtypes(compute=torch.float16, master=torch.float32)
    assert dtypes(PrecisionConfig(fp64=True)) == Dtypes(compute=torch.float64, master=torch.float64)
