"""Small models of all the kinds that torch.compile's tests look at: plain ones, transformers' and diffusers'."""

import torch
import torch.nn.functional as F
from torch import nn

WIDTH, HEADS, LAYERS, LENGTH, WORDS = 64, 2, 2, 16, 97


class PreNorm(nn.Module):
    """A block of a GPT. dropout: between its branches and the stream."""

    def __init__(self, width=WIDTH, dropout=0.0):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        q, k, v = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).flatten(2)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class PostNorm(nn.Module):
    """A block of a BERT."""

    def __init__(self, width=WIDTH):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.up = nn.Linear(width, width), nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        x = self.norm1(self.mix(x) + x)
        return self.norm2(x + self.down(F.gelu(self.up(x))))


class Stack(nn.Module):
    def __init__(self, block, layers=LAYERS):
        super().__init__()
        self.embedding = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(layers))
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x):
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class ConvBlock(nn.Module):
    """As in diffusers: SiLU is called as a function of the norm's result."""

    def __init__(self, channels=32):
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(8, channels), nn.GroupNorm(8, channels)
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x):
        hidden = self.conv1(F.silu(self.norm1(x)))
        return x + self.conv2(F.silu(self.norm2(hidden)))


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv_in, self.conv_out = nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(32, 3, 3, padding=1)
        self.blocks = nn.Sequential(ConvBlock(), ConvBlock())

    def forward(self, image):
        return self.conv_out(self.blocks(self.conv_in(image)))


def rows():
    return [torch.randn(2, LENGTH, WIDTH)]


def tokens():
    return [torch.randint(WORDS, (2, LENGTH))]


def images(channels=3, size=8):
    return [torch.randn(2, channels, size, size)]


def _of_transformers(kind, inputs, **settings):
    def make():
        import transformers

        sizes = {
            "hidden_size": WIDTH,
            "intermediate_size": 2 * WIDTH,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "vocab_size": WORDS,
        }
        config = getattr(transformers, f"{kind}Config")(**(sizes | settings))
        model = getattr(transformers, f"{kind}Model")
        return model._from_config(config, attn_implementation="sdpa").train(), inputs()

    return make


_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_DECODER = {"num_key_value_heads": HEADS, "use_cache": False, "max_position_embeddings": 32}

MODELS = {
    "pre-norm": lambda: (Stack(PreNorm), rows()),
    "dropout": lambda: (Stack(lambda: PreNorm(dropout=0.1)), rows()),
    "post-norm": lambda: (Stack(PostNorm), rows()),
    "conv net": lambda: (ConvNet(), images()),
    "conv net, channels last": lambda: (
        ConvNet().to(memory_format=torch.channels_last),
        [image.contiguous(memory_format=torch.channels_last) for image in images()],
    ),
    "ViT": _of_transformers("ViT", images, image_size=8, patch_size=4, **_NO_DROPOUT),
    "BERT": _of_transformers("Bert", tokens, **_NO_DROPOUT),
    "GPT-2": _of_transformers(
        "GPT2",
        tokens,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        n_positions=32,
        bos_token_id=0,
        eos_token_id=0,
    ),
    "Llama": _of_transformers("Llama", tokens, **_DECODER),
    "Qwen3": _of_transformers("Qwen3", tokens, head_dim=32, **_DECODER),
}
