"""evenkeel's callbacks in the real trainers of Lightning and Hugging Face, on small models."""

import os
import subprocess
import sys

import lightning.pytorch
import pytest
import pytorch_lightning
import torch
import transformers
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from trainers_support import close, norms, warned

import evenkeel.torch as ek
from evenkeel.lightning import Fuse
from evenkeel.transformers import FuseCallback

BATCHES = 4  # an epoch


def quietly(run):
    """Fails at a warning by evenkeel."""
    result, texts = warned("evenkeel", run=run)
    assert not texts
    return result


# ---- Lightning ----


class Scaled(nn.Module):
    """A norm that has to be probed, which needs gradients, where Lightning evaluates without."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = 1e-6

    def forward(self, x):
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


def tiny_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), Scaled(16), nn.Linear(16, 5))


def make_lightning(package, late=None, net=tiny_net):
    """A module that builds its network at once, or late: in `setup` or `configure_model`."""

    class Tiny(package.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = None if late else net()
            self.losses, self.seen = [], {}

        def build(self):
            self.net = self.net or net()

        def setup(self, stage):
            if late == "setup":
                self.build()

        def configure_model(self):
            if late == "configure_model":
                self.build()

        def run(self, batch, where):
            x, y = batch
            outputs = self.net(x)
            self.seen.setdefault(where, norms_of(self.net))
            return nn.functional.cross_entropy(outputs, y)

        def training_step(self, batch):
            loss = self.run(batch, "train")
            self.losses.append(loss.item())
            return loss

        def validation_step(self, batch):
            where = "sanity" if self.trainer.sanity_checking else "validate"
            self.log("loss", self.run(batch, where))

        def test_step(self, batch):
            self.run(batch, "test")

        def predict_step(self, batch):
            self.run(batch, "predict")
            return self.net[0](batch[0])

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=1e-2)

    return Tiny()


def norms_of(net):
    return [isinstance(net[place], ek.modules.Fused) for place in (0, 2)]


def loader():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(4 * BATCHES, 16, generator=generator)
    y = torch.randint(5, (4 * BATCHES,), generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=4)


def lightning_trainer(*callbacks, package=lightning.pytorch, **options):
    package.seed_everything(3, verbose=False)
    return package.Trainer(
        accelerator="cpu",
        max_epochs=2,
        callbacks=list(callbacks),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"enable_checkpointing": False} | options,
    )


FUSED, UNFUSED = [True, True], [False, False]


@pytest.mark.parametrize("late", [None, "setup", "configure_model"])
@pytest.mark.parametrize("package", [lightning.pytorch, pytorch_lightning])
def test_lightning_trains_and_evaluates_fused(package, late):
    plain = make_lightning(package, late)
    lightning_trainer(package=package).fit(plain, loader(), loader())
    assert plain.seen == dict.fromkeys(["sanity", "train", "validate"], UNFUSED)

    model, fuse = make_lightning(package, late), Fuse()
    trainer = lightning_trainer(fuse, package=package)
    quietly(lambda: trainer.fit(model, loader(), loader()))
    assert [entry.name for entry in fuse.report.replaced] == ["net.0", "net.2"]
    report = fuse.report
    quietly(lambda: trainer.test(model, loader(), verbose=False))
    quietly(lambda: trainer.predict(model, loader()))
    assert model.seen == dict.fromkeys(["sanity", "train", "validate", "test", "predict"], FUSED)
    assert fuse.report is report
    assert len(plain.losses) == 2 * BATCHES
    close(model.losses, plain.losses)


@pytest.mark.parametrize("late", [None, "configure_model"])
@pytest.mark.parametrize("what", ["validate", "test", "predict"])
def test_lightning_evaluates_fused_without_training(what, late):
    model, fuse = make_lightning(lightning.pytorch, late), Fuse()
    quietly(lambda: getattr(lightning_trainer(fuse), what)(model, loader()))
    assert model.seen == {what: FUSED}
    assert len(fuse.report.replaced) == 2


def test_lightning_network_that_is_built_again_is_fused_again():
    model, fuse = make_lightning(lightning.pytorch), Fuse()
    trainer = lightning_trainer(fuse)
    trainer.fit(model, loader())
    model.net = tiny_net()
    quietly(lambda: trainer.test(model, loader(), verbose=False))
    assert model.seen == {"train": FUSED, "test": FUSED}
    assert fuse.report.replaced[0].module is model.net[0]


def test_lightning_mixed_precision_runs_the_norms_in_bf16():
    for callbacks, dtype in [([], torch.float32), ([Fuse()], torch.bfloat16)]:
        model = make_lightning(lightning.pytorch)
        results = lightning_trainer(*callbacks, precision="bf16-mixed").predict(model, loader())
        assert {result.dtype for result in results} == {dtype}


def test_lightning_checkpoints_move_both_ways(tmp_path):
    """A run that is resumed after its first epoch, with and without the callback in either half."""
    whole = {}
    for fused in (False, True):
        model = make_lightning(lightning.pytorch)
        saver = lightning.pytorch.callbacks.ModelCheckpoint(
            tmp_path / str(fused), filename="{epoch}", save_top_k=-1
        )
        callbacks = [Fuse()] if fused else []
        trainer = lightning_trainer(saver, *callbacks, enable_checkpointing=True)
        trainer.fit(model, loader())
        whole[fused] = model.losses
    for first in (False, True):
        for then in (False, True):
            model = make_lightning(lightning.pytorch, late="configure_model")
            trainer = lightning_trainer(*([Fuse()] if then else []))
            path = str(tmp_path / str(first) / "epoch=0.ckpt")
            trainer.fit(model, loader(), ckpt_path=path)
            assert model.seen["train"] == (FUSED if then else UNFUSED)
            if first == then:
                assert model.losses == whole[first][BATCHES:]
            else:
                close(model.losses, whole[first][BATCHES:])


@pytest.mark.parametrize("callback", [Fuse, FuseCallback])
def test_options_are_those_of_fuse(callback):
    with pytest.raises(TypeError, match="layernorm"):
        callback(layernorm=False)
    model = nn.ModuleDict({"a": nn.LayerNorm(8), "b": nn.LayerNorm(8), "c": nn.GroupNorm(2, 8)})
    hook = callback(exclude="b", group_norm=False)
    assert hook.report is None
    if callback is Fuse:
        hook.on_fit_start(None, model)
    else:
        hook.on_init_end(None, None, None, model=model)
    assert norms(model) == [ek.LayerNorm, nn.LayerNorm, nn.GroupNorm]
    assert hook.report.model is model


# ---- Hugging Face ----


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


# ---- both ----


def test_model_without_norms_is_warned_about_once(tmp_path):
    model = make_lightning(
        lightning.pytorch, net=lambda: nn.Sequential(nn.Linear(16, 5), *[nn.Identity()] * 2)
    )
    trainer = lightning_trainer(Fuse())

    def fit_and_test():
        trainer.fit(model, loader(), loader())
        trainer.test(model, loader(), verbose=False)

    _, texts = warned("evenkeel", run=fit_and_test)
    assert len(texts) == 1

    def train():
        callback = FuseCallback(exclude="*")
        hugging_face(tmp_path, callback, model_init=make_llama)[0].train()

    _, texts = warned("evenkeel", run=train)
    assert len(texts) == 1


PACKAGES = ["composer", "lightning", "pytorch_lightning", "transformers"]


def python(program, path=()):
    path = os.pathsep.join([*map(str, path), os.environ["PYTHONPATH"]])
    return subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )


def test_nothing_is_imported_that_was_not_asked_for():
    result = python(
        "import sys, evenkeel, evenkeel.torch; "
        f"print(*[name for name in {PACKAGES} if name in sys.modules])"
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == []


@pytest.mark.parametrize(
    ("module", "install"),
    [
        ("composer", "pip install mosaicml"),
        ("lightning", "pip install lightning"),
        ("transformers", "pip install transformers"),
    ],
)
def test_missing_package_is_named(module, install, tmp_path):
    for name in PACKAGES:
        (tmp_path / f"{name}.py").write_text("raise ImportError('not here')")
    result = python(f"import evenkeel.{module}", [tmp_path])
    assert result.returncode == 1
    assert f"ImportError: evenkeel.{module} needs" in result.stderr
    assert install in result.stderr
