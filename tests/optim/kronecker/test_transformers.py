"""Hugging Face's layers and its Trainer."""

import pytest
import torch
from torch import nn

from gnomon.optim import INGD

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize("by_name", [True, False])
def test_inputs_by_name_of_a_transposed_layer(by_name):
    from transformers.pytorch_utils import Conv1D

    class Small(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = Conv1D(3, 5)

        def forward(self, h):
            return self.layer(x=h) if by_name else self.layer(h)

    torch.manual_seed(0)
    model = Small()
    optimizer = INGD(model, update_every=1)
    model(torch.randn(8, 5)).square().mean().backward()
    optimizer.step()
    assert optimizer._collector.was_reached(optimizer._layers[model.layer.weight])
    assert not torch.equal(optimizer.factors("layer")[0], torch.eye(6))


def small_model():
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


@pytest.mark.slow
@pytest.mark.parametrize(
    "way",
    [
        pytest.param(lambda model: (lambda: INGD, {"lr": 1e-2}), id="a factory"),
        pytest.param(lambda model: (INGD, {"model": model, "lr": 1e-2}), id="the model among the arguments"),
    ],
)
def test_a_trainer_that_builds_the_optimizer(way, tmp_path):
    """The two ways of docs/frameworks.md."""
    model = small_model()
    pieces = [{"input_ids": piece, "labels": piece} for piece in torch.randint(32, (8, 8))]
    trainer = transformers.Trainer(
        model=model,
        args=transformers.TrainingArguments(
            output_dir=str(tmp_path),
            use_cpu=True,
            max_steps=2,
            per_device_train_batch_size=4,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=pieces,
        optimizer_cls_and_kwargs=way(model),
    )
    before = model.transformer.wte.weight.clone()
    trainer.train()
    optimizer = trainer.optimizer.optimizer
    assert type(optimizer) is INGD
    assert optimizer.defaults["lr"] == 1e-2
    assert all(optimizer._collector.was_reached(layer) for layer in optimizer._layers.values())
    assert not torch.equal(model.transformer.wte.weight, before)
