"""Training steps of whole models on a CUDA device: as they are, after evenkeel's surgery, and without norms.

Random weights in float32, bfloat16 autocast, fused AdamW. BERT, GPT-2 and ViT are those of transformers, with torch's
scaled_dot_product_attention and dropout as in the configuration (0.1 in BERT and GPT-2, none in ViT). So are Llama and
Qwen3, of 12 layers of 2048, in pure bfloat16. The UNet is diffusers', in the small configuration of Stable Diffusion's, and is
measured where diffusers is installed. The conv net is eight residual blocks, each x + SiLU(GroupNorm(convolution 3 x 3)) with
320 channels and 32 groups, on an image of 16 x 320 x 64 x 64, in NCHW and channels last; without norms its SiLUs stay.
How steps are measured: evenkeel/bench/steps.py. To compile block by block takes seconds, a whole model minutes.

    python benchmarks/training.py --csv benchmarks/results/<file>.csv
    python benchmarks/training.py --device cpu --tiny
"""

import argparse
import importlib.util
import operator
import pathlib
import sys
import typing

import torch
import transformers
from rich.table import Table

from evenkeel.bench import command, models, report, steps
from evenkeel.bench.report import complain
from evenkeel.torch import compiling

TINY = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
TINY_TEXT = TINY | {"vocab_size": 97, "max_position_embeddings": 32}


class Transformer(typing.NamedTuple):
    auto: str  # of transformers' classes
    config: str
    batch: tuple  # texts and their length, or images
    settings: dict
    tiny: dict  # settings to try the program with
    pure: bool = False  # weights in bfloat16, instead of autocast

    def training(self, options):
        config = getattr(transformers, self.config)(
            **(self.tiny if options.tiny else self.settings)
        )
        torch.manual_seed(0)
        with options.device:
            model = getattr(transformers, self.auto).from_config(config, attn_implementation="sdpa")
        if self.pure:
            model = model.to(torch.bfloat16)
        inputs = self.inputs(config, options)
        return steps.Training(
            model.train(),
            lambda model: model(**inputs).loss,
            options.device,
            None if self.pure else torch.bfloat16,
            next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList)),
        ), next(iter(inputs.values()))

    def inputs(self, config, options):
        count, *length = (2, *self.batch[1:]) if options.tiny else self.batch
        with options.device:
            if not length:
                images = torch.randn(count, config.num_channels, *[config.image_size] * 2)
                return {
                    "pixel_values": images,
                    "labels": torch.randint(config.num_labels, (count,)),
                }
            length = min(*length, config.max_position_embeddings)
            tokens = torch.randint(config.vocab_size, (count, length))
            return {"input_ids": tokens, "labels": tokens}


class ConvNet(typing.NamedTuple):
    layout: str

    def training(self, options):
        shape, blocks = ((2, 32, 8, 8), 2) if options.tiny else ((16, 320, 64, 64), 8)
        model, image = models.conv_net(shape, options.device, blocks, self.layout)
        return steps.Training(
            model, lambda model: model(image), options.device, torch.bfloat16, model.blocks
        ), image


class UNet(typing.NamedTuple):
    """diffusers' UNet2DConditionModel on latents of 64 x 64, conditioned on 77 tokens."""

    settings: dict

    def training(self, options):
        import diffusers

        count, size, tokens, width = (2, 8, 5, 32) if options.tiny else (8, 64, 77, 768)
        settings = TINY_UNET if options.tiny else self.settings
        torch.manual_seed(0)
        with options.device:
            model = diffusers.UNet2DConditionModel(sample_size=size, **settings)
            latents, condition = (
                torch.randn(count, 4, size, size),
                torch.randn(count, tokens, width),
            )
            steps_of_noise = torch.randint(1000, (count,))

        def loss_of(model):
            return model(latents, steps_of_noise, condition).sample.float().square().mean()

        blocks = [*model.down_blocks, model.mid_block, *model.up_blocks]
        return steps.Training(
            model.train(), loss_of, options.device, torch.bfloat16, blocks
        ), latents


TINY_UNET = {
    "block_out_channels": (32, 64),
    "layers_per_block": 1,
    "norm_num_groups": 8,
    "cross_attention_dim": 32,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
}
DECODER = {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 128,
    "use_cache": False,
}
TINY_DECODER = TINY_TEXT | {"num_key_value_heads": 4, "head_dim": 32, "use_cache": False}

MODELS = {
    "bert-base": Transformer("AutoModelForMaskedLM", "BertConfig", (64, 512), {}, TINY_TEXT),
    "gpt2-medium": Transformer(
        "AutoModelForCausalLM",
        "GPT2Config",
        (16, 1024),
        {"n_embd": 1024, "n_layer": 24, "n_head": 16, "use_cache": False},
        TINY_TEXT | {"bos_token_id": 0, "eos_token_id": 0, "use_cache": False},
    ),
    "vit-base": Transformer(
        "AutoModelForImageClassification",
        "ViTConfig",
        (128,),
        {"num_labels": 1000},
        TINY | {"image_size": 32, "patch_size": 8, "num_labels": 10},
    ),
    "llama": Transformer(
        "AutoModelForCausalLM", "LlamaConfig", (8, 2048), DECODER, TINY_DECODER, pure=True
    ),
    "qwen3": Transformer(
        "AutoModelForCausalLM", "Qwen3Config", (8, 2048), DECODER, TINY_DECODER, pure=True
    ),
    "unet": UNet({"block_out_channels": (320, 640, 1280, 1280), "cross_attention_dim": 768}),
    "conv-net-nchw": ConvNet("nchw"),
    "conv-net-nhwc": ConvNet("nhwc"),
}

# Kinds of kernels by what is in their names, first match first.
KINDS = {
    "evenkeel": ("evenkeel",),
    "products": ("gemm", "cutlass", "nvjet", "xmma", "splitK", "fprop", "dgrad", "wgrad"),
    "attention": ("flash", "fmha", "attention", "cudnn_generated"),
    "optimizer": ("multi_tensor", "FusedAdam"),
    "with norm": ("layer_norm", "LayerNorm", "GammaBeta", "group_norm", "GroupNorm"),
    "compiled": ("triton_",),
    "other": ("",),
}


def profile(label, training):
    """Prints how long the kinds of kernels take in a step of each variant, in milliseconds."""
    spent = {}
    activity = getattr(torch.profiler.ProfilerActivity, training.device.type.upper())
    for variant in steps.VARIANTS:
        torch.compiler.reset()
        with steps.surgery(training.model, variant):
            for _ in range(steps.WARM_STEPS):
                training.step()
            with torch.profiler.profile(activities=[activity]) as profiler:
                for _ in range(steps.STEPS):
                    training.step()
        spent[variant] = dict.fromkeys(KINDS, 0.0)
        for event in profiler.key_averages():
            kind = next(k for k, words in KINDS.items() if any(w in event.key for w in words))
            spent[variant][kind] += event.self_device_time_total / 1e3 / steps.STEPS
    table = Table(title=f"{label}: milliseconds of a step by kind of kernel", title_justify="left")
    for name in ("", *steps.VARIANTS):
        table.add_column(name, justify="right" if name else "left")
    for kind in KINDS:
        table.add_row(kind, *(f"{spent[variant][kind]:.2f}" for variant in steps.VARIANTS))
    table.add_row("all", *(f"{sum(spent[variant].values()):.2f}" for variant in steps.VARIANTS))
    report.console().print(table)


def available():
    """All models that can be made here."""
    lacks = importlib.util.find_spec("diffusers") is None
    return [name for name in MODELS if not (lacks and name == "unet")]


def inductor_options():
    """Those of torch.compile that norms depend on, as they are here."""
    from torch._inductor import config

    names = "max_autotune", "triton.mix_order_reduction", "triton.cudagraphs", "epilogue_fusion"
    found = [f"{name}={operator.attrgetter(name)(config)}" for name in names if has(config, name)]
    return " ".join([*found, f"evenkeel={compiling.status()}"])


def has(config, name):
    try:
        operator.attrgetter(name)(config)
    except AttributeError:
        return False
    return True


def arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", type=command.choices(MODELS), default=available())
    parser.add_argument(
        "--rounds", type=int, default=5, help=f"of {steps.STEPS} steps each (default: 5)"
    )
    parser.add_argument(
        "--compile",
        type=command.choices(("blocks", "model", "no")),
        default=["blocks"],
        help="what torch.compile gets after the eager rounds (default: blocks; blocks,model: both)",
    )
    parser.add_argument(
        "--profile", action="store_true", help="instead of times of steps: where they are spent"
    )
    parser.add_argument("--csv", type=pathlib.Path, help="append the figures to this file")
    parser.add_argument("--commit", help="what the figures belong to (default: git describe)")
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda"))
    parser.add_argument("--tiny", action="store_true", help="small models, to try the program")
    return parser.parse_args()


def check_device(device):
    """Ends the program where the device cannot be used."""
    if device.type != "cuda":
        steps.tame_cpu()
        return
    if reason := steps.no_cuda():
        sys.exit(f"benchmarks/training.py: {reason}")


def run(name, mode, options, figures_report):
    """Measures one model in one mode; whether there is a figure for evenkeel."""
    label = mode if mode == "eager" else f"compiled {mode}"
    try:
        training, batch = MODELS[name].training(options)
        if mode != "eager":
            training.compile(mode)
        if options.profile:
            profile(f"{name} {label}", training)
            return True
        figures = steps.measure(f"{name} {label}", training, options.rounds, mode != "eager")
        batch = "x".join(map(str, batch.shape))
    except Exception as error:
        complain(f"{name} {label}", "model", command.first_line(error))
        return False
    figures_report.add(f"{name} (tiny)" if options.tiny else name, batch, label, figures)
    return "fused" in figures


def main():
    options = arguments()
    check_device(options.device)
    constants = report.constants(options.device, options.commit)
    del constants["triton"]
    constants["transformers"] = transformers.__version__
    constants["inductor"] = inductor_options()
    figures_report = steps.Report(constants, options.csv)
    # What may take long comes last.
    modes = ["eager", *(what for what in options.compile if what != "no")]
    fine = [run(name, mode, options, figures_report) for mode in modes for name in options.models]
    if not options.profile:
        figures_report.print_table()
    sys.exit(0 if all(fine) else 1)


if __name__ == "__main__":
    main()
