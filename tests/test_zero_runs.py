"""Whole runs with each optimizer, stage of ZeRO and overlap: one rank's model, so many collectives, so many bytes."""

import functools
import gc
from collections import Counter
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megazero.parallel.zero import ZeroOptimizer
from tests.harness import on_ranks
from tests.training import LLAMA, SMALL, distance, train, train_rank

LIMITS = {"loss": 1e-11, "norm": 1e-11, "weights": 1e-10, "moments": 1e-10}
OVERLAP = "--overlap-grad-reduce --overlap-param-gather --bucket-size 4000"

# (tensor, pipeline, data), flags that also one rank gets, flags of the layout
RUNS = [
    ((1, 1, 2), "", f"--zero-stage 0 {OVERLAP}"),
    ((1, 1, 3), "--global-batch-size 12", f"--zero-stage 1 {OVERLAP}"),
    ((2, 2, 1), "", f"--zero-stage 2 {OVERLAP} --pipeline-schedule gpipe"),
    ((1, 2, 2), "", f"--zero-stage 2 {OVERLAP} --pipeline-schedule zb-v"),
    ((2, 1, 2), "--no-decoupled-weight-decay", f"--zero-stage 1 {OVERLAP} --recompute-granularity selective"),
    ((1, 1, 4), "--optimizer sgd", f"--zero-stage 2 {OVERLAP}"),
    ((2, 1, 2), "--optimizer lamb", f"--zero-stage 2 {OVERLAP}"),
    ((1, 2, 2), "--optimizer lamb", "--zero-stage 0 --pipeline-schedule zb-v"),
    ((2, 1, 2), f"--optimizer muon {LLAMA}", f"--zero-stage 1 {OVERLAP}"),
    ((1, 2, 2), "--optimizer muon", "--zero-stage 0"),
    ((1, 1, 4), "--optimizer muon", f"--zero-stage 2 {OVERLAP}"),
]


@functools.cache
def one_rank(flags):
    return train(f"--fp64 {flags}")


def early(trainer):
    return trainer.machine.optimizer.reducer.early


@pytest.mark.parametrize(("layout", "shared", "flags"), RUNS, ids=[f"{a}{b}{c} {s} {f}" for (a, b, c), s, f in RUNS])
def test_any_optimizer_and_stage_trains_the_model_of_one_rank(layout, shared, flags):
    want, got = one_rank(shared), train(f"--fp64 {shared} {flags}", layout, look=early)
    assert min(want.norms) > 0.5, "clipping is to be active"
    for name, value in distance(got, want).items():
        assert value <= LIMITS[name], f"{name} differ by {value:.1e}"
    assert any(count > 0 for count in got.seen) == ("--overlap-grad-reduce" in flags)


FIGURES = (
    "--untie-embeddings-and-output-weights --log-interval 2 --log-params-norm --log-num-zeros-in-grad "
    "--log-optimizer-states-to-tensorboard"
)


@pytest.mark.parametrize(
    ("layout", "flags"),
    [((1, 1, 3), "--zero-stage 2"), ((2, 2, 1), OVERLAP), ((2, 1, 2), "--zero-stage 0"), ((1, 4, 1), "")],
)
def test_figures_of_a_step_are_those_of_the_model_in_any_layout(layout, flags):
    """Parameter norm, zeros of the gradient and whether it was clipped, measured where a line is printed. There are no
    biases, for a bias of keys has a gradient of rounding, which is zero by chance."""
    shared = f"{FIGURES} --global-batch-size 12 --clip-grad 0.95 --disable-bias-linear"
    want, got = one_rank(shared).steps, train(f"--fp64 {shared} {flags}", layout).steps
    assert {step["clipped"] for step in want} == {0, 1}, "some steps are to be clipped and some not"
    for ours, theirs in zip(got, want, strict=True):
        assert ours.keys() == theirs.keys() and ours["clipped"] == theirs["clipped"]
        assert ("num_zeros" in ours) == ("params_norm" in ours) == (ours["iteration"] in (2, 4, 5))
        if "num_zeros" in ours:
            assert ours["num_zeros"] == theirs["num_zeros"] > 300
            for norm in ("params_norm", "exp_avg_norm", "exp_avg_sq_norm"):
                assert ours[norm] == pytest.approx(theirs[norm], rel=1e-11) and ours[norm] > 0


def test_figures_cost_a_sum_each_on_the_steps_that_show_them():
    plain, asked = (count(f"--global-batch-size 2 --log-interval 2 {flags}")[0] for flags in ("", FIGURES))
    assert asked == plain + Counter({"all-reduce": 6})


def test_a_checkpoint_of_muon_goes_on_in_another_layout(tmp_path):
    """Matrices have one moment and the rest two."""
    whole = one_rank("--optimizer muon")
    train(f"--fp64 --optimizer muon --save {tmp_path} --save-interval 2", (1, 1, 2), iterations=2)
    got = train(f"--fp64 --optimizer muon --load {tmp_path} --zero-stage 2", (2, 1, 1))
    assert max(distance(got, replace(whole, steps=whole.steps[2:])).values()) < 1e-10


START = 1           # all-reduce before the first step: the bytes that the fullest rank holds, to be printed


def count_collectives(flags):
    """Of a run of three steps on this rank: calls by name, and the most elements that one carried."""
    calls, largest = Counter(), 0

    def counted(name, call):
        def count(*args, **options):
            nonlocal largest
            calls[name] += 1
            largest = max(largest, *(x.numel() for x in args if isinstance(x, torch.Tensor)))
            return call(*args, **options)

        return count

    with (
        mock.patch.object(dist, "isend", counted("send", dist.isend)),
        mock.patch.object(dist, "broadcast", counted("broadcast", dist.broadcast)),
        mock.patch.object(dist, "all_reduce", counted("all-reduce", dist.all_reduce)),
    ):
        buckets = train_rank(f"{SMALL} {flags}".split(), 2, lambda trainer: len(trainer.machine.optimizer.buckets), 3)
    return calls, largest, buckets[2]


def of_buckets(count):
    """What two ranks on CPUs call to reduce-scatter and to all-gather so many buckets."""
    return {"send": count, "broadcast": 2 * count}


def count(flags):
    first, second = on_ranks(2, count_collectives, f"--bucket-size 4000 --micro-batch-size 1 --bf16 {flags}")
    assert first == second
    return first


@pytest.mark.parametrize("overlap", ["", OVERLAP])
def test_collectives_do_not_grow_with_accumulation(overlap):
    """A step is one reduce-scatter and one all-gather per bucket, and three small sums: tokens, loss, norm."""
    calls, _, buckets = count(f"--global-batch-size 2 {overlap}")
    assert calls == of_buckets(3 * buckets) | {"all-reduce": START + 9}
    for micro_batches in (4, 8):
        assert count(f"--global-batch-size {2 * micro_batches} {overlap}")[0] == calls


def test_lamb_exchanges_the_norms_of_all_parameters_at_once():
    calls, _, buckets = count("--global-batch-size 2 --optimizer lamb")
    assert calls == of_buckets(3 * buckets) | {"all-reduce": START + 3 * 4}


def test_communication_buffers_do_not_grow_with_the_model():
    """No collective carries more than a bucket, which is closed at its size: one parameter may exceed it."""
    for flags in ("--zero-stage 1", "--zero-stage 2", "--optimizer muon"):
        sizes = [count(f"--global-batch-size 2 {flags} --num-layers {layers}")[1] for layers in (2, 6)]
        assert sizes[0] == sizes[1] < 4000 + 4 * 32 * 32 + 1000


def held_bytes():
    """Bytes of all tensors that are alive in this process, each storage once."""
    tensors = [x for x in gc.get_objects() if type(x) in (torch.Tensor, torch.nn.Parameter)]
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}.values())


def measure_stages(flags, data):
    return [measure_bytes(f"{SMALL} {flags} --zero-stage {stage}".split(), data) for stage in (0, 1, 2)]


def measure_bytes(argv, world):
    """What this rank's tensors hold before the second update, by measuring and by the optimizer's own count."""
    measured, step = [], ZeroOptimizer.step

    def measuring(self, *args, **options):
        self.reducer.owned()
        gc.collect()
        measured.append((held_bytes() - before, self.bytes()))
        return step(self, *args, **options)

    gc.collect()
    before = held_bytes()
    with mock.patch.object(ZeroOptimizer, "step", measuring):
        _, _, padding = train_rank(argv, world, slack, 2)
    return measured[1], padding


def slack(trainer):
    """Elements of the model, and those that pad this rank's buckets."""
    buckets = trainer.machine.optimizer.buckets
    elements = sum(info.tensor.numel() for bucket in buckets for info in bucket.infos)
    return elements, sum(bucket.params.numel() for bucket in buckets) - elements


@pytest.mark.parametrize("data", [1, 2, 4])
def test_bytes_per_rank_are_those_of_the_formula(data):
    """bf16 parameters, fp32 gradients, masters and moments: 18, 6 + 12 / d, 2 + 16 / d bytes per element at stages 0,
    1, 2, to within the padding of buckets and a few thousand bytes of batches and losses."""
    flags = "--bf16 --hidden-size 64 --micro-batch-size 1 --bucket-size 20000"
    for stages in on_ranks(data, measure_stages, flags, data):
        formulas = (18, 6 + 12 / data, 2 + 16 / data)
        for stage, ((measured, told), (elements, padding)) in enumerate(stages):
            exact, formula = sum(told.values()), formulas[stage]
            print(f"data {data} stage {stage}: {measured / elements:.3f} bytes per element, formula {formula:.3f}")
            assert 0 <= exact - formula * elements <= formula * padding
            assert 0 <= measured - exact < 20_000 < 0.01 * exact * data
