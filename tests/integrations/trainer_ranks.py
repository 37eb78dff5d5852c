"""Hugging Face Trainer on ranks of a pool, with ddp_compile or with its own DistributedDataParallel."""

import copy
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import hugging_face
import torch
from accelerate import Accelerator
from accelerate_ranks import forget_state
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Trainer, TrainingArguments, set_seed
from transformers.trainer_callback import TrainerCallback

from ddp_compile.integrations.accelerate import use
from ddp_compile.module.mixin import ReplicatedModule

VOCABULARY = 32


class Counting(Dataset[dict[str, Tensor]]):
    """Sequences that count up, each by its own step; if they are uneven, some tokens of most of them are padding."""

    def __init__(self, size: int, is_uneven: bool = False) -> None:
        self._size, self._is_uneven = size, is_uneven

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        tokens = (i + torch.arange(12) * (1 + i % 3)) % VOCABULARY
        is_padding = torch.arange(12) >= 2 + 5 * i % 11
        return {"input_ids": tokens, "labels": tokens.masked_fill(is_padding, -100) if self._is_uneven else tokens}


def new_model() -> PreTrainedModel:
    set_seed(3)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=64, **sizes))


def new_trainer(
    ours: bool, folder: str | Path, model_init: Callable[[], nn.Module] | None = None, **settings: Any
) -> Trainer:
    """A Trainer over six steps of two micro-batches on the CPU, that evaluates and saves after each third."""
    forget_state()
    defaults = {
        "max_steps": 6,
        "per_device_train_batch_size": 3,
        "per_device_eval_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "max_grad_norm": 0.5,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 3,
        "save_steps": 3,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
    }
    training = TrainingArguments(output_dir=str(folder), **{**defaults, **settings})
    model = new_model() if model_init is None else None
    trainer = Trainer(model, training, model_init=model_init, train_dataset=Counting(80), eval_dataset=Counting(10))
    if ours:
        use(trainer, backend="aot_eager", bucket_cap_mb=0.01)
    return trainer


def history_of(trainer: Trainer) -> list[tuple[int, str, float]]:
    """The logged losses, norms of gradients and evaluation losses, in order."""
    kept = ("loss", "grad_norm", "eval_loss")
    return [(log["step"], name, log[name]) for log in trainer.state.log_history for name in kept if name in log]


def train_both(folder: str, settings: dict[str, Any]) -> list[list[tuple[int, str, float]]]:
    histories = []
    for ours in (True, False):
        if not ours:  # beside accumulation it is an internal error of DistributedDataParallel's first iteration
            settings.pop("ddp_static_graph", None)
        # The first of the two evaluations has the larger loss: training ends by loading what it has saved there.
        best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "greater_is_better": True}
        trainer = new_trainer(ours, Path(folder) / f"ours={ours}", **best, **settings)
        trainer.train()
        if ours:
            assert trainer.model_wrapped is trainer.model and trainer.model.bucket_plan.buckets
        histories.append([*history_of(trainer), (3, "best", trainer.evaluate()["eval_loss"])])
    return histories


def summed_loss(outputs: Any, labels: Tensor, num_items_in_batch: Any, extra: float = 0.0) -> Tensor:
    """As a user would write it; with an extra loss that no number divides."""
    targets = nn.functional.pad(labels, (0, 1), value=-100)[:, 1:].flatten()
    loss = nn.functional.cross_entropy(outputs["logits"].float().flatten(0, 1), targets, reduction="sum")
    return loss / num_items_in_batch + extra * outputs["logits"].square().mean()


LOSSES: dict[str, Any] = {
    "summed": summed_loss,
    "ignores": lambda outputs, labels, num_items_in_batch: summed_loss(outputs, labels, 60),
    "auxiliary": partial(summed_loss, extra=0.1),
}


class Ending(IterableDataset[dict[str, Tensor]]):
    """Uneven sequences, whose end nobody knows before."""

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return (Counting(54, is_uneven=True)[i] for i in range(54))


class Doubling(Trainer):
    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        return 2 * super().training_step(*args, **kwargs)


UNEVEN_SETTINGS = {
    "max_steps": 9,
    "gradient_accumulation_steps": 4,
    "optim": "sgd",
    "learning_rate": 0.2,
    "max_grad_norm": 0.0,
    "eval_strategy": "no",
    "save_strategy": "no",
}


def train_uneven(
    folder: str,
    loss: str = "",
    settings: Any = None,
    delays: bool = False,
    ends: bool = False,
    gathers: bool = False,
    trainer_class: str = "Trainer",
) -> list[tuple[Any, ...]]:
    """With both: what was logged, the parameters after each step, and how often a count was gathered.

    Epochs end in a smaller step, or if ``ends``, before Trainer expects it. If ``delays``, a gradient is in no bucket.
    """

    class Keep(TrainerCallback):
        def on_step_end(self, *_: Any, model: nn.Module, **__: Any) -> None:
            kept.append(torch.cat([p.detach().flatten() for p in model.parameters()]))

    both = []
    for ours in (True, False):
        kept: list[Tensor] = []
        trainer = new_trainer(False, folder, **{**UNEVEN_SETTINGS, **copy.deepcopy(settings or {})})
        trainer.__class__ = globals()[trainer_class]
        trainer.train_dataset = Ending() if ends else Counting(80, is_uneven=True)
        trainer.compute_loss_func = LOSSES.get(loss)
        trainer.model_accepts_loss_kwargs = loss != "unused"
        trainer.add_callback(Keep())
        head = trainer.model.lm_head.weight
        delayed = {"delay_all_reduce_named_params": [("lm_head.weight", head)], "param_to_hook_all_reduce": head}
        if ours:
            arguments = {"backend": "aot_eager", "bucket_cap_mb": 0.01, "gather_counts": gathers}
            use(trainer, **arguments, **(delayed if delays else {}))
        with patch.object(trainer.accelerator, "gather", wraps=trainer.accelerator.gather) as gather:
            trainer.train()
        num_counts = sum(call.args[0].shape == () and call.args[0].dtype != torch.bool for call in gather.mock_calls)
        both.append((history_of(trainer), torch.stack(kept), num_counts))
    return both


def add_a_term_later(folder: str) -> None:
    """It is an error that the loss gets a term in the fourth step that the number does not divide."""
    trainer = new_trainer(False, folder, **UNEVEN_SETTINGS)

    def loss(*args: Any, **kwargs: Any) -> Tensor:
        return summed_loss(*args, **kwargs, extra=0.1 * (trainer.state.global_step == 3))

    trainer.train_dataset = Counting(80, is_uneven=True)
    trainer.compute_loss_func = loss
    use(trainer, backend="aot_eager")
    said = r"in step 3 one is not, and the mean over tokens would be wrong; call use\(trainer, gather"
    hugging_face.assert_refused([(trainer.train, said)])


def train_again_with_a_term(folder: str) -> None:
    """In the second train() the loss has a term that the number does not divide: gradients are Trainer's own again."""
    found = []
    for ours in (True, False):
        trainer = new_trainer(False, folder, **{**UNEVEN_SETTINGS, "max_steps": 2})
        trainer.train_dataset = Counting(80, is_uneven=True)
        if ours:
            use(trainer, backend="eager")
        for extra in (0.0, 0.1):
            trainer.compute_loss_func = partial(summed_loss, extra=extra)
            trainer.train()
        found.append(torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()]))
    torch.testing.assert_close(*found)


def resume_both(folder: str) -> list[list[tuple[int, str, float]]]:
    """Train without a stop, and resume from its checkpoint in the middle, with ddp_compile and with Trainer's own."""
    whole = new_trainer(True, Path(folder) / "whole")
    whole.train()
    histories = [history_of(whole)]
    for ours in (True, False):
        trainer = new_trainer(ours, Path(folder) / f"ours={ours}")
        trainer.train(resume_from_checkpoint=str(Path(folder) / "whole" / "checkpoint-3"))
        histories.append(history_of(trainer))
    return histories


def train_twice_and_generate(folder: str) -> None:
    """One Trainer evaluates, trains, trains again, saves and generates, with the same model all the time."""
    trainer = new_trainer(True, folder, max_steps=2, bf16=True, eval_strategy="no")
    model = trainer.model
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    trainer.train()
    assert trainer.model is model and trainer.evaluate()["eval_loss"] < before
    trainer.save_model()
    trainer.accelerator.wait_for_everyone()
    loaded = LlamaForCausalLM.from_pretrained(folder)
    prompt = torch.arange(4)[None]
    model.eval()
    generated = model.generate(prompt, max_new_tokens=3, do_sample=False)
    assert generated.shape == (1, 7)
    assert torch.equal(loaded.generate(prompt, max_new_tokens=3, do_sample=False), generated)


def search(folder: str) -> None:
    """The models of two trials are replicated; Trainer makes an accelerator for the second."""
    trainer = new_trainer(True, folder, model_init=new_model, max_steps=1, eval_strategy="no", save_strategy="no")
    accelerators = {trainer.accelerator}
    for _ in range(2):
        trainer.train()
        assert isinstance(trainer.model, ReplicatedModule)
        trainer.create_accelerator_and_postprocess()
        accelerators.add(trainer.accelerator)
    assert len(accelerators) == 3


def new_adapters() -> LoraConfig:
    torch.manual_seed(4)
    return LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)


def add_adapters_late(_folder: str) -> None:
    """Each way to add adapters to a replicated model is an error."""
    forget_state()
    accelerator = use(Accelerator(cpu=True), backend="eager")
    tokens = torch.arange(12)[None]

    def into_a_layer() -> None:
        model = accelerator.prepare(new_model())
        model.model.layers[0] = get_peft_model(model.model.layers[0], new_adapters())
        model(tokens)

    def a_second_one() -> None:
        model = accelerator.prepare(get_peft_model(new_model(), new_adapters()))
        model(tokens, labels=tokens).loss.backward()
        model.add_adapter("second", new_adapters())
        model.set_adapter("second")
        model(tokens)

    prompts = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    late = r"ReplicationError: rank .: PEFT has added adapters to a module.*ddp_compile\(get_peft_model"
    cases: list[tuple[Callable[[], Any], str]] = [
        (lambda: get_peft_model(accelerator.prepare(new_model()), new_adapters()), late),
        (lambda: accelerator.prepare(new_model()).add_adapter(new_adapters()), late),
        (lambda: get_peft_model(accelerator.prepare(new_model()), prompts)(tokens), late),
        (into_a_layer, r"ParametersChangedError: rank .: .*added: model.layers.0.*lora_A"),
        (a_second_one, r"ParametersChangedError: rank .: .*added: base_model.*lora_A.second"),
    ]
    hugging_face.assert_refused(cases)


def train_and_delete_adapters(_folder: str) -> None:
    """Of adapters and prompts that come first the ranks have equal gradients; adapters are deleted afterward."""
    forget_state()
    accelerator = use(Accelerator(cpu=True), backend="eager", bucket_cap_mb=0.001)
    tokens = torch.arange(12)[None] + accelerator.process_index
    with_adapters = new_model()
    with_adapters.add_adapter(new_adapters())
    prompts = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    for model in (with_adapters, get_peft_model(new_model(), prompts)):
        accelerator.prepare(model)(tokens, labels=tokens).loss.backward()
        gradients = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        of_ranks = accelerator.gather(gradients[None])
        assert gradients.any() and torch.equal(of_ranks[0], of_ranks[1])
    with_adapters.delete_adapter("default")
    assert not hasattr(with_adapters, "peft_config")


def run_example(folder: str) -> str:
    forget_state()
    return hugging_face.run_example("train_trainer.py", "--steps", "6", "--out-dir", folder)
