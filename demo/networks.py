"""The demo's models: a Llama of transformers, and those that `python -m evenkeel bench surgery` times.

As somebody might have written them who has never heard of evenkeel. No dropout, so two runs can differ by their
norms only. Called with a batch, a model returns its loss.
"""

import torch
import torch.nn.functional as F
from torch import nn

from evenkeel.bench import models

PATCH = 8  # the side of a vision transformer's tokens, in pixels


def small_weights(module):
    """As GPT-2 begins: a deep model learns from its first steps on."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def gpt(classes, length, **sizes):
    return models.Gpt(classes, context=length, **sizes).apply(small_weights)


class Llama(nn.Module):
    """transformers' LlamaForCausalLM as it is: hand-written RMS norms, rotary embeddings, SwiGLU."""

    def __init__(self, classes, length, layers, width, inner, heads, kv_heads):
        import transformers  # here, so that the other models do without it

        super().__init__()
        self.llama = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=classes,
                hidden_size=width,
                intermediate_size=inner,
                num_hidden_layers=layers,
                num_attention_heads=heads,
                num_key_value_heads=kv_heads,
                max_position_embeddings=length,
                tie_word_embeddings=True,
                use_cache=False,
            )
        )

    def forward(self, tokens):
        return self.llama(input_ids=tokens, labels=tokens).loss


class VisionTransformer(nn.Module):
    """torch's own encoder over patches of a picture; the mean of all tokens decides."""

    def __init__(self, classes, length, layers, width, heads):
        super().__init__()
        self.patches = nn.Conv2d(3, width, PATCH, stride=PATCH)
        self.positions = nn.Parameter(0.02 * torch.randn((length // PATCH) ** 2, width))
        options = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": True}
        self.blocks = nn.Sequential(
            *(nn.TransformerEncoderLayer(width, heads, 4 * width, **options) for _ in range(layers))
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, pictures, labels):
        tokens = self.patches(pictures).flatten(2).transpose(1, 2) + self.positions
        features = self.norm(self.blocks(tokens)).mean(1)
        return F.cross_entropy(self.head(features).float(), labels)


class ConvNet(nn.Module):
    """Residual blocks of convolution, group norm and SiLU; the mean of all pixels decides."""

    def __init__(self, classes, length, channels, blocks):
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.blocks = nn.Sequential(*(models.Residual(channels) for _ in range(blocks)))
        self.head = nn.Linear(channels, classes)

    def forward(self, pictures, labels):
        features = self.blocks(self.stem(pictures)).mean((2, 3))
        return F.cross_entropy(self.head(features).float(), labels)


MAKERS = {"llama": Llama, "gpt": gpt, "vit": VisionTransformer, "conv": ConvNet}
