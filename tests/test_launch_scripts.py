"""The launch scripts of GPT-3, Llama 2 and Mixtral: sizes, hyperparameters, what DRY_RUN=1 shows, what TINY=1 trains.

The MoE family has tests of its own (test_moe_scripts.py). Of the tiny runs four are here, all others in soak.sh.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

import pretrain_gpt
from megazero.config import check_world
from megazero.flags import parse
from megazero.moe.pyramid import count_parameters
from tests.harness import on_ranks
from tests.training import train_rank

ROOT = Path(__file__).parent.parent

# script -> layers, width, heads, parameters (tables of 50,304 and 32,000 rows), batch, rate
GPT = {
    "gpt_125m": (12, 768, 12, 125_262_336, 256, 6e-4),
    "gpt_350m": (24, 1024, 16, 355_919_872, 256, 3e-4),
    "gpt_760m": (24, 1536, 16, 760_372_224, 256, 2.5e-4),
    "gpt_1.3b": (24, 2048, 16, 1_315_819_520, 512, 2e-4),
    "gpt_2.7b": (32, 2560, 32, 2_651_673_600, 512, 1.6e-4),
    "gpt_6.7b": (32, 4096, 32, 6_658_596_864, 1024, 1.2e-4),
    "gpt_13b": (40, 5120, 40, 12_853_626_880, 1024, 1e-4),
    "gpt_175b": (96, 12288, 96, 174_604_836_864, 1536, 6e-5),
}
OTHERS = {
    "llama_7b": (32, 4096, 32, 6_738_415_616, 1024, 3e-4),
    "llama_13b": (40, 5120, 40, 13_015_864_320, 1024, 3e-4),
    "llama_70b": (80, 8192, 64, 68_976_648_192, 1024, 1.5e-4),
    "mixtral_8x7b": (32, 4096, 32, 46_702_792_704, 1024, 1e-4),
}
SCRIPTS = GPT | OTHERS
MOE_SCRIPTS = ("moe_350m_128", "moe_1.3b_128", "moe_350m_pr", "moe_1.3b_pr", "moe_350m_pr_mos", "moe_1.3b_pr_mos")
IN_THE_SUITE = {"gpt_125m": 2, "gpt_175b": 4, "llama_70b": 4, "mixtral_8x7b": 8}      # their processes


def started(script: str, python: str, *more: str, **environment: str) -> str:
    """What a script prints, with `python` in place of Python."""
    plain = {key: os.environ[key] for key in ("PATH", "HOME") if key in os.environ}
    found = subprocess.run(
        ["bash", f"scripts/{script}", *more], cwd=ROOT, capture_output=True, text=True, timeout=60,
        env=plain | {"MEGAZERO_PYTHON": python, "TEACHER": "none"} | environment,
    )
    assert found.returncode == 0 and found.stderr == "", found.stderr
    return found.stdout


@pytest.fixture(scope="module")
def echo(tmp_path_factory):
    """A Python that only says what it was asked, one word per line."""
    path = tmp_path_factory.mktemp("python") / "python"
    path.write_text("#!/bin/bash\nprintf '%s\\n' \"$@\"\n")
    path.chmod(0o755)
    return str(path)


def test_every_script_is_in_a_table():
    there = {path.stem.removeprefix("pretrain_") for path in (ROOT / "scripts").glob("pretrain_*.sh")}
    assert {name.removesuffix(".sh") for name in there} == {*SCRIPTS, *MOE_SCRIPTS}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_trains_the_model_of_its_name_as_the_paper_says(name, echo):
    layers, hidden, heads, parameters, batch, rate = SCRIPTS[name]
    first, *words = started(f"pretrain_{name}.sh", echo, DRY_RUN="command").splitlines()
    c, notices = parse(words)
    assert first == "pretrain_gpt.py" and notices == []
    model, schedule = c.model, c.schedule
    assert (model.num_layers, model.hidden_size, model.num_attention_heads) == (layers, hidden, heads)
    count = count_parameters(model, c.moe, vocab=50304 if name in GPT else 32000)
    assert count.total == parameters
    size = float(name.split("_")[1].rstrip("mb").removeprefix("8x")) * (1e6 if name.endswith("m") else 1e9)
    if name != "mixtral_8x7b":                  # whose name counts eight times what its experts share
        assert count.total == pytest.approx(size, rel=0.04)
    else:
        assert count.active == 12_879_925_248 and c.experts == (8,) * 32 and c.moe.topk == 2
    assert f"{parameters:,}" in (ROOT / "scripts" / f"pretrain_{name}.sh").read_text()
    assert (c.batch.global_batch_size, schedule.lr, schedule.lr_decay_style) == (batch, rate, "cosine")
    assert schedule.min_lr == pytest.approx(rate / 10)
    assert (c.optimizer.adam_beta1, c.optimizer.adam_beta2, c.optimizer.clip_grad) == (0.9, 0.95, 1.0)
    assert schedule.weight_decay == 0.1 and c.precision.bf16 and model.seq_length == (2048 if name in GPT else 4096)
    if name in GPT:
        assert c.batch.train_tokens == 300 * 10**9 and schedule.lr_decay_tokens == 260 * 10**9
        assert model.init_method_std == pytest.approx((3 * hidden) ** -0.5, rel=0.05)
    else:
        assert c.batch.train_iters * batch * 4096 == pytest.approx(2e12, rel=1e-5) and not model.tied
        assert (model.normalization, model.activation, model.bias) == ("RMSNorm", "swiglu", False)
        assert model.query_groups == (8 if name in ("llama_70b", "mixtral_8x7b") else heads)


@pytest.mark.parametrize("name", [*SCRIPTS, *MOE_SCRIPTS])
def test_a_dry_run_shows_a_layout_that_fits(name, echo, capsys):
    """As the script calls pretrain_gpt.py; the MoE family on the 64 devices of its paper."""
    nodes = {"NODES": "8", "GPUS_PER_NODE": "8"} if name in MOE_SCRIPTS else {}
    program, *words = started(f"pretrain_{name}.sh", echo, "--json", DRY_RUN="1", **nodes).splitlines()
    assert program == "pretrain_gpt.py"
    assert pretrain_gpt.main(words) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["fits"] and told["device_memory_gb"] == 80
    config, _ = parse(words)
    check_world(config, told["world"])
    padded = count_parameters(config.model, config.moe, vocab=config.model.vocab_size).total
    assert told["parameters"] == padded
    assert all(stage["bytes"]["activations"] > 0 for stage in told["pipeline"])


def tiny(name: str, echo: str, out: Path) -> tuple[int, list[str]]:
    """Processes and flags of a script's tiny run."""
    words = started(f"pretrain_{name}.sh", echo, TINY="1", OUT=str(out)).splitlines()
    at = words.index("pretrain_gpt.py")
    return int(words[words.index("--nproc-per-node", 0, at) + 1]), words[at + 1 :]


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_tiny_model_is_of_the_same_kind(name, echo, tmp_path):
    processes, words = tiny(name, echo, tmp_path)
    whole, _ = parse(started(f"pretrain_{name}.sh", echo, DRY_RUN="command").splitlines()[1:])
    c, _ = parse(words)
    check_world(c, processes)
    assert 2 <= processes <= 8 and c.batch.train_iters == 3 and c.data.mock_data
    same = ("activation", "normalization", "position_embedding_type", "disable_bias_linear", "hidden_dropout")
    assert [vars(c.model)[field] for field in same] == [vars(whole.model)[field] for field in same]
    assert (c.model.query_groups < c.model.num_attention_heads) == (
        whole.model.query_groups < whole.model.num_attention_heads
    )
    for size in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size"):
        assert vars(c.parallel)[size] == min(2, vars(whole.parallel)[size])
    assert c.moe.any == whole.moe.any and count_parameters(c.model, c.moe, vocab=97).total < 1_000_000


@pytest.mark.parametrize("name", IN_THE_SUITE)
def test_the_tiny_model_trains(name, echo, tmp_path):
    processes, words = tiny(name, echo, tmp_path)
    assert processes == IN_THE_SUITE[name]
    record, _, _ = on_ranks(processes, train_rank, words, processes, None, None, timeout=110)[0]
    losses = [step["lm_loss"] for step in record.steps]
    assert len(losses) == 3 and all(4 < loss < 6 for loss in losses)
    assert (tmp_path / "checkpoints" / "iter_0000003" / "index.json").is_file()


def test_a_slurm_job_starts_one_launch_per_node(echo, tmp_path):
    """With a Slurm that runs the first task of two nodes here; a dry run and a tiny one need none."""
    for name, text in (("srun", "SLURM_PROCID=1 exec \"$@\""), ("scontrol", "printf 'n1\\nn2\\n'")):
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    out = started(
        "slurm.sh", echo, "scripts/pretrain_gpt_13b.sh", "--seed", "7", OUT=str(tmp_path),
        PATH=f"{tmp_path}:{os.environ['PATH']}", SLURM_JOB_NUM_NODES="2", SLURM_JOB_ID="41",
        SLURM_JOB_NODELIST="n[1-2]",
    )
    words = " ".join(out.splitlines())
    assert "--nnodes 2 --node-rank 1 --nproc-per-node 8 --master-addr n1 --master-port 20041 pretrain_gpt.py" in words
    assert words.endswith("--seed 7")
    dry = started("slurm.sh", echo, "scripts/pretrain_gpt_13b.sh", DRY_RUN="1").splitlines()
    assert dry[:2] == ["pretrain_gpt.py", "--print-layout"]
    small = started("slurm.sh", echo, "scripts/pretrain_gpt_13b.sh", TINY="1", OUT=str(tmp_path))
    assert "torch.distributed.run" in small


@pytest.mark.parametrize(("nodes", "restarts"), [("6:8", ""), ("8", "3")])
def test_a_launch_with_restarts_meets_where_hosts_may_come_and_go(nodes, restarts, echo, tmp_path):
    how = {"NODES": nodes, "MASTER_ADDR": "n1", "OUT": str(tmp_path / "run7"), "MAX_RESTARTS": restarts}
    words = started("pretrain_gpt_13b.sh", echo, **how).split()
    assert " ".join(words[: words.index("pretrain_gpt.py")]) == (
        f"-m torch.distributed.run --nnodes {nodes} --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint n1:29500 "
        f"--rdzv-id run7 --max-restarts {restarts or 100}"
    )
    dry = started("pretrain_gpt_13b.sh", echo, DRY_RUN="1", **how).split()
    assert dry[dry.index("--world-size") + 1] == "64"
