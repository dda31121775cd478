"""The kernels in a block: with them it computes what it does without, and recomputation draws the same again."""

import pytest
import torch

from megazero.config import ModelConfig
from megazero.config_moe import MoEConfig
from megazero.data.batch import MicroBatch
from megazero.gpt import Block, GPTSetup
from megazero.kernels.dispatch import Kernels
from megazero.parallel.groups import open_mesh
from megazero.parallel.params import collect, initialize
from megazero.parallel.random import recompute
from megazero.parallel.topology import Topology
from megazero.pipe.output import hidden_of

pytest.importorskip("triton")
SEQ, BATCH, HIDDEN = 6, 2, 12
MODELS = {
    "gpt": {},
    "exact gelu, positions interleaved": {
        "activation": "gelu", "position_embedding_type": "rope", "rotary_interleaved": True, "rotary_percent": 0.5,
    },
    "llama": {
        "activation": "swiglu", "ffn_hidden_size": 20, "position_embedding_type": "rope", "num_query_groups": 1,
        "normalization": "RMSNorm", "disable_bias_linear": True,
    },
}


def _values(kernels, changes, draw=None, wrap=lambda block, x, batch: block(x, batch)):
    """Output of a block and the gradients of its input and parameters."""
    model = ModelConfig(
        num_layers=1, hidden_size=HIDDEN, num_attention_heads=3, seq_length=SEQ, init_method_std=0.5,
        attention_dropout=0.0, hidden_dropout=0.3, **changes,
    )
    mesh = open_mesh(Topology())
    block = Block(GPTSetup(model, 97, torch.float64, kernels=kernels), 0, mesh)
    initialize(collect([("block", block)]), mesh.topology, 0, seed=1)
    generator = torch.Generator().manual_seed(0)
    for parameter in block.parameters():        # biases too
        parameter.data.add_(torch.randn(parameter.shape, generator=generator).double() * 0.1)
    x = torch.randn(SEQ, BATCH, HIDDEN, generator=generator).double().requires_grad_()
    called = set()      # parameters on their way are waited for where a module is called
    for module in block.modules():
        module.register_forward_pre_hook(lambda module, inputs: called.add(module))
    batch = MicroBatch(torch.zeros(SEQ, BATCH, dtype=torch.long), draw=draw)
    y = wrap(block, x, batch)
    y.backward(torch.randn(y.shape, generator=generator).double())
    assert all(p.grad is not None for p in block.parameters())
    assert called >= {module for module in block.modules() if list(module.parameters(recurse=False))}
    return {"y": y.detach(), "x": x.grad} | {name: p.grad for name, p in block.named_parameters()}


@pytest.mark.parametrize("model", MODELS)
def test_a_block_of_kernels_is_the_block_of_torch(model):
    found, wanted = (_values(Kernels(impl), MODELS[model]) for impl in ("triton", "torch"))
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-9, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("model", ("gpt", "llama"))
def test_recomputation_draws_the_same_without_keeping_it(model):
    """C078 for the kernel's draws: bit-equal; and another micro-batch draws otherwise."""
    def again(block, x, batch):
        return recompute(lambda x: block(x, batch), x)

    plain = _values(Kernels("triton"), MODELS[model], draw=(1, 2, 3))
    for name, value in _values(Kernels("triton"), MODELS[model], draw=(1, 2, 3), wrap=again).items():
        assert torch.equal(value, plain[name]), name
    other = _values(Kernels("triton"), MODELS[model], draw=(1, 2, 4))
    assert not torch.equal(other["y"], plain["y"])


@pytest.mark.parametrize("parts", [{"moe_shared_expert_intermediate_size": 8}, {"mlp_type": "residual"}])
def test_the_choice_of_kernels_reaches_every_part_of_a_layer_of_experts(parts):
    moe = MoEConfig(num_experts=(2,), moe_router_topk=2, **parts)

    def output(kernels):
        model = ModelConfig(
            num_layers=1, hidden_size=HIDDEN, num_attention_heads=3, seq_length=SEQ, hidden_dropout=0.0,
            init_method_std=0.5, **MODELS["llama"],
        )
        mesh = open_mesh(Topology())
        block = Block(GPTSetup(model, 97, torch.float64, kernels=kernels, moe=moe, experts=(2,)), 0, mesh)
        initialize(collect([("block", block)]), mesh.topology, 0, seed=1)
        dense = block.ffn.residual or block.ffn.shared
        assert {part.keywords["impl"] for part in (dense.activation, block.ffn.experts.activation.forward)} == {
            kernels.impl("swiglu")
        }
        x = torch.randn(SEQ, BATCH, HIDDEN, generator=torch.Generator().manual_seed(0)).double()
        with torch.no_grad():
            return hidden_of(block(x, MicroBatch(torch.zeros(SEQ, BATCH, dtype=torch.long), draw=(1, 2, 3))))

    torch.testing.assert_close(output(Kernels("triton")), output(Kernels("torch")), rtol=1e-9, atol=1e-9)
