"""Fits for trainers.py: what is trained, what is recorded of it, and one function for each trainer.

Models and data are the demo's (demo/training.py); of its Llama, the model of transformers. They have no dropout and come
in the same order, so that two fits differ by their norms only.
"""

import contextlib
import gc
import sys
import tempfile
import time
import typing

import torch
from torch.utils.data import DataLoader, TensorDataset

import checkout  # noqa: F401
from demo import training

SEED = 0
LAST_STEPS = training.LAST_STEPS


class Workload:
    """A model, its batches and its optimizer; the same whenever they are asked for."""

    def __init__(self, name, device, size, steps):
        self.name, self.device, self.steps = name, device, steps
        # On the CPU: moving things to a GPU is the trainer's business.
        self.settings = training.Settings(name, torch.device("cpu"), size, steps, seed=SEED)
        data = self.settings.data()
        self.classes, self.batch = data.classes, self.settings.sizes.batch
        batches = zip(*(data.batch(step) for step in range(steps)), strict=True)
        self.dataset = TensorDataset(*map(torch.cat, batches))

    def model(self):
        network = self.settings.network(self.classes)
        return network.llama if self.name == "llama" else network

    def loader(self):
        return DataLoader(self.dataset, batch_size=self.batch)

    def optimizer(self, model):
        return torch.optim.AdamW(model.parameters(), lr=self.settings.sizes.rate)

    def texts(self):
        """As transformers' Trainer takes them."""
        return [{"input_ids": row, "labels": row} for (row,) in self.dataset]


class Fit(typing.NamedTuple):
    losses: list[float]
    steps_per_s: float
    replaced: int  # norms


class Recorder:
    """Takes the loss of every step; waits for the device only where the time begins and ends."""

    def __init__(self, workload, steps=None):
        self.device, self.steps = workload.device, steps or workload.steps
        self.losses = []
        self.warm = self.steps // 2 + 1  # after the checkpoint in the middle, where there is one
        gc.collect()

    def take(self, loss):
        self.losses.append(loss.detach().clone())
        if len(self.losses) == self.warm:
            self.begin = self.now()
        if len(self.losses) == self.steps:
            self.end = self.now()

    def now(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def fit(self, report):
        """`report`: of the surgery, or None."""
        if len(self.losses) != self.steps:
            raise RuntimeError(f"{len(self.losses)} steps were taken, not {self.steps}")
        rate = (self.steps - self.warm) / (self.end - self.begin)
        return Fit(
            torch.stack(self.losses).float().tolist(), rate, len(report.replaced) if report else 0
        )


def lightning():
    try:
        import lightning.pytorch as package
    except ImportError:
        import pytorch_lightning as package
    return package


def lightning_fit(workload, fused, precision):
    pl = lightning()
    from evenkeel.lightning import Fuse

    recorder = Recorder(workload)

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = workload.model()

        def training_step(self, batch):
            loss = self.net(*batch)
            recorder.take(loss)
            return loss

        def configure_optimizers(self):
            return workload.optimizer(self)

    fuse = Fuse() if fused else None
    trainer = pl.Trainer(
        accelerator="gpu" if workload.device.type == "cuda" else "cpu",
        devices=1,
        precision=precision,
        max_steps=workload.steps,
        callbacks=[fuse] if fused else [],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), workload.loader())
    return recorder.fit(fuse and fuse.report)


def hugging_face_fit(workload, fused, **arguments):
    import transformers

    from evenkeel.transformers import FuseCallback

    recorder = Recorder(workload)

    class Trainer(transformers.Trainer):
        def compute_loss(self, *args, **options):
            loss = super().compute_loss(*args, **options)
            recorder.take(loss)
            return loss

    fuse = FuseCallback() if fused else None
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            workload.model(),
            transformers.TrainingArguments(
                folder,
                max_steps=workload.steps,
                per_device_train_batch_size=workload.batch,
                learning_rate=workload.settings.sizes.rate,
                lr_scheduler_type="constant",
                seed=SEED,
                use_cpu=workload.device.type == "cpu",
                dataloader_pin_memory=workload.device.type != "cpu",
                logging_strategy="no",
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
                **arguments,
            ),
            train_dataset=workload.texts(),
            callbacks=[fuse] if fused else [],
        )
        with contextlib.redirect_stdout(sys.stderr):  # it prints what it did
            trainer.train()
    return recorder.fit(fuse and fuse.report)


def accelerate_fit(workload, fused, mixed_precision):
    import accelerate
    from accelerate.state import AcceleratorState

    import evenkeel.torch

    AcceleratorState._reset_state(True)  # it refuses another precision in the same process
    recorder = Recorder(workload)
    accelerator = accelerate.Accelerator(
        mixed_precision=mixed_precision, cpu=workload.device.type == "cpu"
    )
    model = workload.model()
    report = evenkeel.torch.fuse(model) if fused else None
    model, optimizer, loader = accelerator.prepare(
        model, workload.optimizer(model), workload.loader()
    )
    for batch in loader:
        loss = model(*batch)
        recorder.take(loss)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return recorder.fit(report)
