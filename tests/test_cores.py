"""Cores are counted on systems that do not say which of them a process may use."""

import os

import pytest

from megazero.cores import usable_cores


def test_a_system_without_affinities_counts_all_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 1 <= usable_cores() <= os.cpu_count()
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert usable_cores() == os.cpu_count()
