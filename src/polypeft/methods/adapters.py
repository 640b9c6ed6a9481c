"""Stored bottleneck adapters: Houlsby (after a sublayer) and parallel (beside the feed-forward).

houlsby   u' = u + N(act(u W_down + b_down) W_up + b_up) on the output u of the attention and of the feed-forward sublayer, before the residual is
          added; N an own layer norm. Houlsby et al. 2019, arXiv 1902.00751; the defaults (reduction 32, the layer norm, gelu, the backbone's norms
          trained, 3e-4) are those of the baseline "Adapters" of HyperFormer's table 1 (arXiv 2106.04489), whose counts they reproduce.
          Deviation: the layer norm's scale starts at zero, so that the adapter starts as the identity; the published code starts it at one, which
          blows the near-zero output up to unit variance.
parallel  out = x + FF(norm(x)) + relu(x W_down + b_down) W_up + b_up, x the residual stream. He et al. 2022, arXiv 2110.04366; placement,
          initialisation and size 230 are the baseline "Adapter" of Hyperdecoders (arXiv 2203.08304, table 1 and its configuration files; the 410
          of its appendix fits neither the file nor the count).
          Deviation: the adapter joins the feed-forward's output before the backbone's residual dropout, not after it.
"""

from __future__ import annotations

from typing import Literal

from torch import nn
from transformers import PreTrainedModel

from polypeft.deltas import Activation, Bottleneck, Delta, NormShift
from polypeft.errors import UserError
from polypeft.method import Method, Roles, require
from polypeft.sites import Site, find
from polypeft.sites import roles as roles_of
from polypeft.source import Deltas, Joint, Source, Stored


def houlsby(
    *,
    reduction: int = 32,
    sites: tuple[str, ...] = ("attention", "ffn"),
    activation: Activation = "gelu_new",
    norm: bool = True,
    train_norms: bool = True,
    per_task: bool = False,
    stack: Literal["encoder", "decoder"] | None = None,
    roles: Roles | None = None,
) -> Method:
    """Bottleneck adapters of width d // reduction on the output of the blocks named by `sites`.

    norm: a layer norm of its own after each adapter. train_norms: train the backbone's norms too, shared by all tasks. per_task: one adapter for
    each task instead of a shared one. stack: only this one.
    """
    require(reduction >= 1, f"houlsby: reduction must be at least 1; found {reduction}")
    arguments = {
        "reduction": reduction,
        "sites": sites,
        "activation": activation,
        "norm": norm,
        "train_norms": train_norms,
        "per_task": per_task,
        "stack": stack,
        "roles": roles,
    }
    return Method("houlsby", arguments, _build_houlsby, learning_rate=3e-4)


def parallel(
    *,
    size: int = 230,
    activation: Activation = "relu",
    reads: Literal["stream", "normed"] = "stream",
    per_task: bool = False,
    stack: Literal["encoder", "decoder"] | None = None,
    roles: Roles | None = None,
) -> Method:
    """Bottleneck adapters of width `size` beside every feed-forward.

    reads: the residual stream before the block's norm, or after it ("normed", for pre-norm backbones only). per_task: one adapter for each task
    instead of a shared one. stack: only this one.
    """
    require(size >= 1, f"parallel: size must be at least 1; found {size}")
    arguments = {"size": size, "activation": activation, "reads": reads, "per_task": per_task, "stack": stack, "roles": roles}
    return Method("parallel", arguments, _build_parallel, learning_rate=3e-4)


def _build_houlsby(
    backbone: PreTrainedModel,
    tasks: int,
    reduction: int,
    sites: tuple[str, ...],
    activation: Activation,
    norm: bool,
    train_norms: bool,
    per_task: bool,
    stack: str | None,
    roles: Roles | None,
) -> tuple[Deltas, Source]:
    blocks: Deltas = {
        site: Bottleneck(reduced(site, reduction), activation, norm=norm) for site in find(backbone, tuple(sites), stack, roles)
    }
    adapters = Stored(blocks, tasks if per_task else None)
    return with_norms(backbone, blocks, adapters, "adapters", train_norms, stack, roles)


def _build_parallel(
    backbone: PreTrainedModel,
    tasks: int,
    size: int,
    activation: Activation,
    reads: Literal["stream", "normed"],
    per_task: bool,
    stack: str | None,
    roles: Roles | None,
) -> tuple[Deltas, Source]:
    delta = Bottleneck(size, activation, reads, init="xavier")
    deltas = {checked(site, delta): delta for site in find(backbone, ("ffn",), stack, roles)}
    return deltas, Stored(deltas, tasks if per_task else None)


def reduced(site: Site, reduction: int) -> int:
    """Bottleneck width d // reduction. Raises `UserError` when it would be zero."""
    size = site.d_out // reduction
    require(size >= 1, f"reduction {reduction} leaves no bottleneck at width {site.d_out} ({site.path}); choose at most {site.d_out}")
    return size


def checked(site: Site, delta: Bottleneck) -> Site:
    """`site`, unless `delta` wants the normed input of a block that has none."""
    if delta.reads == "normed" and not site.prenorm:
        raise UserError(
            f"reads='normed' needs a norm before the block, and {site.path} belongs to a post-norm backbone (its norm comes after the residual): "
            "use reads='stream'"
        )
    return site


def with_norms(
    backbone: PreTrainedModel, blocks: Deltas, source: Source, name: str, train_norms: bool, stack: str | None, roles: Roles | None
) -> tuple[Deltas, Source]:
    """`blocks` with their `source` (called `name`), joined where asked for by the training of all the backbone's norms."""
    if not train_norms:
        return blocks, source
    has = [role for role in ("norm", "final_norm") if role in roles_of(backbone, roles)]  # post-norm backbones end without a final norm
    norms: Deltas = {site: norm_delta(backbone, site) for site in find(backbone, has or ("norm",), stack, roles)}
    return {**norms, **blocks}, Joint({name: source, "norms": Stored(norms)})


def norm_delta(backbone: PreTrainedModel, site: Site) -> Delta:
    """How to train the norm at `site`: a layer norm is centred and has a bias; any other is taken for a root-mean-square norm."""
    module = backbone.get_submodule(site.path)
    if isinstance(module, nn.LayerNorm):
        return NormShift(module.eps, centred=True, bias=module.bias is not None)
    for name in ("variance_epsilon", "eps"):
        if name in vars(module):
            return NormShift(float(vars(module)[name]), centred=False, bias=False)
    raise UserError(f"the norm at {site.path} ({type(module).__name__}) states no epsilon, so it cannot be trained: set train_norms=False")
