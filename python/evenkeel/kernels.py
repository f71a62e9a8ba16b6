"""evenkeel for the package `kernels` of Hugging Face: `register()`, then `use_kernels=True` or `kernelize(model)`.

transformers marks its RMS norms with use_kernel_forward_from_hub("RMSNorm"), and `kernels` gives all that are
marked one forward, whatever they are: with or without 1 + weight, rounding here or there. So a module
settles at its first call: the proof of `fuse` says what it computes, and one that it does not prove keeps the
forward of its class. With torch.compile (Mode.TORCH_COMPILE) all of them do.
"""

import pathlib
from types import MethodType

import torch

from evenkeel.torch import surgery

try:
    from kernels import LocalLayerRepository, Mode, register_kernel_mapping
except ImportError as error:
    raise ImportError(f"evenkeel.kernels needs kernels (pip install kernels): {error}") from error

REPOSITORY = pathlib.Path(__file__).parent / "_kernel_repository"


class RMSNorm(torch.nn.Module):
    """The layer: its forward replaces that of a module, and makes way for the one that fits."""

    can_torch_compile = False

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        _settle(self)
        return self.forward(hidden_states)


def _settle(module):
    del module.forward  # RMSNorm's, of the instance
    planned = surgery._planned(module, {"rms_norm": True})
    if not isinstance(planned, str):
        module.forward = MethodType(planned[0].forward, module)


def register() -> None:
    """Makes evenkeel the kernel of the layer "RMSNorm", for CPU and CUDA, training and inference."""
    layer = LocalLayerRepository(REPOSITORY, layer_name="RMSNorm")
    modes = {Mode.TRAINING: layer, Mode.INFERENCE: layer}
    devices = {"cpu": modes, "cuda": modes}
    register_kernel_mapping({"RMSNorm": devices})
    try:
        from transformers.integrations.hub_kernels import get_kernel_mapping_transformers
    except ImportError:
        return
    # Which use_kernels=True registers over what there is.
    get_kernel_mapping_transformers().setdefault("RMSNorm", {}).update(devices)
