"""The Triton kernels as kernels_static.py compiles them: one line for each kernel and way of using it.

A line gives op and kernel (megazero/kernels/OP.py), a note, compile-time constants, and what is not of the dtype bf16:
`fp32` names arguments (pointers without _ptr) of fp32. `least` is the fewest bytes that the kernel could move for each
of its `elements` (default: BLOCK), `cached` names pointers that every row reads alike and that stay in a cache.
"""

from __future__ import annotations

from dataclasses import dataclass, field

FP32 = "tl.float32"         # as a constant


@dataclass(frozen=True)
class Case:
    """A kernel with its constants."""

    op: str
    kernel: str
    note: str
    least: float
    fp32: tuple[str, ...] = ()
    cached: tuple[str, ...] = ()
    elements: int = 0
    constants: dict = field(default_factory=dict)       # num_warps among them

    @property
    def name(self) -> str:
        """For tables and messages."""
        return f"{self.op}.{self.kernel.strip('_')}, {self.note}"


def case(
    op: str, kernel: str, note: str, *, least: float, fp32: str = "", cached: str = "", elements: int = 0,
    **constants: object,
) -> Case:
    """A line of the list."""
    count = elements or constants["BLOCK"]
    return Case(op, kernel, note, least, tuple(fp32.split()), tuple(cached.split()), count, constants)


WHOLE = {"BLOCK": 4096, "WHOLE": True, "STATISTICS": FP32, "ADDS": False, "num_warps": 8}      # a row is one block
LONG = {"BLOCK": 8192, "WHOLE": False, "STATISTICS": FP32, "ADDS": False, "num_warps": 16}     # a row is many
ADDS = WHOLE | {"ADDS": True}
WIDE = ADDS | {"num_warps": 16}         # the widest rows that are one block: rows.py's limits
TILE = {"BLOCK": 1024, "WIDE": FP32, "num_warps": 4}
GELU = TILE | {"BIASED": True}
HEAD = {"BLOCK_HEADS": 16, "BLOCK_HALF": 64, "BLOCK_REST": 0, "x_stride": 1, "y_stride": 1, "num_warps": 4}
KEYS = {"WINDOWED": False, "SINK": False, "x_key_stride": 1, "dy_key_stride": 1}
CAUSAL = {"CAUSAL": True, "MASKED": False, **KEYS}
MASKED = {"CAUSAL": False, "MASKED": True, "mask_key_stride": 1, **KEYS}
STATE = {"BLOCK": 1024, "STATISTICS": FP32, "FACTOR": True, "num_warps": 4}
VOCAB = {"BLOCK": 4096, "STATISTICS": FP32, "num_warps": 8}
MEANS = "mean rstd mean_g mean_gx dw db"

CASES = (
    case("layer_norm", "_forward", "whole rows", least=4, fp32=MEANS, cached="w b", **WHOLE),
    case("layer_norm", "_forward", "whole rows, added", least=8, fp32=MEANS, cached="w b", **ADDS),
    case("layer_norm", "_backward", "whole rows, added", least=8, fp32=MEANS, **ADDS),
    case("layer_norm", "_forward", "widest whole rows", least=8, fp32=MEANS, cached="w b", **WIDE | {"BLOCK": 16384}),
    case("layer_norm", "_backward", "widest whole rows", least=8, fp32=MEANS, **WIDE | {"BLOCK": 8192}),
    case("layer_norm", "_forward", "long rows", least=4, fp32=MEANS, cached="w b", **LONG),
    case("layer_norm", "_moments", "long rows", least=2, fp32=MEANS, **LONG),
    case("layer_norm", "_backward", "whole rows", least=6, fp32=MEANS, **WHOLE),
    case("layer_norm", "_backward", "long rows", least=6, fp32=MEANS, **LONG),
    case("layer_norm", "_means", "long rows", least=4, fp32=MEANS, cached="w", **LONG),
    case("rms_norm", "_forward", "whole rows", least=4, fp32=MEANS, cached="w", **WHOLE),
    case("rms_norm", "_forward", "whole rows, added", least=8, fp32=MEANS, cached="w", **ADDS),
    case("rms_norm", "_backward", "whole rows, added", least=8, fp32=MEANS, **ADDS),
    case("rms_norm", "_forward", "widest whole rows", least=8, fp32=MEANS, cached="w", **WIDE | {"BLOCK": 16384}),
    case("rms_norm", "_backward", "widest whole rows", least=8, fp32=MEANS, **WIDE | {"BLOCK": 8192}),
    case("rms_norm", "_forward", "long rows", least=4, fp32=MEANS, cached="w", **LONG),
    case("rms_norm", "_moments", "long rows", least=2, fp32=MEANS, **LONG),
    case("rms_norm", "_backward", "whole rows", least=6, fp32=MEANS, **WHOLE),
    case("rms_norm", "_backward", "long rows", least=6, fp32=MEANS, **LONG),
    case("rms_norm", "_means", "long rows", least=4, fp32=MEANS, cached="w", **LONG),
    case("swiglu", "_forward", "per ffn", least=6, **TILE),
    case("swiglu", "_backward", "per ffn", least=10, **TILE),
    case("bias_gelu", "_forward", "tanh", least=4, cached="b", TANH=True, **GELU),
    case("bias_gelu", "_forward", "exact", least=4, cached="b", TANH=False, **GELU),
    case("bias_gelu", "_backward", "tanh", least=6, fp32="db", TANH=True, **GELU),
    case("bias_gelu", "_backward", "exact", least=6, fp32="db", TANH=False, **GELU),
    case("rotary", "_turn", "halves, in place", least=4, fp32="cos sin sign", cached="cos sin", elements=2048,
         INTERLEAVED=False, COPY=False, **HEAD),
    case("rotary", "_turn", "interleaved, in place", least=4, fp32="cos sin sign", cached="cos sin", elements=2048,
         INTERLEAVED=True, COPY=False, **HEAD),
    case("rotary", "_turn", "halves, backward", least=4, fp32="cos sin sign", cached="cos sin", elements=2048,
         INTERLEAVED=False, COPY=True, **HEAD),
    case("dropout_add", "_forward", "with bias", least=6, fp32="probability", cached="b", BIASED=True, DROPS=True,
         **TILE),
    case("softmax", "_forward", "whole rows, causal", least=4, fp32="top total", **WHOLE, **CAUSAL),
    case("softmax", "_forward", "whole rows, masked", least=5, fp32="top total", **WHOLE, **MASKED),
    case("softmax", "_forward", "whole rows, with a sink", least=4, fp32="top total sink", cached="sink", **WHOLE,
         **CAUSAL | {"SINK": True}),
    case("softmax", "_backward", "whole rows, causal", least=6, fp32="dot", **WHOLE, **CAUSAL),
    case("softmax", "_forward", "long rows, causal", least=4, fp32="top total", **LONG, **CAUSAL),
    case("softmax", "_moments", "long rows, causal", least=2, fp32="top total", **LONG, **CAUSAL),
    case("softmax", "_backward", "long rows, causal", least=6, fp32="dot", **LONG, **CAUSAL),
    case("softmax", "_dots", "long rows, causal", least=4, fp32="dot", **LONG, **CAUSAL),
    case("adam", "_update", "bf16 over fp32", least=30, fp32="weight grad exp_avg exp_avg_sq", COPY=True, **STATE),
    case("adam", "_update", "fp32", least=28, fp32="weight grad exp_avg exp_avg_sq", COPY=False, **STATE),
    case("squared_norm", "_partials", "fp32", least=4, fp32="x", BLOCK=1024, num_warps=4),
    case("cross_entropy", "_forward", "per entry", least=2, fp32="top total target sum", **VOCAB),
    case("cross_entropy", "_backward", "per entry", least=4, fp32="log_n dy", **VOCAB),
    case("dropout_add", "_backward", "with bias", least=4, fp32="probability db", BIASED=True, **TILE),
)
