"""What a log says of experts, by hand."""

import torch

from megazero.moe.statistics import statistics_of


def test_figures_are_means_over_layers_and_gate_calls():
    """Two layers, four gate calls; of other reports nothing is said, and of a dense model nothing at all."""
    def told(counts, dropped, z, balance):
        return {"counts": torch.tensor(counts), "dropped": torch.tensor(dropped), "z": torch.tensor(z)} | {
            f"balance.{kind}": torch.tensor(value) for kind, value in balance.items()
        }  # fmt: skip

    layers = {
        1: told([6.0, 2.0], 3.0, 8.0, {"deepspeed": 4.0, "seq_aux_loss": 2.0}),
        3: told([1.0, 3.0, 4.0, 0.0], 1.0, 4.0, {"deepspeed": 6.0, "seq_aux_loss": 10.0}),
    }
    reports = {f"moe.{layer}.{what}": value for layer, own in layers.items() for what, value in own.items()}
    found = statistics_of(reports | {"mine.0.norm": torch.ones(())}, 4)
    each = found.pop("experts")
    assert found == {"aux_loss": 1.25, "seq_aux_loss": 1.5, "z_loss": 1.5, "load": 2.0, "dropped": 0.25}
    assert each[0] == {
        "layer": 1, "z_loss": 2.0, "aux_loss": 1.0, "seq_aux_loss": 0.5, "counts": [6, 2], "dropped": 3
    }  # fmt: skip
    assert each[1]["counts"] == [1, 3, 4, 0]
    assert statistics_of({}, 4) == {}
