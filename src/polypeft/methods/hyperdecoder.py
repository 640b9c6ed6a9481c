"""Hyperdecoder: stored adapters in the encoder, and in the decoder an adapter for each input, generated from the encoded input.

Ivison and Peters, "Hyperdecoders: Instance-specific decoders for multi-task NLP", Findings of EMNLP 2022, arXiv 2203.08304.

    out = x + FF(norm(x)) + relu(x W_down + b_down) W_up + b_up        x the residual stream entering the feed-forward sublayer
    e   = MLP(mean over the source tokens of the encoder's final states),  MLP = Linear(d, d), ReLU, Linear(d, d)
    h_i = relu(Linear([e; l_i])), l_i a learned vector of width 10 for decoder layer i;  each tensor of layer i's adapter is a linear map of h_i

Defaults: adapters of 64 in both stacks and a hidden width of 128 (the GLUE setting of table 1; with T5 v1.1 large 22,452,400 parameters), heads drawn
from U(-c, c) with c = 1e-3 sqrt(3 / (hidden * fan)), fan being the rows of the generated weight (1 for biases), learning rate 3e-4. Norms stay
frozen. The generated adapter is near zero at the start but not zero: the paper's initialisation.

Deviations from the released code, which regenerates the adapter at every decoding step: it is made once for each input and kept for the whole
`generate`; the adapter joins the feed-forward's output before the backbone's residual dropout, not after it (the same in evaluation, and on
backbones without dropout); decoders may have another number of layers than encoders (the code silently left some without adapters).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from polypeft.condition import Condition
from polypeft.deltas import Bottleneck
from polypeft.errors import UserError
from polypeft.method import Method, Roles, require
from polypeft.sites import find
from polypeft.source import Deltas, Heads, Joint, Params, Source, Stored

LAYER_WIDTH = 10  # of a layer embedding, section 2.2 of the method notes


def hyperdecoder(*, encoder: int = 64, decoder: int = 64, hidden: int = 128, roles: Roles | None = None) -> Method:
    """A stored adapter of width `encoder` in each encoder layer, a generated one of width `decoder` in each decoder layer.

    hidden: width of the hypernetwork. Only for encoder-decoder backbones; raises `UserError` for others.
    """
    for name, value in {"encoder": encoder, "decoder": decoder, "hidden": hidden}.items():
        require(value >= 1, f"hyperdecoder: {name} must be at least 1; found {value}")
    arguments = {"encoder": encoder, "decoder": decoder, "hidden": hidden, "roles": roles}
    return Method("hyperdecoder", arguments, _build, learning_rate=3e-4)


def _build(backbone: PreTrainedModel, tasks: int, encoder: int, decoder: int, hidden: int, roles: Roles | None) -> tuple[Deltas, Source]:
    if not backbone.config.is_encoder_decoder:
        raise UserError(
            f"hyperdecoder makes the decoder's adapters from the encoder's output, and {type(backbone).__name__} has no encoder: "
            "use an encoder-decoder backbone such as T5, or another method (hyperformer, lora)"
        )
    stored: Deltas = {site: _delta(encoder) for site in find(backbone, ("ffn",), "encoder", roles)}
    generated: Deltas = {site: _delta(decoder) for site in find(backbone, ("ffn",), "decoder", roles)}
    context = next(site.d_out for site in stored)
    parts = {"encoder": Stored(stored), "decoder": FromEncoder(generated, context, hidden)}
    return {**stored, **generated}, Joint(parts)


def _delta(size: int) -> Bottleneck:
    return Bottleneck(size, "relu", "stream", init="xavier")


class FromEncoder(Source):
    """Pooled encoder states (B, d) -> MLP -> with a layer embedding, one network and generators shared by all sites."""

    needs_encoder = True

    def __init__(self, deltas: Deltas, context: int, hidden: int):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(context, context), nn.ReLU(), nn.Linear(context, context))
        self.layer_embedding = nn.Embedding(len(deltas), LAYER_WIDTH)
        self.trunk = nn.Linear(context + LAYER_WIDTH, hidden)
        self.heads = Heads(deltas, hidden, shared=True, draw=_hyperfan)

    def forward(self, condition: Condition) -> Params:
        if condition.context is None:
            raise ValueError("the decoder's adapters are made from the encoder's pooled states, but the condition has no context")
        encoded = self.mlp(condition.context.to(self.trunk.weight.dtype))  # (B, d)
        layers = self.layer_embedding.weight  # (L, 10)
        joint = torch.cat(
            [encoded.expand(layers.shape[0], -1, -1), layers.unsqueeze(1).expand(-1, encoded.shape[0], -1)], -1
        )  # (L, B, d + 10)
        return self.heads(torch.relu(self.trunk(joint)))

    def task_tables(self) -> list[nn.Parameter]:
        return []


def _hyperfan(weight: Tensor, name: str, shape: tuple[int, ...]) -> Tensor:
    """Fill a generator's weight (copies, hidden, size) as section 2.2 of the method notes says."""
    fan = shape[0] if len(shape) == 2 else 1  # (d, a) for the down weight, (a, d) for the up weight
    bound = 1e-3 * math.sqrt(3 / (weight.shape[1] * fan))
    return weight.uniform_(-bound, bound)
