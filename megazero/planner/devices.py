"""Machines by their data sheets, and what of it a program reaches: matrix products by shape, memory, links.

The constants in capitals are set or fitted, as docs/planner.md says; all others are from data sheets.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

MATMUL_SHARE = 0.75         # of the peak that a large product of matrices reaches
MATMUL_DEPTH = 2            # tiles of inner size that cost as much as a tile's start and end
ATTENTION_SHARE = 0.60      # of a large product's rate that fused attention reaches
MEMORY_SHARE = 0.85         # of the memory's bandwidth that passes over tensors reach
LINK_SHARE = 0.75           # of a link's bandwidth that a collective reaches
KERNEL_SECONDS = 4e-6       # that the smallest kernel takes
MESSAGE_SECONDS = 1e-5      # that the smallest message between two ranks takes
USABLE_SHARE = 0.94         # of a device's memory that is left beside libraries and gaps between pieces


@dataclass(frozen=True)
class Device:
    """One accelerator.

    flops           16-bit matrix products per second, dense
    memory          bytes
    bandwidth       bytes of memory per second
    units           that work side by side (streaming multiprocessors, compute units)
    link, network   bytes per second to the other devices of a node, and out of it, per direction
    per_node        devices of a node
    tile            rows and columns of a product that a unit works on at a time
    """

    name: str
    flops: float
    memory: float
    bandwidth: float
    units: int
    link: float
    network: float
    per_node: int = 8
    tile: int = 128

    @property
    def usable(self) -> float:
        """Bytes that a layout may take."""
        return self.memory * USABLE_SHARE

    def pass_seconds(self, moved: float) -> float:
        """Of reading and writing so many bytes of memory."""
        return moved / (self.bandwidth * MEMORY_SHARE)

    def matmul_seconds(self, rows: float, columns: float, inner: float, *, size: int = 2, count: float = 1) -> float:
        """Of `count` products [rows, inner] x [inner, columns] side by side, of elements of `size` bytes.

        Whole tiles are computed, in rounds of as many as there are units; or the memory is slower than that.
        """
        if not rows * columns * inner * count:
            return 0.0
        tile = self.tile
        tiles = math.ceil(rows / tile) * math.ceil(columns / tile) * count
        rounds = math.ceil(tiles / self.units)
        flops = 2 * rounds * self.units * tile**2 * (inner + MATMUL_DEPTH * tile)
        moved = size * count * (rows * inner + inner * columns + rows * columns)
        return KERNEL_SECONDS + max(flops / (self.flops * MATMUL_SHARE * 2 / size), self.pass_seconds(moved))


@dataclass(frozen=True)
class Axis:
    """The ranks of one group: how many, and how far apart neighbours are."""

    size: int
    stride: int = 1


def collective_seconds(device: Device, axis: Axis, whole: float) -> float:
    """Of an all-gather or a reduce-scatter of `whole` bytes, in a ring. An all-reduce takes both.

    A ring over several nodes leaves each by as many devices as it has there.
    """
    if axis.size == 1:
        return 0.0
    rate, inside = device.link, _inside(device, axis)
    if inside < axis.size:
        rate = min(device.link, device.network * inside)
    return (axis.size - 1) * (whole / axis.size / (rate * LINK_SHARE) + MESSAGE_SECONDS)


def exchange_seconds(device: Device, axis: Axis, held: float) -> float:
    """Of an all-to-all in which each rank sends `held` bytes, evenly to all."""
    if axis.size == 1:
        return 0.0
    inside = _inside(device, axis)
    near, far = (inside - 1) / axis.size, (axis.size - inside) / axis.size
    slowest = max(near * held / device.link, far * held / device.network)
    return slowest / LINK_SHARE + (axis.size - 1) * MESSAGE_SECONDS


def message_seconds(device: Device, stride: int, held: float) -> float:
    """Of a message to the rank `stride` further on."""
    rate = device.link if stride < device.per_node else device.network
    return held / (rate * LINK_SHARE) + MESSAGE_SECONDS


def _inside(device: Device, axis: Axis) -> int:
    """How many ranks of a group are in one node."""
    return max(1, min(axis.size, device.per_node // axis.stride))


GIB = 2**30
DEVICES = {
    device.name: device
    for device in (
        Device("a100-80gb", 312e12, 79.2 * GIB, 2.04e12, 108, 300e9, 25e9),
        Device("h100-80gb", 989e12, 79.2 * GIB, 3.35e12, 132, 450e9, 50e9),
        Device("h200", 989e12, 139.8 * GIB, 4.8e12, 132, 450e9, 50e9),
        Device("b200", 2250e12, 178.4 * GIB, 8.0e12, 148, 900e9, 50e9),
        Device("mi300x", 1307e12, 191.9 * GIB, 5.3e12, 304, 448e9, 50e9),
    )
}
