"""Models to try the surgery on: small, with random weights, made from configurations alone.

What is expected of the surgery is written down here by hand, from reading the models' own code: how many
norms a model has (modules with "norm" in the name of their class), and which of them must be left alone.
Nothing here asks evenkeel, so that expectation and surgery can disagree. Models of transformers whose
classes an installation does not have raise MissingError.
"""

import fnmatch
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn

TOKENS, HIDDEN, HEADS, LAYERS = 97, 64, 4, 2
BATCH, LENGTH, PIXELS = 2, 12, 32
ZERO = 1e-6  # relative to the largest gradient of a model

GATED = "its forward takes other arguments: gate"
MATRIX = "its weight is not one-dimensional"
NOT_REPRODUCED = "no candidate reproduces it"


class MissingError(Exception):
    """This installation has no such model."""


@dataclass(frozen=True)
class Entry:
    """A model; `left`: glob patterns of the names that must be left alone, and how the reason begins."""

    name: str
    make: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, torch.Tensor]]
    norms: int
    left: dict[str, str] = field(default_factory=dict)

    def build(self, device="cpu", dtype=torch.float32):
        """The same weights every time; those of norms are not all ones, so that they matter."""
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = self.make()
            for module in norms_of(model).values():
                for parameter in module.parameters(recurse=False):
                    parameter.data += 0.2 * torch.randn_like(parameter)
        return model.to(device, dtype).train()

    def run(self, model, autocast=None):
        """Logits, loss and the parameters' gradients by name; dropout drops the same every time."""
        device, dtype = next((p.device, p.dtype) for p in model.parameters())
        inputs = {
            name: value.to(device, dtype if value.is_floating_point() else None)
            for name, value in self.inputs().items()
        }
        model.zero_grad()
        with torch.random.fork_rng():
            torch.manual_seed(1)
            with torch.autocast(device.type, autocast, enabled=autocast is not None):
                output = model(**inputs)
            logits = output if isinstance(output, torch.Tensor) else output[0]
            target = torch.randn(logits.shape).to(device)
            loss = F.mse_loss(logits.float(), target)
            loss.backward()
        gradients = {
            name: parameter.grad.clone()
            for name, parameter in model.named_parameters()
            if parameter.grad is not None
        }
        return logits.detach(), loss.detach(), gradients

    def expected(self, model):
        """Names that are to be replaced, and names that are to be left with how the reason begins."""
        left = {}
        for name in norms_of(model):
            reasons = [r for pattern, r in self.left.items() if fnmatch.fnmatch(name, pattern)]
            if reasons:
                left[name] = reasons[0]
        return norms_of(model).keys() - left.keys(), left


def norms_of(model):
    """By name. What has children alone holds a norm; weight norm and its like normalize no activations."""
    return {
        name: module
        for name, module in model.named_modules()
        if "norm" in type(module).__name__.lower()
        and (list(module.parameters(recurse=False)) or not list(module.children()))
        and ".parametrizations." not in name
    }


def difference(actual, expected):
    """Between two runs: the largest of logits, the largest of gradients, and whose gradient that is.

    Relative to the largest element of a tensor. A gradient that is zero but for rounding, like that of
    a key's bias, has no scale of its own, and is measured by the largest of all.
    """
    (logits, _, gradients), (expected_logits, _, expected_gradients) = actual, expected
    assert gradients.keys() == expected_gradients.keys()
    scales = {name: gradient.abs().max() for name, gradient in expected_gradients.items()}
    largest = max(scales.values())
    off = {
        name: (gradient - expected_gradients[name]).abs().max()
        / (scales[name] if scales[name] > ZERO * largest else largest)
        for name, gradient in gradients.items()
    }
    worst = max(off, key=off.get)
    logits_off = (logits - expected_logits).abs().max() / expected_logits.abs().max()
    return logits_off.item(), off[worst].item(), worst


# ---- inputs ----


def random_tokens(length=LENGTH):
    return torch.randint(3, TOKENS, (BATCH, length), generator=torch.Generator().manual_seed(2))


def random_values(*shape):
    return torch.randn(BATCH, *shape, generator=torch.Generator().manual_seed(3))


def text():
    return {"input_ids": random_tokens()}


def two_texts():
    return {"input_ids": random_tokens(), "decoder_input_ids": random_tokens(7)}


def image():
    return {"pixel_values": random_values(3, PIXELS, PIXELS)}


def image_and_text():
    return image() | text()


def spectrogram():
    return {"input_features": random_values(16, 24), "decoder_input_ids": random_tokens(7)}


def sound():
    return {"input_values": random_values(400)}


def noise():
    return {"x": random_values(4, 16, 16), "step": torch.tensor([0.1, 0.7])}


# ---- models of transformers ----

# The names that most of its configurations share.
COMMON = {
    "hidden_size": HIDDEN,
    "intermediate_size": 2 * HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "initializer_range": 0.1,
}
TEXT = {
    "vocab_size": TOKENS,
    "max_position_embeddings": 64,
    "use_cache": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
VISION = {"image_size": PIXELS, "patch_size": 8}
GROUPED = {"num_key_value_heads": 2}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
STATE_SPACE = {"state_size": 8, "conv_kernel": 4, "expand": 2}


def model(name, inputs, norms, left=None, **settings):
    """transformers' class of this name with the given settings beside COMMON; None leaves one out."""
    given = {key: value for key, value in (COMMON | settings).items() if value is not None}

    def make():
        try:
            import transformers

            made = getattr(transformers, name)
        except (ImportError, AttributeError) as error:
            raise MissingError(f"{name}: {error}") from error
        return made(made.config_class(**given))

    return Entry(name, make, inputs, norms, left or {})


def decoder(family, norms, left=None, **settings):
    return model(f"{family}ForCausalLM", text, norms, left, **(TEXT | settings))


def encoder(family, norms, left=None, **settings):
    return model(f"{family}ForMaskedLM", text, norms, left, **(TEXT | settings))


def classifier(family, norms, left=None, **settings):
    return model(f"{family}ForImageClassification", image, norms, left, num_labels=10, **settings)


# ---- a model of our own ----


class ResidualBlock(nn.Module):
    """Group norm, SiLU, convolution, twice, with the time step added between."""

    def __init__(self, channels, out_channels, groups=8):
        super().__init__()
        self.norm1 = nn.GroupNorm(groups, channels)
        self.conv1 = nn.Conv2d(channels, out_channels, 3, padding=1)
        self.time = nn.Linear(HIDDEN, out_channels)
        self.norm2 = nn.GroupNorm(groups, out_channels, eps=1e-6)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1)
        self.skip = nn.Conv2d(channels, out_channels, 1)

    def forward(self, x, time):
        y = self.conv1(F.silu(self.norm1(x)))
        y = y + self.time(F.silu(time))[:, :, None, None]
        return self.skip(x) + self.conv2(F.silu(self.norm2(y)))


class AttentionBlock(nn.Module):
    """Pixels attend to each other: a group norm on the way in, then a transformer's layer norms."""

    def __init__(self, channels, groups=8):
        super().__init__()
        self.group_norm = nn.GroupNorm(groups, channels, eps=1e-6)
        self.norm1 = nn.LayerNorm(channels)
        self.attention = nn.MultiheadAttention(channels, HEADS, batch_first=True)
        self.norm2 = nn.LayerNorm(channels)
        self.mlp = nn.Sequential(
            nn.Linear(channels, 2 * channels), nn.GELU(), nn.Linear(2 * channels, channels)
        )

    def forward(self, x):
        rows = self.group_norm(x).flatten(2).transpose(1, 2)
        normalized = self.norm1(rows)
        rows = rows + self.attention(normalized, normalized, normalized, need_weights=False)[0]
        rows = rows + self.mlp(self.norm2(rows))
        return x + rows.transpose(1, 2).reshape(x.shape)


class UNet(nn.Module):
    """The shape of a diffusion model: down, across, up with what was seen on the way down."""

    def __init__(self, channels=32):
        super().__init__()
        self.time = nn.Sequential(nn.Linear(1, HIDDEN), nn.SiLU(), nn.Linear(HIDDEN, HIDDEN))
        self.conv_in = nn.Conv2d(4, channels, 3, padding=1)
        self.down = ResidualBlock(channels, channels)
        self.shrink = nn.Conv2d(channels, channels, 3, stride=2, padding=1)
        self.middle = ResidualBlock(channels, 2 * channels)
        self.attention = AttentionBlock(2 * channels)
        self.up = ResidualBlock(3 * channels, channels)
        self.norm_out = nn.GroupNorm(8, channels)
        self.conv_out = nn.Conv2d(channels, 4, 3, padding=1)

    def forward(self, x, step):
        time = self.time(step[:, None])
        high = self.down(self.conv_in(x), time)
        low = self.attention(self.middle(self.shrink(high), time))
        y = self.up(torch.cat([high, F.interpolate(low, scale_factor=2.0)], 1), time)
        return self.conv_out(F.silu(self.norm_out(y)))


# ---- all of them ----

ZOO = [
    encoder("Bert", 6),
    encoder("ModernBert", 6, cls_token_id=1, sep_token_id=2),
    # It rounds to bfloat16 three times: what is normalized, the product and the sum.
    encoder("Deberta", 6, {"deberta.*": NOT_REPRODUCED}),
    model("GPT2LMHeadModel", text, 5, **TEXT),
    decoder("GPTNeoX", 5),
    decoder("Falcon", 5, new_decoder_architecture=True, num_kv_heads=2),
    decoder("Phi", 7, qk_layernorm=True),
    decoder("Phi3", 5),
    decoder("Llama", 5, **GROUPED),
    decoder("Llama4", 7, **GROUPED, **EXPERTS, head_dim=16, intermediate_size_mlp=128),
    decoder("Mistral", 5, **GROUPED),
    decoder("Mixtral", 5, **GROUPED, **EXPERTS),
    decoder(
        "DeepseekV3",
        9,
        moe_intermediate_size=32,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=24,
        kv_lora_rank=16,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
    ),
    decoder("Qwen2", 5, **GROUPED),
    decoder("Qwen3", 9, **GROUPED, head_dim=16),
    decoder(
        "Qwen3Next",
        8,
        {"*.linear_attn.norm": GATED},
        **GROUPED,
        head_dim=16,
        layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
    ),
    decoder("Gemma", 5, **GROUPED, head_dim=16),
    decoder("Gemma2", 9, **GROUPED, head_dim=16),
    decoder("Gemma3", 13, **GROUPED, head_dim=16),
    decoder("GptOss", 5, **GROUPED, **EXPERTS, head_dim=16),
    decoder("Olmo", 5, **GROUPED),
    decoder("Olmo2", 9, **GROUPED),
    decoder("Cohere", 7, {"*.[qk]_norm": MATRIX}, **GROUPED, use_qk_norm=True),
    # It rounds 1 + weight to bfloat16.
    decoder("Nemotron", 5, {"model.*": NOT_REPRODUCED}, **GROUPED),
    decoder("Mamba", 3, **STATE_SPACE),
    decoder(
        "Mamba2", 5, {"*.mixer.norm": GATED}, **STATE_SPACE, num_heads=8, head_dim=16, n_groups=2
    ),
    decoder("FalconMamba", 9, **STATE_SPACE),
    model(
        "T5ForConditionalGeneration",
        two_texts,
        12,
        **TEXT,
        d_model=HIDDEN,
        d_kv=16,
        d_ff=2 * HIDDEN,
        num_layers=LAYERS,
        num_heads=HEADS,
    ),
    model(
        "WhisperForConditionalGeneration",
        spectrogram,
        12,
        **TEXT,
        d_model=HIDDEN,
        encoder_layers=LAYERS,
        decoder_layers=LAYERS,
        encoder_attention_heads=HEADS,
        decoder_attention_heads=HEADS,
        encoder_ffn_dim=2 * HIDDEN,
        decoder_ffn_dim=2 * HIDDEN,
        num_mel_bins=16,
        max_source_positions=12,
        max_target_positions=16,
        decoder_start_token_id=1,
    ),
    model(
        "Wav2Vec2ForCTC",
        sound,
        7,
        vocab_size=TOKENS,
        conv_dim=[32, 32],
        conv_kernel=[10, 3],
        conv_stride=[5, 2],
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4,
        mask_time_prob=0.0,
        layerdrop=0.0,
    ),
    classifier("ViT", 5, **VISION),
    model(
        "CLIPModel",
        image_and_text,
        11,
        text_config=COMMON | TEXT,
        vision_config=COMMON | VISION,
        projection_dim=32,
    ),
    # One class: with the channels last it is a layer norm of rows, with the channels first it is not.
    classifier(
        "ConvNext",
        5,
        num_stages=2,
        hidden_sizes=[16, 32],
        depths=[1, 1],
        layer_scale_init_value=1.0,
    ),
    # Each of its norms holds an activation.
    classifier(
        "Bit",
        7,
        embedding_size=32,
        hidden_sizes=[32, 64],
        depths=[1, 1],
        num_groups=8,
        num_hidden_layers=None,
    ),
    classifier(
        "ResNet",
        6,
        {"*": "evenkeel has no batch norm"},
        embedding_size=16,
        hidden_sizes=[16, 32],
        depths=[1, 1],
        layer_type="basic",
    ),
    Entry("UNet", UNet, noise, 10),
]
