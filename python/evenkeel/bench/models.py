"""Small models with random weights, made of plain torch modules: a GPT with layer norms, and a conv net
with group norm and SiLU. `bench surgery` and benchmarks/training.py measure steps of them.
"""

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x):
        parts = self.queries_keys_values(self.attention_norm(x)).chunk(3, -1)
        q, k, v = (p.unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.mlp_norm(x))


class Gpt(nn.Module):
    """Predicts the next of `tokens` (texts, length); called, it returns the loss."""

    def __init__(self, vocabulary, layers, width, heads, context):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


class Residual(nn.Module):
    """x + SiLU(GroupNorm(convolution 3 x 3 of x)); the three are an nn.Sequential, as `fuse` likes them."""

    def __init__(self, channels):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1), nn.GroupNorm(32, channels), nn.SiLU()
        )

    def forward(self, x):
        return x + self.body(x)


class ConvNet(nn.Module):
    """Residual blocks on an image that keeps its size; called, it returns the mean square as a loss."""

    def __init__(self, channels, blocks):
        super().__init__()
        self.blocks = nn.ModuleList(Residual(channels) for _ in range(blocks))

    def forward(self, image):
        for block in self.blocks:
            image = block(image)
        return image.float().square().mean()


def gpt(texts, length, device, vocabulary=256, **sizes):
    """A model and its batch."""
    torch.manual_seed(0)
    with device:
        return Gpt(vocabulary, context=length, **sizes), torch.randint(vocabulary, (texts, length))


def conv_net(shape, device, blocks, layout):
    """A model and its batch, an image of `shape`, both in the layout nchw or nhwc."""
    torch.manual_seed(0)
    order = torch.channels_last if layout == "nhwc" else torch.contiguous_format
    with device:
        model, image = ConvNet(shape[1], blocks), torch.randn(shape)
    return model.to(memory_format=order), image.contiguous(memory_format=order)
