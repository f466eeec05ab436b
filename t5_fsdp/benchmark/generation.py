"""Summaries and their ROUGE: this program's evaluation, and Seq2SeqTrainer.predict."""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from t5_fsdp.benchmark.ranks import report
from t5_fsdp.benchmark.workload import PREFIX, load_fitting_tokenizer
from t5_fsdp.benchmark.world import chosen_device, entered_world, quiet
from t5_fsdp.config import EvaluationConfig, ModelConfig
from t5_fsdp.console import Console
from t5_fsdp.data.tokenization import encode_sources, load_tokenizer
from t5_fsdp.evaluation.evaluate import Generator, score_summaries, summarize
from t5_fsdp.evaluation.generation import GenerationSettings
from t5_fsdp.evaluation.rouge import METRICS, RougeSettings, score_pairs
from t5_fsdp.model.build import build_with_weights, draw_weights, has_own_head
from t5_fsdp.model.configuration import resolve_spec
from t5_fsdp.model.pretrained import open_pretrained
from t5_fsdp.parallel.common import DTYPES


@dataclass(frozen=True)
class GenerationWork:
    """What is decoded.

    Attributes:
        checkpoint: Hugging Face folder with its tokenizer.
        rows: document and summary of each example.
        device: cpu or cuda.
    """

    checkpoint: str
    rows: list[dict[str, str]]
    num_beams: int
    max_new_tokens: int
    max_source_tokens: int
    max_target_tokens: int
    device: str
    param_dtype: str
    seed: int


def write_random_model(folder: Path, model: dict[str, Any], tokenizer: str, seed: int) -> None:
    """A Hugging Face folder with random weights, for those who have no trained ones."""
    quiet()
    loaded = load_fitting_tokenizer(tokenizer, model["vocab_size"])
    spec = resolve_spec(ModelConfig(name=None, init="random", config=model), loaded)
    made = build_with_weights(spec, draw_weights(spec, seed), "sdpa_per_layer")
    assert has_own_head(made) == spec.own_head
    made.save_pretrained(folder)
    loaded.save_pretrained(folder)


def ours(work: GenerationWork, rounds: int) -> None:
    """On a rank: as `eval_rouge` does it, once a turn."""
    with entered_world(work.device) as world:
        evaluation = EvaluationConfig(num_beams=work.num_beams, max_new_tokens=work.max_new_tokens)
        tokenizer = load_tokenizer(work.checkpoint)
        options = ModelConfig(name=work.checkpoint)
        spec = resolve_spec(options, tokenizer)
        opened = open_pretrained(options, spec)
        spec.own_head = opened.own_head
        dtype = DTYPES[work.param_dtype]
        weights = {n: t.to(device=world.device, dtype=dtype) for n, t in opened.tensors.items()}
        generator = Generator.whole(build_with_weights(spec, weights))
        settings = GenerationSettings.of(evaluation, work.seed)
        examples = [{"id": str(n), **_named(row)} for n, row in enumerate(work.rows)]
        report(None)
        for _ in range(rounds):
            world.barrier()
            began = time.perf_counter()
            sources = encode_sources(
                tokenizer, [row["document"] for row in work.rows], PREFIX, work.max_source_tokens
            )
            made = summarize(generator, tokenizer, sources, settings, world, Console(False))
            generated = time.perf_counter() - began
            if made is not None:
                score_summaries(examples, made, tokenizer, RougeSettings())
            texts = None if made is None else [summary.text for summary in made]
            report(_figures(work, began, generated, texts))


def seq2seq_trainer(work: GenerationWork, rounds: int) -> None:
    """On a rank: `predict` with `predict_with_generate`, then rouge-score, as its users do it."""
    import os

    import numpy as np
    from rouge_score.rouge_scorer import RougeScorer
    from transformers import (
        AutoModelForSeq2SeqLM,
        DataCollatorForSeq2Seq,
        Seq2SeqTrainer,
        Seq2SeqTrainingArguments,
    )

    quiet()
    chosen_device(work.device, int(os.environ["RANK"]))
    tokenizer = load_tokenizer(work.checkpoint)
    model = AutoModelForSeq2SeqLM.from_pretrained(work.checkpoint)
    with tempfile.TemporaryDirectory() as scratch:
        trainer = Seq2SeqTrainer(
            model,
            Seq2SeqTrainingArguments(
                scratch,
                per_device_eval_batch_size=16,
                predict_with_generate=True,
                generation_num_beams=work.num_beams,
                generation_max_length=work.max_new_tokens + 1,  # the start counts there
                bf16_full_eval=work.param_dtype == "bf16",
                use_cpu=work.device == "cpu",
                report_to=[],
                disable_tqdm=True,
            ),
            data_collator=DataCollatorForSeq2Seq(tokenizer, model),
        )
        report(None)
        for _ in range(rounds):
            began = time.perf_counter()
            found: Any = trainer.predict(_encoded(work, tokenizer))  # type: ignore[arg-type]
            ids = np.where(found.predictions < 0, tokenizer.pad_token_id, found.predictions)
            # The last batch is filled up with examples of the first.
            texts = tokenizer.batch_decode(ids[: len(work.rows)], skip_special_tokens=True)
            generated = time.perf_counter() - began
            is_main = trainer.is_world_process_zero()
            if is_main:
                scorer = RougeScorer(list(METRICS), use_stemmer=True)
                for row, text in zip(work.rows, texts, strict=True):
                    scorer.score(row["summary"], text)
            report(_figures(work, began, generated, texts if is_main else None))


def _encoded(work: GenerationWork, tokenizer: Any) -> list[dict[str, Any]]:
    sources = tokenizer(
        [PREFIX + row["document"] for row in work.rows],
        max_length=work.max_source_tokens,
        truncation=True,
    )
    targets = tokenizer(
        text_target=[row["summary"] for row in work.rows],
        max_length=work.max_target_tokens,
        truncation=True,
    )
    return [
        {"input_ids": ids, "attention_mask": mask, "labels": labels}
        for ids, mask, labels in zip(
            sources["input_ids"], sources["attention_mask"], targets["input_ids"], strict=True
        )
    ]


def _named(row: dict[str, str]) -> dict[str, str]:
    return {"document": row["document"], "reference": row["summary"]}


def _figures(
    work: GenerationWork, began: float, generated: float, texts: list[str] | None
) -> dict[str, float]:
    """On rank 0; ROUGE is taken by one scorer for all, outside of the time."""
    if texts is None:
        return {}
    seconds = time.perf_counter() - began
    scores = score_pairs(texts, [row["summary"] for row in work.rows], RougeSettings(), 1)
    means = dict(zip(METRICS, scores.fmeasure.mean(axis=0).tolist(), strict=True))
    return {
        "seconds": seconds,
        "generating_seconds": generated,
        "summaries_per_second": len(work.rows) / seconds,
        **{name: means[name] for name in ("rouge1", "rouge2", "rougeL", "rougeLsum")},
    }
