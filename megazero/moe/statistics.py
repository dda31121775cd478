"""What a log says of the experts of a finished global batch, from what their layers reported."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

# Balancing that both families call their auxiliary loss.
AUX_LOSSES = ("deepspeed", "aux_loss")


def statistics_of(reports: Mapping[str, Tensor], gate_calls: int) -> dict[str, Any]:
    """Figures of all layers with experts, and "experts" with those of each; empty for a dense model.

    reports     as moe/layer.py names them, summed over all micro-batches of the global batch
    gate_calls  of each layer: how many micro-batches that were
    Losses are means over layers and gate calls, without coefficient. `load` is the choices of the fullest expert of any
    layer over the mean of its layer, `dropped` the share of choices that found no place.
    """
    layers: dict[int, dict[str, list[float] | float]] = {}
    for name, value in reports.items():
        if name.startswith("moe."):
            _, layer, what = name.split(".", 2)
            layers.setdefault(int(layer), {})[what] = value.tolist()
    each = [_of_layer(number, told, gate_calls) for number, told in sorted(layers.items())]
    if not each:
        return {}
    figures = {
        name: sum(layer[name] for layer in each) / len(each) for name in each[0] if name.endswith("_loss")
    }
    choices = sum(sum(layer["counts"]) for layer in each)
    return figures | {
        "load": max(max(layer["counts"]) * len(layer["counts"]) / max(sum(layer["counts"]), 1) for layer in each),
        "dropped": sum(layer["dropped"] for layer in each) / max(choices, 1),
        "experts": each,
    }


def _of_layer(number: int, told: Mapping[str, Any], gate_calls: int) -> dict[str, Any]:
    """Losses, and choices of each expert before any was dropped."""
    figures = {"layer": number}
    for what, value in told.items():
        if what == "z":
            figures["z_loss"] = value / gate_calls
        elif what.startswith("balance."):
            kind = what.removeprefix("balance.")
            figures["aux_loss" if kind in AUX_LOSSES else kind] = value / gate_calls
    return figures | {"counts": [int(n) for n in told["counts"]], "dropped": int(told["dropped"])}
