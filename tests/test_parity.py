"""Every method against a slow reference, written from the papers' equations: one row, one site and one position at a time.

The reference shares no code with the deltas, the grouped products and the generators: it names the modules itself, reads the trained
tensors by name from the source's state dict, and changes a bare backbone with hooks of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from backbones import PAD, WIDTH
from cases import TASKS, bare, disturb
from polypeft import Adapted, methods
from polypeft.method import Method

LENGTHS = (7, 5, 6, 7)
TASK_OF_ROW = (0, 2, 1, 0)
SIZE, RANK, ALPHA = 8, 4, 6.0
EXACT = {"rtol": 0, "atol": 1e-10}

Weights = dict[str, Tensor]
Apply = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Change:
    """At `path`, each position's output y (d) becomes apply(x, y); x (d) is that module's input, or the input of `reads`."""

    path: str
    apply: Apply
    reads: str | None = None


# --- where, by hand ---


@dataclass(frozen=True)
class Block:
    """A sublayer: `reads` is fed the residual stream, what `writes` puts out is added to it."""

    role: str
    stack: str
    layer: int
    reads: str
    writes: str

    @property
    def key(self) -> str:
        return f"{self.writes}:{self.role}".replace(".", "/")


def blocks(family: str) -> list[Block]:
    if family == "llama":
        return [block for i in range(2) for block in _llama_layer(i, f"model.layers.{i}")]
    return [block for stack, depth in (("encoder", 3), ("decoder", 2)) for i in range(depth) for block in _t5_layer(stack, i)]


def _llama_layer(i: int, layer: str) -> Iterator[Block]:
    yield Block("attention", "decoder", i, f"{layer}.input_layernorm", f"{layer}.self_attn.o_proj")
    yield Block("ffn", "decoder", i, f"{layer}.post_attention_layernorm", f"{layer}.mlp")


def _t5_layer(stack: str, i: int) -> Iterator[Block]:
    layer, last = f"{stack}.block.{i}.layer", 1 if stack == "encoder" else 2
    yield Block("attention", stack, i, f"{layer}.0.layer_norm", f"{layer}.0.SelfAttention.o")
    yield Block("ffn", stack, i, f"{layer}.{last}.layer_norm", f"{layer}.{last}.DenseReluDense")


def norm_paths(family: str) -> list[str]:
    if family == "llama":
        return [f"model.layers.{i}.{name}" for i in range(2) for name in ("input_layernorm", "post_attention_layernorm")] + ["model.norm"]
    encoder = [f"encoder.block.{i}.layer.{j}.layer_norm" for i in range(3) for j in range(2)]
    decoder = [f"decoder.block.{i}.layer.{j}.layer_norm" for i in range(2) for j in range(3)]
    return [*encoder, *decoder, "encoder.final_layer_norm", "decoder.final_layer_norm"]


def query_and_value(family: str) -> list[str]:
    if family == "llama":
        return [f"model.layers.{i}.self_attn.{name}_proj" for i in range(2) for name in "qv"]
    encoder = [f"encoder.block.{i}.layer.0.SelfAttention.{name}" for i in range(3) for name in "qv"]
    return encoder + [f"decoder.block.{i}.layer.0.SelfAttention.{name}" for i in range(2) for name in "qv"]


# --- what, from the equations ---


def relu(v: Tensor) -> Tensor:
    return v * (v > 0)


def gelu_new(v: Tensor) -> Tensor:
    return 0.5 * v * (1 + torch.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3)))


def standardised(v: Tensor, eps: float) -> Tensor:
    centred = v - v.sum() / v.numel()
    return centred / torch.sqrt((centred * centred).sum() / v.numel() + eps)


def bottleneck(p: Weights, activation: Callable[[Tensor], Tensor], *, reads_output: bool) -> Apply:
    def apply(x: Tensor, y: Tensor) -> Tensor:
        z = y if reads_output else x
        out = activation(z @ p["down"] + p["down_bias"]) @ p["up"] + p["up_bias"]
        if "scale" in p:
            out = p["scale"] * standardised(out, 1e-5) + p["shift"]
        return y + out

    return apply


def low_rank(a: Tensor, b: Tensor) -> Apply:
    return lambda x, y: y + (ALPHA / RANK) * ((x @ a) @ b)


def shifted_norm(scale: Tensor) -> Apply:
    """T5's and Llama's norms divide by the root mean square, with eps 1e-6."""
    return lambda x, y: y + scale * x / torch.sqrt((x * x).sum() / x.numel() + 1e-6)


def affine(w: Weights, name: str, v: Tensor) -> Tensor:
    return w[f"{name}.weight"] @ v + w[f"{name}.bias"]


def projected(w: Weights, name: str, v: Tensor) -> Tensor:
    return affine(w, f"{name}.2", relu(affine(w, f"{name}.0", v)))


def generated(w: Weights, heads: str, hidden: Tensor, copy_: int, shapes: dict[str, tuple[int, ...]]) -> Weights:
    """Each tensor is a linear map of the hidden vector, reshaped row by row."""
    p = {}
    for name, shape in shapes.items():
        head = f"{name}_{'x'.join(map(str, shape))}"
        flat = hidden @ w[f"{heads}.weights.{head}"][copy_] + w[f"{heads}.biases.{head}"][copy_, 0]
        p[name] = flat.reshape(shape)
    return p


PLAIN = {"down": (WIDTH, SIZE), "down_bias": (SIZE,), "up": (SIZE, WIDTH), "up_bias": (WIDTH,)}
NORMED = {**PLAIN, "scale": (WIDTH,), "shift": (WIDTH,)}


def stored(w: Weights, prefix: str, key: str, row: int) -> Weights:
    """The tensors of one site, of the set in `row`."""
    start = f"{prefix}table.{key}."
    return {name.removeprefix(start): tensor[row] for name, tensor in w.items() if name.startswith(start)}


# --- the methods ---


def norms(w: Weights, family: str) -> list[Change]:
    key = "parts.norms.table.{}.scale"
    return [Change(path, shifted_norm(w[key.format(path.replace(".", "/"))][0])) for path in norm_paths(family)]


def lora(w: Weights, family: str, row: int) -> list[Change]:
    found = [(path, stored(w, "", path.replace(".", "/"), row)) for path in query_and_value(family)]
    return [Change(path, low_rank(p["a"], p["b"])) for path, p in found]


def houlsby(w: Weights, family: str, row: int) -> list[Change]:
    found = [(block, stored(w, "parts.adapters.", block.key, row)) for block in blocks(family)]
    return norms(w, family) + [Change(block.writes, bottleneck(p, gelu_new, reads_output=True)) for block, p in found]


def parallel(w: Weights, family: str, row: int) -> list[Change]:
    found = [(block, stored(w, "", block.key, row)) for block in blocks(family) if block.role == "ffn"]
    return [Change(block.writes, bottleneck(p, relu, reads_output=False), block.reads) for block, p in found]


def hyperformer(w: Weights, family: str, task: int) -> list[Change]:
    hidden = projected(w, "parts.generated.projector", w["parts.generated.task_embedding.weight"][task])
    found = [(block, generated(w, "parts.generated.heads", hidden, i, NORMED)) for i, block in enumerate(blocks(family))]
    return norms(w, family) + [Change(block.writes, bottleneck(p, gelu_new, reads_output=True)) for block, p in found]


def hyperformer_shared(w: Weights, family: str, task: int) -> list[Change]:
    changes = norms(w, family)
    for block in blocks(family):
        net = f"parts.generated.stacks.{block.stack}"
        layer = w[f"{net}.layer_embedding.weight"][block.layer]
        position = w[f"{net}.position_embedding.weight"][("attention", "ffn").index(block.role)]
        joint = torch.cat([w["parts.generated.task_embedding.weight"][task], layer, position])
        hidden = standardised(projected(w, f"{net}.projector", joint), 1e-6) * w[f"{net}.norm.weight"] + w[f"{net}.norm.bias"]
        p = generated(w, f"{net}.heads", hidden, 0, NORMED)
        changes.append(Change(block.writes, bottleneck(p, gelu_new, reads_output=True)))
    return changes


def hyperdecoder_encoder(w: Weights) -> list[Change]:
    ffn = [block for block in blocks("t5_v11") if (block.stack, block.role) == ("encoder", "ffn")]
    found = [(block, stored(w, "parts.encoder.", block.key, 0)) for block in ffn]
    return [Change(block.writes, bottleneck(p, relu, reads_output=False), block.reads) for block, p in found]


def hyperdecoder(w: Weights, states: Tensor) -> list[Change]:
    """`states` (n, d): the encoder's final states of the row's real tokens."""
    mean = sum(states.unbind(0)) / states.shape[0]
    net = "parts.decoder"
    encoded = affine(w, f"{net}.mlp.2", relu(affine(w, f"{net}.mlp.0", mean)))
    changes = hyperdecoder_encoder(w)
    for block in blocks("t5_v11"):
        if (block.stack, block.role) == ("decoder", "ffn"):
            joint = torch.cat([encoded, w[f"{net}.layer_embedding.weight"][block.layer]])
            p = generated(w, f"{net}.heads", relu(affine(w, f"{net}.trunk", joint)), 0, PLAIN)
            changes.append(Change(block.writes, bottleneck(p, relu, reads_output=False), block.reads))
    return changes


# --- running the reference ---


def run(family: str, changes: list[Change], inputs: dict[str, Tensor]) -> Any:
    """The bare backbone's output for a single row, with the changes applied position by position."""
    model = bare(family)
    for change in changes:
        _hang(model, change)
    with torch.no_grad():
        return model(**inputs)


def _hang(model: nn.Module, change: Change) -> None:
    stream: list[Tensor] = []
    if change.reads is not None:
        model.get_submodule(change.reads).register_forward_pre_hook(lambda module, args: stream.append(args[0]))

    def hook(module: nn.Module, args: tuple[Tensor, ...], y: Tensor) -> Tensor:
        x = stream.pop() if change.reads is not None else args[0]
        return torch.stack([change.apply(x[0, i], y[0, i]) for i in range(y.shape[1])]).unsqueeze(0)

    model.get_submodule(change.path).register_forward_hook(hook)


def padded(encoder_decoder: bool) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(3, 64, (len(LENGTHS), max(LENGTHS)), generator=generator)
    mask = torch.tensor([[int(i < length) for i in range(max(LENGTHS))] for length in LENGTHS])
    inputs = {"input_ids": torch.where(mask == 1, ids, PAD), "attention_mask": mask}
    return {**inputs, "decoder_input_ids": torch.randint(3, 64, (len(LENGTHS), 4), generator=generator)} if encoder_decoder else inputs


def unpadded(inputs: dict[str, Tensor], row: int) -> dict[str, Tensor]:
    """One row without its padding."""
    return {name: t[row : row + 1, : None if name == "decoder_input_ids" else LENGTHS[row]] for name, t in inputs.items()}


def adapted_by(method: Method, family: str) -> Adapted:
    torch.manual_seed(0)
    adapted = method(bare(family), tasks=TASKS).to(torch.float64).eval()
    disturb(adapted)
    return adapted


def check(adapted: Adapted, family: str, expected: Callable[[Weights, dict[str, Tensor], int], Tensor]) -> None:
    """The whole padded batch of mixed tasks, against each row on its own; and the change must not be small."""
    inputs = padded(family != "llama")
    tasks = torch.tensor(TASK_OF_ROW) if adapted.source.needs_task else None
    with torch.no_grad():
        found, plain = adapted(**inputs, task=tasks).logits, bare(family)(**inputs).logits
    assert (found - plain).abs().mean() > 1e-2
    weights = {name: tensor.clone() for name, tensor in adapted.source.state_dict().items()}
    for row, length in enumerate(LENGTHS):
        reference = expected(weights, unpadded(inputs, row), row)
        assert_close(found[row, : reference.shape[1]], reference[0], **EXACT)
        assert reference.shape[1] == (4 if family != "llama" else length)


CASES = {
    "lora": (methods.lora(rank=RANK, alpha=ALPHA), lora, False),
    "lora_per_task": (methods.lora(rank=RANK, alpha=ALPHA, per_task=True), lora, True),
    "houlsby": (methods.houlsby(reduction=4), houlsby, False),
    "houlsby_per_task": (methods.houlsby(reduction=4, per_task=True), houlsby, True),
    "parallel": (methods.parallel(size=SIZE), parallel, False),
    "parallel_per_task": (methods.parallel(size=SIZE, per_task=True), parallel, True),
    "hyperformer": (methods.hyperformer(reduction=4, task_width=12, hidden=16, width=8), hyperformer, True),
    "hyperformer_shared": (methods.hyperformer(shared=True, reduction=4, task_width=12, hidden=16, width=8), hyperformer_shared, True),
}


@pytest.mark.parametrize("family", ["t5_v11", "llama"])
@pytest.mark.parametrize("name", CASES)
def test_method_equals_its_equations(name, family):
    method, reference, per_task = CASES[name]

    def expected(w: Weights, inputs: dict[str, Tensor], row: int) -> Tensor:
        return run(family, reference(w, family, TASK_OF_ROW[row] if per_task else 0), inputs).logits

    check(adapted_by(method, family), family, expected)


def test_hyperdecoder_equals_its_equations():
    def expected(w: Weights, inputs: dict[str, Tensor], row: int) -> Tensor:
        states = run("t5_v11", hyperdecoder_encoder(w), inputs).encoder_last_hidden_state[0]
        return run("t5_v11", hyperdecoder(w, states), inputs).logits

    check(adapted_by(methods.hyperdecoder(encoder=SIZE, decoder=SIZE, hidden=16), "t5_v11"), "t5_v11", expected)


def test_reference_notices_a_wrong_site():
    """The reference would not pass by accident: without one site's change it differs by far more than the tolerance."""
    adapted = adapted_by(CASES["lora"][0], "t5_v11")
    inputs = unpadded(padded(True), 0)
    with torch.no_grad():
        found = adapted(**inputs).logits
    changes = lora(dict(adapted.source.state_dict()), "t5_v11", 0)
    assert_close(run("t5_v11", changes, inputs).logits, found, **EXACT)
    assert all((run("t5_v11", changes[:i] + changes[i + 1 :], inputs).logits - found).abs().max() > 1e-4 for i in range(len(changes)))


# --- trained norms ---


@pytest.mark.parametrize(
    ("family", "tolerance"),
    [("gpt2", 1e-10), ("bart", 1e-10), ("t5_v11", 1e-5), ("llama", 1e-5), ("gemma3", 1e-5)],  # 1e-5: these backbones' norms compute in fp32
)
def test_trained_norms_equal_changed_weights(family, tolerance):
    """A fresh Houlsby adapter is the identity, which leaves the norms: T5's and Llama's RMS norm, Gemma's 1 + w, layer norms with a bias."""
    torch.manual_seed(0)
    adapted = methods.houlsby(reduction=4)(bare(family)).to(torch.float64).eval()
    model, inputs = bare(family), padded(adapted.backbone.config.is_encoder_decoder)
    with torch.no_grad():
        plain = model(**inputs).logits
        names = [name for name, _ in model.named_modules() if name.split(".")[-1] in NORM_NAMES]
        for name in names:
            _move_norm(adapted.source, model, name)
        found, changed = adapted(**inputs).logits, model(**inputs).logits
    assert set(adapted.source.get_submodule("parts.norms.table")._modules) == {name.replace(".", "/") for name in names}
    real = torch.ones_like(inputs["input_ids"], dtype=torch.bool) if "decoder_input_ids" in inputs else inputs["attention_mask"].bool()
    real = real[:, : found.shape[1]]
    assert_close(found[real], changed[real], rtol=0, atol=tolerance)
    assert (found - plain)[real].abs().mean() > 1e-2


NORM_NAMES = {
    *("ln_1", "ln_2", "ln_f"),
    *("self_attn_layer_norm", "encoder_attn_layer_norm", "final_layer_norm", "layer_norm"),
    *("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm", "q_norm", "k_norm", "norm"),
}


def _move_norm(source: nn.Module, model: nn.Module, name: str) -> None:
    """The same random step for the source's shift and for the norm's own weight and bias."""
    shift = source.get_submodule(f"parts.norms.table.{name.replace('.', '/')}")
    norm = model.get_submodule(name)
    for ours, theirs in (("scale", "weight"), ("shift", "bias")):
        own = dict(norm.named_parameters()).get(theirs)
        assert (own is not None) == (ours in dict(shift.named_parameters()))
        if own is not None:
            step = 0.3 * torch.randn(own.shape, dtype=torch.float64)
            own += step
            shift.get_parameter(ours)[0] += step


# --- initialisation ---


def start(method: Method, family: str = "t5_v11") -> Weights:
    torch.manual_seed(0)
    return dict(method(bare(family), tasks=16).source.state_dict())


def named(w: Weights, *parts: str) -> dict[str, Tensor]:
    found = {name: tensor for name, tensor in w.items() if any(part in name for part in parts)}
    assert found
    return found


def uniform_within(tensor: Tensor, bound: float) -> bool:
    """All inside (-bound, bound), and spread as a uniform law is."""
    return bool(tensor.abs().max() <= bound) and float(tensor.std()) == pytest.approx(bound / math.sqrt(3), rel=0.1)


@pytest.mark.parametrize("shared", [False, True])
def test_hyperformer_starts_as_published(shared):
    """Every linear layer N(0, 0.01^2) with bias 0, embeddings N(0, 1); 2 to 4 thousand draws tell the deviation to 10 per cent."""
    w = start(methods.hyperformer(shared=shared, reduction=4))
    embeddings = torch.cat([t.flatten() for t in named(w, "embedding").values()])
    assert float(embeddings.std()) == pytest.approx(1, abs=0.1)
    assert abs(float(embeddings.mean())) < 0.1
    linears = {n: t for n, t in w.items() if ("projector" in n and n.endswith("weight")) or ".heads.weights." in n}
    assert all(float(t.std()) == pytest.approx(0.01, rel=0.1) for t in linears.values())
    biases = {n: t for n, t in w.items() if ("projector" in n and n.endswith("bias")) or ".heads.biases." in n}
    assert not any(t.any() for t in biases.values())
    norms_of_stacks = {n: t for n, t in w.items() if ".stacks." in n and ".norm." in n}
    assert all(bool((t == (1 if n.endswith("weight") else 0)).all()) for n, t in norms_of_stacks.items())
    assert len(norms_of_stacks) == (4 if shared else 0)
    shifts = {n: t for n, t in w.items() if n.startswith("parts.norms.")}
    assert not any(t.any() for t in shifts.values())
    assert set(w) == {*named(w, "embedding"), *linears, *biases, *norms_of_stacks, *shifts}


def test_hyperdecoder_starts_as_published():
    """Heads U(-c, c) with c = 1e-3 sqrt(3 / (hidden * fan)); fan: the bottleneck for up weights, the width for down weights, 1 for biases."""
    hidden, size = 64, 16
    w = start(methods.hyperdecoder(encoder=size, decoder=size, hidden=hidden))
    fans = {f"down_{WIDTH}x{size}": WIDTH, f"up_{size}x{WIDTH}": size, f"down_bias_{size}": 1, f"up_bias_{WIDTH}": 1}
    heads = {name.rpartition(".")[2]: tensor for name, tensor in named(w, ".heads.weights.").items()}
    assert heads.keys() == fans.keys()
    for name, fan in fans.items():
        assert uniform_within(heads[name], 1e-3 * math.sqrt(3 / (hidden * fan)))
    assert not any(t.any() for t in named(w, ".heads.biases.").values())
    assert w["parts.decoder.layer_embedding.weight"].shape == (2, 10)
    assert float(w["parts.decoder.layer_embedding.weight"].std()) == pytest.approx(1, abs=0.5)
    _check_xavier({n.removeprefix("parts.encoder."): t for n, t in named(w, "parts.encoder.").items()}, size)


def test_parallel_starts_as_published():
    _check_xavier(start(methods.parallel(size=16)), 16)


def _check_xavier(w: Weights, size: int) -> None:
    """Xavier-uniform with gain 1e-4 for both weights, zero biases."""
    for name, tensor in w.items():
        if name.endswith("bias"):
            assert not tensor.any()
        else:
            assert uniform_within(tensor, 1e-4 * math.sqrt(6 / (WIDTH + size)))


def test_houlsby_starts_as_the_identity():
    w = start(methods.houlsby(reduction=4))
    for name, tensor in named(w, "parts.adapters.").items():
        if name.endswith((".down", ".up")):
            assert float(tensor.std()) == pytest.approx(0.01, rel=0.2)
        else:
            assert not tensor.any()


def test_lora_starts_with_b_at_zero():
    """And a as a linear layer's weight starts: Kaiming-uniform with a = sqrt(5), which is U(-1 / sqrt(d_in), 1 / sqrt(d_in))."""
    for name, tensor in start(methods.lora(rank=8, sites="all", per_task=True)).items():
        if name.endswith(".b"):
            assert not tensor.any()
        else:
            assert uniform_within(tensor, 1 / math.sqrt(tensor.shape[-2]))
