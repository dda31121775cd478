"""A model of one's own, over pipeline and data ranks with ZeRO and checkpoints: a recurrent net that learns to add.

    torchrun --nproc-per-node 4 examples/own_model.py --pipeline 2 --data 2 --save runs/adding

It reads a row of random numbers, two of which are marked, and is to tell the sum of these two.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn

from megazero.machine import Pipelining, Setup
from megazero.own import Example, OwnModel, open_ranks, plain
from megazero.parallel.topology import Topology

LENGTH, BATCH, WIDTH = 16, 16, 32


class Recurrent(nn.Module):
    """x + LSTM(norm(x)), [length, batch, width]."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.lstm = nn.LayerNorm(WIDTH), nn.LSTM(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.lstm(self.norm(x))[0]


LAYERS = [
    plain("enter", lambda: nn.Linear(2, WIDTH), std=0.5, cost=0.0),
    *(plain(f"recurrent.{i}", Recurrent, std=0.2, recomputable=True) for i in range(4)),
    plain("leave", lambda: nn.Linear(WIDTH, 1), std=0.2, cost=0.0),
]


def loss(output: Tensor, sums: Tensor) -> Tensor:
    """Of output [length, batch, 1] the last place counts; sums [batch, 1]."""
    return nn.functional.mse_loss(output[-1], sums)


def example(number: int) -> Example:
    """Micro-batch `number`: numbers and marks [length, batch, 2], and the sums of the marked numbers [batch, 1]."""
    numbers, places = torch.rand(2, LENGTH, BATCH, generator=torch.Generator().manual_seed(number))
    marks = torch.zeros(LENGTH, BATCH).scatter(0, places.topk(2, dim=0).indices, 1.0)
    return Example(torch.stack((numbers, marks), -1), (numbers * marks).sum(0).unsqueeze(1))


def main(argv: list[str] | None = None) -> list[float]:
    """Train as the flags say; returns the loss of every step."""
    parser = argparse.ArgumentParser("own_model.py")
    parser.add_argument("--pipeline", type=int, default=1, help="ranks that share the depth")
    parser.add_argument("--data", type=int, default=1, help="ranks that share the batch")
    parser.add_argument("--schedule", default="1f1b", help="1f1b, gpipe or zb-h1")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--save", type=Path, help="where checkpoints are; a run goes on from the newest")
    asked = parser.parse_args(argv)
    with open_ranks(Topology(asked.pipeline, asked.data)) as mesh:
        model = OwnModel(LAYERS, loss, mesh, Setup(pipelining=Pipelining(asked.schedule)))
        return model.train(example, steps=asked.steps, micro_batches=8, learning_rate=3e-3, save=asked.save)


if __name__ == "__main__":
    main()
