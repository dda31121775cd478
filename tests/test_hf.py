"""megazero/hf.py and scripts/convert_hf.py: the same model on both sides, the same bits when it comes back.

The models are tiny and random, made by the transformers library.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from megazero.checkpoint import Reader, folder_of
from megazero.config import Config
from megazero.data.batch import MicroBatch
from megazero.flags import parse
from megazero.gpt import GPTSetup, gpt_layers
from megazero.hf import export_folder, import_folder, open_source, read_json
from megazero.hf_config import describe, experts_of, moe_of, to_values
from megazero.hf_names import rows_of
from megazero.parallel.groups import mesh_on_paper
from megazero.parallel.params import collect
from megazero.parallel.topology import Topology
from megazero.pipe.stage import Recompute, Stage, build_stages, cut_layers
from megazero.resume import check_same_model
from scripts import convert_hf
from tests.harness import on_ranks, run_script
from tests.test_evaluate import score_ranks
from tests.training import LLAMA, train

SMALL_HF = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "rms_norm_eps": 1e-5,
            "max_position_embeddings": 64, "intermediate_size": 48}
LLAMA3_ROPE = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
MODELS: dict[str, transformers.PretrainedConfig] = {
    "gpt2": transformers.GPT2Config(vocab_size=97, n_embd=32, n_layer=3, n_head=4, n_positions=24, bos_token_id=1,
                                    eos_token_id=1),
    "gpt2-untied": transformers.GPT2Config(
        vocab_size=97, n_embd=32, n_layer=2, n_head=2, n_positions=24, n_inner=40, activation_function="gelu",
        tie_word_embeddings=False, bos_token_id=1, eos_token_id=1,
    ),
    "llama2": transformers.LlamaConfig(**SMALL_HF, num_key_value_heads=4),
    "llama3": transformers.LlamaConfig(
        **SMALL_HF, num_key_value_heads=2, tie_word_embeddings=True, rope_parameters=LLAMA3_ROPE
    ),
    "llama-bias": transformers.LlamaConfig(
        **SMALL_HF, num_key_value_heads=1, head_dim=16, attention_bias=True, mlp_bias=True
    ),
    "qwen2": transformers.Qwen2Config(**SMALL_HF, num_key_value_heads=2, tie_word_embeddings=True),
    "qwen3": transformers.Qwen3Config(
        **SMALL_HF, num_key_value_heads=2, head_dim=16,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    ),
}  # fmt: skip
MIXTURES: dict[str, transformers.PretrainedConfig] = {
    "mixtral": transformers.MixtralConfig(**SMALL_HF, num_key_value_heads=2, num_local_experts=4),
    "qwen3_moe": transformers.Qwen3MoeConfig(
        **SMALL_HF, num_key_value_heads=2, head_dim=16, num_experts=5, num_experts_per_tok=3, moe_intermediate_size=24,
        norm_topk_prob=True, mlp_only_layers=[0],
    ),
    "qwen2_moe": transformers.Qwen2MoeConfig(
        **SMALL_HF, num_key_value_heads=2, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24,
        shared_expert_intermediate_size=40, decoder_sparse_step=2,
    ),
}  # fmt: skip


def make_model(name: str, dtype: torch.dtype = torch.float32) -> transformers.PreTrainedModel:
    """A random model, with no parameter left at 0 or 1: a norm or a bias that is lost must show."""
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config((MODELS | MIXTURES)[name]).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model.to(dtype)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A Hugging Face folder of each model."""
    root = tmp_path_factory.mktemp("hf")
    for name in (*MODELS, *MIXTURES):
        make_model(name).save_pretrained(root / name)
    return {name: root / name for name in (*MODELS, *MIXTURES)}


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """All weights of a Hugging Face folder, by the safetensors library."""
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def assert_same_bits(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert got[name].dtype == tensor.dtype and torch.equal(got[name], tensor), name


def our_stage(checkpoint: Path) -> tuple[Stage, dict[str, torch.nn.Parameter]]:
    """The whole model of a checkpoint on one rank, in fp32, and its parameters by name."""
    reader = Reader(checkpoint)
    config = Config.from_json(json.dumps(reader.config))
    layers = gpt_layers(GPTSetup(config.model, 97, moe=config.moe, experts=config.experts))
    stage = build_stages(layers, mesh_on_paper(Topology(), 0), cut_layers(layers, [0]), Recompute())[0]
    parameters = {info.name: info.tensor for info in collect(stage.named_layers())}
    for name, parameter in parameters.items():      # the padding rows of tables are zero
        parameter.data.zero_()
        values = reader.read(name, "weight")
        parameter.data[tuple(slice(n) for n in values.shape)] = values
    return stage, parameters


def test_an_imported_model_computes_the_same_logits_loss_and_gradients(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    tokens = torch.randint(0, 97, (3, 24), generator=torch.Generator().manual_seed(3))
    for name in (*MODELS, *MIXTURES):
        theirs = transformers.AutoModelForCausalLM.from_pretrained(folders[name])
        told = theirs(tokens, labels=tokens)
        told.loss.backward()
        made = import_folder(folders[name], tmp_path / name)
        stage, parameters = our_stage(made.folder)
        with torch.no_grad():
            logits = stage(None, MicroBatch(tokens.T))[..., :97].transpose(0, 1)
        assert told.logits.std() > 0.3, "logits near zero would prove nothing"
        assert (logits - told.logits).abs().max() < 2e-5, name
        loss = stage(None, MicroBatch(tokens.T[:-1], labels=tokens.T[1:], scale=1 / tokens[:, 1:].numel()))
        assert loss.item() == pytest.approx(told.loss.item(), rel=1e-6)
        loss.backward()
        for parameter in theirs.parameters():       # their gradients, as a folder of weights, go the same way
            parameter.data = parameter.grad
        theirs.save_pretrained(tmp_path / f"{name}-gradients")
        source = open_source(tmp_path / f"{name}-gradients")
        for row in source.rows:
            want, got = source.read(row), parameters[row.name].grad[tuple(slice(n) for n in row.shape)]
            assert (got - want).abs().max() <= 1e-4 * want.abs().max(), f"{name}: {row.name}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_folder_comes_back_bit_by_bit_and_computes_the_same_bits(tmp_path: Path, dtype: torch.dtype) -> None:
    tokens = torch.randint(0, 97, (2, 24), generator=torch.Generator().manual_seed(3))
    for name in (*MODELS, *MIXTURES):
        make_model(name, dtype).save_pretrained(tmp_path / name)
        made = import_folder(tmp_path / name, tmp_path / f"{name}-ours")
        export_folder(made.folder, tmp_path / f"{name}-back", shard_bytes=30_000)
        assert_same_bits(tensors_of(tmp_path / f"{name}-back"), tensors_of(tmp_path / name))
        first, back = (
            transformers.AutoModelForCausalLM.from_pretrained(tmp_path / folder, dtype="auto")
            for folder in (name, f"{name}-back")
        )
        assert type(back) is type(first) and back.dtype == dtype
        with torch.no_grad():
            assert torch.equal(back(tokens).logits, first(tokens).logits), name
        assert made.config.precision.bf16 == (dtype == torch.bfloat16)


def test_a_trained_checkpoint_comes_back_bit_by_bit_from_hugging_face(tmp_path: Path) -> None:
    """Written by 2 x 2 ranks; its moments stay behind."""
    train(f"{LLAMA} --num-query-groups 2 --num-layers 2 --save {tmp_path / 'run'} --save-interval 5", (2, 2, 1))
    export_folder(folder_of(tmp_path / "run", 5), tmp_path / "hf", shard_bytes=10**9)
    made = import_folder(tmp_path / "hf", tmp_path / "back", iteration=5)
    one, two = Reader(folder_of(tmp_path / "run", 5)), Reader(made.folder)
    assert one.tensors.keys() == two.tensors.keys() and len(one.tensors) == 15
    for name in one.tensors:
        assert torch.equal(one.read(name, "weight"), two.read(name, "weight")), name
    assert made.folder.name == "iter_0000005" and two.progress["iteration"] == 5


@pytest.mark.parametrize(
    ("name", "layout"), [("llama2", (4, 1, 1)), ("qwen2", (2, 2, 1)), ("llama-bias", (1, 2, 1)), ("gpt2", (2, 1, 1)),
     ("qwen2_moe", (2, 2, 1)), ("mixtral", (1, 1, 2))]
)
def test_an_import_trains_on_in_any_layout_and_leaves_it_bit_by_bit(
    folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, layout: tuple[int, ...]
) -> None:
    """C143, C144: 4, 2 and 1 key heads of 4, and gate and up; imported by one process, loaded by several with the
    flags that the import prints, saved by them and exported: the original's bits. The learning rate is 0."""
    assert convert_hf.main(["import", str(folders[name]), "--save", str(tmp_path / "ours")]) == 0
    printed = capsys.readouterr().out.splitlines()[-1]
    flags = f"{printed} --seq-length 24 --fp64 --lr 0 --train-iters 2"
    alone = train(flags)
    parted = train(f"{flags} --save {tmp_path / 'saved'} --save-interval 2", layout)
    np.testing.assert_allclose(parted.losses, alone.losses, rtol=1e-10)
    np.testing.assert_allclose(parted.norms, alone.norms, rtol=1e-10)
    words = ["export", str(tmp_path / "saved"), "--out", str(tmp_path / "back"), "--dtype", "fp32"]
    assert convert_hf.main(words) == 0
    assert_same_bits(tensors_of(tmp_path / "back"), tensors_of(folders[name]))


def test_the_printed_flags_ask_for_the_imported_model(folders: dict[str, Path], tmp_path: Path) -> None:
    for name in (*MODELS, *MIXTURES):
        made = import_folder(folders[name], tmp_path / name)
        words = convert_hf.flags_for(made.config)
        assert name in MIXTURES or not any(word.startswith("--moe") for word in words), name
        config, _ = parse([*words, *"--micro-batch-size 1 --train-iters 1 --lr 1 --mock-data".split()])
        assert (config.model, config.moe) == (made.config.model, made.config.moe), name
        check_same_model(made.config, config)


def test_a_checkpoint_without_moments_says_so(folders: dict[str, Path], tmp_path: Path) -> None:
    made = import_folder(folders["gpt2"], tmp_path / "ours")
    flags = f"{' '.join(convert_hf.flags_for(made.config))} --train-iters 2 --override-opt_param-scheduler"
    with pytest.raises(ValueError, match="holds weights only.*: give --finetune .*--no-load-optim"):
        train(f"{flags} --load {tmp_path / 'ours'}")
    assert len(train(f"{flags} --load {tmp_path / 'ours'} --no-load-optim").losses) == 2


def test_a_folder_is_scored_as_it_is(folders: dict[str, Path], tmp_path: Path) -> None:
    """In one process and in four: the loss that the transformers library finds."""
    ids = torch.randint(0, 97, (24,), generator=torch.Generator().manual_seed(5))
    (tmp_path / "texts.jsonl").write_text(json.dumps({"text": " ".join(map(str, ids.tolist()))}) + "\n")
    words, names, wanted = ["--jsonl", str(tmp_path / "texts.jsonl")], ("gpt2", "llama3"), []
    for name in names:
        theirs = transformers.AutoModelForCausalLM.from_pretrained(folders[name])
        with torch.no_grad():
            wanted.append(theirs(ids[None], labels=ids[None]).loss.item())
    for size in ("1", "2"):
        words += ["--tensor-model-parallel-size", size, "--pipeline-model-parallel-size", size]
        ranks, commands = int(size) ** 2, [["--hf", str(folders[name]), *words] for name in names]
        for found in on_ranks(ranks, score_ranks, commands, ranks):
            assert [score.lm_loss for score in found] == pytest.approx(wanted, rel=1e-6), size


# ----------------------------------------------------------------------------------------------------------- the table


def test_the_tables_name_every_parameter_of_the_model_in_its_shape() -> None:
    for name, theirs in (MODELS | MIXTURES).items():
        told = describe(theirs.to_dict(), name)
        moe = moe_of(told.experts, told.model)
        layers = gpt_layers(GPTSetup(told.model, 97, moe=moe, experts=moe.experts_of_layers(told.model.num_layers)))
        with torch.device("meta"):
            stage = build_stages(layers, mesh_on_paper(Topology(), 0), cut_layers(layers, [0]), Recompute())[0]
        declared = {info.name: info.spec.shape for info in collect(stage.named_layers())}
        rows = rows_of(told.family, told.model, 97, told.experts)
        assert {row.name: row.shape for row in rows} == declared, name


def test_the_tensors_of_a_row_hold_each_of_its_elements_once() -> None:
    for name, theirs in (MODELS | MIXTURES).items():
        told = describe(theirs.to_dict(), name)
        for row in rows_of(told.family, told.model, 97, told.experts):
            count = np.zeros(row.shape, int)
            for part in row.parts:
                assert np.prod(part.shape) == part.box.numel
                count[part.box.slices()] += 1
            assert (count == 1).all(), row.name


def test_a_query_head_stands_with_the_key_and_value_head_that_it_shares(folders: dict[str, Path]) -> None:
    """C143: group g holds query heads 2 g and 2 g + 1, then key g, then value g; C144: gate before up."""
    source = open_source(folders["llama3"])
    theirs = tensors_of(folders["llama3"])
    layer = "model.layers.1."
    rows = {row.name: source.read(row) for row in source.rows}
    qkv = rows["layers.1.attention.qkv.weight"]
    q, k, v = (theirs[f"{layer}self_attn.{kind}_proj.weight"].unflatten(0, (-1, 8)) for kind in "qkv")
    for group in range(2):
        torch.testing.assert_close(qkv[group], torch.stack((q[2 * group], q[2 * group + 1], k[group], v[group])))
    up = rows["layers.1.ffn.up.weight"]
    assert torch.equal(up, torch.stack((theirs[f"{layer}mlp.gate_proj.weight"], theirs[f"{layer}mlp.up_proj.weight"])))


def test_experts_stand_under_global_numbers(folders: dict[str, Path], tmp_path: Path) -> None:
    """[expert, gate or up, ffn, hidden]; and what the settings say of a mixture comes back."""
    for name in MIXTURES:
        made = import_folder(folders[name], tmp_path / name)
        theirs = tensors_of(folders[name])
        up = Reader(made.folder).read("layers.1.ffn.experts.up", "weight")
        word = "block_sparse_moe.experts.3.w3" if name == "mixtral" else "mlp.experts.3.up_proj"
        assert torch.equal(up[3, 1], theirs[f"model.layers.1.{word}.weight"])
        told = open_source(folders[name]).described
        assert experts_of(made.config) == told.experts
        assert describe(to_values(told.model, 97, told.experts, "F32"), "config.json") == told


# ----------------------------------------------------------------------------------------------- other people's folders


def test_folders_of_older_versions_are_read(folders: dict[str, Path], tmp_path: Path) -> None:
    """Buffers among the weights, names without their first word, a tied head saved twice, rope_theta in the open."""
    old = tmp_path / "gpt2"
    shutil.copytree(folders["gpt2"], old)
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in tensors_of(old).items()}
    save_file(tensors | {"h.0.attn.bias": torch.ones(1, 1, 24, 24)}, old / "model.safetensors")
    import_folder(old, tmp_path / "ours")
    export_folder(folder_of(tmp_path / "ours", 0), tmp_path / "back", shard_bytes=10**9)
    assert_same_bits(tensors_of(tmp_path / "back"), tensors_of(folders["gpt2"]))

    old = tmp_path / "llama"
    shutil.copytree(folders["llama3"], old)
    tensors = tensors_of(old)
    head = tensors["model.embed_tokens.weight"].clone()
    inv_freq = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    save_file(tensors | inv_freq | {"lm_head.weight": head}, old / "model.safetensors")
    values = read_json(old / "config.json")
    rope = values.pop("rope_parameters")
    values |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope | {"type": rope.pop("rope_type")}}
    (old / "config.json").write_text(json.dumps(values))
    assert open_source(old).described == open_source(folders["llama3"]).described
    head[5, 5] += 1
    save_file(tensors | {"lm_head.weight": head}, old / "model.safetensors")
    with pytest.raises(ValueError, match="lm_head.weight is not the embedding, but config.json ties the two"):
        open_source(old)


# --------------------------------------------------------------------------------------------------------- the command


def test_every_error_is_one_line_and_exit_code_2_and_leaves_nothing(
    folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = folders["llama2"]
    tensors = tensors_of(good)
    norm = "model.layers.1.input_layernorm.weight"
    broken = {
        "lacks the tensor " + norm: {k: v for k, v in tensors.items() if k != norm},
        f"{norm} has shape [31], config.json asks for [32]": tensors | {norm: torch.ones(31)},
        "holds the tensor score.weight, for which this model has no place": tensors | {"score.weight": torch.ones(2)},
        f"{norm} and what goes with it are of type I64": tensors | {norm: torch.ones(32, dtype=torch.int64)},
    }

    def refused(words: str, *argv: str | Path) -> None:
        assert convert_hf.main([str(word) for word in argv]) == 2
        told = capsys.readouterr()
        assert told.out == "" and words in told.err and told.err.count("\n") == 1, told.err
        assert told.err.startswith("convert_hf.py: error: ")

    for number, (words, changed) in enumerate(broken.items()):
        folder = tmp_path / f"broken{number}"
        folder.mkdir()
        shutil.copy(good / "config.json", folder)
        save_file(changed, folder / "model.safetensors")
        refused(words, "import", folder, "--save", tmp_path / "ours")
    empty = tmp_path / "empty"
    empty.mkdir()
    refused("there is no such folder", "import", tmp_path / "nowhere", "--save", tmp_path / "ours")
    refused("config.json: cannot be read: No such file", "import", empty, "--save", tmp_path / "ours")
    (empty / "config.json").write_text("{")
    refused("config.json: is not JSON", "import", empty, "--save", tmp_path / "ours")
    (empty / "config.json").write_text(json.dumps({"model_type": "bloom"}))
    refused('config.json: model_type "bloom" is none of gpt2, ', "import", empty, "--save", tmp_path / "ours")
    shutil.copy(good / "config.json", empty)
    (empty / "pytorch_model.bin").write_bytes(b"never opened")
    refused("has neither model.safetensors nor", "import", empty, "--save", tmp_path / "ours")
    (empty / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {norm: "../model.safetensors"}}))
    refused("has no weight_map from tensors to files of this folder", "import", empty, "--save", tmp_path / "ours")
    (empty / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {norm: "a.safetensors"}}))
    refused("a.safetensors: missing, but model.safetensors.index.json", "import", empty, "--save", tmp_path / "ours")
    refused("--iteration -1: must be at least 0", "import", good, "--save", tmp_path / "ours", "--iteration", "-1")
    refused("there is no complete checkpoint", "export", tmp_path / "ours", "--out", tmp_path / "out")
    assert not (tmp_path / "ours").exists()

    assert convert_hf.main(["import", str(good), "--save", str(tmp_path / "ours"), "--iteration", "3"]) == 0
    capsys.readouterr()
    words = "holds a checkpoint of iteration 3 already"
    refused(words, "import", good, "--save", tmp_path / "ours", "--iteration", "3")
    words = "there is no complete checkpoint of iteration 4"
    refused(words, "export", tmp_path / "ours", "--out", tmp_path / "out", "--ckpt-step", "4")
    refused("is there already", "export", tmp_path / "ours", "--out", empty)
    words = "--max-shard-size 5 parsecs: must be"
    refused(words, "export", tmp_path / "ours", "--out", tmp_path / "out", "--max-shard-size", "5 parsecs")
    assert not (tmp_path / "out").exists()


def test_an_export_that_fails_on_the_way_leaves_no_folder(folders: dict[str, Path], tmp_path: Path) -> None:
    """65504 is the largest number of fp16."""
    folder = tmp_path / "large"
    shutil.copytree(folders["llama2"], folder)
    tensors = tensors_of(folder)
    tensors["model.norm.weight"][3] = 70000.0
    save_file(tensors, folder / "model.safetensors")
    made = import_folder(folder, tmp_path / "ours")
    with pytest.raises(ValueError, match="final_norm.norm.weight holds numbers that are too large for float16"):
        export_folder(made.folder, tmp_path / "out", dtype=torch.float16, shard_bytes=10**9)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["large", "ours"]
    export_folder(made.folder, tmp_path / "out", dtype=torch.bfloat16, shard_bytes=10**9)
    want = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    assert_same_bits(tensors_of(tmp_path / "out"), want)


def test_shards_stay_below_the_limit_and_the_index_names_every_tensor(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    made = import_folder(folders["qwen3"], tmp_path / "ours")
    words = ["export", str(made.folder), "--out", str(tmp_path / "out"), "--max-shard-size", "20KB"]
    assert convert_hf.main(words) == 0
    index = read_json(tmp_path / "out" / "model.safetensors.index.json")
    files = sorted((tmp_path / "out").glob("model-*.safetensors"))
    assert [file.name for file in files] == [f"model-{n:05d}-of-{len(files):05d}.safetensors" for n in range(1, 9)]
    total = 0
    for file in files:
        held = load_file(file)
        total += sum(tensor.nbytes for tensor in held.values())
        assert sum(tensor.nbytes for tensor in held.values()) <= 20_000
        assert {name for name, home in index["weight_map"].items() if home == file.name} == set(held)
    assert index["metadata"]["total_size"] == total


def test_the_files_of_the_tokenizer_go_along(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    shutil.copytree(folders["llama2"], folder)
    vocab = {f"<{number}>": number for number in range(96)} | {"</s>": 96}
    model = {"type": "WordLevel", "vocab": vocab, "unk_token": "<0>"}
    special = {"id": 96, "content": "</s>", "special": True, "single_word": False, "lstrip": False, "rstrip": False,
               "normalized": False}
    (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": [special], "model": model}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    generation = {"bos_token_id": 1, "eos_token_id": [96, 5]}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    made = import_folder(folder, tmp_path / "ours")
    side = tmp_path / "ours" / "huggingface"
    assert made.config.data.tokenizer_model == str(side / "tokenizer.json")
    export_folder(made.folder, tmp_path / "out", shard_bytes=10**9)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (folder / name).read_bytes()
    values = read_json(tmp_path / "out" / "config.json")
    assert (values["bos_token_id"], values["eos_token_id"]) == (1, [96, 5])

    (side / "generation_config.json").unlink()      # as in a run whose tokenizer never came from a model
    export_folder(made.folder, tmp_path / "out2", shard_bytes=10**9)
    assert read_json(tmp_path / "out2" / "generation_config.json") == {"eos_token_id": 96}
    shutil.rmtree(side)
    told = export_folder(made.folder, tmp_path / "out3", shard_bytes=10**9)
    assert told.notes == (f"no tokenizer is copied: {side / 'tokenizer.json'} is not there",)


LIMITED = """
import resource, sys
sys.path.insert(0, ".")
from scripts import convert_hf
held = 1024 * next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmData"))
resource.setrlimit(resource.RLIMIT_DATA, (held + int(sys.argv[1]), resource.RLIM_INFINITY))
sys.exit(convert_hf.main(sys.argv[2:]))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the limit on private memory is Linux's")
def test_memory_is_bounded_by_a_few_times_one_tensor(tmp_path: Path) -> None:
    """76 MiB of weights, of which the largest tensor has 6 MiB, are converted in 32 MiB, and not in 4."""
    sizes = {"vocab_size": 3072, "hidden_size": 384, "intermediate_size": 2048, "num_hidden_layers": 6}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_attention_heads=6))
    model.save_pretrained(tmp_path / "hf")
    del model
    script, ours, out = tmp_path / "limited.py", tmp_path / "ours", tmp_path / "out"
    script.write_text(LIMITED)
    (tight,) = run_script([script, 4 * 2**20, "import", tmp_path / "hf", "--save", ours])
    assert "MemoryError" in tight.stderr, "a limit that stops nothing proves nothing"
    for words in (["import", tmp_path / "hf", "--save", ours], ["export", ours, "--out", out]):
        (end,) = run_script([script, 32 * 2**20, *words])
        assert end.code == 0, end.stderr
    assert sum(file.stat().st_size for file in out.glob("*.safetensors")) > 76 * 2**20
