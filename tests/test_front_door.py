"""The front door: wrong flags and files end all ranks at once with one line, printing commands print, runs can be
left and taken up again.

What happens before ranks meet is tried rank by rank in this process; whole scripts are run where processes matter.
"""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import pretrain_gpt
from megazero.config import Config
from megazero.data.indexed import IndexedWriter
from megazero.kernels import dispatch
from megazero.lr_curves import Done
from megazero.lr_schedule import Rates, make_schedule
from megazero.plan import plan_stages
from megazero.trainer import Trainer
from tests.harness import run_script
from tests.training import LLAMA, SMALL, train


def run(capsys: pytest.CaptureFixture, code: int, flags: str) -> tuple[str, str]:
    """What the front door says, entered here as one process: standard output and error."""
    assert pretrain_gpt.main(f"{SMALL} {flags}".split()) == code
    return capsys.readouterr()


def run_ranks(words: list[str], n: int, code: int, told: str) -> None:
    """The script itself on n ranks: all end with `code` in time, and one of them says why in one line.

    In time is 15 s on two free cores; here others may use them too. A rank that waited for the others would wait for
    --distributed-timeout-minutes.
    """
    ended = run_script(["pretrain_gpt.py", *words], n)
    assert [rank.code for rank in ended] == [code] * n
    said = "".join(rank.stderr for rank in ended)
    assert told in said and said.count("\n") == 1, said
    assert "".join(rank.stdout for rank in ended) == ""
    assert max(rank.seconds for rank in ended) < 45


def metrics(path: Path) -> list[dict]:
    """The training lines of --metrics-jsonl, without what depends on the clock."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    timeless = ("iteration", "consumed_samples", "lm_loss", "grad_norm", "learning_rate")
    return [{key: line[key] for key in timeless} for line in lines if "split" not in line]


# -------------------------------------------------------------------------------------------------- what is refused


def write_tokens(prefix: Path, vocab: int) -> Path:
    with IndexedWriter(prefix, vocab_size=vocab) as writer:
        writer.add_document([np.arange(400) % vocab])
    return prefix


def without(flag: str) -> str:
    """SMALL without a flag and its value."""
    return re.sub(rf"{flag}( [^-]\S*)?(?= |$)", "", SMALL)


WRONG = [
    # C079: the two numbers are named
    (4, "{small} --num-attention-heads 6 --hidden-size 48 {tp4}", "--num-attention-heads 6 is not divisible by"),
    (4, "{small} --ffn-hidden-size 30 {tp4}", "--ffn-hidden-size 30 is not divisible by --tensor-model"),
    (4, "{small} {llama} --num-query-groups 2 {tp4}", "--num-query-groups 2 is not divisible by"),
    (4, "{small} --seq-length 18 {tp4}", "--seq-length 18 is not divisible by --tensor-model-parallel-size 4"),
    (3, "{small} --tensor-model-parallel-size 2", "world size 3 is not a multiple of --tensor-model-parallel-size 2"),
    (5, "{small} --pipeline-model-parallel-size 5", "--num-layers 4 is below --pipeline-model-parallel-size 5"),
    # C137: the equation, and the nearest flag
    (2, "{small} --global-batch-size 7", "7 must be --micro-batch-size 2 x accumulation x data size 2"),
    (2, "{small} --num-experts 4 --moe-expert-parallel-size 4", "--moe-expert-parallel-size 4 does not divide the 2"),
    (2, "{small} --num-layer 3", "unknown flag --num-layer; did you mean --num-layers?"),
    (2, "{data} --data-path {tmp}/none_text_document", "{tmp}/none_text_document"),
    # C016: data made with a larger vocabulary
    (2, "{data} --data-path {tmp}/wide", "was made with a vocabulary of 131, the tokenizer"),
    # C047: an explicit load of what is not there
    (2, "{small} --load {tmp}/empty", "--load {tmp}/empty: there is no complete checkpoint in {tmp}/empty\n"),
    (2, "{small} --load {tmp}/empty --save {tmp}/empty --save-interval 1", "give --auto-resume instead"),
    (2, "{small} --load {tmp}/empty --ckpt-step 7", "there is no complete checkpoint"),
    # C034: no end of document, and something asked of it
    (2, "{small} --eod-mask-loss", "the tokenizer has no end-of-document token"),
    (2, "{small} --reset-attention-mask", "the tokenizer has no end-of-document token"),
    (2, "{small} --metrics-jsonl {tmp}/empty", "--metrics-jsonl {tmp}/empty: "),
    (2, "{small} --tensorboard-dir {tmp}/wide.bin", "--tensorboard-dir {tmp}/wide.bin: "),
    (2, "{small} --save {tmp}/wide.bin --save-interval 1", "--save {tmp}/wide.bin: "),
    # C139
    (2, "{small} --kernel soft=torch", "--kernel soft=torch: "),
    (2, "{small} --kernels fast", "--kernels fast: must be one of auto, triton, torch"),
]


@pytest.mark.parametrize(("n", "words", "told"), WRONG, ids=[words.replace("{small} ", "") for _, words, _ in WRONG])
def test_what_is_wrong_is_told_by_one_rank_and_fails_all_before_any_waits_for_another(
    n: int, words: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "empty").mkdir()
    write_tokens(tmp_path / "wide", 131)
    texts = {
        "small": SMALL, "data": without("--mock-data"), "llama": LLAMA, "tp4": "--tensor-model-parallel-size 4",
        "tmp": tmp_path,
    }
    monkeypatch.setattr(pretrain_gpt, "connect", lambda *_, **__: pytest.fail("it went on to meet the others"))
    monkeypatch.setenv("WORLD_SIZE", str(n))
    for rank in range(n):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        assert pretrain_gpt.main(words.format(**texts).split()) != 0
        out, err = capsys.readouterr()
        assert out == ""
        if rank == 0:
            assert told.format(**texts) in err and err.startswith("pretrain_gpt.py: error: ") and err.count("\n") == 1
        else:
            assert err == ""


def test_as_processes_all_ranks_end_in_time_and_one_speaks() -> None:
    gone = f"{without('--mock-data')} --data-path gone_text_document"
    run_ranks(gone.split(), 2, 2, "gone_text_document")


# -------------------------------------------------------------------------------------------------- what is printed


def test_the_layout_of_a_world_is_printed_without_the_world(capsys: pytest.CaptureFixture) -> None:
    """C141: coordinates, groups, layers of each stage and parameters of each rank; neither data nor --lr is asked."""
    words = (
        "--num-layers 5 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --vocab-size 97 --print-layout "
        "--world-size 8 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --num-experts 2 "
        "--expert-model-parallel-size 2"
    ).split()
    assert pretrain_gpt.main(words) == 0
    out, err = capsys.readouterr()
    assert err == "" and "world 8: tensor 2 x pipeline 2 x data 2 (expert 2)" in out
    assert "tensor    {0,1} {2,3} {4,5} {6,7}" in out and "pipeline  {0,4} {1,5} {2,6} {3,7}" in out
    assert "data      {0,2} {1,3} {4,6} {5,7}" in out and "tied_data {0,2,4,6} {1,3,5,7}" in out
    assert "expert    {0,2} {1,3} {4,6} {5,7}" in out and "expert_data {0} {1} {2} {3} {4} {5} {6} {7}" in out
    assert "embedding layers.0-2" in out and "layers.3-4 final_norm head" in out
    rows = [line.split() for line in out.splitlines() if re.fullmatch(r"\d( +\d){3} +[\d,]+", line)]
    assert [tuple(map(int, row[:4])) for row in rows] == [(r, r // 4, r // 2 % 2, r % 2) for r in range(8)]
    config = pretrain_gpt.parse([*words, "--train-iters", "1"])[0]
    first, last = plan_stages(pretrain_gpt.layers_of(config, 97), pretrain_gpt.topology_of(config, 8))
    assert [row[4] for row in rows] == [f"{first.parameters:,}"] * 4 + [f"{last.parameters:,}"] * 4
    assert f"parameters {first.recorded + last.recorded:,}" in out
    assert pretrain_gpt.main([*words, "--world-size", "6"]) == 2


GPT_175B = (
    "--num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048 --vocab-size 51200 --print-layout "
)


def test_a_model_that_does_not_fit_is_said_not_to(capsys: pytest.CaptureFixture) -> None:
    """96 layers of 12,288 at tensor 4, pipeline 4, data 2: 109 GB of states by the published 16 bytes, and more here,
    where gradients are fp32."""
    layout = "--tensor-model-parallel-size 4 --pipeline-model-parallel-size 4 --world-size 32 --device-memory-gb 80"
    assert pretrain_gpt.main(f"{GPT_175B} {layout} --bf16".split()) == 0
    out = capsys.readouterr().out
    assert "per parameter, of which 2 are a gradient's: 108.74 to 110.09 GB per rank" in out
    assert "it does not fit: " in out and " GB are needed of --device-memory-gb 80" in out
    rows = [line.split() for line in out.splitlines() if re.fullmatch(r"\d( +\d+\.\d\d){6}", line)]
    for row, elements in zip(rows, (11_056_373_760, 10_873_921_536, 10_873_921_536, 11_031_232_512), strict=True):
        parameters, gradients, _, states, activations, total = map(float, row[1:])
        assert (parameters, gradients) == pytest.approx((2e-9 * elements, 4e-9 * elements), abs=0.01)
        assert states == pytest.approx(12e-9 * elements, rel=0.01)
        assert total == pytest.approx(states + activations, abs=0.02)
    assert "bubble 75.0% in a step of 1 micro-batches" in out


def test_the_layout_of_a_large_world_is_told_in_seconds(capsys: pytest.CaptureFixture) -> None:
    """98,304 ranks, as JSON; of the processor's time, whatever else runs."""
    layout = "--tensor-model-parallel-size 8 --pipeline-model-parallel-size 32 --world-size 98304 --json"
    began = time.process_time()
    more = "--recompute-granularity full --recompute-method uniform --global-batch-size 24576"
    assert pretrain_gpt.main(f"{GPT_175B} {layout} {more}".split()) == 0
    assert time.process_time() - began < 3
    told = json.loads(capsys.readouterr().out)
    assert told["world"] == 98304 and told["axes"]["data"] == 384 and told["micro_batches"] == 64
    assert told["groups"]["data"] == {"size": 384, "count": 256, "first": [8 * i for i in range(384)]}
    assert len(told["pipeline"]) == 32 and told["ranks"][-1]["pipeline"] == 31
    assert 31 / 95 < told["bubble"] < 0.4, "a fill of 31 of 95 rounds, and the head makes the last stage the slowest"
    assert told["flops_with_recomputation"] > 1.3 * told["flops_of_a_step"]


def test_rates_are_printed_as_the_run_uses_them(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    schedule = "--lr-decay-style cosine --lr-warmup-iters 2 --min-lr 1e-4 --train-iters 4"
    out, _ = run(capsys, 0, f"{schedule} --print-lr 4")
    lines = [json.loads(line) for line in out.splitlines()]
    assert [sorted(line) for line in lines] == [["learning_rate", "step", "weight_decay"]] * 4
    assert [line["step"] for line in lines] == [1, 2, 3, 4] and lines[0]["learning_rate"] == 0.0
    run(capsys, 0, f"{schedule} --metrics-jsonl {tmp_path}/m.jsonl")
    used = [step["learning_rate"] for step in metrics(tmp_path / "m.jsonl")]
    assert used == [line["learning_rate"] for line in lines]


def test_the_configuration_is_printed_whole(capsys: pytest.CaptureFixture) -> None:
    out, _ = run(capsys, 0, "--lr 0.5 --print-config")
    config = Config.from_json(out)
    assert config.schedule.lr == 0.5 and config.model.num_layers == 4
    assert config == pretrain_gpt.parse(f"{SMALL} --lr 0.5".split())[0]      # what would run, and may be read back
    both = "--lr 0.5 --print-config --print-layout --json --device-memory-gb 80"
    assert run(capsys, 0, both)[0].startswith(out.rstrip())
    assert make_schedule(config.schedule, config.batch, 8).at(Done()) == Rates(0.5, 0.1)


# ------------------------------------------------------------------------------------------- runs, and what is left


def contents(folder: Path) -> dict[str, tuple[int, int]]:
    """Every file with its size and the time of its last change."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): (path.stat().st_size, path.stat().st_mtime_ns) for path in files}


def test_auto_resume_starts_anew_where_there_is_nothing_and_says_so(
    capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    """C047: the named choice; then it resumes what it finds."""
    flags = f"--save {tmp_path}/new --save-interval 2 --auto-resume --log-interval 1"
    out, err = run(capsys, 0, f"{flags} --train-iters 2")
    assert f"--auto-resume: nothing to resume in {tmp_path}/new, starting anew" in out and err == ""
    assert "iteration 1/2" in out and "iteration 2/2" in out
    out, _ = run(capsys, 0, f"{flags} --train-iters 3")
    assert "going on after iteration 2" in out and "iteration 3/3" in out and "iteration 2/3" not in out


def test_a_finished_run_does_nothing_when_relaunched_and_goes_on_to_a_larger_target(
    capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    """C054: 4 of 4, again, and 6 of 6 as if it had never stopped."""
    folder = tmp_path / "run"
    flags = f"--save {folder} --load {folder} --save-interval 2 --metrics-jsonl {tmp_path}/parts.jsonl"
    run(capsys, 0, f"{flags.replace(f'--load {folder}', '')} --train-iters 4")
    before = contents(folder)
    out, err = run(capsys, 0, f"{flags} --train-iters 4")
    assert "nothing to do: the checkpoint is at iteration 4 of 4" in out and err == ""
    assert contents(folder) == before and len(metrics(tmp_path / "parts.jsonl")) == 4
    run(capsys, 0, f"{flags} --train-iters 6")
    run(capsys, 0, f"--train-iters 6 --metrics-jsonl {tmp_path}/straight.jsonl")
    assert metrics(tmp_path / "parts.jsonl") == metrics(tmp_path / "straight.jsonl")
    assert (folder / "latest_checkpointed_iteration.txt").read_text().strip() == "6"


def test_a_run_is_left_at_an_interval_or_after_a_time_with_a_save(
    capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    flags = f"--train-iters 5 --save-interval 100 --eval-interval 1 --eval-iters 1 --save {tmp_path}"
    out, _ = run(capsys, 0, f"{flags}/interval --exit-interval 3 --metrics-jsonl {tmp_path}/m.jsonl")
    assert "left after iteration 3, as asked" in out and (tmp_path / "interval/iter_0000003/index.json").is_file()
    assert [step["iteration"] for step in metrics(tmp_path / "m.jsonl")] == [1, 2, 3]
    out, _ = run(capsys, 0, f"{flags}/time --exit-duration-in-mins 0")
    assert "left after iteration 1, as asked" in out and (tmp_path / "time/iter_0000001/index.json").is_file()


def only_rank_3_has_a_limit(trainer: Trainer) -> None:
    if trainer.machine.mesh.rank != 3:
        trainer.batch = replace(trainer.batch, exit_duration_in_mins=None)


def test_all_ranks_leave_together_when_the_time_of_one_is_up() -> None:
    """C135: clocks differ."""
    assert len(train("--exit-duration-in-mins 0", (2, 2, 1), before=only_rank_3_has_a_limit).steps) == 1


# ----------------------------------------------------------------------------------------------------- C139: kernels

TWICE = """
import pretrain_gpt
run, refused = " ".join(sys.argv[1:]).split(" THEN ")
print(pretrain_gpt.main(run.split()), "torch._dynamo" in sys.modules, pretrain_gpt.main(refused.split()))
"""
HIDDEN = f"import sys; sys.modules['triton'] = None{TWICE}"
REFUSED = f"{SMALL} --train-iters 2 --kernels triton"


def test_without_triton_the_script_trains_on_the_torch_path(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    """C139: and without a compiler, with the same results; only what asks for triton by name is refused."""
    flags = f"{SMALL} {LLAMA} --train-iters 2 --metrics-jsonl"
    nothing = {"PATH": str(tmp_path), "CC": "none", "CXX": "none"}
    (ended,) = run_script(["-c", HIDDEN, f"{flags} {tmp_path}/without.jsonl THEN {REFUSED}"], env=nothing)
    assert ended.code == 0 and ended.stdout.splitlines()[-1] == "0 False 2", ended.stderr
    assert ended.stderr.count("\n") == 1 and "triton is not installed here" in ended.stderr
    run(capsys, 0, f"{LLAMA} --train-iters 2 --kernel rms_norm=torch --metrics-jsonl {tmp_path}/with.jsonl")
    assert metrics(tmp_path / "without.jsonl") == metrics(tmp_path / "with.jsonl")


def test_the_attention_that_is_asked_for_runs(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    """Attention in three steps, scaled by layers or not, and the fused op give one loss, but for the order of sums."""
    losses = {}
    for number, words in enumerate(("flash", "unfused", "local --apply-query-key-layer-scaling")):
        file = tmp_path / f"{number}.jsonl"
        run(capsys, 0, f"{LLAMA} --train-iters 2 --attention-backend {words} --metrics-jsonl {file}")
        losses[words] = [line["lm_loss"] for line in metrics(file)]
    fused, unfused, scaled = losses.values()
    assert unfused == pytest.approx(fused, rel=1e-5) and scaled == pytest.approx(fused, rel=1e-5)


@pytest.mark.skipif(dispatch.triton is None, reason="triton is not installed")
def test_a_run_on_kernels_is_a_run_on_torch(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    """In Triton's interpreter: the loss, the norm of the gradient with its clipping, and Adam."""
    words, found = f"{LLAMA} --train-iters 2 --clip-grad 0.1 --metrics-jsonl", []
    for impl in ("torch", "triton"):
        kernels = " ".join(f"--kernel {op}={impl}" for op in ("cross_entropy", "squared_norm", "adam"))
        run(capsys, 0, f"{words} {tmp_path}/{impl} {kernels}")
        found.append([value for line in metrics(tmp_path / impl) for value in line.values()])
    assert found[1] == pytest.approx(found[0], rel=1e-5) and found[1] != found[0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run here")
def test_a_run_loads_no_compiler_and_triton_by_name_is_refused_where_it_cannot_run() -> None:
    """torch's own takes seconds of every rank's start, and some operations on its meta device import it. C139: with
    triton but without a GPU or Triton's interpreter."""
    words = f"{SMALL} {LLAMA} --train-iters 1 THEN {REFUSED}"
    (ended,) = run_script(["-c", f"import sys{TWICE}", words], env={"TRITON_INTERPRET": "0"})
    assert ended.code == 0 and ended.stdout.splitlines()[-1] == "0 False 2", ended.stderr
    assert ended.stderr.startswith("pretrain_gpt.py: error: ") and "triton" in ended.stderr
    assert ended.stderr.count("\n") == 1


def test_a_run_does_not_mix_itself_with_another_in_one_folder(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """A second run from scratch into a folder that holds later saves is refused; going back on purpose is not."""
    words = f"{SMALL} --save {tmp_path / 'saves'} --save-interval 2".split()
    assert pretrain_gpt.main([*words, "--train-iters", "4"]) == 0
    capsys.readouterr()
    assert pretrain_gpt.main([*words, "--train-iters", "2", "--seed", "6"]) == 2
    assert "holds iteration 4 of another run, and this one starts after iteration 0" in capsys.readouterr().err
    again = [*words, "--load", str(tmp_path / "saves"), "--ckpt-step", "2", "--train-iters", "4"]
    assert pretrain_gpt.main(again) == 0


def test_parts_without_data_are_told_once(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """A part into which no document falls is not evaluated, and that is said at start."""
    out = IndexedWriter(tmp_path / "one", vocab_size=97)
    out.add_document([list(range(90))])
    out.finish()
    words = SMALL.replace("--mock-data", f"--data-path {tmp_path / 'one'}")
    assert pretrain_gpt.main(f"{words} --eval-interval 1 --eval-iters 1 --train-iters 1".split()) == 0
    said = capsys.readouterr().out
    assert said.count("no validation: no document of") == 1 and said.count("no test: no document of") == 1
