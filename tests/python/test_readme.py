"""README.md says what is true: its Python snippets run as they stand, with what they need given."""

import lightning
import pytest
import torch
import torch.nn.functional as F
import transformers
from readme import README, for_composer, run, snippets
from torch import nn
from trainers_support import norms

import evenkeel.torch as ek

INTO_A_MODEL = [s for s in snippets("Into a model you already have") if not for_composer(s)]


def small_llama():
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=4,
            num_attention_heads=2,
        )
    )


def small_classifier():
    return nn.Sequential(nn.LayerNorm(16), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(64, 5))


def test_no_snippet_is_overlooked():
    # Those for TensorFlow run in tests/tensorflow/test_readme.py.
    sections = ["From PyTorch", "Into a model you already have", "From TensorFlow"]
    known = [snippet for section in sections for snippet in snippets(section)]
    assert README.read_text().count("```python\n") == len(known)
    assert len(INTO_A_MODEL) == 6


def test_from_pytorch():
    scope = {}
    for snippet in snippets("From PyTorch"):
        run(snippet, scope)


def test_fuse_prints_what_is_shown(capsys):
    (snippet,) = [s for s in INTO_A_MODEL if "ek.fuse(" in s]
    run(snippet, {"model": small_llama()})
    assert f"```\n{capsys.readouterr().out}```" in README.read_text()


@pytest.mark.parametrize(
    ("function", "replaced"),
    [
        ("apply_fused_layernorm", [ek.LayerNorm, nn.GroupNorm]),
        ("apply_low_precision_layernorm", [ek.LayerNorm, nn.GroupNorm]),
        ("apply_low_precision_groupnorm", [nn.LayerNorm, ek.GroupNorm]),
    ],
)
def test_composers_functions(function, replaced):
    (snippet,) = [s for s in INTO_A_MODEL if function in s]
    model = small_classifier()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    loader = [(torch.randn(3, 4, 16), torch.randint(5, (3,))) for _ in range(2)]
    run(snippet, {"torch": torch, "F": F})["training_loop"](model, loader)
    assert norms(model) == replaced
    for name, value in model.state_dict().items():
        assert not torch.equal(value, before[name]), name


def test_lightning():
    (snippet,) = [s for s in INTO_A_MODEL if "evenkeel.lightning" in s]
    scope = run(snippet, {"lightning": lightning})
    assert any(isinstance(callback, scope["Fuse"]) for callback in scope["trainer"].callbacks)


def test_hugging_face(tmp_path):
    (snippet,) = [s for s in INTO_A_MODEL if "evenkeel.transformers" in s]
    arguments = transformers.TrainingArguments(
        str(tmp_path), use_cpu=True, max_steps=1, report_to=[], disable_tqdm=True
    )
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(32, (4, 8))]
    given = {"model": small_llama(), "args": arguments, "train_dataset": rows}
    trainer = run(snippet, {"transformers": transformers, **given})["trainer"]
    trainer.train()
    assert all(issubclass(norm, ek.modules.Fused) for norm in norms(given["model"]))
