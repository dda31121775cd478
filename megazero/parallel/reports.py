"""Numbers that layers report of a global batch, brought together from all ranks: one small reduction per step."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .collectives import all_reduce, gather_objects
from .groups import Mesh


class ReportTable:
    """Sums reports over the data ranks and joins those of all stages. The ranks of a tensor group report alike.

    Names and shapes are told once, with the first reports, and stay as they are.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self._shapes: dict[str, tuple[int, ...]] | None = None

    def collect(self, reports: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """This rank's sums by name -> those of the whole global batch, fp64, equal on all ranks, which call it
        together."""
        if self._shapes is None:
            own = {name: tuple(value.shape) for name, value in reports.items()}
            told = gather_objects(own, self.mesh.pipeline)
            self._shapes = {name: shape for shapes in told for name, shape in shapes.items()}
        unknown = reports.keys() - self._shapes.keys()
        assert not unknown, f"{sorted(unknown)} were not reported at first"
        if not self._shapes:
            return {}
        device = self.mesh.device
        parts = [
            reports[name].double().flatten() if name in reports else
            torch.zeros(shape, dtype=torch.float64, device=device).flatten()
            for name, shape in self._shapes.items()
        ]
        flat = all_reduce(all_reduce(torch.cat(parts), self.mesh.data), self.mesh.pipeline)
        sums = flat.split([part.numel() for part in parts])
        return {name: own.view(shape) for own, (name, shape) in zip(sums, self._shapes.items(), strict=True)}
