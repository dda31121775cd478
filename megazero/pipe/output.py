"""What layers hand on: hidden states, which are one tensor or a tuple of them, and beside them, where a layer has
any, a loss of its own and numbers to report.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

Hidden = Tensor | tuple[Tensor, ...]


@dataclass(frozen=True)
class WithLoss:
    """What a layer returns that has a loss of its own or something to report.

    x        what goes on to the next layer
    loss     scalar, already scaled, whose gradient is added to the model's: it is a root of its stage's backward and no
             part of the loss that is told; None: there is none
    reports  detached tensors, summed by name over layers and micro-batches (`PipeEngine.reports`)
    """

    x: Hidden
    loss: Tensor | None = None
    reports: Mapping[str, Tensor] = field(default_factory=dict)


Output = Hidden | WithLoss


def hidden_of(output: Output) -> Hidden:
    """What goes on of a layer's output."""
    return output.x if isinstance(output, WithLoss) else output


def check_output(output: Output, layer: str) -> None:
    """ValueError, naming the layer, where that is not what a layer returns."""
    x, loss = hidden_of(output), output.loss if isinstance(output, WithLoss) else None
    if not isinstance(x, Tensor) and not (isinstance(x, tuple) and x and all(isinstance(part, Tensor) for part in x)):
        parts = f" of {', '.join(type(part).__name__ for part in x) or 'nothing'}" if isinstance(x, tuple) else ""
        raise ValueError(
            f"layer {layer} returned {type(x).__name__}{parts}, but a layer returns a tensor or a tuple of tensors, or "
            "WithLoss of these"
        )
    if loss is not None and not (isinstance(loss, Tensor) and loss.ndim == 0):
        what = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(f"layer {layer}: its own loss must be a tensor without dims, as mean() gives it, not {what}")


def with_losses_of(x: Hidden, *outputs: Output) -> Output:
    """`x` with the losses and reports that the outputs of its parts carry; `x` itself where they carry none.

    So a layer made of layers that may have losses ends with: return with_losses_of(x + hidden_of(y), y).
    """
    carried = [output for output in outputs if isinstance(output, WithLoss)]
    losses = [output.loss for output in carried if output.loss is not None]
    reports: dict[str, Tensor] = {}
    for output in carried:
        add_reports_(reports, output.reports)
    if not losses and not reports:
        return x
    return WithLoss(x, sum(losses[1:], losses[0]) if losses else None, reports)


def add_reports_(total: dict[str, Tensor], reports: Mapping[str, Tensor]) -> None:
    """Add reports to those of the same name; the tensors in `total` are not written to."""
    for name, value in reports.items():
        known = total.get(name)
        assert known is None or known.shape == value.shape, f"{name} is reported in shapes {known.shape}, {value.shape}"
        total[name] = value.detach() if known is None else known + value.detach()


def flat(x: Hidden | None) -> tuple[Tensor, ...]:
    """Hidden states as a tuple; the empty one before the first layer."""
    return x if isinstance(x, tuple) else () if x is None else (x,)


def shaped(tensors: tuple[Tensor, ...], is_tuple: bool) -> Hidden | None:
    """What `flat` made flat: a tuple, a tensor, or None."""
    return tensors if is_tuple else tensors[0] if tensors else None
