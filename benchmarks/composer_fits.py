"""Fits with Composer for trainers.py: its precisions, gradient scaler, checkpoints and events.

It runs in an interpreter that has Composer, which pins other packages than everybody else.
"""

import pathlib
import tempfile

import torch

import torchvision_names  # noqa: F401  isort: skip
import composer
import composer.trainer.trainer
from composer.core import Precision

import evenkeel.composer
from trainer_fits import SEED, Recorder


def allow_amp_on_cpu(setattr=setattr):
    """Composer refuses mixed precision without a GPU; its two functions for it become a CPU's."""

    def autocast(precision, *arguments, **options):
        enabled = precision != Precision.FP32
        return torch.autocast("cpu", torch.bfloat16, enabled=enabled)

    module = composer.trainer.trainer
    setattr(module, "_validate_precision", lambda precision, device: None)
    setattr(module, "get_precision_context", autocast)


class Model(composer.ComposerModel):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, batch):
        return self.net(*batch)

    def loss(self, outputs, batch):
        return outputs  # the network's result is its loss


class Record(composer.Callback):
    def __init__(self, recorder):
        self.recorder = recorder

    def after_loss(self, state, logger):
        self.recorder.take(state.loss)


def one_fit(workload, recorder, algorithm, precision, **options):
    model = Model(workload.model())
    trainer = composer.Trainer(
        model=model,
        train_dataloader=workload.loader(),
        max_duration=f"{workload.steps}ba",
        optimizers=workload.optimizer(model),
        algorithms=[algorithm] if algorithm else [],
        callbacks=[Record(recorder)],
        precision=precision,
        device="gpu" if workload.device.type == "cuda" else "cpu",
        progress_bar=False,
        seed=SEED,
        **options,
    )
    try:
        trainer.fit()
    finally:
        trainer.close()
    return recorder.fit(algorithm.report if algorithm else None)


def fit(workload, algorithm, event, precision):
    """A whole fit, and the second half of it again from the checkpoint in its middle.

    algorithm: the name of one of evenkeel's, or None, which is not resumed.
    """
    if workload.device.type == "cpu":
        allow_amp_on_cpu()
    if algorithm is None:
        return one_fit(workload, Recorder(workload), None, precision), None

    def make():
        return getattr(evenkeel.composer, algorithm)(apply_at=event)

    half = workload.steps // 2
    with tempfile.TemporaryDirectory() as folder:
        whole = one_fit(
            workload,
            Recorder(workload),
            make(),
            precision,
            save_folder=folder,
            save_interval=f"{half}ba",
        )
        (middle,) = pathlib.Path(folder).glob(f"ep*-ba{half}-rank0.pt")
        recorder = Recorder(workload, workload.steps - half)
        resumed = one_fit(workload, recorder, make(), precision, load_path=str(middle))
    return whole, resumed
