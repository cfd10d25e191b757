"""INGD in Lightning: a network learns handwritten digits, with clipping, accumulation and a schedule.

python examples/lightning_digits.py --steps 200 --precision bf16-mixed
"""

import argparse
from typing import Any

import lightning
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import gnomon


class Digits(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 10))

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        x, y = batch
        return cross_entropy(self.network(x), y)

    def test_step(self, batch: list[Tensor], index: int) -> None:
        x, y = batch
        self.log("error", 100 * (self.network(x).argmax(-1) != y).float().mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = gnomon.optim.INGD(self)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def loaders(batch_size: int = 64) -> tuple[DataLoader[Any], DataLoader[Any]]:
    images, labels = load_digits(return_X_y=True)
    x, y = torch.from_numpy(images).float() / 8 - 1, torch.from_numpy(labels)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    train, test = (TensorDataset(x[part], y[part]) for part in (order[360:], order[:360]))
    return DataLoader(train, batch_size, shuffle=True, drop_last=True), DataLoader(test, 360)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--precision", default="32-true", help="or bf16-mixed")
    parser.add_argument("--devices", type=int, default=1)
    arguments = parser.parse_args()
    lightning.seed_everything(0, verbose=False)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=arguments.devices,
        strategy="ddp" if arguments.devices > 1 else "auto",
        max_steps=arguments.steps,
        max_epochs=-1,
        precision=arguments.precision,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    train, test = loaders()
    model = Digits()
    trainer.fit(model, train)
    (measured,) = trainer.test(model, test, verbose=False)
    if trainer.is_global_zero:
        print(f"test error {measured['error']:.2f} % after {trainer.global_step} steps")


if __name__ == "__main__":
    main()
