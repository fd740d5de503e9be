"""``Trainer`` of transformers, with our model and with its own Llama of the same weights.

``Trainer.train`` is a whole loop. It runs in a thread that waits in front of each step, so that it can take turns.
"""

from __future__ import annotations

import tempfile
import threading
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.peers.case import Case, Contender, InOurOrder, own_model
from benchmarks.peers.contenders import adamw, installed, refuse_sharding
from hpc_train.config.schema import Config
from hpc_train.models.hf_names import hf_config, hf_name
from hpc_train.models.model import Model
from hpc_train.parallel.mesh import Mesh

MOST_STEPS = 1_000_000


def build_trainer(case: Case, config: Config, mesh: Mesh) -> Contender:
    refuse_sharding(mesh)
    return _contender(_OwnModel(own_model(config)), config, mesh)


def build_trainer_llama(case: Case, config: Config, mesh: Mesh) -> Contender:
    refuse_sharding(mesh)
    transformers = installed("transformers")
    with torch.device("cpu"):
        values = hf_config(config.model, config.data.sequence_length, "float32")
        llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**values, use_cache=False))
    llama.load_state_dict(hf_weights(config), strict=True)
    return _contender(llama.train(), config, mesh)


def hf_weights(config: Config) -> dict[str, Tensor]:
    """Returns the weights with which all contenders begin, by their names in transformers."""
    return {hf_name(config.model, name): value.detach() for name, value in own_model(config).named_parameters()}


class _OwnModel(nn.Module):
    """Our model with the arguments and the result that ``Trainer`` expects."""

    accepts_loss_kwargs = True

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, input_ids: Tensor, labels: Tensor, shift_labels: Tensor, num_items_in_batch: Tensor
    ) -> dict[str, Tensor]:
        loss, _ = self.model(input_ids, {}, shift_labels)
        return {"loss": loss / num_items_in_batch}


def _contender(model: nn.Module, config: Config, mesh: Mesh) -> Contender:
    size = sum(each.numel() for each in model.parameters())
    return Contender(_Turns(_trainer(model, config, mesh), mesh.layout.dp), size, in_own_thread=True)


def _trainer(model: nn.Module, config: Config, mesh: Mesh) -> Any:
    transformers = installed("transformers")
    arguments = transformers.TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        use_cpu=True,
        bf16=config.precision.name == "bf16",
        per_device_train_batch_size=mesh.layout.micro_size,
        gradient_accumulation_steps=mesh.layout.micro_batches,
        max_steps=MOST_STEPS,
        max_grad_norm=config.optim.clip_norm,
        learning_rate=config.optim.lr,
        lr_scheduler_type="constant",
        train_sampling_strategy="sequential",  # InOurOrder is shuffled
        ddp_find_unused_parameters=False,
        dataloader_pin_memory=False,
        remove_unused_columns=False,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=config.train.seed,
    )
    return transformers.Trainer(
        model=model,
        args=arguments,
        train_dataset=InOurOrder(config),
        data_collator=_collate,
        optimizers=(adamw(model, config), None),
    )


def _collate(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
    inputs, targets = (torch.as_tensor([each[key].tolist() for each in samples]) for key in ("inputs", "targets"))
    return {"input_ids": inputs, "labels": targets, "shift_labels": targets}


class _Turns:
    """Calls one step of ``trainer.train``, which runs in a separate thread."""

    def __init__(self, trainer: Any, ranks: int) -> None:
        self._trainer, self._ranks = trainer, ranks
        self._begin, self._end = threading.Semaphore(0), threading.Semaphore(0)
        self._losses: list[Tensor] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._train, daemon=True)
        trainer.add_callback(_callback(self))
        self._plain_step = trainer.training_step
        trainer.training_step = self._keep_loss

    def __call__(self) -> Tensor:
        """Runs one step and returns its loss over that of all ranks; raises the error of the thread."""
        self._losses.clear()
        if not self._thread.ident:
            self._thread.start()
        self._begin.release()
        self._end.acquire()
        if self._error is not None:
            raise self._error
        return torch.stack(self._losses).sum() / self._ranks  # Trainer has multiplied it for the mean of DDP

    def wait(self) -> None:
        """Waits for the next turn; called in the thread."""
        self._begin.acquire()

    def finish(self) -> None:
        """Ends a turn; called in the thread."""
        self._end.release()

    def _train(self) -> None:
        torch.set_num_threads(1)
        self.wait()
        try:
            self._trainer.train()
        except BaseException as error:
            self._error = error
            self.finish()

    def _keep_loss(self, *args: Any, **options: Any) -> Tensor:
        loss: Tensor = self._plain_step(*args, **options)
        self._losses.append(loss)
        return loss


def _callback(turns: _Turns) -> Any:
    class AtTheEndOfAStep(installed("transformers").TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            turns.finish()
            turns.wait()

    return AtTheEndOfAStep()
