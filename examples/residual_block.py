"""A pre-norm transformer in which every addition is part of the norm behind it: `norm(x, residual)`.

Each norm returns what goes into its branch, and the sum that goes on as the next residual. The sum is read and
written once; an addition of its own would read and write it once more, forward and backward.
"""

import torch
from torch import nn

import evenkeel.torch as ek


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (self.heads, -1)) for part in self.qkv(x).chunk(3, -1))
        q, k, v = (part.transpose(-2, -3) for part in (q, k, v))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(-2, -3).flatten(-2))


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.first, self.attention = ek.RMSNorm(width, eps=1e-6), Attention(width, heads)
        self.second = ek.RMSNorm(width, eps=1e-6)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, branch, residual):
        x, residual = self.first(branch, residual)  # residual = branch + residual
        x, residual = self.second(self.attention(x), residual)
        return self.mlp(x), residual


class Decoder(nn.Module):
    def __init__(self, tokens=256, width=64, heads=4, blocks=2):
        super().__init__()
        self.embedding = nn.Embedding(tokens, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(blocks))
        self.norm = ek.RMSNorm(width, eps=1e-6)
        self.head = nn.Linear(width, tokens, bias=False)

    def forward(self, tokens):
        branch = self.embedding(tokens)
        residual = torch.zeros_like(branch)
        for block in self.blocks:
            branch, residual = block(branch, residual)
        x, _ = self.norm(branch, residual)
        return self.head(x)


torch.manual_seed(0)
model = Decoder()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
tokens = torch.randint(256, (8, 33))
for step in range(10):
    loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.3f}")
