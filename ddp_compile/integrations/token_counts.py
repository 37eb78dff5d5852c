"""Hugging Face Trainer's mean over tokens, without its gather of their number before each step.

Note [Counts of a Trainer]
With ``average_tokens_across_devices`` Trainer gathers the number of items in a step. The losses of the micro-batches
divide sums by it. Here every step but the first passes the *first* step's number to them, so that losses keep about
their size (a GradScaler depends on it), and ``model.normalize_by`` corrects the gradients by the ratio of the numbers.

This is right if losses are inversely proportional to the number: not if they ignore it, or add an auxiliary loss. The
first step, which is Trainer's own, tells: the number is a leaf of its graph, whose gradient has to be -loss / number.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ddp_compile.features.compatibility import Feature, in_force
from ddp_compile.module.mixin import ReplicatedModule, state_of


class TokenCounts:
    """Overrides two methods of a Trainer, see Note [Counts of a Trainer]."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._number: Tensor | None = None  # of items in the first step
        self._is_proportional: bool | None = None  # losses to 1 / number; None until the first step is over
        self._own = self._sum = torch.zeros(())  # number of items and losses of this step, on this rank
        self._num_left = 0  # micro-batches of this step that are still to come
        self._get_batches, self._train = trainer.get_batch_samples, trainer.training_step
        trainer.get_batch_samples, trainer.training_step = self.get_batch_samples, self.training_step

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, *args: Any) -> tuple[list[Any], Any]:
        """A step's batches, and the number that their losses divide by."""
        arguments, accelerator = self._trainer.args, self._trainer.accelerator
        if self._number is not None and self._is_proportional is None:
            is_shown = torch.tensor(not self._num_left, device=self._number.device)
            self._is_proportional = bool(accelerator.gather(is_shown).all())
        if self._is_proportional is False or not self._may_count():
            return self._get_batches(epoch_iterator, num_batches, *args)
        arguments.average_tokens_across_devices = False
        try:
            batches, own = self._get_batches(epoch_iterator, num_batches, *args)
        finally:
            arguments.average_tokens_across_devices = True
        # If data end within a step, Trainer does not step the optimizer, and the next step's gradients come on top.
        is_whole = len(batches) == num_batches and accelerator.sync_gradients
        if own is None:
            return batches, None
        self._own, self._sum, self._num_left = own, torch.zeros_like(own), len(batches)
        if self._is_proportional and is_whole:
            return batches, self._number
        number = accelerator.gather(own).sum()
        if self._number is None:
            self._number = number = number.float().requires_grad_()
        return batches, number

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """The loss of a micro-batch. After the first step, that of all in the last micro-batch, and 0 before."""
        number = self._number
        if number is None or num_items_in_batch is not number:
            return self._train(model, inputs, num_items_in_batch)
        number.grad = None
        if not self._is_proportional:
            loss: Tensor = self._train(model, inputs, number)
            self._num_left -= self._shows_proportion(loss)
            return loss
        self._num_left -= 1
        is_last = self._num_left == 0  # it is counted for all: Trainer may break off a step, and zero its gradients
        ratio = self._own.double() * self._trainer.accelerator.num_processes / number.detach()
        model.normalize_by(ratio * is_last, loss=ratio.new_tensor(is_last))
        loss = self._train(model, inputs, number)
        self._sum = self._sum + loss
        correction = (
            model.mean_loss if is_last else 0.0
        )  # each rank's loss was 1, so it is a ratio of the ranks' counts
        return (self._sum * correction).to(loss.dtype)

    def _may_count(self) -> bool:
        """Whether Trainer averages over tokens, with a model that takes `normalize_by` in each micro-batch."""
        model, accelerator = self._trainer.model_wrapped, self._trainer.accelerator
        each_is_reduced = accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False)
        averages = self._trainer.args.average_tokens_across_devices and not each_is_reduced
        if not averages or not isinstance(model, ReplicatedModule):  # nothing in it is trained
            return False
        present = in_force(state_of(model), model.comm_algorithm)
        return present.keys().isdisjoint({Feature.AVERAGES, Feature.BEYOND_GROUP, Feature.DELAYED})

    def _shows_proportion(self, loss: Tensor) -> bool:
        """Whether the number's gradient, in the first step, is that of a loss proportional to 1 / number."""
        number, scaler = self._number, self._trainer.accelerator.scaler
        if number is None or number.grad is None:
            return False
        scale = 1.0 if scaler is None else scaler.get_scale()
        return torch.allclose(number.grad, (-scale * loss / number.detach()).to(number.dtype), rtol=1e-5, atol=0.0)
