"""scripts/evaluate.py and what is behind it: every token once, the same loss in every layout, errors in one line."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from megazero.checkpoint import Reader, folder_of
from megazero.config import Config
from megazero.data.batch import MicroBatch
from megazero.data.indexed import IndexedReader, IndexedWriter
from megazero.data.loader import DocumentRules
from megazero.data.tokenizer import ByteTokenizer
from megazero.evaluation import Evaluator, TextWindows, per_token, rounds_of
from megazero.gpt import GPTSetup, gpt_layers
from megazero.parallel.collectives import AgreedError
from megazero.parallel.groups import World, open_mesh
from megazero.parallel.shard import ShardSpec
from megazero.parallel.topology import Topology
from scripts import evaluate
from tests.harness import on_ranks, run_script
from tests.training import LLAMA, train

EOD = 256
BYTES = "--tokenizer-type ByteTokenizer --vocab-size 257"
TEXTS = ["the cat sat on the mat", "a dog ran", "n\u00e9e here and there and everywhere and nowhere", "no no no no"]
EXPERTS = (
    "--num-layers 2 --position-embedding-type rope --num-experts 4 --topk 2 --moe-eval-capacity-factor 0.5 "
    "--moe-min-capacity 1"
)
WORD = "one two three four five six seven"


def write_corpus(prefix: Path, lengths: list[int], seed: int = 1) -> Path:
    """Documents of so many random bytes and an end each."""
    draw = np.random.default_rng(seed)
    with IndexedWriter(prefix, vocab_size=257) as writer:
        for length in lengths:
            writer.add_document([np.append(draw.integers(0, 256, length), EOD)])
    return prefix


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Roots of checkpoints of models that know bytes, a corpus, and texts."""
    folder = tmp_path_factory.mktemp("trained")
    models = {"gpt": "", "llama": LLAMA, "uneven": "--num-layers 3 --bf16 --fp32-residual-connection", "moe": EXPERTS}
    for name, words in models.items():
        train(f"{BYTES} {words} --train-iters 20 --lr 1e-2 --save {folder / name} --save-interval 20")
    write_corpus(folder / "corpus", [30, 50, 7, 90, 41, 1, 33, 20])
    (folder / "texts").write_text("\n\n".join(json.dumps({"text": text}) for text in TEXTS) + "\n")
    (folder / "words").write_text(json.dumps({"text": WORD}) + "\n")
    return {path.name: path for path in folder.iterdir()} | {"corpus": folder / "corpus"}


def said(capsys: pytest.CaptureFixture, code: int, *words: object) -> tuple[str, str]:
    """Standard output and error of the command, run here."""
    try:
        got = evaluate.main([str(word) for word in words])
    except SystemExit as left:
        got = left.code
    out, err = capsys.readouterr()
    assert got == code, err
    return out, err


def scores(capsys: pytest.CaptureFixture, *words: object) -> dict[str, dict]:
    """What --json tells, by part."""
    out, _ = said(capsys, 0, *words, "--json")
    return {told.pop("part"): told for told in map(json.loads, out.splitlines())}


# ------------------------------------------------------------------------------------------------------- by hand


def plain_losses(root: Path, ids: np.ndarray) -> list[float]:
    """The loss of each token of `ids` but the first given those before, by one forward of the model, fp64."""
    reader = Reader(folder_of(root, 20))
    model = Config.from_json(json.dumps(reader.config)).model
    mesh = open_mesh(Topology())
    layers = [(spec.name, spec.build(mesh)) for spec in gpt_layers(GPTSetup(model, 257, torch.float64))]
    for name, layer in layers:
        for own, parameter in layer.named_parameters():
            known = f"{name}.{own}" if f"{name}.{own}" in reader.tensors else "embedding.word.weight"
            parameter.data.copy_(reader.read(known, "weight"))
    tokens = torch.from_numpy(ids).unsqueeze(1)
    x = None
    with torch.no_grad():
        for _, layer in layers:
            x = layer(x, MicroBatch(tokens[:-1]))
    chosen = x.log_softmax(-1).gather(-1, tokens[1:].unsqueeze(-1))
    return (-chosen).flatten().tolist()


def test_every_token_of_a_corpus_is_scored_once_and_its_tail_too(
    trained: dict[str, Path], capsys: pytest.CaptureFixture
) -> None:
    tokens = IndexedReader(str(trained["corpus"])).read(0, 280)
    want = [loss for at in range(0, 279, 16) for loss in plain_losses(trained["gpt"], tokens[at : at + 17])]
    told = scores(capsys, "--load", trained["gpt"], "--data-path", trained["corpus"], "--part", "all", "--fp64")
    assert told["all"]["tokens"] == len(want) == 279 and 279 % 16
    assert told["all"]["lm_loss"] == pytest.approx(math.fsum(want) / 279, rel=1e-12)
    assert told["all"]["ppl"] == pytest.approx(math.exp(told["all"]["lm_loss"]), rel=1e-12)


def test_a_text_is_scored_for_itself_in_windows_that_share_a_token(
    trained: dict[str, Path], capsys: pytest.CaptureFixture
) -> None:
    ids = [np.array(ByteTokenizer().encode(text)) for text in TEXTS]
    pieces = [text[at : at + 17] for text in ids for at in range(0, len(text) - 1, 16)]
    want = [loss for piece in pieces for loss in plain_losses(trained["gpt"], piece)]
    told = scores(capsys, "--load", trained["gpt"], "--jsonl", trained["texts"], "--fp64")[str(trained["texts"])]
    assert told["tokens"] == len(want) == sum(len(text) - 1 for text in ids)
    assert told["lm_loss"] == pytest.approx(math.fsum(want) / len(want), rel=1e-12)


def test_documents_kept_apart_in_one_window_score_as_each_for_itself(
    trained: dict[str, Path], capsys: pytest.CaptureFixture
) -> None:
    """The eod is the last label of its document, and as an input it predicts nothing."""
    reader = IndexedReader(str(trained["corpus"]))
    want = [loss for number in range(8) for loss in plain_losses(trained["llama"], reader.document(number))]
    apart = ("--eod-mask-loss", "--reset-position-ids", "--reset-attention-mask", "--seq-length", 300, "--fp64")
    told = scores(capsys, "--load", trained["llama"], "--data-path", trained["corpus"], "--part", "all", *apart)
    assert told["all"]["tokens"] == len(want) == 280 - 8
    assert told["all"]["lm_loss"] == pytest.approx(math.fsum(want) / len(want), rel=1e-12)


def test_parts_are_cut_at_documents_as_in_training(trained: dict[str, Path], capsys: pytest.CaptureFixture) -> None:
    reader = IndexedReader(str(trained["corpus"]))
    words = ("--load", trained["gpt"], "--data-path", trained["corpus"], "--split", "5,2,1", "--fp64")
    told = scores(capsys, *words, "--part", "test", "valid", "train")
    assert [told[part]["tokens"] for part in ("train", "valid", "test")] == [223 - 1, 36 - 1, 21 - 1]
    last = reader.document(7)
    want = plain_losses(trained["gpt"], last[:17]) + plain_losses(trained["gpt"], last[16:])
    assert told["test"]["lm_loss"] == pytest.approx(math.fsum(want) / 20, rel=1e-12)
    out, _ = said(capsys, 0, *words, "--part", "valid", "test")
    assert [line.split()[0] for line in out.splitlines()] == ["part", "valid", "test"]
    both = scores(capsys, *words, "--part", "all", "--data-path", 3, trained["corpus"], 1, trained["corpus"])
    assert both["all"]["tokens"] == 2 * 279, "each corpus once, whatever its weight"


def test_the_last_word_is_right_where_all_its_tokens_are_the_likeliest(
    trained: dict[str, Path], capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    """As LAMBADA asks. The model has learnt one text by heart, and a second one is wrong in its last letter."""
    right, wrong = WORD, f"{WORD[:-1]}x"
    prefix = tmp_path / "one"
    with IndexedWriter(prefix, vocab_size=257) as writer:
        writer.add_document([ByteTokenizer().encode(right)])
    flags = f"{BYTES} {LLAMA} --no-mock-data --data-path {prefix} --split 1,0,0 --seq-length 32 --num-layers 2"
    flags = f"{flags} --global-batch-size 2 --lr 5e-3 --clip-grad 1 --train-iters 80"
    train(f"{flags} --save {tmp_path / 'model'} --save-interval 80")
    (tmp_path / "both").write_text("".join(json.dumps({"text": text}) + "\n" for text in (right, wrong)))
    words = ("--load", tmp_path / "model", "--jsonl")
    told = scores(capsys, *words, tmp_path / "both", "--last-word")[str(tmp_path / "both")]
    assert (told["accuracy"], told["examples"], told["tokens"]) == (0.5, 2, 2 * len(" seven"))
    told = scores(capsys, *words, trained["words"], "--last-word", "--seq-length", 12)[str(trained["words"])]
    assert told["accuracy"] == 1, "the window's end is what counts of a text that is longer than it"


# ------------------------------------------------------------------------------------------------------- arithmetic


def test_windows_hold_each_label_once() -> None:
    for length in range(2, 30):
        for seq_length in range(1, 12):
            ids = np.arange(length)
            texts = TextWindows([ids, ids[:5]], seq_length)
            labels = [label for k in range(len(texts)) for label in texts[k].tokens[1:].tolist()]
            assert sorted(labels) == sorted([*range(1, length), *range(1, min(5, length))])
            assert [texts.longest(k) for k in range(len(texts))] == sorted(
                (len(texts[k].tokens) - 1 for k in range(len(texts))), reverse=True
            )


def test_rounds_hold_each_window_once() -> None:
    for windows in range(1, 60):
        for each in (1, 2, 6):
            for most in (1, 4, 8):
                rounds = list(rounds_of(windows, each, most))
                held = [k for first, count in rounds for k in range(first, first + each * count)]
                assert held == list(range(len(held))) and 0 <= len(held) - windows < each
                assert max(count for _, count in rounds) <= most


LOGITS = [[1, 3, 2, 0, 0, 9], [0, 0, 0, 0, 4, 9], [2, 0, 0, 2, 0, 9], [2, 0, 0, 2, 0, 9], [0, 1, 0, 0, 0, 9]]
LABELS, HITS = [1, 4, 0, 3, 2], [1, 1, 1, 0, 0]


def hits(tensor: int) -> list[list[float]]:
    """Of five tokens over a vocabulary of 5 in 6 rows."""
    group, rows = open_mesh(Topology(tensor=tensor)).tensor, 6 // tensor
    logits = torch.tensor(LOGITS, dtype=torch.bfloat16)[:, group.index * rows : (group.index + 1) * rows].unsqueeze(1)
    return per_token(logits.contiguous(), torch.tensor(LABELS).unsqueeze(1), 5, group)[..., 0].tolist()


def test_of_equal_logits_the_lowest_id_is_the_likeliest_and_padding_never() -> None:
    want = hits(1)
    assert want[1] == HITS
    rows = torch.tensor(LOGITS, dtype=torch.float32)[:, :5].log_softmax(-1)
    assert want[0] == pytest.approx([-row[at].item() for row, at in zip(rows, LABELS, strict=True)], rel=1e-5)
    for losses, right in [*on_ranks(2, hits, 2), *on_ranks(6, hits, 6)]:
        assert right == HITS and losses == pytest.approx(want[0], rel=1e-5)


# --------------------------------------------------------------------------------------------------------- layouts


def score_ranks(words: list[list[str]], ranks: int) -> list[dict[str, float]]:
    """What each command finds on this rank: summed loss, tokens, right ones, of the only part."""
    found = []
    for command in words:
        args = evaluate.parser().parse_args(command)
        (score,) = evaluate.run(evaluate.prepare(args, World(0, ranks, 0)), World(0, ranks, 0)).values()
        found.append(score)
    return found


@pytest.mark.parametrize(
    ("model", "tensor", "pipeline", "data"),
    [("gpt", 4, 1, 1), ("gpt", 1, 4, 1), ("llama", 2, 2, 1), ("llama", 1, 1, 3), ("gpt", 2, 1, 2), ("uneven", 1, 2, 2)],
)
def test_every_layout_finds_the_same_loss(
    trained: dict[str, Path], model: str, tensor: int, pipeline: int, data: int
) -> None:
    """Whatever share of a batch is left over: 18 or 38 windows in twos, threes or fives, over one to three ranks; and
    where the tensor size does not divide the sequence."""
    layout = ["--tensor-model-parallel-size", str(tensor), "--pipeline-model-parallel-size", str(pipeline)]
    load = ["--load", str(trained[model]), "--fp64"]
    corpus = [*load, "--data-path", str(trained["corpus"]), "--part", "all"]
    commands = [
        corpus, [*corpus, "--micro-batch-size", "5"], [*corpus, "--seq-length", "15", "--micro-batch-size", "3"],
        [*load, "--jsonl", str(trained["texts"])], [*load, "--jsonl", str(trained["texts"]), "--last-word"],
    ]
    want = score_ranks(commands, 1)
    assert len({score.loss_sum for score in want}) >= 4, "windows matter, batches do not"
    assert want[1].loss_sum == pytest.approx(want[0].loss_sum, rel=1e-12)
    ranks = tensor * pipeline * data
    for found in on_ranks(ranks, score_ranks, [[*command, *layout] for command in commands], ranks):
        for got, alone in zip(found, want, strict=True):
            assert (got.tokens, got.windows, got.right) == (alone.tokens, alone.windows, alone.right)
            assert got.loss_sum == pytest.approx(alone.loss_sum, rel=1e-12)


def test_what_fills_up_a_batch_takes_no_place_at_experts(trained: dict[str, Path]) -> None:
    """Experts take half of what comes: a window has the same loss beside windows that are none, and before padding."""
    words = ["--load", str(trained["moe"]), "--fp64"]
    corpus = [*words, "--data-path", str(trained["corpus"]), "--part", "all", "--seq-length", "300"]
    exact = [*corpus[:-1], "279", "--micro-batch-size", "1"]
    text = [*words, "--jsonl", str(trained["words"]), "--seq-length", "40"]
    alike = [
        [exact, [*corpus, "--micro-batch-size", "3"]],
        [[*text, "--micro-batch-size", "1"], [*text, "--micro-batch-size", "4"],
         [*text, "--micro-batch-size", "4", "--last-word"]],
    ]  # fmt: skip
    for ranks, layout in ((1, []), (2, ["--tensor-model-parallel-size", "2"])):
        for commands in alike:
            found = on_ranks(ranks, score_ranks, [[*command, *layout] for command in commands], ranks)[0]
            assert found[1].loss_sum == pytest.approx(found[0].loss_sum, rel=1e-12)
            assert all(score.loss_sum < found[0].loss_sum for score in found[2:])
    alone, together = score_ranks([[*corpus[:-1], "16", "--micro-batch-size", number] for number in "14"], 1)
    assert alone.loss_sum != pytest.approx(together.loss_sum, rel=1e-6), "capacity is to matter"


@pytest.mark.parametrize(
    ("precision", "limit"), [("--bf16 --fp32-residual-connection", 1e-5), ("", 1e-6), ("--fp64", 1e-12)]
)
def test_a_checkpoint_has_the_loss_that_its_training_told(
    precision: str, limit: float, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Training evaluates whole batches of whole samples in another order; here they are all there are."""
    prefix = write_corpus(tmp_path / "pair", [96, 96])
    flags = f"{BYTES} {precision} --no-mock-data --data-path {prefix} --split 1,1,0 --train-iters 3 --lr 1e-2"
    flags = f"{flags} --global-batch-size 2 --eval-interval 9 --eval-iters 3"
    run = train(f"{flags} --save {tmp_path / 'a'} --save-interval 3")
    words = ("--load", tmp_path / "a", "--data-path", prefix)
    told = scores(capsys, *words)
    assert told["valid"]["tokens"] == 96 and run.evaluations[0][:2] == ("valid", 3)
    assert told["valid"]["lm_loss"] == pytest.approx(run.evaluations[0][2], rel=limit)
    other = scores(capsys, *words, "--fp32" if precision == "--fp64" else "--fp64")
    assert 0 < abs(other["valid"]["lm_loss"] / told["valid"]["lm_loss"] - 1) < 1e-2


class Spoilt:
    """A checkpoint with a weight that is no number: one that training would not have saved."""

    def read_flat(self, name: str, kind: str, spec: ShardSpec, *, start: int, stop: int, **at: object) -> torch.Tensor:
        return torch.full((stop - start,), math.nan if name.startswith("final_norm") else 0.01)


def faults(root: Path) -> list[str]:
    """What is said on this rank of three where one reads an id that is none, where nothing is scored, of no number."""
    words = ["--load", str(root), "--data-path", str(root.parent / "corpus"), "--part", "all"]
    plan = evaluate.prepare(evaluate.parser().parse_args(words), World(0, 3, 0))
    said = []
    for weights, text in ((plan.weights, [1, 300]), (plan.weights, [EOD, 5]), (Spoilt(), [1, 2])):
        rules = DocumentRules(EOD, mask_loss=True)
        evaluator = Evaluator(plan.layers, open_mesh(plan.topology), replace(plan.setup, rules=rules), weights)
        with pytest.raises(AgreedError) as wrong:
            evaluator.score(TextWindows([np.array(text)], 16))
        said.append(str(wrong.value))
    return said


def test_what_is_wrong_on_one_rank_is_told_by_all(trained: dict[str, Path]) -> None:
    told = on_ranks(3, faults, trained["gpt"])
    assert told[0] == told[1] == told[2]
    vocabulary, nothing, number = told[0]
    assert vocabulary == "text 1: token id 300, but the vocabulary has 257 entries (rank 0 of 3)"
    assert nothing == "there is no token to score"
    assert number == "the loss is nan: the weights, or what is computed from them, are not finite"


# ------------------------------------------------------------------------------------------------------- the command


def test_under_a_launcher_rank_0_prints_one_object(
    trained: dict[str, Path], capsys: pytest.CaptureFixture
) -> None:
    data = ["--data-path", trained["corpus"], "--part", "all", "--fp64", "--json"]
    first, other = run_script(["scripts/evaluate.py", "--load", trained["gpt"], *data], 2)
    assert first.code == other.code == 0, first.stderr
    want, got = scores(capsys, "--load", trained["gpt"], *data[:-1])["all"], json.loads(first.stdout)
    assert sorted(got) == ["lm_loss", "part", "ppl", "tokens"] and got["tokens"] == want["tokens"] == 279
    assert got["lm_loss"] == pytest.approx(want["lm_loss"], rel=1e-12)
    assert other.stdout == "" and "window" not in first.stderr, "no bar where no terminal is"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--load {missing} --data-path {corpus}", "there is no complete checkpoint"),
        ("--load {gpt}", "one of the arguments --data-path --jsonl is required"),
        ("--load {gpt} --data-path {missing}", "--data-path {missing}"),
        ("--load {gpt} --data-path {corpus} --part most", "invalid choice: 'most'"),
        ("--load {gpt} --data-path {corpus} --split 1,0,0", "--part valid: its share of --split 1,0,0 holds no two"),
        ("--load {gpt} --data-path {corpus} --last-word", "--last-word goes with --jsonl"),
        ("--load {gpt} --data-path {corpus} --seq-length 17", "17: the model has learned positions up to 16 only"),
        ("--load {gpt} --data-path {corpus} --seq-length 0", "--seq-length 0: must be at least 1"),
        ("--load {gpt} --data-path {corpus} --micro-batch-size 0", "--micro-batch-size 0: must be at least 1"),
        ("--load {gpt} --data-path {corpus} --fp32 --bf16", "not allowed with"),
        ("--hf {missing} --data-path {corpus}", "{missing}: there is no such folder"),
        ("--hf {missing} --data-path {corpus} --ckpt-step 3", "--ckpt-step 3 goes with --load"),
        ("--load {gpt} --data-path {corpus} --pipeline-model-parallel-size 2", "world size 1 is not a multiple of"),
        ("--load {gpt} --data-path {other}", "was made with a vocabulary of 300"),
        ("--load {gpt} --jsonl {missing}", "cannot be read: No such file"),
        ("--load {gpt} --jsonl {notext}", "line 2: is not an object with a string"),
        ("--load {gpt} --jsonl {nojson}", "line 1: Expecting"),
        ("--load {gpt} --jsonl {nothing}", "holds no text of two tokens"),
        ("--load {gpt} --jsonl {alone} --last-word", "line 1: --last-word needs words before the last one"),
        ("--load {gpt} --jsonl {words} --last-word --seq-length 3", "which may have up to 3 tokens; it has 6 of 33"),
    ],
)
def test_what_is_wrong_is_told_in_one_line_and_the_exit_code_is_2(
    trained: dict[str, Path], capsys: pytest.CaptureFixture, tmp_path: Path, words: str, told: str
) -> None:
    lines = {"notext": '{"text": "a b"}\n{"txt": 1}', "nojson": "a b"}
    lines |= {"nothing": '{"text": "a"}', "alone": '{"text": "word"}'}
    for name, text in lines.items():
        (tmp_path / name).write_text(text)
    with IndexedWriter(tmp_path / "other", vocab_size=300) as writer:
        writer.add_document([[1, 2, 3]])
    paths = {name: tmp_path / name for name in (*lines, "missing", "other")} | trained
    out, err = said(capsys, 2, *words.format(**paths).split())
    assert told.format(**paths) in err and err.count("\n") == 1 and out == ""
    assert err.startswith("evaluate.py: error: ")
