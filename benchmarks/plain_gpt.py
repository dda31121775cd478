"""A GPT of torch's own layers with the weights of ours, and ours as the trainer has it: what benchmarks compare."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megazero.config import ModelConfig, OptimizerConfig
from megazero.gpt import GPTSetup, gpt_layers
from megazero.kernels.dispatch import Kernels
from megazero.machine import Machine, Setup, assemble
from megazero.parallel.groups import open_mesh
from megazero.parallel.topology import Topology
from megazero.parallel.zero import Zero
from megazero.precision import Dtypes
from megazero.products import Products, products_of


class PlainBlock(nn.Module):
    """[batch, seq, hidden] -> the same, with torch's own layers."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        hidden = model.hidden_size
        self.heads = model.num_attention_heads
        self.attention_norm, self.ffn_norm = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, model.ffn), nn.Linear(model.ffn, hidden)

    def forward(self, x: Tensor) -> Tensor:
        fused = self.qkv(self.attention_norm(x)).unflatten(-1, (self.heads, 3, -1)).transpose(1, 2)
        y = F.scaled_dot_product_attention(*fused.unbind(3), is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.ffn_norm(x)), approximate="tanh"))


class PlainGPT(nn.Module):
    """Tokens and labels [batch, seq] -> mean loss."""

    def __init__(self, model: ModelConfig, vocab: int) -> None:
        super().__init__()
        self.word = nn.Embedding(vocab, model.hidden_size)
        self.position = nn.Parameter(torch.zeros(model.seq_length, model.hidden_size))
        self.blocks = nn.ModuleList(PlainBlock(model) for _ in range(model.num_layers))
        self.norm = nn.LayerNorm(model.hidden_size)
        self.head = nn.Linear(model.hidden_size, vocab, bias=False)

    def logits(self, tokens: Tensor) -> Tensor:
        """[batch, seq] -> [batch, seq, vocab]."""
        x = self.word(tokens) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.logits(tokens).flatten(0, 1), labels.flatten())


def plain_copy(machine: Machine, model: ModelConfig, vocab: int) -> PlainGPT:
    """A GPT of torch's layers with the weights of ours."""
    plain = PlainGPT(model, vocab)
    ours = {info.name: info.tensor for bucket in machine.optimizer.buckets for info in bucket.infos}
    for name, parameter in plain.named_parameters():
        name = name.replace("blocks.", "layers.").replace("word.", "embedding.word.")
        for part in ("qkv.", "out."):
            name = name.replace(part, f"attention.{part}")
        for part in ("up.", "down."):
            name = name.replace(part, f"ffn.{part}")
        name = {"position": "embedding.position"}.get(name, name)
        name = name.replace("norm.", "final_norm.norm.", 1) if name.startswith("norm.") else name
        parameter.data.copy_(ours[name].detach().reshape(parameter.shape))
    return plain


def our_machine(
    model: ModelConfig, vocab: int, zero: Zero, *, topology: Topology = Topology(),
    dtype: torch.dtype = torch.float32, products: Products | None = None, kernels: Kernels = Kernels(),
) -> Machine:
    """The engine and the optimizer as the trainer has them, parameters in `dtype`."""
    layers = gpt_layers(GPTSetup(model, vocab, torch.float32, kernels=kernels))
    optimizer = OptimizerConfig(adam_eps=1e-8)
    setup = Setup(Dtypes(dtype, torch.float32), optimizer, zero)
    mesh = open_mesh(topology, products=products or products_of(torch.device("cpu")))
    return assemble(layers, mesh, setup)
