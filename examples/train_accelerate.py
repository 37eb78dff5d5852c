"""Hugging Face Accelerate: torchrun --standalone --nproc-per-node 2 examples/train_accelerate.py"""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ddp_compile.integrations.accelerate import use


def main() -> None:
    on_cpu = not torch.cuda.is_available()  # Accelerate must be told, or it trains in one process
    accelerator = Accelerator(cpu=on_cpu, mixed_precision="bf16", gradient_accumulation_steps=2)
    use(accelerator, bucket_cap_mb=1)  # the only change, apart from its import

    torch.manual_seed(0)
    inputs = torch.randn(512, 64)
    targets = (inputs @ torch.randn(64, 4)).argmax(dim=1)
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=16, shuffle=True)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 4))
    model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=3e-3), loader)

    for epoch in range(3):
        losses = []
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach())
        mean = accelerator.reduce(torch.stack(losses).mean(), "mean")
        accelerator.print(f"epoch {epoch}: loss {mean.item():.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
