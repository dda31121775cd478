"""A model of one's own: the example is short, runs on four ranks as on one, and goes on from its checkpoint."""

from __future__ import annotations

import ast
import io
import os
import tokenize
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from examples.own_model import WIDTH, Recurrent, example, loss, main
from megazero.machine import Pipelining, Setup
from megazero.own import Example, OwnModel, open_ranks, plain
from megazero.parallel.collectives import AgreedError
from megazero.parallel.groups import mesh_on_paper, open_mesh
from megazero.parallel.params import adopt, collect, initialize, join_tied, share
from megazero.parallel.topology import Topology
from megazero.parallel.zero import Zero
from megazero.pipe.output import WithLoss, hidden_of
from megazero.pipe.split import Split
from megazero.pipe.stage import LayerSpec, Recompute, cut_layers, shared_apart
from megazero.precision import Dtypes
from tests.harness import ROOT, on_ranks

EXAMPLE = ROOT / "examples" / "own_model.py"
FP64 = Dtypes(torch.float64, torch.float64)


def lines_of_code(text: str) -> int:
    """Lines with code on them: not blank, comment or docstring."""
    words = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    lines = {n for t in tokens if t.type not in words for n in range(t.start[0], t.end[0] + 1)}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node):
            lines -= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return len(lines)


def test_the_example_has_less_than_forty_lines_of_code() -> None:
    assert lines_of_code(EXAMPLE.read_text()) < 40


def run_example(argv: list[str]) -> list[float]:
    """The example's main in a world that is already there; the variables are those of torchrun."""
    if torch.distributed.is_initialized():
        rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    return main(argv)


def test_the_example_runs_on_four_ranks_as_on_one_and_goes_on_from_there(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """fp32: pipeline 2 x data 2 saves after three steps, one rank goes on. It learns to add."""
    whole = run_example(["--steps", "6", "--save", str(tmp_path / "one")])
    assert capsys.readouterr().out.startswith(f"step 1: loss {whole[0]:.6f}\nstep 2: ")
    assert whole[-1] < 0.3 * whole[0]
    flags = ["--pipeline", "2", "--data", "2", "--schedule", "zb-h1", "--steps", "3", "--save", str(tmp_path / "four")]
    for losses in on_ranks(4, run_example, flags):
        assert losses == pytest.approx(whole[:3], rel=1e-5)
    assert run_example(["--steps", "6", "--save", str(tmp_path / "four")]) == pytest.approx(whole[3:], rel=1e-4)
    assert run_example(["--steps", "6", "--save", str(tmp_path / "four")]) == [], "there is nothing left to do"


class Noisy(nn.Module):
    """A layer that draws."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.drop = Recurrent(), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.inner(x))


NOISY = [
    plain("enter", lambda: nn.Linear(2, WIDTH), std=0.5, cost=0.0),
    *(plain(f"noisy.{i}", Noisy, std=0.2, recomputable=True) for i in range(5)),
    plain("leave", lambda: nn.Linear(WIDTH, 1), std=0.2, cost=0.0),
]
RUNS = [("1f1b", 1), ("interleaved", 2), ("zb-v", 2)]


def wide(number: int) -> Example:
    one = example(number)
    return Example(one.inputs[:4, :2].double(), one.targets[:2].double())


def train_noisy(pipeline: int, data: int, runs: list[tuple[str, int]], recompute: Recompute) -> list[list[float]]:
    """Losses of three steps and of an evaluation, by run."""
    mesh, found = open_mesh(Topology(pipeline, data)), []
    for name, chunks in runs:
        setup = Setup(FP64, pipelining=Pipelining(name, chunks), recompute=recompute)
        model = OwnModel(NOISY, loss, mesh, setup)
        losses = model.train(wide, steps=3, micro_batches=4, learning_rate=3e-3)
        mine = [wide(number) for number in range(4)[mesh.data.index :: data]]
        found.append([*losses, model.evaluate(mine)])
    return found


def test_schedules_and_layouts_train_it_alike_though_its_layers_draw() -> None:
    """To 1e-10 in fp64, with dropout of plain torch and full recomputation, on pipeline 2 x data 2."""
    (want,) = train_noisy(1, 1, RUNS[:1], Recompute())
    for found in on_ranks(4, train_noisy, 2, 2, RUNS, Recompute("uniform", 1)):
        for (name, _), losses in zip(RUNS, found, strict=True):
            assert losses == pytest.approx(want, rel=1e-10), name


class Reader(nn.Module):
    """What is read, as memory, and its first places, as queries."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(2, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        memory = self.enter(x)
        return memory, memory[:3]


class Query(nn.Module):
    """Queries [3, batch, width] look at the memory, which goes on untouched."""

    def __init__(self) -> None:
        super().__init__()
        self.look = nn.MultiheadAttention(WIDTH, 2)

    def forward(self, memory: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return memory, x + self.look(x, memory, memory, need_weights=False)[0]


class Answer(nn.Module):
    """The memory ends here."""

    def __init__(self) -> None:
        super().__init__()
        self.leave = nn.Linear(WIDTH, 1)

    def forward(self, memory: Tensor, x: Tensor) -> Tensor:
        return self.leave(x)


QUERIES = [
    plain("read", Reader, std=0.5, cost=0.0),
    *(plain(f"query.{i}", Query, std=0.2, recomputable=True) for i in range(4)),
    plain("answer", Answer, std=0.2, cost=0.0),
]


def train_queries(pipeline: int, data: int, runs: list[tuple[str, int]], recompute: Recompute) -> list[list[float]]:
    """Losses by run: training, an evaluation of longer examples, and more training on longer and on shorter ones."""
    mesh, found = open_mesh(Topology(pipeline, data)), []
    for name, chunks in runs:
        model = OwnModel(QUERIES, loss, mesh, Setup(FP64, pipelining=Pipelining(name, chunks), recompute=recompute))
        mine = [long(number) for number in range(4)[mesh.data.index :: data]]
        losses = model.train(wide, steps=2, micro_batches=4, learning_rate=3e-3)
        losses += [model.evaluate(mine), model.step(mine, learning_rate=3e-3)]
        losses += model.train(wide, steps=5, micro_batches=4, learning_rate=3e-3)
        found.append(losses)
    return found


def long(number: int) -> Example:
    one = example(number)
    return Example(one.inputs[:9, :3].double(), one.targets[:3].double())


def test_layers_may_hand_on_several_tensors_of_any_shape() -> None:
    """To 1e-10 in fp64, on pipeline 2 x data 2: nobody says which shapes they have, nor when they change."""
    (want,) = train_queries(1, 1, RUNS[:1], Recompute())
    assert len(want) == 6
    for found in on_ranks(4, train_queries, 2, 2, RUNS, Recompute("uniform", 1)):
        for (name, _), losses in zip(RUNS, found, strict=True):
            assert losses == pytest.approx(want, rel=1e-10), name


class Enter(nn.Module):
    """Words [length, batch] and how much each counts, the two inputs, to hidden states and such weights."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.ranks = nn.Embedding(VOCAB, WIDTH), nn.Embedding(3, WIDTH)

    def forward(self, words: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        return self.words(words) + self.ranks(words % 3), weights.unsqueeze(-1)


class InPlace(nn.Module):
    """Works in place on what it is given, and has a loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, weights: Tensor) -> WithLoss:
        y = self.map(x.mul_(weights))
        loss = 0.1 * y.square().mean()
        return WithLoss((y.sin(), weights), loss, {"own": loss.detach()})


class Leave(nn.Module):
    """Logits by the table that the words came from."""

    def __init__(self) -> None:
        super().__init__()
        self.few, self.out = nn.Linear(WIDTH, 3, bias=False), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        return self.out(x) + self.few(x).mean(-1, keepdim=True)


VOCAB = 11
ENTER, LEAVE = {"words.weight": "table", "ranks.weight": "ranks"}, {"few.weight": "ranks", "out.weight": "table"}


def tied(split: bool) -> list[LayerSpec]:
    """Their layers."""
    return [
        plain("enter", Enter, std=0.3, cost=0.0, shared=ENTER),
        *(plain(f"in_place.{i}", InPlace, std=0.2, split_backward=split) for i in range(4)),
        plain("leave", Leave, std=0.3, cost=0.0, shared=LEAVE, split_backward=split),
    ]


def told(number: int) -> Example:
    generator = torch.Generator().manual_seed(number)
    words = torch.randint(0, VOCAB, (6, 3), generator=generator)
    weights = torch.rand(2, 5, 3, generator=generator, dtype=torch.float64)
    return Example((words[:-1], weights[0]), (words[1:], weights[1]))


def weighed(logits: Tensor, targets: tuple[Tensor, Tensor]) -> Tensor:
    words, weights = targets
    losses = nn.functional.cross_entropy(logits.flatten(0, 1), words.flatten(), reduction="none")
    return (losses * weights.flatten()).mean()


def in_plain_torch(steps: int, micro_batches: int) -> tuple[list[float], float]:
    """Losses of the same training without megazero's engine and optimizer, and what the layers reported at its end."""
    mesh = mesh_on_paper(Topology(), 0)
    layers = [(spec, spec.build(mesh).double()) for spec in tied(False)]
    for spec, module in layers:
        for path, name in spec.shared.items():
            share(module, path, name, tied=False)
    join_tied([(spec.name, module) for spec, module in layers])
    infos = collect([(spec.name, module) for spec, module in layers])
    initialize(infos, mesh.topology, 0, seed=Setup().seed)
    parameters, losses, reported = [info.tensor for info in infos], [], 0.0
    adam = torch.optim.AdamW(parameters, lr=3e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
    for step in range(steps):
        total, reported = 0.0, 0.0
        for number in range(step * micro_batches, (step + 1) * micro_batches):
            one, x = told(number), None
            own = 0.0
            for _, module in layers:
                out = module(x, one)
                own = own + (out.loss if isinstance(out, WithLoss) else 0.0)
                x = hidden_of(out)
            loss = weighed(x, one.targets)
            ((loss + own) / micro_batches).backward()
            total, reported = total + loss.item() / micro_batches, reported + own.item()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        adam.step()
        adam.zero_grad()
        losses.append(total)
    return losses, reported


# Schedule, stages of a rank, and whether linear layers' weight gradients may be put off.
TIED_RUNS = [*((*run, False) for run in RUNS), ("1f1b", 1, True), ("zb-h1", 1, True), ("zb-v", 2, True)]


def train_tied(pipeline: int, data: int, runs: list[tuple[str, int, bool]]) -> list[tuple[list[float], float]]:
    mesh, found = open_mesh(Topology(pipeline, data)), []
    for name, chunks, split in runs:
        setup = Setup(FP64, pipelining=Pipelining(name, chunks), zero=Zero(clip=1.0, overlap_reduce=split))
        model = OwnModel(tied(split), weighed, mesh, setup)
        losses = model.train(told, steps=3, micro_batches=4, learning_rate=3e-3)
        found.append((losses, model.reports()["own"].item()))
    return found


def test_shared_parameters_own_losses_and_work_in_place_train_as_in_plain_torch() -> None:
    """To 1e-10 in fp64, alone and on pipeline 2 x data 2, where what is shared lies on two ranks or on one, and a stage
    begins with a layer that works in place. A layer's own loss counts by its mean, as the model's does. Weight
    gradients may be put off."""
    losses, reported = in_plain_torch(3, 4)
    for ranks in (train_tied(1, 1, TIED_RUNS[:1]), *on_ranks(4, train_tied, 2, 2, TIED_RUNS)):
        for run, (found, own) in zip(TIED_RUNS, ranks, strict=False):
            assert found == pytest.approx(losses, rel=1e-10) and own == pytest.approx(reported, rel=1e-10), run


def test_weight_gradients_of_linear_layers_are_put_off_where_that_is_asked_for() -> None:
    """Whatever the shape of what they map: alone, a row, rows of rows; none is put off unasked."""
    for split in (True, False):
        layer = plain("map", lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), split_backward=split)
        mesh = mesh_on_paper(Topology(), 0)
        module = layer.build(mesh).double()
        initialize(collect([("map", module)]), mesh.topology, 0, seed=1)
        for shape in ((3,), (5, 3), (2, 5, 3), (2, 4, 5, 3), (0, 3)):
            x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
            y = module(None, Example(x, x))
            weights = list(module.parameters())
            plainly = nn.functional.linear(nn.functional.linear(x, *weights[:2]).tanh(), *weights[2:])
            want = torch.autograd.grad(plainly.square().sum(), [x, *weights])
            with mesh.weights.deferring() as work:
                y.square().sum().backward()
            assert len(work) == 2 * split and all((p.grad is None) is split for p in weights)
            for one in work:
                one()
            for got, expected in zip([x.grad, *(p.grad for p in weights)], want, strict=True):
                torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
            module.zero_grad()


def test_a_plain_module_is_declared_whole_and_starts_the_same_on_every_rank() -> None:
    """Matrices are drawn, biases are zero and do not decay, as the weights of norms do not, which are one."""
    filled = []
    for rank in range(4):
        mesh = mesh_on_paper(Topology(2, 2), rank)
        module = adopt(Recurrent(), std=0.5)
        infos = collect([("layer", module)])
        initialize(infos, mesh.topology, rank, seed=7)
        filled.append([info.tensor.detach().clone() for info in infos])
    assert all(torch.equal(a, b) for other in filled[1:] for a, b in zip(filled[0], other, strict=True))
    values = dict(zip([info.name for info in infos], filled[0], strict=True))
    assert list(values) == ["layer.norm.weight", "layer.norm.bias", *(f"layer.lstm.{name}_l0" for name in (
        "weight_ih", "weight_hh", "bias_ih", "bias_hh"))]
    for info in infos:
        value, is_matrix = values[info.name], info.tensor.ndim == 2
        assert info.decay is is_matrix and info.spec.shape == tuple(value.shape)
        expected = 0.5 if is_matrix else 0.0
        assert value.std().item() == pytest.approx(expected, rel=0.05)
        assert is_matrix or bool((value == float("norm.weight" in info.name)).all())


def test_what_a_checkpoint_would_lose_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"BatchNorm1d.running_mean is not trained, so no checkpoint would hold it"):
        adopt(nn.BatchNorm1d(3), std=0.1)
    frozen = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    frozen[1].weight.requires_grad_(False)
    with pytest.raises(ValueError, match=r"Sequential.1.weight is not trained"):
        adopt(frozen, std=0.1)


def test_wrong_sizes_are_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(ValueError, match=r"pipeline=2, data=2.* needs 4 processes, 1 were started"):
        with open_ranks(Topology(2, 2)):
            pass
    model = OwnModel(NOISY, loss, mesh_on_paper(Topology(), 0), Setup(FP64))
    model.mesh = mesh_on_paper(Topology(data=3), 0)
    with pytest.raises(ValueError, match="8 micro-batches of a step are not evenly shared by 3 data ranks"):
        model.train(wide, steps=1, micro_batches=8, learning_rate=1e-3)


def of_layers(*layers: LayerSpec, loss: Callable[..., Any] = loss) -> OwnModel:
    """A model on one rank."""
    return OwnModel(layers, loss, mesh_on_paper(Topology(), 0), Setup(FP64))


class Returns(nn.Module):
    """A layer that returns what it is told to."""

    def __init__(self, what: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.what, self.inner = what, nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Any:
        return self.what(self.inner(x))


@pytest.mark.parametrize(("what", "told"), [
    (lambda x: None, "layer odd returned NoneType, but a layer returns a tensor or a tuple of tensors, or WithLoss"),
    (lambda x: [x], "layer odd returned list, but"),
    (lambda x: (x, None), "layer odd returned tuple of Tensor, NoneType, but"),
    (lambda x: (), "layer odd returned tuple of nothing, but"),
    (lambda x: WithLoss(3.0), "layer odd returned float, but"),
    (lambda x: WithLoss(x, x.mean(0)), r"layer odd: its own loss must be a tensor without dims, .* shape \[2, 1\]"),
    (lambda x: WithLoss(x, 0.5), "layer odd: its own loss must be a tensor without dims, .* not float"),
])
def test_a_layer_that_returns_what_cannot_go_on_is_named(what: Callable[[Tensor], Any], told: str) -> None:
    """A forgotten return too: the next layer must not begin again with the inputs."""
    model = of_layers(plain("odd", lambda: Returns(what)), plain("leave", lambda: nn.Linear(1, 1)))
    with pytest.raises(ValueError, match=told):
        model.step([wide(0)], learning_rate=1e-3)


@pytest.mark.parametrize(("bad", "told"), [
    (lambda x, sums: x[-1] - sums, r"the loss must be a tensor without dims, as mean\(\) gives it, not .* \[2, 1\]"),
    (lambda x, sums: loss(x, sums).item(), "the loss must be a tensor .*, not float"),
    (lambda x, sums: loss(x.detach(), sums), "the loss depends on no parameter by way of gradients"),
])
def test_a_loss_that_cannot_be_trained_on_is_told(bad: Callable[..., Any], told: str) -> None:
    model = of_layers(*NOISY, loss=bad)
    with pytest.raises(ValueError, match=told):
        model.step([wide(0)], learning_rate=1e-3)


def test_what_is_no_list_of_layers_is_refused_by_name() -> None:
    leave, one = plain("leave", lambda: nn.Linear(2, 1)), nn.Linear(2, 2)
    with pytest.raises(ValueError, match="layer 0 is Linear, not LayerSpec: make it with own.plain"):
        of_layers(one, leave)
    with pytest.raises(ValueError, match="two layers are called leave"):
        of_layers(leave, leave)
    with pytest.raises(ValueError, match=r"layer f: make\(\) gave builtin_function_or_method, which is no "):
        of_layers(plain("f", lambda: torch.sin), leave)
    with pytest.raises(ValueError, match="layer f: a cost of -1.0, but it must be 0 or more"):
        plain("f", lambda: nn.Linear(2, 2), cost=-1.0)
    with pytest.raises(ValueError, match="--pipeline-schedule zb-x: must be one of gpipe, 1f1b"):
        Pipelining("zb-x")


def test_layers_that_hold_one_parameter_unsaid_are_refused() -> None:
    """On ranks of their own they would hold two."""
    one = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="Linear.weight is declared already: each layer needs a module of its own"):
        of_layers(plain("a", lambda: one), plain("b", lambda: nn.Sequential(one)))

    def with_weight(weight: nn.Parameter) -> nn.Module:
        module = nn.Linear(2, 2, bias=False)
        module.weight = weight
        return module

    weight = nn.Parameter(torch.zeros(2, 2))
    with pytest.raises(ValueError, match="b.weight is a.weight of another layer: say so .see LayerSpec.shared"):
        of_layers(plain("a", lambda: with_weight(weight)), plain("b", lambda: with_weight(weight)))


def two_ends(first: int, last: int, std: float, *, between: dict[str, str] | None = None) -> list[LayerSpec]:
    """Layers that share a table of so many rows."""
    return [
        plain("words", lambda: nn.Embedding(first, 4), std=0.3, shared={"weight": "table"}),
        plain("between", lambda: nn.Linear(4, 4, bias=False), shared=between),
        plain("out", lambda: nn.Linear(4, last, bias=False), std=std, shared={"weight": "table"}),
    ]


def refusal(layers: list[LayerSpec], pipeline: int) -> str:
    """What the machine says to layers that do not fit each other."""
    try:
        OwnModel(layers, loss, open_mesh(Topology(pipeline)), Setup(FP64))
    except ValueError as wrong:
        return str(wrong)
    return ""


def refusals(pipeline: int) -> list[str]:
    alone = plain("words", lambda: nn.Embedding(5, 4), shared={"weight": "table"})
    asked = [two_ends(5, 6, 0.3), two_ends(5, 5, 0.2), [alone, *two_ends(5, 5, 0.3)[1:2]]]
    return [refusal(layers, pipeline) for layers in asked]


def test_layers_that_share_must_agree_on_any_layout() -> None:
    for pipeline in (1, 2):
        for shapes, stds, alone in on_ranks(pipeline, refusals, pipeline):
            assert shapes.startswith("layers that share table must declare it alike, not as [5, 4] with"), pipeline
            assert stds.startswith("layers that share table must declare it alike") and "std=0.2" in stds
            assert alone == "the shared parameter table is named by one layer alone: words on stage 0"
    told = refusal(two_ends(5, 5, 0.3, between={"no": "table"}), 1)
    assert told == "Linear has no parameter no to share as table"
    layers = two_ends(5, 5, 0.3, between={"weight": "table"})
    with pytest.raises(ValueError, match="table must stand on one rank, or on the first and the last of 3 stages: wo"):
        shared_apart(layers, cut_layers(layers, range(3)))


def test_a_checkpoint_of_other_layers_is_refused(tmp_path: Path) -> None:
    of_layers(*NOISY).save(tmp_path)
    with pytest.raises(ValueError, match="holds the layers enter, noisy.0, .*, but the model's are enter, noisy.0"):
        of_layers(*NOISY[:2], NOISY[-1]).load(tmp_path)


def test_measured_costs_need_an_example_to_measure_with() -> None:
    """A layer that works in place can be timed as well."""
    setup = Setup(FP64, pipelining=Pipelining(split=Split("measured")))
    mesh = mesh_on_paper(Topology(), 0)
    with pytest.raises(ValueError, match="--pipeline-split measured: it needs a micro-batch to time the layers with"):
        OwnModel(tied(True), weighed, mesh, setup)
    OwnModel(tied(True), weighed, mesh, setup, told(0)).step([told(0)], learning_rate=1e-3)


def test_a_loss_that_is_no_number_ends_the_run() -> None:
    setup = Setup(FP64)
    model = OwnModel(NOISY, lambda x, sums: loss(x, sums) / 0.0, mesh_on_paper(Topology(), 0), setup)
    with pytest.raises(AgreedError, match="step 1: loss inf, gradient norm .*: not finite"):
        model.step([wide(0)], learning_rate=1e-3)
