"""The mean over tokens of Hugging Face Trainer, without its gather.

Note [Counts of a Trainer]
With ``average_tokens_across_devices`` Trainer gathers the number of items of each step and passes it to the losses,
which divide sums by it. Here the first step's number is passed in all steps, so that losses keep about their size, and
``model.normalize_by`` corrects the gradients by the ratio of the two numbers. That is right for losses proportional to
1 / number: not for those that ignore it, are clamped, or have an auxiliary term. So the number is a leaf of the graph,
and its gradient is compared with -loss / number in each backward. If they differ in the first step, whose number
Trainer has gathered, it gathers those of all other steps too. If they differ later, that is an error.
"""

from typing import Any

import torch
from torch import Tensor

from ddp_compile.errors import ReplicationError, this_rank
from ddp_compile.features.compatibility import Feature, in_force
from ddp_compile.module.mixin import ReplicatedModule, state_of

# Methods of Trainer that count, train and say what the loss was. One that the user has overridden is left alone.
_OWN = ("get_batch_samples", "_get_num_items_in_batch", "training_step")

_EXCLUDING = frozenset({Feature.AVERAGES, Feature.BEYOND_GROUP, Feature.DELAYED})


def has_counts(trainer: Any) -> bool:
    """Whether a Trainer gathers counts, by methods that are transformers' own."""
    methods = [getattr(type(trainer), name, None) for name in _OWN]
    is_own = all(getattr(method, "__module__", None) == "transformers.trainer" for method in methods)
    return is_own and vars(trainer).keys().isdisjoint(_OWN) and hasattr(trainer.args, "average_tokens_across_devices")


class TokenCounts:
    """Overrides two methods of a Trainer; see Note [Counts of a Trainer]."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._state: Any = None  # of Trainer, which makes a new one for each train()
        self._number: Tensor | None = None  # of items in the first step
        self._is_proportional: bool | None = None  # losses to 1 / number, on all ranks; None until a step is over
        self._own = self._sum = torch.zeros(())  # number of items, and losses of this step, on this rank
        self._num_left = 0  # micro-batches of this step whose loss is still to come, or to be found proportional
        self._get_batches, self._train = trainer.get_batch_samples, trainer.training_step
        trainer.get_batch_samples, trainer.training_step = self.get_batch_samples, self.training_step

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, *args: Any) -> tuple[list[Any], Any]:
        """A step's batches, and the number that their losses divide by."""
        arguments, accelerator = self._trainer.args, self._trainer.accelerator
        if self._trainer.state is not self._state:
            self._state, self._number, self._is_proportional = self._trainer.state, None, None
        if self._number is not None and self._is_proportional is None:
            is_shown = torch.tensor(not self._num_left, device=self._number.device)
            self._is_proportional = bool(accelerator.gather(is_shown).all())
        if self._is_proportional is False or not arguments.average_tokens_across_devices or not self._may_count():
            return self._get_batches(epoch_iterator, num_batches, *args)
        arguments.average_tokens_across_devices = False
        try:
            batches, own = self._get_batches(epoch_iterator, num_batches, *args)
        finally:
            arguments.average_tokens_across_devices = True
        if own is None:
            return batches, None
        self._own, self._sum, self._num_left = own, torch.zeros_like(own), len(batches)
        # If data end within a step, Trainer does not step the optimizer, and the next step's gradients come on top.
        if self._is_proportional and len(batches) == num_batches and accelerator.sync_gradients:
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
        is_last = not self._num_left  # which is counted for all: their counts are not known one by one
        ratio = self._own.double() * self._trainer.accelerator.num_processes / number.detach()
        model.normalize_by(ratio * is_last, loss=ratio.new_tensor(is_last))
        loss = self._train(model, inputs, number)
        if not self._shows_proportion(loss):
            raise ReplicationError(
                f"{this_rank()}: in the first step this Trainer's losses were proportional to 1 / num_items_in_batch;"
                f" in step {self._trainer.state.global_step} one is not, and the mean over tokens would be wrong; call"
                " use(trainer, gather_counts=True, ...), which lets Trainer gather the counts before each step"
            )
        self._sum = self._sum + loss
        # Since the losses were given as 1 on each rank, their mean is the ratio of the two numbers.
        return (self._sum * model.mean_loss).to(loss.dtype) if is_last else torch.zeros_like(loss)

    def _may_count(self) -> bool:
        """Whether the model takes `normalize_by` in all micro-batches of a step."""
        model, state = self._trainer.model_wrapped, self._trainer.accelerator.gradient_state
        if not isinstance(model, ReplicatedModule) or state.plugin_kwargs.get("sync_each_batch", False):
            return False  # nothing in it is trained, or each micro-batch is reduced
        return in_force(state_of(model), model.comm_algorithm).keys().isdisjoint(_EXCLUDING)

    def _shows_proportion(self, loss: Tensor) -> bool:
        """Whether the number's gradient is that of a sum / number. The host reads it, as Trainer reads each loss."""
        number, scaler = self._number, self._trainer.accelerator.scaler
        if number is None or number.grad is None or loss.dtype not in (torch.float32, torch.float64):
            return False
        expected = -loss / number.detach() * (1.0 if scaler is None else scaler.get_scale())
        return torch.allclose(number.grad, expected.to(number.dtype), rtol=1e-5, atol=0.0, equal_nan=True)
