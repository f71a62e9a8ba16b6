"""evenkeel's callback in the real Trainer of Hugging Face's transformers, on small models."""

import pytest
import torch
import transformers
from torch import nn
from trainers_support import close, norms, quietly, warned

import evenkeel.torch as ek
from evenkeel.transformers import FuseCallback

pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate")

BATCHES = 4  # an epoch


def random_model(kind, config):
    """Leaves torch's random numbers alone: the trainer makes models in the middle of a run."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return kind(config)


def make_llama():
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=16,
        attention_dropout=0.1,
    )
    return random_model(transformers.LlamaForCausalLM, config)


def make_gpt2():
    config = transformers.GPT2Config(
        vocab_size=32,
        n_embd=16,
        n_layer=2,
        n_head=2,
        n_positions=16,
        bos_token_id=0,
        eos_token_id=0,
    )
    return random_model(transformers.GPT2LMHeadModel, config)


def tokens():
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(32, (2 * BATCHES, 8), generator=generator)
    return [{"input_ids": row, "labels": row} for row in rows]


class Watch(transformers.TrainerCallback):
    """Which norms the model had whenever it was run, and the losses."""

    def __init__(self):
        self.losses, self.seen = [], set()

    def on_step_begin(self, args, state, control, model=None, **others):
        self.seen.add(all_fused(model))

    def on_prediction_step(self, args, state, control, model=None, **others):
        self.seen.add(all_fused(model))

    def on_log(self, args, state, control, logs=None, **others):
        if "loss" in logs:
            self.losses.append(logs["loss"])


def all_fused(model):
    """Whether all norms are evenkeel's, or none (None: some)."""
    found = {issubclass(norm, ek.modules.Fused) for norm in norms(model)}
    return found.pop() if len(found) == 1 else None


def hugging_face(folder, *callbacks, **options):
    arguments = {
        "num_train_epochs": 2,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_steps": 3,
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
    }
    watch = Watch()
    trainer = transformers.Trainer(
        args=transformers.TrainingArguments(str(folder), **arguments | options.pop("args", {})),
        train_dataset=tokens(),
        eval_dataset=tokens(),
        callbacks=[watch, *callbacks],
        **options,
    )
    return trainer, watch


@pytest.mark.parametrize("given", ["model", "model_init"])
@pytest.mark.parametrize(("make", "count"), [(make_llama, 5), (make_gpt2, 5)])
def test_hugging_face_trains_and_evaluates_fused(make, count, given, tmp_path):
    def model():
        return {given: make() if given == "model" else make}

    trainer, plain = hugging_face(tmp_path, **model())
    trainer.train()
    expected = trainer.evaluate()["eval_loss"]
    assert plain.seen == {False}

    callback = FuseCallback()
    trainer, watch = quietly(lambda: hugging_face(tmp_path, callback, **model()))
    quietly(trainer.train)
    assert callback.report.model is trainer.model
    assert len(callback.report.replaced) == count
    loss = quietly(trainer.evaluate)["eval_loss"]
    quietly(lambda: trainer.predict(tokens()))
    assert watch.seen == {True}
    close([loss], [expected], tolerance=1e-4)
    assert len(plain.losses) == 2 * BATCHES
    close(watch.losses, plain.losses, tolerance=1e-4)


@pytest.mark.parametrize("given", ["model", "model_init"])
def test_hugging_face_evaluates_fused_without_training(given, tmp_path):
    callback = FuseCallback()
    model = {given: make_llama() if given == "model" else make_llama}
    trainer, watch = hugging_face(tmp_path, callback, **model)
    quietly(trainer.evaluate)
    assert watch.seen == {True}


def test_hugging_face_callback_that_is_added_later_acts_from_the_next_train_on(tmp_path):
    trainer, watch = hugging_face(tmp_path, model=make_llama())
    trainer.add_callback(FuseCallback)
    quietly(trainer.train)
    assert watch.seen == {True}


@pytest.mark.parametrize("make", [make_llama, make_gpt2])
def test_hugging_face_checkpoints_move_both_ways(make, tmp_path):
    """A run that is resumed from its third step, with and without the callback in either half."""
    whole = {}
    for fused in (False, True):
        callbacks = [FuseCallback()] if fused else []
        trainer, watch = hugging_face(tmp_path / str(fused), *callbacks, model_init=make)
        trainer.train()
        whole[fused] = watch.losses
    for first in (False, True):
        for then in (False, True):
            callbacks = [FuseCallback()] if then else []
            trainer, watch = hugging_face(tmp_path / "resumed", *callbacks, model_init=make)
            trainer.train(resume_from_checkpoint=str(tmp_path / str(first) / "checkpoint-3"))
            assert watch.seen == {then}
            if first == then:
                assert watch.losses == whole[first][3:]
            else:
                close(watch.losses, whole[first][3:], tolerance=1e-4)
            loaded = make().from_pretrained(tmp_path / str(first) / "checkpoint-3")
            assert all_fused(loaded) is False


def test_options_are_those_of_fuse():
    with pytest.raises(TypeError, match="layernorm"):
        FuseCallback(layernorm=False)
    model = nn.ModuleDict({"a": nn.LayerNorm(8), "b": nn.LayerNorm(8), "c": nn.GroupNorm(2, 8)})
    callback = FuseCallback(exclude="b", group_norm=False)
    assert callback.report is None
    callback.on_init_end(None, None, None, model=model)
    assert norms(model) == [ek.LayerNorm, nn.LayerNorm, nn.GroupNorm]
    assert callback.report.model is model


def test_model_without_norms_is_warned_about_once(tmp_path):
    def train():
        callback = FuseCallback(exclude="*")
        hugging_face(tmp_path, callback, model_init=make_llama)[0].train()

    _, texts = warned("evenkeel", run=train)
    assert len(texts) == 1
