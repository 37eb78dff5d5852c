"""Hugging Face Trainer: torchrun --standalone --nproc-per-node 2 examples/train_trainer.py"""

import argparse

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

from ddp_compile.integrations.accelerate import use


class Counting(torch.utils.data.Dataset):
    """Sequences that count up, each by its own step, which a model can learn to continue."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        tokens = (i + torch.arange(32) * (1 + i % 3)) % 64
        return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out-dir", default="runs/train_trainer")
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()

    set_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes))
    settings = TrainingArguments(
        output_dir=args.out_dir,
        max_steps=args.steps,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        learning_rate=3e-3,
        logging_steps=0.2,  # a share of all steps, like the two below
        eval_strategy="steps",
        eval_steps=0.5,
        save_steps=0.5,
        ddp_find_unused_parameters=False,  # Trainer's default is True, which costs a message in each iteration
        report_to="none",
        use_cpu=not torch.cuda.is_available(),  # must be set, or it trains in one process
    )
    trainer = Trainer(model, settings, train_dataset=Counting(1024), eval_dataset=Counting(64))
    use(trainer, bucket_cap_mb=1)
    trainer.train()


if __name__ == "__main__":
    main()
