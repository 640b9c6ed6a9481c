"""Slots: the hooks through which an adapter reaches a backbone.

The backbone is never changed: a slot is a small callable object in a module's hook table, so it can be deep-copied, pickled, compiled and taken out
again. All slots of one adapted model share a `Live`, which holds parameters only while that model's own forward or generate runs; outside it every
slot is inert, and the bare backbone computes what it always did.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from polypeft.deltas import Delta
from polypeft.sites import Site
from polypeft.source import Params


class Live:
    """What the slots of one adapted model read: the parameters in force, or None.

    reads_encoder: the decoder's part of the parameters is still to be made, from what the decoder is given. encoder_states: those from which it was
    made last, kept only while no gradient is needed, so that a whole `generate` makes it once.
    """

    def __init__(self) -> None:
        self.params: Params | None = None
        self.reads_encoder = False
        self.encoder_states: Tensor | None = None


class Slot:
    """Forward hook at a site: replaces the module's output y by delta(x, y, p)."""

    def __init__(self, live: Live, site: Site, delta: Delta):
        self.live, self.key, self.stack, self.delta = live, site.key, site.stack, delta
        self.taps = site.reads is not None and delta.reads != "output"
        self.tapped: Tensor | None = None
        self.fired = False

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor | None:
        if self.live.params is None or self.key not in self.live.params:
            return None
        self.fired = True
        x: Tensor | None = args[0]
        if self.taps:
            x, self.tapped = self.tapped, None
        if x is None:
            raise RuntimeError(f"{self.key}: the module at which the residual stream is read did not run before this one")
        return self.delta(x, output, self.live.params[self.key])


class Tap:
    """Pre-hook of a block site's `reads`: keeps the residual stream x until the block's slot uses it."""

    def __init__(self, slot: Slot):
        self.slot = slot

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if self.slot.live.params is not None:
            self.slot.tapped = args[0]


class NormedTap:
    """Hook of a block site's norm: keeps the block's normed input until the block's slot uses it."""

    def __init__(self, slot: Slot):
        self.slot = slot

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        if self.slot.live.params is not None:
            self.slot.tapped = output


def attach(model: nn.Module, live: Live, deltas: Mapping[Site, Delta]) -> tuple[list[Slot], list[RemovableHandle]]:
    """Hang a slot at every site; removing the handles leaves the model as it was found.

    Slots of a module's own role go before block slots, so that where both hang on one module (Gemma 3's last norm of a block) the block's adapter
    sees the trained norm.
    """
    slots, handles = [], []
    for site, delta in sorted(deltas.items(), key=lambda item: item[0].reads is not None):
        slot = Slot(live, site, delta)
        slots.append(slot)
        handles.append(model.get_submodule(site.path).register_forward_hook(slot))
        if slot.taps:
            handles.append(_tap(model, site, slot))
    return slots, handles


def _tap(model: nn.Module, site: Site, slot: Slot) -> RemovableHandle:
    assert site.reads is not None
    if slot.delta.reads == "normed":
        return model.get_submodule(site.reads).register_forward_hook(NormedTap(slot))
    return model.get_submodule(site.reads).register_forward_pre_hook(Tap(slot))


def detach(handles: Sequence[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()


def before_decoder(model: PreTrainedModel, live: Live, make: Callable[[Tensor, Tensor | None], Params]) -> RemovableHandle:
    """Make the parameters that depend on the encoder just before the decoder runs, by `make(states (B, n, d), mask (B, n))`.

    They are read from what the decoder is given, never from the encoder: a caller who passes `encoder_outputs` would otherwise get stale ones.
    """
    decoder: Any = model.get_decoder()
    return decoder.register_forward_pre_hook(DecoderInput(live, make), with_kwargs=True)


class DecoderInput:
    """Pre-hook of a decoder; see `before_decoder`."""

    def __init__(self, live: Live, make: Callable[[Tensor, Tensor | None], Params]):
        self.live, self.make = live, make

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.live.params is None or not self.live.reads_encoder:
            return
        states: Tensor | None = kwargs.get("encoder_hidden_states")
        if states is None:
            raise RuntimeError(
                f"{type(module).__name__} was called without encoder_hidden_states, from which this method makes its adapters"
            )
        if self.live.encoder_states is states and not torch.is_grad_enabled():
            return
        self.live.params = self.live.params | self.make(states, kwargs.get("encoder_attention_mask"))
        self.live.encoder_states = None if torch.is_grad_enabled() else states


@contextlib.contextmanager
def using(live: Live, params: Params | None, reads_encoder: bool = False) -> Iterator[None]:
    """Put `params` in force for the time of the context."""
    before = live.params, live.reads_encoder, live.encoder_states
    live.params, live.reads_encoder, live.encoder_states = params, reads_encoder, None
    try:
        yield
    finally:
        live.params, live.reads_encoder, live.encoder_states = before


def checkpointing(model: nn.Module) -> list[Any]:
    """The checkpointing function of each module of `model` where activation checkpointing is on."""
    states = [vars(module) for module in model.modules()]
    return [state.get("_gradient_checkpointing_func") for state in states if state.get("gradient_checkpointing", False)]


class Checkpointing:
    """Activation checkpointing that recomputes each layer with the parameters of its own forward.

    Without it a recomputation would find the slots inert, or filled by a later forward, and give wrong gradients. Compilers take a plain checkpoint
    instead: they trace the recomputation with the parameters as they were.
    """

    def __init__(self, live: Live, preserve_rng_state: bool = True):
        self.live, self.preserve_rng_state = live, preserve_rng_state

    def __call__(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=self.preserve_rng_state, **kwargs)
        params = self.live.params
        return checkpoint(
            function,
            *args,
            use_reentrant=False,
            preserve_rng_state=self.preserve_rng_state,
            context_fn=lambda: (contextlib.nullcontext(), using(self.live, params)),
            **kwargs,
        )
