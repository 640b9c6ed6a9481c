from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from cases import adapt
from polypeft import Adapted
from polypeft.errors import UserError
from polypeft.evaluate import Decoding, Scored, evaluate_task, log_likelihood, predict, summary
from polypeft.tasks.collate import Collator, Example, Text
from polypeft.tasks.task import Row, Task
from texts import tokenizer

FAMILIES = pytest.mark.parametrize("family", ["t5_v11", "llama"])
ANSWERS = ("yes", "no", "w9 w10 w11")


def opened(family: str, method: str = "hyperformer") -> tuple[Adapted, Text]:
    adapted = adapt(method, family)
    encoder_decoder = bool(adapted.backbone.config.is_encoder_decoder)
    return adapted, Text(tokenizer(ends=encoder_decoder), encoder_decoder)


def examples_of(text: Text) -> list[Example]:
    """Sources of different lengths, in no order, of three tasks."""
    sources = ["w20 w21 w22", "w30", "w40 w41 w42 w43 w44 w45", "w50 w51", "w60 w61 w62 w63", "w23", "w33 w34 w35"]
    rows = [Row(f"test:{i}", source, "yes") for i, source in enumerate(sources)]
    return [replace(example, task=i % 3) for i, example in enumerate(text.encode(rows, 0, "t")[0])]


def generated_alone(adapted: Adapted, text: Text, example: Example, beams: int) -> str:
    prompt = torch.tensor([example.prompt])
    tokens = adapted.generate(
        prompt,
        task=example.task,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=6,
        num_beams=beams,
        do_sample=False,
        pad_token_id=text.pad,
        eos_token_id=text.end,
    )[0]
    return text.tokenizer.decode(tokens if text.encoder_decoder else tokens[prompt.shape[1] :], skip_special_tokens=True).strip()


def likelihood_by_hand(adapted: Adapted, text: Text, example: Example, target: tuple[int, ...]) -> float:
    """The sum of log-probabilities of the target, one token after the other."""
    total, prompt = 0.0, list(example.prompt)
    for i, token in enumerate(target):
        with torch.no_grad():
            if text.encoder_decoder:
                so_far = torch.tensor([[adapted.backbone.config.decoder_start_token_id, *target[:i]]])
                logits = adapted(input_ids=torch.tensor([prompt]), decoder_input_ids=so_far, task=example.task).logits
            else:
                logits = adapted(input_ids=torch.tensor([[*prompt, *target[:i]]]), task=example.task).logits
        total += float(torch.log_softmax(logits[0, -1], -1)[token])
    return total


@FAMILIES
@pytest.mark.parametrize("beams", [1, 3])
def test_generated_predictions_are_those_of_one_row_at_a_time(family, beams):
    adapted, text = opened(family)
    examples = examples_of(text)
    found = predict(adapted, text, examples, Decoding(batch_size=3, beams=beams, max_new_tokens=6))
    assert found == [generated_alone(adapted, text, example, beams) for example in examples]
    assert len(set(found)) > 2  # a constant model would hide a wrong order


@FAMILIES
def test_generated_predictions_of_an_instance_method_or_lora(family):
    adapted, text = opened(family, "hyperdecoder" if family == "t5_v11" else "lora_per_task")
    examples = examples_of(text)
    found = predict(adapted, text, examples, Decoding(batch_size=4, max_new_tokens=6))
    assert found == [generated_alone(adapted, text, example, 1) for example in examples]


@FAMILIES
def test_ranked_predictions_are_those_of_one_row_at_a_time(family):
    adapted, text = opened(family)
    examples = examples_of(text)
    found = predict(adapted, text, examples, Decoding("rank", batch_size=4), ANSWERS)
    expected = []
    for example in examples:
        scores = [likelihood_by_hand(adapted, text, example, target) for target in text.targets(ANSWERS)]
        expected.append(ANSWERS[scores.index(max(scores))])
    assert found == expected
    assert len(set(found)) > 1 or family == "t5_v11"  # the tiny T5 has a favourite


@FAMILIES
def test_log_likelihood_is_the_sum_over_target_tokens(family):
    adapted, text = opened(family)
    examples = [replace(e, target=text.targets([ANSWERS[i % 3]])[0]) for i, e in enumerate(examples_of(text))]
    found = log_likelihood(adapted, Collator(text)(examples))
    assert found.shape == (len(examples),)
    by_hand = torch.tensor([likelihood_by_hand(adapted, text, e, e.target) for e in examples], dtype=found.dtype)
    torch.testing.assert_close(found, by_hand, rtol=1e-5, atol=1e-5)
    assert not found.requires_grad


@FAMILIES
def test_the_longest_target_bounds_generation_by_default(family):
    adapted, text = opened(family)
    examples = [replace(e, target=(6, 6, 1)) for e in examples_of(text)]
    found = predict(adapted, text, examples, Decoding())
    assert max(len(prediction.split()) for prediction in found) <= 3
    assert found == predict(adapted, text, examples, Decoding(max_new_tokens=3))


def test_rank_without_answers_is_refused():
    adapted, text = opened("llama")
    with pytest.raises(UserError, match="decode: rank chooses among a task's answers, but this task has none: give `answers:`"):
        predict(adapted, text, examples_of(text), Decoding("rank"))


@pytest.mark.parametrize("training", [True, False])
def test_the_training_mode_is_restored_also_after_an_error(training):
    adapted, text = opened("llama")
    adapted.train(training)
    seen = []
    adapted.backbone.register_forward_pre_hook(lambda module, args: seen.append(module.training))
    predict(adapted, text, examples_of(text)[:2], Decoding(max_new_tokens=2))
    assert adapted.training is training
    assert seen
    assert not any(seen)
    with pytest.raises(UserError, match="rank"):
        predict(adapted, text, examples_of(text), Decoding("rank"))
    assert adapted.training is training
    assert adapted.backbone.training is training


def test_no_examples_have_no_predictions():
    adapted, text = opened("llama")
    assert predict(adapted, text, [], Decoding()) == []
    assert predict(adapted, text, [], Decoding("rank"), ANSWERS) == []


def test_evaluate_task_scores_predictions_against_targets(monkeypatch):
    adapted, text = opened("llama")
    task = Task(name="rte", source="s", target="t", test="x.jsonl", answers=("yes", "no"), metrics=("accuracy", "f1"))
    rows = [Row(f"test:{i}", f"w{20 + i}", target) for i, target in enumerate(["yes", "no", "no", "yes"])]
    train = [Row("train:1", "w9", "no"), Row("train:2", "w9", "no"), Row("train:3", "w9", "yes")]
    seen: list[Example] = []

    def answers(adapted, text, examples, decoding, answers) -> list[str]:
        seen.extend(examples)
        return ["yes", "no", "yes", "yes"]

    monkeypatch.setattr("polypeft.evaluate.predict", answers)
    found = evaluate_task(adapted, text, task, text.encode(rows, 2, task.name)[0], rows, Decoding(), train)
    assert [example.task for example in seen] == [2, 2, 2, 2]
    assert found.metrics["accuracy"] == pytest.approx(0.75)
    assert found.metrics["f1"] == pytest.approx(2 / 3)  # precision 1, recall 1/2 of "no"
    assert found.score == pytest.approx((0.75 + 2 / 3) / 2)
    assert found.majority == pytest.approx((0.5 + 2 / 3) / 2)  # always "no": precision 1/2, recall 1
    assert (found.rows, found.predictions) == (4, ("yes", "no", "yes", "yes"))
    assert evaluate_task(adapted, text, task, text.encode(rows, 2, task.name)[0], rows, Decoding()).majority is None


def test_summary_averages_over_tasks():
    first = Scored({"accuracy": 0.5, "f1": 1.0}, 0.75, 10, 0.5, ())
    second = Scored({"accuracy": 0.25}, 0.25, 1000, 0.1, ())
    found = summary({"a": first, "b": second})
    assert found["macro"] == pytest.approx(0.5)
    assert found["majority_macro"] == pytest.approx(0.3)
    assert found["tasks"]["a"] == {"metrics": {"accuracy": 0.5, "f1": 1.0}, "score": 0.75, "majority": 0.5, "rows": 10}
    assert summary({"a": first, "b": replace(second, majority=None)})["majority_macro"] is None


def test_a_likelihood_of_nothing_is_zero():
    adapted, text = opened("llama")
    batch = Collator(text)([Example("a", 0, (8, 9), ())])
    value: Tensor = log_likelihood(adapted, batch)
    assert math.isclose(float(value), 0.0)
