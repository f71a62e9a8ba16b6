"""evenkeel's callback in the real trainer of Lightning, on small models."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from trainers_support import close, norms, quietly, warned

import evenkeel.torch as ek

try:
    import lightning.pytorch as pl
except ImportError:
    pl = pytest.importorskip("pytorch_lightning", reason="needs lightning or pytorch_lightning")

from evenkeel.lightning import Fuse

BATCHES = 4  # an epoch


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


def lightning_trainer(*callbacks, package=pl, **options):
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
@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_lightning_trains_and_evaluates_fused(package, late):
    package = pytest.importorskip(package)
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
    model, fuse = make_lightning(pl, late), Fuse()
    quietly(lambda: getattr(lightning_trainer(fuse), what)(model, loader()))
    assert model.seen == {what: FUSED}
    assert len(fuse.report.replaced) == 2


def test_lightning_network_that_is_built_again_is_fused_again():
    model, fuse = make_lightning(pl), Fuse()
    trainer = lightning_trainer(fuse)
    trainer.fit(model, loader())
    model.net = tiny_net()
    quietly(lambda: trainer.test(model, loader(), verbose=False))
    assert model.seen == {"train": FUSED, "test": FUSED}
    assert fuse.report.replaced[0].module is model.net[0]


def test_lightning_mixed_precision_runs_the_norms_in_bf16():
    for callbacks, dtype in [([], torch.float32), ([Fuse()], torch.bfloat16)]:
        model = make_lightning(pl)
        results = lightning_trainer(*callbacks, precision="bf16-mixed").predict(model, loader())
        assert {result.dtype for result in results} == {dtype}


def test_lightning_checkpoints_move_both_ways(tmp_path):
    """A run that is resumed after its first epoch, with and without the callback in either half."""
    whole = {}
    for fused in (False, True):
        model = make_lightning(pl)
        saver = pl.callbacks.ModelCheckpoint(
            tmp_path / str(fused), filename="{epoch}", save_top_k=-1
        )
        callbacks = [Fuse()] if fused else []
        trainer = lightning_trainer(saver, *callbacks, enable_checkpointing=True)
        trainer.fit(model, loader())
        whole[fused] = model.losses
    for first in (False, True):
        for then in (False, True):
            model = make_lightning(pl, late="configure_model")
            trainer = lightning_trainer(*([Fuse()] if then else []))
            path = str(tmp_path / str(first) / "epoch=0.ckpt")
            trainer.fit(model, loader(), ckpt_path=path)
            assert model.seen["train"] == (FUSED if then else UNFUSED)
            if first == then:
                assert model.losses == whole[first][BATCHES:]
            else:
                close(model.losses, whole[first][BATCHES:])


def test_options_are_those_of_fuse():
    with pytest.raises(TypeError, match="layernorm"):
        Fuse(layernorm=False)
    model = nn.ModuleDict({"a": nn.LayerNorm(8), "b": nn.LayerNorm(8), "c": nn.GroupNorm(2, 8)})
    callback = Fuse(exclude="b", group_norm=False)
    assert callback.report is None
    callback.on_fit_start(None, model)
    assert norms(model) == [ek.LayerNorm, nn.LayerNorm, nn.GroupNorm]
    assert callback.report.model is model


def test_model_without_norms_is_warned_about_once():
    model = make_lightning(pl, net=lambda: nn.Sequential(nn.Linear(16, 5), *[nn.Identity()] * 2))
    trainer = lightning_trainer(Fuse())

    def fit_and_test():
        trainer.fit(model, loader(), loader())
        trainer.test(model, loader(), verbose=False)

    _, texts = warned("evenkeel", run=fit_and_test)
    assert len(texts) == 1
