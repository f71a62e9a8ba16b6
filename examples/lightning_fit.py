"""Training with Lightning: one callback replaces the model's norms when everything is built.

The images and labels are random, so that this runs on a CPU in seconds.
"""

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from evenkeel.lightning import Fuse


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, nhead=4, dim_feedforward=128, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, num_layers=2, norm=nn.LayerNorm(64))
        self.head = nn.Linear(64, 10)

    def training_step(self, batch):
        patches, labels = batch
        loss = nn.functional.cross_entropy(self.head(self.encoder(patches).mean(1)), labels)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


lightning.seed_everything(0)
data = DataLoader(TensorDataset(torch.randn(64, 16, 64), torch.randint(10, (64,))), batch_size=16)
fuse = Fuse()
trainer = lightning.Trainer(
    accelerator="cpu", max_epochs=2, callbacks=[fuse], logger=False, enable_checkpointing=False
)
trainer.fit(Classifier(), data)

print(fuse.report)
