"""Freed memory stays with the process where glibc's malloc can be told so."""

import ctypes
import resource

import torch

from megazero import allocator
from tests.harness import on_ranks


def faults_of_a_block() -> int:
    """Pages that the kernel hands out while a block of 64 MiB is filled."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(2**24)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def fill_blocks() -> tuple[int, bool, int]:
    first = faults_of_a_block()
    kept = allocator.keep_freed_memory()
    # An aligned block needs a little more room than the one that was freed, until what is beside that is free as well.
    return first, kept, min(faults_of_a_block() for _ in range(40))


def test_a_block_that_was_freed_comes_back_without_its_pages_being_made_anew():
    ((first, kept, later),) = on_ranks(1, fill_blocks)
    assert first > 2**24 * 4 // 2**21       # of 4 KiB, or of 2 MiB where the system gives huge ones
    assert kept and later < first / 8


def test_another_malloc_is_left_as_it_is(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    assert not allocator.keep_freed_memory()
