"""evenkeel.kernels with the real package `kernels` and real models of transformers: `use_kernels`, `kernelize`."""

import copy
import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys

import pytest
import torch

if importlib.util.find_spec("kernels") is None:
    pytest.skip("needs kernels: scripts/setup puts it into .venv-composer", allow_module_level=True)
if importlib.util.find_spec("torchvision"):
    from documents import ROOT

    sys.path.insert(0, str(ROOT / "benchmarks"))
    import torchvision_names  # noqa: F401

import kernels
import transformers

import evenkeel.kernels
import evenkeel.torch as ek

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
}
TOKENS = torch.arange(24).reshape(2, 12)
of_transformers = pytest.mark.skipif(
    not transformers.utils.is_kernels_available(),
    reason=f"transformers {transformers.__version__} takes another version of kernels than {kernels.__version__}",
)


@pytest.fixture(autouse=True)
def registered():
    torch.manual_seed(0)
    evenkeel.kernels.register()


def model_of(name):
    config = getattr(transformers, f"{name}Config")(**SIZES)
    return getattr(transformers, f"{name}ForCausalLM")(config)


def marked(model):
    return [m for m in model.modules() if getattr(type(m), "kernel_layer_name", None) == "RMSNorm"]


def is_ours(module):
    """Whether its forward was replaced by one of evenkeel's."""
    return "evenkeel" in vars(module).get("forward", module.forward).__func__.__module__


def run(model):
    loss = model(TOKENS, labels=TOKENS).loss
    loss.backward()
    return loss.item(), [p.grad for p in model.parameters()]


@of_transformers
@pytest.mark.parametrize("name", ["Llama", "Qwen3", "Mistral"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_training_is_that_of_fuse(name, dtype):
    """Bit by bit: the same kernels, the same rounding."""
    model = model_of(name).to(dtype).train()
    fused = copy.deepcopy(model)
    ek.fuse(fused)
    model.set_use_kernels(True)
    ours, expected = run(model), run(fused)
    assert len(marked(model)) > 4
    assert all(map(is_ours, marked(model)))
    assert ours[0] == expected[0]
    for mine, theirs in zip(ours[1], expected[1], strict=True):
        assert torch.equal(mine, theirs)


def test_inference():
    model = model_of("Llama").eval()
    with torch.inference_mode():
        expected = model(TOKENS).logits
        kernels.kernelize(model, mode=kernels.Mode.INFERENCE)
        logits = model(TOKENS).logits
    torch.testing.assert_close(logits, expected)
    assert all(map(is_ours, marked(model)))


@kernels.use_kernel_forward_from_hub("RMSNorm")
class Other(torch.nn.Module):
    """Of that name, but no RMS norm."""

    def __init__(self, size):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(size))
        self.eps = 1e-6

    def forward(self, x):
        return x / (x.abs().mean(-1, keepdim=True) + self.eps) * self.weight


def test_what_does_not_fit_is_left_alone():
    model = torch.nn.Sequential(Other(16))
    x = torch.randn(4, 16)
    expected = model(x)
    kernels.kernelize(model, mode=kernels.Mode.TRAINING, device="cpu")
    assert is_ours(model[0])  # until its first call
    assert torch.equal(model(x), expected)
    assert "forward" not in vars(model[0])
    assert torch.equal(model(x), expected)


def test_compiled_models_keep_their_own():
    model = model_of("Llama").train()
    kernels.kernelize(model, mode=kernels.Mode.TRAINING | kernels.Mode.TORCH_COMPILE)
    assert not any(map(is_ours, marked(model)))


@of_transformers
def test_transformers_own_mapping_names_evenkeel():
    """For GPUs too, where it would name another kernel and use_kernels=True registers it."""
    mapping = transformers.integrations.hub_kernels.get_kernel_mapping_transformers()["RMSNorm"]
    for device in ("cpu", "cuda"):
        assert set(mapping[device]) == {kernels.Mode.TRAINING, kernels.Mode.INFERENCE}
        for layer in mapping[device].values():
            assert layer.load() is evenkeel.kernels.RMSNorm


# ---- the folder as a repository of its own, wherever it lies ----

LOAD = """
import kernels, sys
kernel = kernels.{how}
print(kernel.layers.RMSNorm, kernels.get_loaded_kernels()[0].metadata.name)
"""
WAYS = {
    "a folder": "get_local_kernel(__import__('pathlib').Path({folder!r}))",
    "a name": "get_kernel('somebody/evenkeel', version=1)",
}


@pytest.fixture
def published(tmp_path):
    """A copy, as it would be downloaded."""
    return shutil.copytree(
        evenkeel.kernels.REPOSITORY,
        tmp_path / "repository",
        ignore=shutil.ignore_patterns("__pycache__"),
    )


def load(folder, way, path):
    """The copy, in a process that finds packages in `path`."""
    environment = os.environ | {
        "PYTHONPATH": path,
        "LOCAL_KERNELS": f"somebody/evenkeel={folder}",
        "HF_HUB_OFFLINE": "1",
    }
    code = LOAD.format(how=WAYS[way].format(folder=str(folder)))
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300
    )


@pytest.mark.parametrize("way", WAYS)
def test_a_copy_of_the_repository_is_evenkeel(published, way):
    done = load(published, way, os.pathsep.join(sys.path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "<class 'evenkeel.kernels.RMSNorm'> evenkeel"


def test_a_copy_without_evenkeel_says_so(published):
    without = [p for p in sys.path if not (pathlib.Path(p or ".") / "evenkeel").is_dir()]
    done = load(published, "a folder", os.pathsep.join(without))
    assert done.returncode != 0
    assert "install evenkeel" in done.stderr
