"""Training with Composer: its FusedLayerNorm, by evenkeel, with an import as the only change.

The images and labels are random, so that this runs on a CPU in seconds.
"""

import torch
from composer import ComposerModel, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from evenkeel.composer import FusedLayerNorm


class Classifier(ComposerModel):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, nhead=4, dim_feedforward=128, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, num_layers=2, norm=nn.LayerNorm(64))
        self.head = nn.Linear(64, 10)

    def forward(self, batch):
        return self.head(self.encoder(batch[0]).mean(1))

    def loss(self, outputs, batch):
        return nn.functional.cross_entropy(outputs, batch[1])


torch.manual_seed(0)
data = DataLoader(TensorDataset(torch.randn(64, 16, 64), torch.randint(10, (64,))), batch_size=16)
model, algorithm = Classifier(), FusedLayerNorm()
trainer = Trainer(
    model=model,
    train_dataloader=data,
    optimizers=torch.optim.AdamW(model.parameters(), lr=1e-3),
    max_duration="2ep",
    device="cpu",
    algorithms=[algorithm],
)
trainer.fit()

print(algorithm.report)
