"""A frozen backbone with a source of adapters: forward, generate, and the adapters themselves."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from polypeft import inject
from polypeft.adapter import Adapter
from polypeft.condition import Condition, TaskIds, pooled, task_ids
from polypeft.errors import UserError
from polypeft.interop import Face
from polypeft.io import fingerprint, restore_adapted, save_adapted
from polypeft.ops import pick
from polypeft.source import Deltas, Params, Source, module_name


class Adapted(Face):
    """`backbone` with slots at the sites of `deltas`, filled by `source` for the time of each forward or generate.

    tasks: the names of the task table; a task is given by name or by index. method, arguments: how it was made, for saving (None for an adapter
    attached on its own). Only `source.parameters()` train; full fine-tuning, whose source says so, trains the backbone instead.
    """

    def __init__(
        self,
        backbone: PreTrainedModel,
        deltas: Deltas,
        source: Source,
        tasks: tuple[str, ...] = (),
        method: str | None = None,
        arguments: Mapping[str, Any] | None = None,
    ):
        super().__init__(backbone)
        self.source = source
        self.deltas = dict(deltas)
        self.tasks, self.method, self.arguments = tasks, method, dict(arguments or {})
        self.fingerprint = fingerprint(backbone)
        backbone.requires_grad_(source.trains_backbone)
        self._live = inject.Live()
        self._slots, self._handles = inject.attach(backbone, self._live, deltas)
        if source.needs_encoder:
            self._handles.append(inject.before_decoder(backbone, self._live, self._from_encoder))
        self._override: Adapter | None = None
        self._checkpointing: inject.Checkpointing | None = None
        self._verified = False

    # ------------------------------------------------------------------ running

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        task: TaskIds | None = None,
        num_items_in_batch: Tensor | int | None = None,
        smoothing: float = 0.0,
        position_ids: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        **inputs: Any,
    ) -> Any:
        """The backbone's forward with the adapter of `task` (one for the batch, or one for each row) in force.

        input_ids, attention_mask (B, n); labels (B, m), -100 where nothing is to be learnt. Other `inputs` go to the backbone as they are; some are
        named because Trainer drops columns that the signature does not name. With labels the output has `loss`: cross-entropy summed over target
        tokens and divided by their number, or by `num_items_in_batch`, with label smoothing by `smoothing` (Trainer takes any name with "label" in
        it for labels).

        Raises `UserError` for an unknown or missing task and for a number of tasks that is neither 1 nor B.
        """
        named = {"position_ids": position_ids, "decoder_input_ids": decoder_input_ids, "decoder_attention_mask": decoder_attention_mask}
        inputs |= {name: value for name, value in named.items() if value is not None}
        self._refuse_foreign_checkpointing()
        with self._engaged(task, _rows(input_ids, inputs)):
            output = self.backbone(input_ids=input_ids, attention_mask=attention_mask, **self._with_decoder_inputs(inputs, labels))
        self._verify_slots(inputs)
        if labels is None:
            return output
        shift = not self.backbone.config.is_encoder_decoder
        loss = token_loss(output.logits, labels, shift=shift, num_items=num_items_in_batch, smoothing=smoothing)
        return type(output)(loss=loss, **output)

    @torch.no_grad()
    def generate(self, input_ids: Tensor | None = None, task: TaskIds | None = None, **inputs: Any) -> Any:
        """The backbone's `generate` with the adapter of `task` in force; the adapter is made once, not per token. Errors as for `forward`."""
        run: Any = self.backbone.generate
        with self._engaged(task, _rows(input_ids, inputs)):
            output = run(input_ids, **inputs)
        self._verify_slots(inputs)
        return output

    def _with_decoder_inputs(self, inputs: dict[str, Any], labels: Tensor | None) -> dict[str, Any]:
        given = any(inputs.get(name) is not None for name in ("decoder_input_ids", "decoder_inputs_embeds"))
        if labels is None or given or not self.backbone.config.is_encoder_decoder:
            return inputs
        return {**inputs, "decoder_input_ids": self.prepare_decoder_input_ids_from_labels(labels)}

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """The backbone's own rule for decoder inputs, which Trainer and collators call."""
        prepare: Any = self.backbone.prepare_decoder_input_ids_from_labels
        return prepare(labels=labels)

    # ------------------------------------------------------------------ adapters

    def adapter(self, task: TaskIds | None = None, input_ids: Tensor | None = None, attention_mask: Tensor | None = None) -> Adapter:
        """The adapter of `task` (one row for each id given), or of the rows of `input_ids` (B, n) for a source that reads the encoder.

        Raises `UserError` when a task or an input that the source needs is missing, and for full fine-tuning, which has no adapter.
        """
        if self.source.trains_backbone:
            raise UserError("full fine-tuning has no adapter apart from its backbone: save the whole model with save(directory)")
        ids = self._ids(task)
        params = self._cast(self.source(Condition(task=None if ids is None else ids.to(self.backbone.device))))
        if self.source.needs_encoder:
            if input_ids is None:
                raise UserError("this method makes an adapter for each input: pass input_ids (and attention_mask)")
            encoder: Any = self.backbone.get_encoder()
            _check_rows(ids, input_ids.shape[0])
            with inject.using(self._live, params):
                states = encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
            params |= self._from_encoder(states, attention_mask)
        return Adapter(self.deltas, params, self.fingerprint)

    @contextlib.contextmanager
    def using(self, adapter: Adapter) -> Iterator[Adapted]:
        """Run with `adapter` instead of the source's own, for the time of the context.

        Raises `UserError` when the adapter was made for another backbone or has sites that this model has no slots for.
        """
        adapter.check_backbone(self.fingerprint)
        if dict(adapter.deltas) != self.deltas:
            raise UserError("this adapter has other sites or deltas than this model; run it with polypeft.attach(backbone, adapter)")
        before, self._override = self._override, adapter
        try:
            yield self
        finally:
            self._override = before

    def _ids(self, task: TaskIds | None) -> Tensor | None:
        if task is None:
            if self.source.needs_task and self._override is None:
                raise UserError(f"this method's adapters depend on the task: pass task=, one of {', '.join(self.tasks[:20])}")
            return None
        if not self.tasks:
            raise UserError("task= was given, but this model has no task table: make it with method(backbone, tasks=[...])")
        return task_ids(task, self.tasks)

    @contextlib.contextmanager
    def _engaged(self, task: TaskIds | None, rows: int | None) -> Iterator[None]:
        ids = self._ids(task)
        _check_rows(ids, rows)
        if self._override is None:
            params, reads = self._for_rows(ids), self.source.needs_encoder
        else:
            params, reads = self._cast(self._override.params), False
        with inject.using(self._live, params, reads):
            yield

    def _for_rows(self, ids: Tensor | None) -> Params:
        """Make parameters for the distinct tasks only, then give each row its own."""
        if ids is None or not self.source.needs_task:
            return self._cast(self.source(Condition()))
        distinct, index = _distinct(ids, len(self.tasks))
        params = self._cast(self.source(Condition(task=distinct.to(self.backbone.device))))
        if index is None:
            return params
        index = index.to(self.backbone.device)
        made = distinct.shape[0]
        return {key: {name: pick(t, index) if t.shape[0] == made else t for name, t in p.items()} for key, p in params.items()}

    def _from_encoder(self, states: Tensor, mask: Tensor | None) -> Params:
        return self._cast(self.source(Condition(context=pooled(states, mask))))

    def _cast(self, params: Params) -> Params:
        dtype = self.backbone.dtype
        return {key: {name: t.to(dtype) for name, t in p.items()} for key, p in params.items()}

    # ------------------------------------------------------------------ guards

    def _verify_slots(self, inputs: Mapping[str, Any]) -> None:
        """After the first full forward every slot must have fired, or something (a fused kernel, a dead branch) bypasses the hooks."""
        if self._verified or torch.compiler.is_compiling() or inputs.get("past_key_values") is not None:
            return
        exempt = "encoder" if inputs.get("encoder_outputs") is not None else None
        silent = [slot.key for slot in self._slots if not slot.fired and slot.stack != exempt]
        if silent:
            raise RuntimeError(
                f"{len(silent)} of {len(self._slots)} slots never ran in a full forward, the first at {silent[0]}: the backbone bypasses its "
                "modules there (a fused kernel, or a part this input does not reach). Choose other roles, or load the backbone without it"
            )
        self._verified = exempt is None

    def gradient_checkpointing_enable(
        self, gradient_checkpointing_kwargs: Mapping[str, Any] | None = None, every_n_layers: int = 1, offload: bool = False
    ) -> None:
        """Recompute activations in the backward pass, each layer with the adapter of its own forward. Only the non-reentrant kind exists.

        every_n_layers: checkpoint one layer in so many. offload, moving what is kept to the host, is refused with `UserError`.
        """
        given = dict(gradient_checkpointing_kwargs or {})
        if given.pop("use_reentrant", False):
            raise UserError("reentrant checkpointing cannot keep the adapter of a forward: use {'use_reentrant': False}")
        preserve = given.pop("preserve_rng_state", True)
        if given:
            raise UserError(f"unknown checkpointing arguments {sorted(given)}; known are use_reentrant=False and preserve_rng_state")
        if offload:
            raise UserError("checkpointed activations cannot be kept on the host here: leave out offload=True")
        spaced = {} if every_n_layers == 1 else {"every_n_layers": every_n_layers}  # older transformers do not know it
        self._checkpointing = inject.Checkpointing(self._live, preserve)
        self.backbone._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=self._checkpointing, **spaced)

    def activation_checkpointing_enable(
        self, activation_checkpointing_kwargs: Mapping[str, Any] | None = None, every_n_layers: int = 1, offload: bool = False
    ) -> None:
        """The newer transformers name of `gradient_checkpointing_enable`."""
        self.gradient_checkpointing_enable(activation_checkpointing_kwargs, every_n_layers, offload)

    def gradient_checkpointing_disable(self) -> None:
        self.backbone._set_gradient_checkpointing(enable=False)
        self._checkpointing = None

    activation_checkpointing_disable = gradient_checkpointing_disable

    def _refuse_foreign_checkpointing(self) -> None:
        """Only our own checkpointing recomputes with this model's adapter; another adapted model of the same backbone has its own."""
        if not self.training or torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        if any(function is not self._checkpointing for function in inject.checkpointing(self.backbone)):
            raise UserError(
                "activation checkpointing was switched on at the backbone or by another adapted model of it, where a recomputation loses the "
                "adapter: switch it on with this model's gradient_checkpointing_enable() instead"
            )

    def detach(self) -> PreTrainedModel:
        """Take all slots out, and our checkpointing, and return the backbone as it was found, but for its weights, which stay frozen."""
        if self._checkpointing in inject.checkpointing(self.backbone):
            self.gradient_checkpointing_disable()
        inject.detach(self._handles)
        self._slots, self._handles = [], []
        return self.backbone

    # ------------------------------------------------------------------ what it is

    def trainable(self) -> list[nn.Parameter]:
        """The parameters that train: the source's, or the backbone's for full fine-tuning."""
        return list(self.backbone.parameters() if self.source.trains_backbone else self.source.parameters())

    def describe(self) -> dict[str, Any]:
        """Counts: trainable, active (what one task uses), backbone, percent and percent_per_task of the backbone, parts, sites."""
        backbone = sum(p.numel() for p in self.backbone.parameters())
        trainable = sum(p.numel() for p in self.trainable())
        tasks = max(len(self.tasks), 1)
        return {
            "method": self.method,
            "tasks": len(self.tasks),
            "trainable": trainable,
            "active": trainable - _inactive(self.source, tasks),
            "backbone": backbone,
            "percent": 100 * trainable / backbone,
            "percent_per_task": 100 * trainable / tasks / backbone,
            "sites": len(self.deltas),
            "parts": {"backbone": backbone} if self.source.trains_backbone else parts(self.source),
        }

    def save(self, directory: str | Path) -> None:
        """Write the trainable tensors and a header into `directory`, atomically; see `polypeft.load`."""
        save_adapted(self, Path(directory))

    def save_pretrained(
        self, save_directory: str | Path, state_dict: Mapping[str, Tensor] | None = None, is_main_process: bool = True
    ) -> None:
        """What Trainer calls to write a checkpoint; `state_dict`, where given, is this model's gathered one."""
        if is_main_process:
            save_adapted(self, Path(save_directory), state_dict)

    def load_adapter(self, model_id: str | Path, adapter_name: str = "default", is_trainable: bool = False) -> None:
        """What Trainer calls to resume and to reload the best checkpoint: read the trainable tensors saved in a directory."""
        self.set_adapter(adapter_name)
        restore_adapted(self, Path(model_id))


def _rows(input_ids: Tensor | None, inputs: Mapping[str, Any]) -> int | None:
    """Rows of the batch as given, before beams expand them; None when nothing tells."""
    encoded = inputs.get("encoder_outputs")
    states = None if encoded is None else encoded[0]
    for value in (input_ids, inputs.get("inputs_embeds"), states, inputs.get("decoder_input_ids")):
        if value is not None:
            return value.shape[0]
    return None


def _check_rows(ids: Tensor | None, rows: int | None) -> None:
    if ids is not None and rows is not None and ids.shape[0] not in (1, rows):
        raise UserError(f"{ids.shape[0]} tasks for {rows} rows: pass one task for all rows, or one for each")


def _distinct(ids: Tensor, tasks: int) -> tuple[Tensor, Tensor | None]:
    """Tasks to make adapters for, and for each row the index of its own (None: the rows are the tasks, or there is one task for all).

    On the CPU the distinct tasks are found by looking; elsewhere looking would wait for the device, so all tasks are made when they are no more than
    the rows, and one for each row otherwise.
    """
    if ids.shape[0] == 1:
        return ids, None
    if ids.device.type == "cpu" and not torch.compiler.is_compiling():
        distinct, index = torch.unique(ids, return_inverse=True)
        return distinct, None if distinct.shape[0] == 1 else index
    if tasks <= ids.shape[0]:
        return torch.arange(tasks, device=ids.device), ids
    return ids, None


def token_loss(logits: Tensor, labels: Tensor, *, shift: bool, num_items: Tensor | int | None, smoothing: float) -> Tensor:
    """Cross-entropy of `logits` (B, m, V) summed over the labels (B, m) that are not -100, over their number or over `num_items`.

    `shift`: position i predicts label i + 1 (decoder-only models). The mean is over all tokens of the step, whatever micro-batch they are in, when
    `num_items` counts them all. A batch without any target token gives 0.
    """
    if shift:
        logits, labels = logits[:, :-1], labels[:, 1:]
    labels = labels.to(logits.device)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    total = F.cross_entropy(
        logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), ignore_index=-100, reduction="sum", label_smoothing=smoothing
    )
    if num_items is None:
        num_items = (labels != -100).sum().clamp_min(1)
    return total / (num_items.to(total.device) if isinstance(num_items, Tensor) else num_items)


def parts(source: Source) -> dict[str, int]:
    """Trainable parameters by part: part of a joint source, then its submodules ("generated/heads": 123)."""
    counts: dict[str, int] = {}
    for name, parameter in source.named_parameters():
        path = [step for step in name.split(".")[:-1] if step != "parts"][:2] or ["source"]
        counts["/".join(path)] = counts.get("/".join(path), 0) + parameter.numel()
    return counts


def _inactive(source: Source, tasks: int) -> int:
    """Parameters that belong to tasks other than the one in use."""
    tables = [p for module in source.modules() if isinstance(module, Source) for p in module.task_tables()]
    return sum(p.numel() // tasks * (tasks - 1) for p in tables)


class Given(Source):
    """The parameters of an adapter, as they are."""

    def __init__(self, adapter: Adapter):
        super().__init__()
        self.names = {key: tuple(p) for key, p in adapter.params.items()}
        for key, p in adapter.params.items():
            for name, value in p.items():
                self.register_buffer(f"{module_name(key)}|{name}", value)

    def forward(self, condition: Condition) -> Params:
        return {key: {name: self.get_buffer(f"{module_name(key)}|{name}") for name in names} for key, names in self.names.items()}

    def task_tables(self) -> list[nn.Parameter]:
        return []


def attach(backbone: PreTrainedModel, adapter: Adapter) -> Adapted:
    """`backbone` with `adapter` in force in every forward and generate, without the source that made it.

    An adapter of several rows serves batches of a multiple of that many rows. Raises `UserError` when it was made for another backbone.
    """
    adapter.check_backbone(fingerprint(backbone))
    return Adapted(backbone, adapter.deltas, Given(adapter.to(backbone.device)))
