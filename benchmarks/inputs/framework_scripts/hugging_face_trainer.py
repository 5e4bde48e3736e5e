"""A small GPT-2 on random tokens with the Hugging Face Trainer, as its users write it."""

from __future__ import annotations

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


class Tokens(Dataset):
    def __init__(self, length: int, vocabulary: int) -> None:
        self.ids = torch.randint(0, vocabulary, (4096, length))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def main() -> None:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=1000,
        bos_token_id=0,
        eos_token_id=0,
        n_positions=64,
        n_embd=128,
        n_layer=4,
        n_head=4,
    )
    arguments = TrainingArguments(
        output_dir="trained",
        max_steps=90,
        per_device_train_batch_size=16,
        learning_rate=3e-4,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        bf16=torch.cuda.is_available(),
    )
    trainer = Trainer(
        model=GPT2LMHeadModel(config),
        args=arguments,
        train_dataset=Tokens(64, config.vocab_size),
    )
    trainer.train()


if __name__ == "__main__":
    main()
