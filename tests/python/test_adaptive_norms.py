"""diffusers' adaptive norms and a block of DiT beside the same with a scale and a shift in the norm's kernel: values and
gradients.
"""

import importlib.util
import sys

import pytest
import torch

import evenkeel.torch as ek

if importlib.util.find_spec("diffusers") is None:
    pytest.skip(
        "needs diffusers: scripts/setup puts it into .venv-composer", allow_module_level=True
    )
if importlib.util.find_spec("torchvision"):
    from documents import ROOT

    sys.path.insert(0, str(ROOT / "benchmarks"))
    import torchvision_names  # noqa: F401

from diffusers.models import normalization
from diffusers.models.attention import BasicTransformerBlock

BATCH, ROWS, WIDTH = 3, 7, 32


def ada_layer_norm(module, x, timestep=None, temb=None):
    temb = module.emb(timestep) if module.emb is not None else temb
    temb = module.linear(module.silu(temb))
    if module.chunk_dim == 1:
        shift, scale = temb.chunk(2, dim=1)
    else:
        scale, shift = temb.chunk(2, dim=0)
    norm = module.norm
    return ek.layer_norm(
        x, norm.normalized_shape, norm.weight, norm.bias, norm.eps, scale=scale, shift=shift
    )


def ada_layer_norm_zero(module, x, timestep=None, labels=None, emb=None):
    emb = module.emb(timestep, labels) if module.emb is not None else emb
    emb = module.linear(module.silu(emb))
    shift, scale, *others = emb.chunk(6, dim=1)
    norm = module.norm
    x = ek.layer_norm(x, norm.normalized_shape, eps=norm.eps, scale=scale, shift=shift)
    return x, *others


def ada_layer_norm_continuous(module, x, conditioning):
    scale, shift = module.linear(module.silu(conditioning).to(x.dtype)).chunk(2, dim=1)
    norm, shape, options = module.norm, (x.shape[-1],), {"scale": scale, "shift": shift}
    if isinstance(norm, normalization.RMSNorm):
        return ek.rms_norm(x, shape, norm.weight, norm.eps, **options)
    return ek.layer_norm(x, shape, norm.weight, norm.bias, norm.eps, **options)


def dit_block(block, x, timestep, labels):
    """BasicTransformerBlock's forward, with norm_type="ada_norm_zero"."""
    y, gate, shift, scale, gate_mlp = ada_layer_norm_zero(block.norm1, x, timestep, labels)
    x = x + gate[:, None] * block.attn1(y)
    norm = block.norm3
    y = ek.layer_norm(x, norm.normalized_shape, eps=norm.eps, scale=scale, shift=shift)
    return x + gate_mlp[:, None] * block.ff(y)


def check(module, ours, x, *arguments):
    """Ours is a function of the module and its arguments."""
    results = []
    for run in (module, lambda *given: ours(module, *given)):
        leaves = [
            t.detach().clone().requires_grad_() if t.is_floating_point() else t
            for t in (x, *arguments)
        ]
        module.zero_grad()
        output = run(*leaves)
        outputs = output if isinstance(output, tuple) else (output,)
        generator = torch.Generator().manual_seed(1)
        loss = sum((y * torch.randn(y.shape, generator=generator)).sum() for y in outputs)
        loss.backward()
        gradients = {f"argument {i}": leaf.grad for i, leaf in enumerate(leaves)}
        gradients |= {name: parameter.grad for name, parameter in module.named_parameters()}
        results.append((outputs, gradients))
    (expected, expected_gradients), (actual, gradients) = results
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=2e-5)
    assert sum(gradient is not None for gradient in gradients.values()) > 2
    for name, gradient in gradients.items():
        other = expected_gradients[name]
        assert (gradient is None) == (other is None), name
        if gradient is not None:
            torch.testing.assert_close(gradient, other, rtol=1e-4, atol=2e-5, msg=name)


@pytest.fixture
def x():
    torch.manual_seed(0)
    return torch.randn(BATCH, ROWS, WIDTH)


@pytest.mark.parametrize("affine", [False, True])
def test_ada_layer_norm(x, affine):
    by_step = normalization.AdaLayerNorm(WIDTH, 10, norm_elementwise_affine=affine)
    check(by_step, ada_layer_norm, x, torch.tensor(3))
    by_sample = normalization.AdaLayerNorm(
        WIDTH, output_dim=2 * WIDTH, norm_elementwise_affine=affine, chunk_dim=1
    )
    temb = torch.randn(BATCH, WIDTH)
    check(
        by_sample,
        lambda module, *given: ada_layer_norm(module, given[0], temb=given[2]),
        x,
        torch.tensor(0),
        temb,
    )


def test_ada_layer_norm_zero(x):
    module = normalization.AdaLayerNormZero(WIDTH, 10)
    check(module, ada_layer_norm_zero, x, torch.arange(BATCH), torch.arange(BATCH))


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("norm_type", ["layer_norm", "rms_norm"])
def test_ada_layer_norm_continuous(x, norm_type, affine):
    module = normalization.AdaLayerNormContinuous(
        WIDTH, 16, elementwise_affine=affine, eps=1e-6, norm_type=norm_type
    )
    check(module, ada_layer_norm_continuous, x, torch.randn(BATCH, 16))


@pytest.mark.parametrize("compiled", [False, True])
def test_dit_block(x, compiled):
    block = BasicTransformerBlock(
        WIDTH,
        4,
        8,
        norm_type="ada_norm_zero",
        num_embeds_ada_norm=10,
        norm_elementwise_affine=False,
    )
    real = block.forward
    block.forward = lambda x, timestep, labels: real(x, timestep=timestep, class_labels=labels)
    ours = dit_block
    if compiled:
        ours = torch.compile(dit_block, backend="aot_eager", fullgraph=True)
    # Labels are dropped at random in training.
    block.norm1.emb.class_embedder.dropout_prob = 0
    check(block, ours, x, torch.arange(BATCH), torch.arange(BATCH))
