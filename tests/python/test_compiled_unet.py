"""diffusers' UNet, compiled: what stands beside its norms joins them (test_compiled.py has the other models)."""

import importlib.util
import sys

import pytest
import torch
from compiled_support import Compiled, error, with_gradients

import evenkeel.torch as ek

if importlib.util.find_spec("diffusers") is None:
    pytest.skip(
        "needs diffusers: scripts/setup puts it into .venv-composer", allow_module_level=True
    )
if importlib.util.find_spec("torchvision"):
    from documents import ROOT

    sys.path.insert(0, str(ROOT / "benchmarks"))
    import torchvision_names  # noqa: F401

import diffusers


def test_unet():
    """Group norms with SiLU as a function, layer norms in its transformers, timesteps, skips."""
    torch.manual_seed(0)
    model = diffusers.UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(32, 64),
        layers_per_block=1,
        cross_attention_dim=32,
        attention_head_dim=8,
        norm_num_groups=8,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )
    ek.fuse(model)
    backend = Compiled()
    inputs = torch.randn(2, 4, 8, 8), torch.tensor([1, 7]), torch.randn(2, 5, 32)
    eager = with_gradients(model, inputs)
    assert error(with_gradients(model, inputs, torch.compile(model, backend=backend)), eager) < 1e-4
    joined = [
        call for call in backend.calls(torch.ops.evenkeel.forward.default) if call["activation"]
    ]
    resnets = sum("ResnetBlock2D" in type(m).__name__ for m in model.modules())
    assert len(joined) >= 2 * resnets
