"""Times of a training step and of generation: every method, and PEFT's LoRA, as ratios to the bare frozen backbone.

    python benchmarks/step.py --shapes t5-base --methods lora peft-lora --json step.json

See README.md beside this file for how to read what it prints. Weights are random: only shapes matter to the clock.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from polypeft import Adapted, __version__, load_backbone, methods
from polypeft.method import Method
from polypeft.source import Joint, Source
from polypeft.timing import adapted_step, floor_step, in_turns

Run = Callable[[], object]
Clock = Callable[[], float]
CLOCKS: dict[str, Clock] = {"wall": time.perf_counter, "cpu": time.process_time}

METHODS: dict[str, Callable[[], Method]] = {
    "full": methods.full,
    "lora": methods.lora,
    "lora-per-task": partial(methods.lora, per_task=True),
    "houlsby": methods.houlsby,
    "parallel": methods.parallel,
    "hyperformer": methods.hyperformer,
    "hyperformer++": partial(methods.hyperformer, shared=True),
    "hyperdecoder": methods.hyperdecoder,
}
FLOOR, PEFT = "floor", "peft-lora"
ROWS = (FLOOR, PEFT, *METHODS)
NEEDS_ENCODER = ("hyperdecoder",)


@dataclass(frozen=True)
class Size:
    """Rows of a batch, source and target tokens of a row, tasks among the rows, tokens to generate."""

    rows: int
    source: int
    target: int
    tasks: int
    new_tokens: int


@dataclass(frozen=True)
class Contender:
    """Something to time. `made` counts, for each part of its source that makes parameters, how often it was called."""

    step: Run
    generate: Run
    made: dict[str, int]


@dataclass(frozen=True)
class Timing:
    """Seconds of the bare backbone and of a contender, run in turns; `made`: times that an adapter was made in one call."""

    base: list[float]
    own: list[float]
    made: int

    @property
    def ratios(self) -> list[float]:
        return [own / base for base, own in zip(self.base, self.own, strict=True)]

    def quartiles(self) -> tuple[float, float, float]:
        low, middle, high = statistics.quantiles(self.ratios, n=4, method="inclusive") if len(self.base) > 1 else self.ratios * 3
        return low, middle, high


def llama() -> PreTrainedModel:
    """A Llama of 98 million parameters in eval mode, weights from a fixed seed."""
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=4,
        tie_word_embeddings=True,
        pad_token_id=0,
    )
    torch.manual_seed(42)
    return LlamaForCausalLM(config).eval()


SHAPES: dict[str, Callable[[], PreTrainedModel]] = {
    "t5-small": partial(load_backbone, "configs/t5-small.json"),
    "t5-base": partial(load_backbone, "configs/t5-base.json"),
    "llama-98m": llama,
}


def batch_for(backbone: PreTrainedModel, size: Size) -> dict[str, Tensor]:
    """input_ids, attention_mask (B, n) and labels, all tokens real; on a decoder-only backbone the target follows the source in input_ids."""
    generator = torch.Generator().manual_seed(0)

    def tokens(n: int) -> Tensor:
        return torch.randint(3, backbone.config.vocab_size, (size.rows, n), generator=generator)

    ids, target = tokens(size.source), tokens(size.target)
    labels = target
    if not backbone.config.is_encoder_decoder:
        labels = torch.cat([torch.full_like(ids, -100), target], 1)
        ids = torch.cat([ids, target], 1)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def bare(backbone: PreTrainedModel, batch: Mapping[str, Tensor], size: Size) -> Contender:
    backbone.requires_grad_(False)
    generate: Any = backbone.generate
    return Contender(floor_step(backbone, batch), partial(generate, **prompt(batch, size)), {})


def ours(backbone: PreTrainedModel, batch: Mapping[str, Tensor], size: Size, method: Method) -> Contender:
    """Rows of all tasks mixed, also where the method has no use for them."""
    adapted = method(backbone, size.tasks)
    task = torch.arange(size.rows) % size.tasks
    step = adapted_step(adapted, {**batch, "task": task})
    return Contender(step, partial(adapted.generate, task=task, **prompt(batch, size)), counted(adapted))


def peft_lora(backbone: PreTrainedModel, batch: Mapping[str, Tensor], size: Size) -> Contender:
    """PEFT's LoRA of the rank, the scale and at the sites of ours."""
    mine = methods.lora()
    adapted = mine(backbone)
    paths = [site.path for site in adapted.deltas]
    arguments = {"r": mine.arguments["rank"], "lora_alpha": mine.arguments["alpha"], "lora_dropout": 0.0}
    model: Any = peft.get_peft_model(adapted.detach(), peft.LoraConfig(target_modules=paths, **arguments)).eval()
    if trainable(model) != trainable(adapted.source):
        raise RuntimeError(f"PEFT trains {trainable(model)} parameters and polypeft {trainable(adapted.source)}: the sites differ")

    def step() -> None:
        model.zero_grad(set_to_none=True)
        model(**batch).loss.backward()

    return Contender(step, partial(model.generate, **prompt(batch, size)), {})


def trainable(module: torch.nn.Module) -> int:
    return sum(p.numel() for p in module.parameters() if p.requires_grad)


def prompt(batch: Mapping[str, Tensor], size: Size) -> dict[str, Any]:
    """Arguments of a greedy `generate` of exactly `new_tokens` tokens."""
    given = {name: batch[name][:, : size.source] for name in ("input_ids", "attention_mask")}
    return {**given, "do_sample": False, "num_beams": 1, "min_new_tokens": size.new_tokens, "max_new_tokens": size.new_tokens}


def counted(adapted: Adapted) -> dict[str, int]:
    """A count for each part of the source that makes parameters, kept by hooks."""
    parts = {name: part for name, part in adapted.source.named_modules() if isinstance(part, Source) and not isinstance(part, Joint)}
    made = dict.fromkeys(parts, 0)

    def hook(name: str) -> Callable[..., None]:
        def called(*_: object) -> None:
            made[name] += 1

        return called

    for name, part in parts.items():
        part.register_forward_hook(hook(name))
    return made


def contender(name: str, backbone: PreTrainedModel, batch: Mapping[str, Tensor], size: Size) -> Contender:
    if name == FLOOR:
        return bare(backbone, batch, size)
    if name == PEFT:
        return peft_lora(backbone, batch, size)
    return ours(backbone, batch, size, METHODS[name]())


def timed(base: Run, own: Run, repeats: int, clock: Clock, made: dict[str, int]) -> Timing:
    """Run `base` and `own` in turns, once to warm up and then `repeats` times."""
    before = dict(made)
    found = in_turns(base, own, repeats, clock)
    calls = [(made[name] - before[name]) / (repeats + 1) for name in made]
    return Timing(*found, round(max(calls, default=0)))


def measured(shape: str, names: list[str], size: Size, repeats: int, clock: Clock, decode: bool) -> dict[str, dict[str, Timing]]:
    """For each row of the table its timings, {"step": ..., "generate": ...}; printed as they come."""
    backbone = SHAPES[shape]()
    batch = batch_for(backbone, size)
    floor = bare(copy.deepcopy(backbone), batch, size)
    found: dict[str, dict[str, Timing]] = {}
    for name in [FLOOR, *(name for name in names if name != FLOOR)]:
        if name in NEEDS_ENCODER and not backbone.config.is_encoder_decoder:
            continue
        own = contender(name, copy.deepcopy(backbone), batch, size)
        found[name] = {"step": timed(floor.step, own.step, repeats, clock, own.made)}
        if decode:
            found[name]["generate"] = timed(floor.generate, own.generate, repeats, clock, own.made)
        print(line(shape, name, found, size), flush=True)
    return found


def line(shape: str, name: str, found: Mapping[str, Mapping[str, Timing]], size: Size) -> str:
    """A row of the table; "~" before a ratio that the floor against itself would give too."""
    step = found[name]["step"]
    cells = [shape, name, f"{1000 * statistics.median(step.base):.0f}", f"{1000 * statistics.median(step.own):.0f}"]
    cells += ratio_cells(step, found[FLOOR]["step"])
    if "generate" in found[name]:
        generate = found[name]["generate"]
        tokens = size.rows * size.new_tokens
        cells += [f"{tokens / statistics.median(generate.base):.0f}", f"{tokens / statistics.median(generate.own):.0f}"]
        cells += [*ratio_cells(generate, found[FLOOR]["generate"]), str(generate.made)]
    return "| " + " | ".join(cells) + " |"


def ratio_cells(timing: Timing, floor: Timing) -> list[str]:
    low, middle, high = timing.quartiles()
    noise = max(abs(1 - floor.quartiles()[0]), abs(floor.quartiles()[2] - 1))
    return [("~" if abs(middle - 1) <= noise else "") + f"{middle:.3f}", f"{low:.3f}-{high:.3f}"]


def header(decode: bool) -> str:
    cells = ["shape", "row", "floor ms", "step ms", "ratio", "quartiles"]
    if decode:
        cells += ["bare tok/s", "tok/s", "time ratio", "quartiles", "made"]
    return "| " + " | ".join(cells) + " |\n|" + "---|" * len(cells)


def machine(threads: int) -> dict[str, Any]:
    """What the numbers depend on."""
    cpu = Path("/proc/cpuinfo")
    models = [row.split(":", 1)[1].strip() for row in cpu.read_text().splitlines() if row.startswith("model name")] if cpu.exists() else []
    versions = {"polypeft": __version__, "torch": torch.__version__, "transformers": transformers.__version__, "peft": peft.__version__}
    return {"cpu": models[0] if models else platform.processor(), "threads": threads, "python": platform.python_version(), **versions}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--methods", nargs="+", choices=ROWS, default=list(ROWS), help="the floor against itself is always there")
    parser.add_argument("--repeats", type=int, default=9, help="pairs of runs for each row (default 9)")
    parser.add_argument("--rows", type=int, default=16, help="rows of the batch (default 16)")
    parser.add_argument("--source", type=int, default=64, help="source tokens of a row (default 64)")
    parser.add_argument("--target", type=int, default=32, help="target tokens of a row (default 32)")
    parser.add_argument("--tasks", type=int, default=8, help="tasks, in turn over the rows (default 8)")
    parser.add_argument("--new-tokens", type=int, default=32, help="tokens to generate (default 32); 0: do not generate")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch (default 1)")
    parser.add_argument(
        "--clock", choices=list(CLOCKS), default="wall", help="cpu: time of this process only, where others use the machine"
    )
    parser.add_argument("--quick", action="store_true", help="4 rows of 16 and 8 tokens, 8 new tokens, 3 repeats: does everything run?")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every time measured, with versions and machine")
    return parser.parse_args()


def main() -> None:
    given = arguments()
    torch.set_num_threads(given.threads)
    size = Size(given.rows, given.source, given.target, given.tasks, given.new_tokens)
    repeats, clock = given.repeats, CLOCKS[given.clock]
    if given.quick:
        size, repeats = Size(4, 16, 8, 4, 8), 3
    facts = {
        **machine(given.threads),
        "size": asdict(size),
        "repeats": repeats,
        "clock": given.clock,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S"),
    }
    print(json.dumps(facts), header(size.new_tokens > 0), sep="\n", flush=True)
    shapes = {shape: measured(shape, given.methods, size, repeats, clock, size.new_tokens > 0) for shape in given.shapes}
    if given.json is not None:
        times = {
            shape: {name: {kind: asdict(t) for kind, t in kinds.items()} for name, kinds in found.items()}
            for shape, found in shapes.items()
        }
        given.json.write_text(json.dumps({**facts, "shapes": times}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
