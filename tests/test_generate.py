"""scripts/generate.py and the loop behind it: one text in every layout, sampling as asked, errors in one line."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest
import torch

from megazero.checkpoint import Reader, folder_of
from megazero.config import Config
from megazero.data.loader import DocumentRules
from megazero.data.tokenizer import ByteTokenizer
from megazero.generation import Sampling, Shape, Writer, choose
from megazero.gpt import GPTSetup, gpt_layers
from megazero.parallel.groups import open_mesh
from megazero.parallel.topology import Topology
from scripts import generate
from tests.harness import on_ranks, run_script
from tests.training import LLAMA, train

WINDOW = 24                     # positions of the models below
PROMPTS = ([5], [1, 2, 3], list(range(40, 56)), list(range(50, 77)))       # the last is longer than the window
EXACT = {"vocab": 97, "positions": WINDOW}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Roots of checkpoints: a GPT-2 and a Llama shape in ids, and one that knows bytes."""
    folder = tmp_path_factory.mktemp("trained")
    flags = {
        "gpt": f"--max-position-embeddings {WINDOW} --train-iters 30 --lr 1e-2",
        "llama": f"{LLAMA} --num-query-groups 2 --max-position-embeddings {WINDOW} --train-iters 30 --lr 1e-2",
        "experts": f"--max-position-embeddings {WINDOW} --train-iters 30 --lr 1e-2 --num-experts 4 --topk 2 "
                   "--expert-interval 1 --mlp-type residual",
        "bytes": "--tokenizer-type ByteTokenizer --vocab-size 257 --train-iters 1",
    }
    for name, words in flags.items():
        train(f"{words} --save {folder / name} --save-interval 30")
    return {name: folder / name for name in flags}


def writer_of(root: Path, tensor: int = 1, pipeline: int = 1, **rules: bool) -> Writer:
    """The model of a checkpoint on this rank, in fp64."""
    reader = Reader(folder_of(root, 30))
    config = Config.from_json(json.dumps(reader.config))
    layers = gpt_layers(GPTSetup(config.model, 97, torch.float64, moe=config.moe, experts=config.experts))
    writer = Writer(layers, open_mesh(Topology(pipeline, 1, tensor)), Shape(**EXACT), DocumentRules(96, **rules))
    writer.load(reader)
    return writer


def greedy_texts(root: Path, tensor: int, pipeline: int) -> list[list[list[int]]]:
    writer = writer_of(root, tensor, pipeline)
    how = Sampling(greedy=True)
    return [writer.write(prompt, how, tokens=6, samples=2) for prompt in PROMPTS]


def sampled_texts(root: Path, tensor: int, pipeline: int) -> list[list[int]]:
    writer = writer_of(root, tensor, pipeline)
    return writer.write([1, 2, 3], Sampling(temperature=1.5, top_k=50, top_p=0.95, seed=7), tokens=20, samples=3)


@pytest.mark.parametrize(
    ("model", "tensor", "pipeline"), [("gpt", 4, 1), ("gpt", 2, 2), ("llama", 2, 2), ("experts", 2, 2)]
)
def test_the_text_is_the_same_in_every_layout_for_prompts_of_any_length(
    trained: dict[str, Path], model: str, tensor: int, pipeline: int
) -> None:
    want = greedy_texts(trained[model], 1, 1)
    for got in on_ranks(tensor * pipeline, greedy_texts, trained[model], tensor, pipeline):
        assert got == want, "every rank holds the same text"
    assert len({id for texts in want for text in texts for id in text}) > 5, "a model that says one thing proves little"


def test_sampled_text_is_the_same_in_every_layout_and_on_every_rank(trained: dict[str, Path]) -> None:
    want = sampled_texts(trained["gpt"], 1, 1)
    assert on_ranks(4, sampled_texts, trained["gpt"], 2, 2) == [want] * 4
    assert len(set(map(tuple, want))) == 3


def test_a_text_is_what_the_model_says_of_itself_one_token_at_a_time(trained: dict[str, Path]) -> None:
    writer = writer_of(trained["gpt"])
    text = list(PROMPTS[1])
    for _ in range(30):                 # past the window: what is cut from the left is as if it had never been
        with torch.no_grad():
            logits = writer.logits(torch.tensor(text[-WINDOW:]).unsqueeze(1))
        text.append(int(logits[0].argmax()))
    assert writer.write(PROMPTS[1], Sampling(greedy=True), tokens=30) == [text[3:]]


def test_the_vocabularys_padding_is_never_chosen(trained: dict[str, Path]) -> None:
    for got in on_ranks(2, functools.partial(padded_choices, trained["gpt"])):
        assert got == (2, 97), "97 entries lie in 2 x 49 rows"


def padded_choices(root: Path) -> tuple[int, ...]:
    return tuple(writer_of(root, 2).logits(torch.zeros(3, 2, dtype=torch.int64)).shape)


def test_the_text_ends_before_the_stop_token_and_each_sample_ends_on_its_own(trained: dict[str, Path]) -> None:
    writer = writer_of(trained["gpt"])
    how = Sampling(temperature=2.0, seed=3)
    free = writer.write([5], how, tokens=12, samples=3)
    stop = free[0][4]
    cut = writer.write([5], how, tokens=12, samples=3, stop=stop)
    assert cut == [row[: row.index(stop)] if stop in row else row for row in free] and cut != free
    assert writer.write([5], how, tokens=12) == free[:1], "a sample does not depend on how many are written"
    assert writer.write([5], Sampling(temperature=2.0, seed=4), tokens=12) != free[:1]


def test_documents_are_kept_apart_as_in_training(trained: dict[str, Path]) -> None:
    """96 ends a document: what stands before it does not count, where training has reset positions and attention."""
    apart = writer_of(trained["llama"], reset_positions=True, reset_attention=True)
    alone = apart.logits(torch.tensor([[7], [8]]))
    after = apart.logits(torch.tensor([[3], [4], [96], [7], [8]]))
    torch.testing.assert_close(after, alone, rtol=1e-12, atol=1e-12)
    mixed = writer_of(trained["llama"]).logits(torch.tensor([[3], [4], [96], [7], [8]]))
    assert (mixed - alone).abs().max() > 1e-3


# --------------------------------------------------------------------------------------------------------- choosing


def shares(logits: list[float], **how: float) -> list[float]:
    """How often each token is chosen over a fine grid of draws: its probability, without chance."""
    grid = 2000
    rows = torch.tensor(logits).expand(grid, -1)
    chosen = choose(rows, Sampling(**how), [(at + 0.5) / grid for at in range(grid)])
    return [(chosen == token).double().mean().item() for token in range(len(logits))]


def test_tokens_are_chosen_as_often_as_they_are_likely() -> None:
    logits = [0.3, 2.0, -1.0, 1.0]
    for temperature in (0.5, 1.0, 3.0):
        want = (torch.tensor(logits) / temperature).softmax(0).tolist()
        assert shares(logits, temperature=temperature) == pytest.approx(want, abs=1e-3)


def test_top_k_and_top_p_leave_the_likeliest_tokens_in_their_proportions() -> None:
    logits = torch.tensor([0.1, 0.4, 0.2, 0.3]).log().tolist()
    assert shares(logits, top_k=2) == pytest.approx([0, 4 / 7, 0, 3 / 7], abs=1e-3)
    assert shares(logits, top_k=9) == pytest.approx([0.1, 0.4, 0.2, 0.3], abs=1e-3)
    assert shares(logits, top_p=0.39) == [0, 1, 0, 0]
    assert shares(logits, top_p=0.41) == pytest.approx([0, 4 / 7, 0, 3 / 7], abs=1e-3)
    assert shares(logits, top_k=3, top_p=0.5) == pytest.approx([0, 4 / 7, 0, 3 / 7], abs=1e-3), "4/9 < 0.5"
    assert shares(logits, top_p=1e-9) == shares(logits, top_k=1) == shares(logits, greedy=True) == [0, 1, 0, 0]


def test_the_last_draws_do_not_lead_past_the_tokens_that_stay() -> None:
    rows = torch.randn(50, 1000, generator=torch.Generator().manual_seed(1))
    kept = rows.topk(7).indices
    chosen = choose(rows, Sampling(top_k=7), [1 - 2.0**-53] * 50)
    assert bool((kept == chosen.unsqueeze(1)).any(1).all())
    chosen = choose(rows, Sampling(top_p=0.01), [1 - 2.0**-53] * 50)
    assert bool((rows.gather(1, chosen.unsqueeze(1)).squeeze(1) > rows.quantile(0.9)).all())
    draws = [Sampling(seed=seed).draw(sample, 2) for seed in range(20) for sample in range(20)]
    assert 0 <= min(draws) < 0.02 and 0.98 < max(draws) < 1 and len(set(draws)) == 400


# ------------------------------------------------------------------------------------------------------- the command


def test_the_command_writes_the_text_and_nothing_else_in_any_layout(
    trained: dict[str, Path], capsys: pytest.CaptureFixture
) -> None:
    words = ["--load", trained["gpt"], "--fp64", "--prompt", "1 2 3", "--num-tokens", 5, "--greedy"]
    alone, _ = said(capsys, 0, *words)
    layout = ["--tensor-model-parallel-size", 2, "--pipeline-model-parallel-size", 1]
    first, second = run_script(["scripts/generate.py", *words, *layout], 2)
    assert first.code == second.code == 0, first.stderr + second.stderr
    assert alone == first.stdout and second.stdout == ""
    ids = alone.split()
    assert ids[:3] == ["1", "2", "3"] and len(ids) == 8 and alone.count("\n") == 1


def said(capsys: pytest.CaptureFixture, code: int, *words: object) -> tuple[str, str]:
    """Standard output and error of the command, run here."""
    try:
        got = generate.main([str(word) for word in words])
    except SystemExit as left:
        got = left.code
    out, err = capsys.readouterr()
    assert got == code, err
    return out, err


def test_json_tells_prompt_text_and_tokens_of_each_sample(
    trained: dict[str, Path], capsys: pytest.CaptureFixture
) -> None:
    free = ("--prompt", "n\u00e9", "--num-tokens", 4, "--no-stop-at-eod", "--json")
    out, _ = said(capsys, 0, "--load", trained["bytes"], "--num-samples", 2, *free)
    samples = [json.loads(line) for line in out.splitlines()]
    assert [sorted(sample) for sample in samples] == [["prompt", "text", "tokens"]] * 2
    assert samples[0]["prompt"] == "n\u00e9" and len(samples[0]["tokens"]) == 4
    assert samples[0]["text"] == ByteTokenizer().decode(samples[0]["tokens"])
    again, _ = said(capsys, 0, "--load", folder_of(trained["bytes"], 1), *free)
    assert json.loads(again) == samples[0], "a checkpoint's own folder is as good as its root"


def test_samples_take_no_places_at_experts_from_each_other(
    trained: dict[str, Path], capsys: pytest.CaptureFixture
) -> None:
    """Nor do later tokens from earlier ones: no choice is dropped, whatever the capacity in evaluation."""
    free = ("--load", trained["experts"], "--prompt", "1 2 3 4 5 6 7 8", "--num-tokens", 12, "--json", "--fp64")
    several, alone = (said(capsys, 0, *free, "--num-samples", number)[0].splitlines() for number in (3, 1))
    assert len(several) == 3 and several[0] == alone[0]


def test_an_empty_prompt_begins_a_document_where_the_tokenizer_knows_of_documents(
    trained: dict[str, Path], capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    (tmp_path / "empty").write_text("")
    command = ("--load", trained["bytes"], "--num-tokens", 3, "--no-stop-at-eod", "--json")
    out, _ = said(capsys, 0, *command, "--prompt-file", tmp_path / "empty")
    assert json.loads(out)["prompt"] == "" and len(json.loads(out)["tokens"]) == 3
    _, err = said(capsys, 2, "--load", trained["gpt"], "--prompt", "")
    assert "the prompt is empty" in err and err.count("\n") == 1


def test_a_context_beyond_the_models_positions_is_cut_and_said(
    trained: dict[str, Path], capsys: pytest.CaptureFixture
) -> None:
    load = ("--load", trained["gpt"], "--num-tokens", 5, "--greedy", "--prompt")
    out, err = said(capsys, 0, *load, " ".join(map(str, range(20))))
    assert err == "" and len(out.split()) == 25, "the last token needs no place of its own"
    out, err = said(capsys, 0, *load, " ".join(map(str, range(21))))
    assert f"the model looks back on the last {WINDOW} only" in err and len(out.split()) == 26


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--load {missing} --prompt 1", "there is no complete checkpoint"),
        ("--load {gpt} --prompt 1 --ckpt-step 7", "--ckpt-step 7: there is no complete checkpoint of this iteration"),
        ("--load {gpt} --prompt 1 --temperature 0", "--temperature 0.0: must be above 0"),
        ("--load {gpt} --prompt 1 --top-p 0", "--top-p 0.0: must be above 0 and at most 1"),
        ("--load {gpt} --prompt 1 --top-p 1.5", "--top-p 1.5: must be above 0 and at most 1"),
        ("--load {gpt} --prompt 1 --top-k 0", "--top-k 0: must be at least 1"),
        ("--load {gpt} --prompt 1 --num-tokens 0", "--num-tokens 0: must be at least 1"),
        ("--load {gpt} --prompt 1 --num-tokens many", "--num-tokens"),
        ("--load {gpt} --prompt 1 --fp32 --bf16", "not allowed with"),
        ("--load {gpt} --prompt 97", "'97' is not an id from 0 to 96"),
        ("--load {gpt} --prompt-file {missing}", "cannot be read: No such file"),
        ("--load {gpt}", "one of the arguments --prompt --prompt-file is required"),
        ("--load {gpt} --prompt 1 --tokenizer-type ByteTokenizer", "is less than the 257 entries"),
        ("--load {gpt} --prompt 1 --pipeline-model-parallel-size 2", "a data-parallel size of 1"),
    ],
)
def test_what_is_wrong_is_told_in_one_line_and_the_exit_code_is_2(
    trained: dict[str, Path], capsys: pytest.CaptureFixture, tmp_path: Path, words: str, told: str
) -> None:
    paths = {**trained, "missing": tmp_path / "missing"}
    out, err = said(capsys, 2, *words.format(**paths).split())
    assert told in err and err.startswith("generate.py: error: ") and err.count("\n") == 1 and out == ""


@pytest.mark.parametrize(
    ("layout", "told"),
    [
        (("--tensor-model-parallel-size", "3"), "a dim of 4 cannot be cut 3 ways"),
        ((), "world size 3 is not --tensor-model-parallel-size 1 x --pipeline-model-parallel-size 1 = 1"),
        (("--top-k", "x"), "invalid int value"),
    ],
)
def test_of_several_ranks_one_speaks_and_none_waits(
    trained: dict[str, Path], capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, layout: tuple, told: str
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    for rank in range(3):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        _, err = said(capsys, 2, "--load", trained["gpt"], "--prompt", "1", *layout)
        assert (told in err and err.count("\n") == 1) if rank == 0 else err == ""
