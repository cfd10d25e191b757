"""INGD in Hugging Face's Trainer: a small GPT-2, built from a config, learns the bytes of a Python module.

python examples/trainer_tiny_gpt.py --steps 100 --bf16
"""

import argparse
import inspect
import tempfile

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import gnomon

CONTEXT = 64


class Pieces(Dataset[dict[str, Tensor]]):
    """A text in pieces of one length; bytes are the tokens."""

    def __init__(self, text: str) -> None:
        tokens = torch.tensor(list(text.encode()))
        self.pieces = tokens[: len(tokens) // CONTEXT * CONTEXT].view(-1, CONTEXT)

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.pieces[index], "labels": self.pieces[index]}


def tiny_gpt() -> GPT2LMHeadModel:
    sizes = {"vocab_size": 256, "n_positions": CONTEXT, "n_embd": 64, "n_layer": 2, "n_head": 4}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--bf16", action="store_true")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    model = tiny_gpt()
    # Its linear layers are Conv1D modules with transposed weights, which INGD knows.
    optimizer = gnomon.optim.INGD(model, lr=1e-2)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=model,
            args=TrainingArguments(
                output_dir=folder,
                use_cpu=True,
                max_steps=arguments.steps,
                per_device_train_batch_size=8,
                gradient_accumulation_steps=2,
                max_grad_norm=1.0,
                lr_scheduler_type="cosine",
                warmup_steps=5,
                bf16=arguments.bf16,
                logging_steps=5,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
            ),
            train_dataset=Pieces(inspect.getsource(argparse)),
            optimizers=(optimizer, None),
        )
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    print(f"loss {float(losses[0]):.3f} at first, {float(losses[-1]):.3f} after {trainer.state.global_step} steps")


if __name__ == "__main__":
    main()
