"""Summaries and ROUGE of this program against transformers' Seq2SeqTrainer, on two CPU ranks.

    OMP_NUM_THREADS=1 python -m tests.measure_generation --checkpoint HF_FOLDER --texts FILE.jsonl

Both decode the same documents with the same exported model and generation settings, then score:
Seq2SeqTrainer.predict with predict_with_generate at its defaults (float32, 16 examples a device),
and with bf16_full_eval; eval_rouge in bf16. Each is a fresh torchrun of two ranks that reports the
seconds of generating and scoring, without imports and loading. Run it on an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from typing import Any

from tests.conftest import ROOT


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--texts", required=True, help="jsonl with document and summary")
    parser.add_argument("--examples", type=int, default=1000)
    parser.add_argument("--beams", type=int, default=4)
    parser.add_argument("--max_new_tokens", type=int, default=32)
    parser.add_argument("--kind", choices=["ours", "fp32", "bf16"], help=argparse.SUPPRESS)
    parser.add_argument("--repeats", type=int, default=1)
    options = parser.parse_args()
    if options.kind is not None:
        measure(options)
        return
    seconds: dict[str, list[float]] = {}
    for _ in range(options.repeats):
        for kind in ("ours", "fp32", "bf16"):
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone",
                       "--nproc_per_node", "2", "-m", "tests.measure_generation", "--kind", kind,
                       *sys.argv[1:]]  # fmt: skip
            environment = {**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
            done = subprocess.run(
                command, cwd=ROOT, env=environment, capture_output=True, text=True
            )
            if done.returncode:
                sys.exit(done.stderr)
            line = next(x for x in done.stdout.splitlines() if x.startswith("seconds "))
            print(kind, line, flush=True)
            seconds.setdefault(kind, []).append(float(line.split()[1]))
    median = {kind: sorted(values)[len(values) // 2] for kind, values in seconds.items()}
    for kind in ("fp32", "bf16"):
        print(f"eval_rouge is {median[kind] / median['ours']:.2f} times as fast as {kind}")


def measure(options: Any) -> None:
    """On a rank: generate and score, and print how long that took."""
    from transformers import AutoTokenizer

    rows = read(options)
    tokenizer = AutoTokenizer.from_pretrained(options.checkpoint)
    run = ours if options.kind == "ours" else theirs
    seconds, predictions = run(options, rows, tokenizer)
    if predictions is not None:
        from t5_fsdp.evaluation.rouge import METRICS, RougeSettings, score_pairs

        scores = score_pairs(predictions, [row["summary"] for row in rows], RougeSettings(), 1)
        points = " / ".join(f"{100 * value:.2f}" for value in scores.fmeasure.mean(axis=0))
        print(f"seconds {seconds:.1f} {', '.join(METRICS)}: {points}", flush=True)
    sys.stdout.flush()
    os._exit(0)


def read(options: Any) -> list[dict[str, str]]:
    with open(options.texts, encoding="utf-8") as file:
        return [json.loads(line) for line in file][: options.examples]


def ours(options: Any, rows: Any, tokenizer: Any) -> tuple[float, list[str] | None]:
    from t5_fsdp.cli.loading import FoundModel, load_model
    from t5_fsdp.config import Config
    from t5_fsdp.console import Console
    from t5_fsdp.data.tokenization import encode_sources
    from t5_fsdp.distributed import enter_world, read_launch
    from t5_fsdp.evaluation.evaluate import score_summaries, summarize
    from t5_fsdp.evaluation.generation import GenerationSettings
    from t5_fsdp.evaluation.rouge import RougeSettings

    world = enter_world(read_launch())
    world.connect(600)
    config = Config()
    config.evaluation.num_beams = options.beams
    config.evaluation.max_new_tokens = options.max_new_tokens
    console = Console(False)
    loaded = load_model(FoundModel(options.checkpoint, "", None, {}), config, world, console)
    world.barrier()
    began = time.perf_counter()
    documents = [row["document"] for row in rows]
    sources = encode_sources(loaded.tokenizer, documents, "summarize: ", 512)
    settings = GenerationSettings.of(config.evaluation, config.seed)
    made = summarize(loaded.generator, loaded.tokenizer, sources, settings, world, console)
    if made is not None:
        examples = [
            {"id": str(i), "document": row["document"], "reference": row["summary"]}
            for i, row in enumerate(rows)
        ]
        score_summaries(examples, made, loaded.tokenizer, RougeSettings())
    seconds = time.perf_counter() - began
    return seconds, None if made is None else [summary.text for summary in made]


def theirs(options: Any, rows: Any, tokenizer: Any) -> tuple[float, list[str] | None]:
    import numpy as np
    from datasets import Dataset
    from rouge_score.rouge_scorer import RougeScorer
    from transformers import (
        AutoModelForSeq2SeqLM,
        DataCollatorForSeq2Seq,
        Seq2SeqTrainer,
        Seq2SeqTrainingArguments,
    )

    model = AutoModelForSeq2SeqLM.from_pretrained(options.checkpoint)

    def encode(batch: Any) -> Any:
        documents = ["summarize: " + text for text in batch["document"]]
        encoded = tokenizer(documents, max_length=512, truncation=True)
        labels = tokenizer(text_target=batch["summary"], max_length=150, truncation=True)
        return {**encoded, "labels": labels["input_ids"]}

    with tempfile.TemporaryDirectory() as scratch:
        trainer = Seq2SeqTrainer(
            model,
            Seq2SeqTrainingArguments(
                scratch,
                per_device_eval_batch_size=16,
                predict_with_generate=True,
                generation_num_beams=options.beams,
                generation_max_length=options.max_new_tokens + 1,  # the start counts there
                bf16_full_eval=options.kind == "bf16",
                use_cpu=True,
                report_to=[],
                disable_tqdm=True,
            ),
            data_collator=DataCollatorForSeq2Seq(tokenizer, model),
        )
        began = time.perf_counter()
        texts = Dataset.from_list([{k: r[k] for k in ("document", "summary")} for r in rows])
        found = trainer.predict(
            texts.map(encode, batched=True, remove_columns=["document", "summary"])
        )
        ids = np.where(found.predictions < 0, tokenizer.pad_token_id, found.predictions)
        # The last batch is filled up with examples of the first.
        predictions = tokenizer.batch_decode(ids[: len(rows)], skip_special_tokens=True)
        if trainer.is_world_process_zero():
            scorer = RougeScorer(["rouge1", "rouge2", "rougeL", "rougeLsum"], use_stemmer=True)
            for row, text in zip(rows, predictions, strict=True):
                scorer.score(row["summary"], text)
        seconds = time.perf_counter() - began
    return seconds, predictions if trainer.is_world_process_zero() else None


if __name__ == "__main__":
    main()
