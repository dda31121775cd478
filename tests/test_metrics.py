"""Console, JSON lines, TensorBoard and counts of operations."""

import io
import json
import math
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
import types
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megazero.config import Config, LoggingConfig, ModelConfig, RecomputeConfig
from megazero.config_data import BatchConfig
from megazero.config_moe import MoEConfig
from megazero.config_schedule import ScheduleConfig
from megazero.config_watching import WatchingConfig
from megazero.flops import Flops, device_peak, flops_per_token, layer_flops, model_flops, sc21_flops
from megazero.metrics import (
    TAGS,
    TRAIN_KEYS,
    Metrics,
    check_places,
    perplexity,
)


def record(iteration, loss=2.0, **changes):
    values = (iteration, 8 * iteration, 128 * iteration, loss, 0.5, 0, 1e-4, 1.0, 0, 0.25, 512.0)
    return dict(zip(TRAIN_KEYS, values, strict=True)) | changes


EXPERTS = {
    "aux_loss": 1.25, "z_loss": 2.5, "load": 1.5, "dropped": 0.125,
    "experts": [{"layer": 1, "z_loss": 2.5, "aux_loss": 1.25, "counts": [3, 1], "dropped": 1}],
}  # fmt: skip


def make(tmp_path, *, writes=True, iterations=10, watching=None, peak=None, **logging):
    places = {"metrics_jsonl": str(tmp_path / "run" / "m.jsonl"), "tensorboard_dir": str(tmp_path / "run" / "tb")}
    config = LoggingConfig(**({"log_interval": 5} | places | logging))
    return Metrics(
        config, iterations=iterations, world=4, writes=writes, watching=watching, peak=peak,
        flops=lambda seq_length: Flops(2.5e12 * 4 / 512, 4e12 * 4 / 512 * (seq_length or 16) / 16),
    )  # fmt: skip


def lines_of(tmp_path):
    return [json.loads(line) for line in (tmp_path / "run" / "m.jsonl").read_text().splitlines() if line]


def scalars(tmp_path):
    events = EventAccumulator(str(tmp_path / "run" / "tb")).Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_one_line_per_interval_and_after_the_last_iteration(tmp_path, capsys):
    metrics = make(tmp_path, iterations=12)
    for i in range(1, 13):
        metrics.train(record(i, loss=1.0 / i, seconds=0.1 * i))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("|")[0].strip() for line in lines] == ["iteration  5/12", "iteration 10/12", "iteration 12/12"]
    assert lines[1] == (
        "iteration 10/12 | consumed samples 80 | consumed tokens 1280 | lm loss 0.100000 | grad norm 0.5000 | "
        "learning rate 1.0000e-04 | 0.800 s/iteration | 512 tokens/s | 2.5 TFLOP/s per rank"
    )


def test_what_is_held_back_is_written_where_training_ends_by_an_error(tmp_path):
    metrics = make(tmp_path)
    metrics.train(record(1, loss=1.5))
    metrics.flush()
    assert scalars(tmp_path)["lm loss"] == [(1, 1.5)]


def test_a_full_disk_of_the_logs_does_not_end_the_run(tmp_path, capsys):
    """It is told once, and what can be told is."""
    metrics = make(tmp_path, metrics_jsonl="/dev/full", log_interval=1)
    for iteration in (1, 2):
        metrics.train(record(iteration))
    metrics.flush()
    metrics.close()
    lines = capsys.readouterr().out.splitlines()
    assert [line[:9] for line in lines] == ["iteration", "warning: ", "iteration"]
    assert lines[1] == "warning: --metrics-jsonl /dev/full: No space left on device: what the run tells there is lost"
    assert scalars(tmp_path)["lm loss"] == [(1, 2.0), (2, 2.0)]


def test_operations_are_those_of_the_tokens_that_the_samples_of_each_step_had(tmp_path, capsys):
    """Under a curriculum: attention's share of a token's operations grows with the sample."""
    metrics = make(tmp_path, log_throughput=True, log_interval=2)
    metrics.train(record(1, seq_length=8))
    metrics.train(record(2, seq_length=16, seconds=0.75))
    metrics.close()
    assert capsys.readouterr().out.endswith("| 512 tokens/s | 2.5 TFLOP/s per rank | 3.5 by SC'21\n")
    assert scalars(tmp_path)["throughput sc21"] == [(1, 2.0), (2, 4.0)]


def test_operations_by_the_formula_of_sc21_stand_beside_those_of_the_model_on_request(tmp_path, capsys):
    make(tmp_path, log_throughput=True).train(record(5))
    assert capsys.readouterr().out.endswith("| 512 tokens/s | 2.5 TFLOP/s per rank | 4 by SC'21\n")


def test_loss_scale_and_skips_show_only_where_there_are_any(tmp_path, capsys):
    make(tmp_path).train(record(5, loss_scale=65536.0, skipped=1))
    assert "loss scale 65536 | skipped |" in capsys.readouterr().out


def test_measured_figures_show_where_there_are_any(tmp_path, capsys):
    make(tmp_path).train(record(5, params_norm=12.5, num_zeros=7))
    assert "grad norm 0.5000 | params norm 12.5000 | zeros in grad 7 | learning rate" in capsys.readouterr().out
    assert tuple(lines_of(tmp_path)[0]) == (*TRAIN_KEYS, "params_norm", "num_zeros")


def test_what_a_teacher_adds_shows_in_the_iterations_that_have_it(tmp_path, capsys):
    metrics = make(tmp_path, log_interval=1)
    metrics.train(record(1, kd_loss=0.25))
    metrics.train(record(2))
    first, second = capsys.readouterr().out.splitlines()
    assert "| lm loss 2.000000 | kd loss 0.250000 | grad norm" in first and "kd loss" not in second
    assert [line.get("kd_loss") for line in lines_of(tmp_path)] == [0.25, None]


def test_experts_show_in_every_place_where_there_are_any(tmp_path, capsys):
    metrics = make(tmp_path)
    metrics.train(record(5) | EXPERTS)
    assert (
        "1.0000e-04 | load balancing loss 1.2500 | z loss 2.5000 | fullest expert over mean 1.5000 | share of choices "
        "dropped 0.1250 | 0.250 s"
    ) in capsys.readouterr().out
    metrics.train(record(6) | EXPERTS | {"experts": [{"layer": 1, "z_loss": math.nan, "counts": [0, 0]}]})
    lines = lines_of(tmp_path)
    assert lines[0]["experts"] == EXPERTS["experts"] and lines[0]["dropped"] == 0.125
    assert lines[1]["experts"] == [{"layer": 1, "z_loss": None, "counts": [0, 0]}]


def test_json_lines_have_every_iteration_at_full_precision(tmp_path):
    metrics = make(tmp_path)
    losses = [math.pi / i for i in range(1, 8)]
    for i, loss in enumerate(losses, 1):
        metrics.train(record(i, loss=loss))
    metrics.evaluation("valid", 7, 1.5)
    lines = lines_of(tmp_path)              # before close: a killed run keeps its lines
    assert [line["lm_loss"] for line in lines[:-1]] == losses
    assert all(tuple(line) == TRAIN_KEYS for line in lines[:-1])
    assert lines[-1] == {"split": "valid", "iteration": 7, "lm_loss": 1.5, "ppl": math.exp(1.5)}


def test_a_killed_run_keeps_its_lines(tmp_path):
    script = f"""
        import os, signal
        from pathlib import Path
        from tests.test_metrics import make, record
        metrics = make(Path({str(tmp_path)!r}))
        for i in range(1, 4):
            metrics.train(record(i))
        os.kill(os.getpid(), signal.SIGKILL)
    """
    root = Path(__file__).resolve().parent.parent
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], cwd=root, timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert [line["iteration"] for line in lines_of(tmp_path)] == [1, 2, 3]


def test_a_resumed_run_adds_to_the_file_even_after_a_torn_line(tmp_path):
    first = make(tmp_path)
    first.train(record(1))
    first.close()
    with open(tmp_path / "run" / "m.jsonl", "a") as file:
        file.write('{"iteration": 2, "lm_')
    second = make(tmp_path)
    second.train(record(2))
    second.close()
    text = (tmp_path / "run" / "m.jsonl").read_text().splitlines()
    assert json.loads(text[0])["iteration"] == 1 and json.loads(text[2])["iteration"] == 2 and len(text) == 3


def test_json_lines_stay_valid_json_where_a_number_is_not_finite(tmp_path):
    metrics = make(tmp_path)
    metrics.train(record(1, grad_norm=math.inf))
    metrics.evaluation("test", 1, 800.0)
    lines = lines_of(tmp_path)
    assert lines[0]["grad_norm"] is None and lines[1]["ppl"] is None
    assert perplexity(800.0) == math.inf and perplexity(0.0) == 1.0


def test_tensorboard_has_the_listed_tags(tmp_path):
    metrics = make(
        tmp_path, log_timers_to_tensorboard=True, log_batch_size_to_tensorboard=True, log_throughput=True,
        log_validation_ppl_to_tensorboard=True, log_memory_to_tensorboard=True, peak=1e13,
    )  # fmt: skip
    for i in (1, 2):
        measured = {"params_norm": 8.0, "num_zeros": 5, "exp_avg_norm": 0.5, "exp_avg_sq_norm": 0.25, "seq_length": 8}
        measured = measured if i == 2 else {"kd_loss": 0.5}
        balance = EXPERTS | {"seq_aux_loss": 1.0, "global_aux_loss": 1.0}
        watched = {"timers": {"data": 0.25, "wait for tensor": 0.5}, "memory_classes": {"peak": 2**20}}
        metrics.train(record(i, loss=3.0 - i, **measured) | balance | (watched if i == 2 else {}))
    metrics.evaluation("valid", 2, 1.0)
    metrics.evaluation("test", 2, 1.25)
    metrics.evaluation("web", 2, 1.5)
    metrics.took("checkpoint", 2, 1.25)
    metrics.close()
    found = scalars(tmp_path)
    gpu = set() if torch.cuda.is_available() else {TAGS["memory"]}
    assert set(found) == {
        *TAGS.values(), "lm loss validation web", "lm loss validation ppl web", "fullest expert over mean/layer 1",
        "timers/data", "timers/wait for tensor", "timers/checkpoint", "memory/peak",
    } - gpu  # fmt: skip
    assert found["memory-peak-bytes"][0][1] > 2**25 and found["second-moments-norm"] == [(2, 0.25)]
    assert found["timers/data"] == [(2, 0.25)] and found["timers/checkpoint"] == [(2, 1.25)]
    assert found["fullest expert over mean/layer 1"] == [(1, 1.5), (2, 1.5)] and found["memory/peak"] == [(2, 2.0**20)]
    assert found["tokens-per-second"] == [(1, 512.0), (2, 512.0)] and found["mfu"] == [(1, 0.25), (2, 0.25)]
    assert found["lm loss validation web"] == [(2, 1.5)]
    assert found["lm loss"] == [(1, 2.0), (2, 1.0)]
    assert found["lm loss validation"] == [(2, 1.0)] and found["lm loss test"] == [(2, 1.25)]
    assert found["params-norm"] == [(2, 8.0)] and found["num-zeros"] == [(2, 5.0)]
    assert found["batch-size"] == [(2, 8.0)] and found["throughput"] == [(1, 2.5), (2, 2.5)]
    assert found["throughput sc21"] == [(1, 4.0), (2, 2.0)]       # of samples half as long


def test_what_was_not_asked_for_is_not_written(tmp_path):
    metrics = make(tmp_path)
    metrics.train(record(1) | {"timers": {"data": 0.25}})
    metrics.took("checkpoint", 1, 1.25)
    metrics.close()
    tags = set(scalars(tmp_path))
    assert not {"iteration-time", "batch-size", "throughput", "mfu", "memory-peak-bytes"} & tags
    assert not [tag for tag in tags if tag.startswith(("timers/", "memory/"))]


def test_tensorboard_has_every_nth_iteration_where_that_is_asked_for(tmp_path):
    metrics = make(tmp_path, tensorboard_log_interval=3, log_batch_size_to_tensorboard=True)
    for i in range(1, 8):
        metrics.train(record(i))
    metrics.evaluation("valid", 4, 1.0)
    metrics.close()
    found = scalars(tmp_path)
    assert found["lm loss"] == [(3, 2.0), (6, 2.0)] and found["lm loss validation"] == [(4, 1.0)]
    assert found["batch-size"] == [(3, 8.0), (6, 8.0)] and len(lines_of(tmp_path)) == 8


def test_mfu_is_told_where_the_peak_is_known(tmp_path, capsys):
    make(tmp_path, peak=1e13).train(record(5))
    assert capsys.readouterr().out.endswith("| 2.5 TFLOP/s per rank | MFU 25.0%\n")
    for name, half, tflops in (
        ("NVIDIA H100 80GB HBM3", True, 989), ("NVIDIA H100 PCIe", True, 756), ("NVIDIA A100-SXM4-80GB", False, 19.5),
        ("NVIDIA L4", True, 121), ("NVIDIA L40S", True, 362), ("Tesla V100-SXM2-16GB", True, 125),
        ("AMD Instinct MI300X", True, 1307), ("NVIDIA GB200", True, 2500),
    ):  # fmt: skip
        assert device_peak(name, half=half) == pytest.approx(1e12 * tflops), name
    assert device_peak("", half=True) is None and device_peak("NVIDIA H1000", half=True) is None


class Terminal(io.StringIO):
    """A terminal that remembers what it was told."""

    def isatty(self):
        return True


def test_a_terminal_shows_a_bar_with_the_time_left_and_whole_lines_above_it(tmp_path, monkeypatch):
    shown = Terminal()
    monkeypatch.setattr(sys, "stdout", shown)
    monkeypatch.setattr(sys, "stderr", shown)
    metrics = make(tmp_path, iterations=12)
    for i in range(4, 11):                              # a run that was taken up at 3
        metrics.train(record(i, loss=1.0 / i))
        time.sleep(0.02)
    metrics.say("hello")
    metrics.close()
    text = shown.getvalue()
    lines = text.replace("\r", "\n").splitlines()
    assert [line[:15] for line in lines if line.startswith("iteration")] == ["iteration  5/12", "iteration 10/12"]
    assert "hello" in lines
    last = [line for line in lines if "10/12" in line and "%" in line][-1]
    assert re.search(r"83%.*\[\d+:\d+<00:00,.*lm loss 0\.1000\]", last), lines     # elapsed < left
    silent = Terminal()
    monkeypatch.setattr(sys, "stdout", silent)
    make(tmp_path, watching=WatchingConfig(progress_bar=False)).train(record(1))
    assert silent.getvalue() == ""


def test_weights_and_biases_gets_the_figures_of_tensorboard(tmp_path, monkeypatch):
    told, wandb = [], types.ModuleType("wandb")
    wandb.__spec__ = ModuleSpec("wandb", None)

    class Run:
        summary: dict = {}

        def log(self, values, step):
            told.append((step, values))

        def finish(self):
            told.append("finished")

    wandb.init = lambda **how: told.append(how) or Run()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    watching = WatchingConfig(
        wandb_project="pretraining", wandb_exp_name="a", wandb_entity="lab", wandb_save_dir=str(tmp_path)
    )
    check_places(LoggingConfig(), watching)
    metrics = make(tmp_path, watching=watching)
    metrics.train(record(1))
    metrics.evaluation("valid", 1, 1.5)
    metrics.overlap(1, 1, 4)
    metrics.close()
    assert told[0] == {"project": "pretraining", "name": "a", "entity": "lab", "dir": str(tmp_path)}
    assert told[1][0] == 1 and told[1][1]["lm loss"] == 2.0 and told[1][1]["grad-norm"] == 0.5
    assert told[2:] == [(1, {"lm loss validation": 1.5}), "finished"] and Run.summary == {"early_share": 0.25}


def test_weights_and_biases_is_named_where_it_is_missing(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="--wandb-project p: the package wandb is not installed here"):
        check_places(LoggingConfig(), WatchingConfig(wandb_project="p"))
    check_places(LoggingConfig(), WatchingConfig(wandb_exp_name="a"))


def test_a_resumed_curve_shows_each_iteration_once(tmp_path):
    first = make(tmp_path)
    for i in (1, 2, 3):
        first.train(record(i, loss=9.0))
    first.close()
    time.sleep(1.1)         # files are read in the order of their names, which begin with the second
    second = make(tmp_path)
    second.train(record(3, loss=1.0))
    second.close()
    assert scalars(tmp_path)["lm loss"] == [(1, 9.0), (2, 9.0), (3, 1.0)]


def test_other_ranks_are_silent_and_make_no_file(tmp_path, capsys):
    metrics = make(tmp_path, writes=False)
    metrics.train(record(5))
    metrics.evaluation("valid", 5, 1.0)
    metrics.say("hello")
    metrics.close()
    assert capsys.readouterr().out == "" and list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_is_told_with_its_flag(tmp_path):
    (tmp_path / "file").write_text("")
    for flag, place in (("metrics_jsonl", "file/m.jsonl"), ("tensorboard_dir", "file/tb")):
        logging = {"metrics_jsonl": None, "tensorboard_dir": None} | {flag: str(tmp_path / place)}
        name = "--" + flag.replace("_", "-")
        with pytest.raises(ValueError, match=f"{name} .*cannot be written"):
            make(tmp_path, **logging)
        with pytest.raises(ValueError, match=f"{name} .*cannot be written"):
            check_places(LoggingConfig(**logging))
    with pytest.raises(ValueError, match="is a folder, not a file"):
        check_places(LoggingConfig(metrics_jsonl=str(tmp_path)))
    check_places(LoggingConfig(metrics_jsonl=str(tmp_path / "a" / "b.jsonl"), tensorboard_dir=str(tmp_path / "c")))
    check_places(LoggingConfig(metrics_jsonl=str(tmp_path / "file")))
    check_places(LoggingConfig())
    assert os.listdir(tmp_path) == ["file"]


def gpt(layers, hidden, heads, **changes):
    shape = {"num_layers": layers, "hidden_size": hidden, "num_attention_heads": heads, "seq_length": 2048}
    return ModelConfig(**(shape | changes))


GPT_175B, GPT_1B = gpt(96, 12288, 96), gpt(24, 2048, 16)


def test_operations_equal_the_published_figures():
    close = pytest.approx
    assert sc21_flops(GPT_175B, vocab=51200, batch=1536, recompute=True) == close(4.51097e18, rel=5e-6)
    assert sc21_flops(GPT_175B, vocab=51200, batch=1536, recompute=False) == close(3.38620e18, rel=5e-6)
    assert sc21_flops(GPT_1B, vocab=50304, batch=512, recompute=True) == close(1.24701e16, rel=5e-6)
    assert sc21_flops(GPT_1B, vocab=50304, batch=512, recompute=False) == close(9.51462e15, rel=5e-6)
    assert model_flops(GPT_175B, vocab=51200, batch=1536) == close(3.34060e18, rel=5e-6)
    assert model_flops(GPT_1B, vocab=50304, batch=512) == close(8.88131e15, rel=5e-6)


def test_operations_equal_the_closed_form_for_any_gpt():
    for layers, h, s, vocab in [(1, 64, 16, 97), (7, 96, 128, 1000)]:
        model = gpt(layers, h, 4, seq_length=s)
        closed = 72 * 3 * s * layers * h**2 * (1 + s / (12 * h) + vocab / (12 * layers * h))
        assert model_flops(model, vocab=vocab, batch=3) == pytest.approx(closed, rel=1e-14)


def test_a_run_counts_what_it_recomputes_beside_what_its_model_needs():
    def counted(**sections):
        batch = BatchConfig(micro_batch_size=1, train_iters=1)
        return flops_per_token(Config(model=GPT_1B, batch=batch, schedule=ScheduleConfig(lr=1.0), **sections), 50304)

    token = 512 * 2048
    full = counted(recompute=RecomputeConfig(recompute_granularity="full", recompute_method="uniform"))
    assert full == pytest.approx((8.88131e15 / token, 1.24701e16 / token), rel=5e-6)
    assert counted() == pytest.approx((8.88131e15 / token, 9.51462e15 / token), rel=5e-6)
    assert counted(moe=MoEConfig(num_experts=(8,))).hardware is None
    half = flops_per_token(
        Config(model=GPT_1B, batch=BatchConfig(micro_batch_size=1, train_iters=1), schedule=ScheduleConfig(lr=1.0)),
        50304, 1024,
    )
    assert half.model == model_flops(gpt(24, 2048, 16, seq_length=1024), vocab=50304, batch=1) / 1024


def test_operations_of_a_window_are_those_of_the_keys_that_are_seen():
    """Over a sequence of s, w keys at most: s w (1 - w / 2 s) pairs, s^2 / 2 where nothing is hidden."""
    def core(**changes):
        return model_flops(gpt(2, 64, 4, seq_length=16, **changes), vocab=97, batch=1) - model_flops(
            gpt(2, 64, 4, seq_length=16, window_size="0,0"), vocab=97, batch=1
        )

    whole, own = 2 * 3 * 4 * 64 * 16**2 / 2, 2 * 3 * 4 * 64 * (16 - 0.5)
    assert core() == core(window_size="15,0") == core(window_size="99,0") == whole - own
    assert core(window_size="3,0") == 2 * 3 * 4 * 64 * 16 * 4 * (1 - 4 / 32) - own
    assert core(window_size="0,0", window_attn_skip_freq="2") == (whole - own) / 2


def test_operations_follow_grouped_heads_and_gates():
    """Llama-3-8B's shape: 32 query heads, 8 groups of 128, a gated feed-forward of 14336."""
    model = gpt(1, 4096, 32, num_query_groups=8, ffn_hidden_size=14336, activation="swiglu", seq_length=8192)
    projections = 2 * 4096 * (4096 + 2 * 1024) + 2 * 4096 * 4096
    core = 2 * 8192 * 4096
    assert layer_flops(model) == projections + core + 3 * 2 * 4096 * 14336
    assert layer_flops(gpt(1, 4096, 32, num_query_groups=8)) < layer_flops(gpt(1, 4096, 32))
