"""What generation knows beside the text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import T5Config, T5ForConditionalGeneration

from t5_fsdp.config import Config
from t5_fsdp.config_problems import value_problems
from t5_fsdp.data.tokenization import decode_summary, load_tokenizer, newline_id, sentinel_ids
from t5_fsdp.errors import UserError
from t5_fsdp.evaluation.generation import (
    GeneratedSummary,
    GenerationSettings,
    _summary_of,
    generate,
)
from tests.workers import joined_world


def test_a_summary_knows_whether_it_was_cut_and_what_was_left_out(corpus: Path) -> None:
    tokenizer = load_tokenizer(str(corpus / "tokenizer"))
    newline = newline_id(tokenizer, keep_newlines=True)
    sentinels = sentinel_ids(tokenizer)
    assert len(sentinels) == 100 and newline in sentinels
    sentinels -= {newline}
    [rice] = tokenizer("rice", add_special_tokens=False)["input_ids"]
    gap = tokenizer.convert_tokens_to_ids("<extra_id_0>")
    end, pad = tokenizer.eos_token_id, tokenizer.pad_token_id

    def read(*ids: int) -> GeneratedSummary:
        return _summary_of(list(ids), tokenizer, newline, sentinels)

    assert read(gap, rice, gap, end, pad) == GeneratedSummary("rice", cut=False, sentinels=2)
    assert read(rice, newline, rice) == GeneratedSummary("rice\nrice", cut=True, sentinels=0)
    assert read(end, pad, pad) == GeneratedSummary("", cut=False, sentinels=0)


def test_sentinels_of_mt5_are_ordinary_pieces(corpus: Path) -> None:
    from transformers import T5Tokenizer

    pieces = ["<pad>", "</s>", "<unk>", "\u2581rice", "\u2581<extra_id_1>", "\u2581<extra_id_0>"]
    tokenizer = T5Tokenizer(vocab=[(piece, 0.0) for piece in pieces], extra_ids=0)
    sentinels = sentinel_ids(tokenizer)
    assert sentinels == {4, 5}
    found = _summary_of([5, 3, 4, 3, 1, 0], tokenizer, None, sentinels)
    assert found == GeneratedSummary("rice rice", cut=False, sentinels=2)


def test_generation_tells_what_it_did(corpus: Path) -> None:
    tokenizer = load_tokenizer(str(corpus / "tokenizer"))
    newline = newline_id(tokenizer, keep_newlines=True)
    config = T5Config(d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2,
                      vocab_size=len(tokenizer), decoder_start_token_id=0)  # fmt: skip
    model = T5ForConditionalGeneration(config)
    settings = GenerationSettings(num_beams=2, max_new_tokens=3, length_penalty=1, batch_tokens=99)

    def generate_only(token: str, newline: int | None = newline) -> GeneratedSummary:
        others = set(range(len(tokenizer))) - {tokenizer.convert_tokens_to_ids(token)}
        model.generation_config.suppress_tokens = sorted(others)
        sources = [np.array([5, 6, 1], np.int32)]
        return generate(model, tokenizer, sources, settings, newline=newline)[0]

    assert generate_only("<extra_id_5>") == GeneratedSummary("", cut=True, sentinels=3)
    assert generate_only("</s>") == GeneratedSummary("", cut=False, sentinels=0)
    assert generate_only("<extra_id_99>") == GeneratedSummary("", cut=True, sentinels=0)
    assert generate_only("<extra_id_99>", None).sentinels == 3


def settings_of(**values: Any) -> GenerationSettings:
    defaults = {"num_beams": 2, "max_new_tokens": 9, "length_penalty": 1.0, "batch_tokens": 200}
    return GenerationSettings(**{**defaults, **values})


def tiny_model(attention: str = "eager") -> Any:
    from t5_fsdp.model.build import ModelSpec, build_with_weights, draw_weights

    config = T5Config(d_model=32, d_kv=8, d_ff=32, num_layers=2, num_heads=4, vocab_size=180,
                      decoder_start_token_id=0)  # fmt: skip
    spec = ModelSpec(config, own_head=True)
    return build_with_weights(spec, draw_weights(spec, seed=3), attention)


def random_sources(count: int) -> list[np.ndarray]:
    rng = np.random.default_rng(5)
    return [rng.integers(2, 180, rng.integers(2, 40)).astype(np.int32) for _ in range(count)]


@pytest.mark.parametrize(
    "values",
    [
        {"num_beams": 4},
        {"num_beams": 4, "length_penalty": 0.6, "no_repeat_ngram_size": 2},
        {"num_beams": 3, "min_new_tokens": 5},
        {"num_beams": 1},
        {"num_beams": 2, "batch_examples": 3},
    ],
)
def test_summaries_are_those_of_transformers_one_by_one(
    corpus: Path, values: dict[str, Any]
) -> None:
    tokenizer = load_tokenizer(str(corpus / "tokenizer"))
    settings, sources = settings_of(**values), random_sources(17)
    found = generate(tiny_model("sdpa"), tokenizer, sources, settings)
    plain = tiny_model("eager").eval()
    for position, source in enumerate(sources):
        [ids] = plain.generate(
            input_ids=torch.from_numpy(source[None].astype(np.int64)),
            num_beams=settings.num_beams,
            max_new_tokens=9,
            length_penalty=settings.length_penalty,
            no_repeat_ngram_size=settings.no_repeat_ngram_size,
            min_new_tokens=settings.min_new_tokens,
        ).tolist()
        assert found[position].text == decode_summary(tokenizer, ids[1:], None)
    assert len({made.text for made in found.values()}) > 2


def test_sampling_depends_on_the_seed_alone(corpus: Path) -> None:
    tokenizer, sources = load_tokenizer(str(corpus / "tokenizer")), random_sources(17)
    model = tiny_model("sdpa")

    def sample(seed: int, world_size: int = 1, **values: Any) -> dict[int, GeneratedSummary]:
        settings = settings_of(num_beams=1, do_sample=True, seed=seed, **values)
        shares = [
            generate(model, tokenizer, sources, settings, rank=rank, world_size=world_size)
            for rank in range(world_size)
        ]
        return {position: made for share in shares for position, made in share.items()}

    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    first = sample(7)
    assert torch.rand(1) == expected  # nobody else's random numbers were drawn
    assert sample(7, world_size=3) == first != sample(8)
    assert sample(7, top_k=1) == sample(8, top_k=1)
    assert sample(7, top_p=1e-6) == generate(model, tokenizer, sources, settings_of(num_beams=1))


def test_a_batch_that_runs_out_of_memory_is_halved(
    corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, sources = load_tokenizer(str(corpus / "tokenizer")), random_sources(9)
    model, settings = tiny_model("sdpa"), settings_of(batch_tokens=10**6)
    expected = generate(model, tokenizer, sources, settings)
    sizes, most = [], 2
    whole = model.generate

    def limited(**inputs: Any) -> Any:
        sizes.append(len(inputs["attention_mask"]))
        if sizes[-1] > most:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return whole(**inputs)

    monkeypatch.setattr(model, "generate", limited)
    assert generate(model, tokenizer, sources, settings) == expected
    assert sizes[:4] == [9, 4, 2, 2]
    most = 0
    with pytest.raises(UserError, match="batch_tokens, batch_examples or"):
        generate(model, tokenizer, sources, settings)


def test_sampling_depends_on_the_halves_and_not_on_where_memory_ran_out(
    corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, sources = load_tokenizer(str(corpus / "tokenizer")), random_sources(9)
    model, whole = tiny_model("sdpa"), tiny_model("sdpa").generate
    settings = settings_of(num_beams=1, do_sample=True, seed=7, batch_tokens=10**6)
    found, devices, fork = [], [], torch.random.fork_rng
    monkeypatch.setattr(
        torch.random, "fork_rng", lambda given: (devices.append(given), fork(given))[1]
    )
    for drawn in (0, 5):

        def limited(drawn: int = drawn, **inputs: Any) -> Any:
            if len(inputs["input_ids"]) > 2:
                torch.rand(drawn)
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return whole(**inputs)

        monkeypatch.setattr(model, "generate", limited)
        found.append(generate(model, tokenizer, sources, settings))
    assert found[0] == found[1] and len({made.text for made in found[0].values()}) > 5
    assert devices == [[], []]  # of a model on the CPU


def generate_sharded(options: dict[str, Any], sources: list[np.ndarray], folder: str) -> Any:
    """On a rank of the pool: summaries by whole models, and by one that stays sharded."""
    from t5_fsdp.config import ParallelConfig
    from t5_fsdp.console import Console
    from t5_fsdp.evaluation.evaluate import Generator, summarize
    from t5_fsdp.model.build import ModelSpec, build_on_meta, build_with_weights, draw_weights
    from t5_fsdp.model.forward import attach_loss
    from t5_fsdp.model.loss import LossOptions
    from t5_fsdp.parallel.common import DTYPES
    from t5_fsdp.parallel.engine import parallelize

    tokenizer = load_tokenizer(folder)
    spec = ModelSpec(tiny_model().config, own_head=True)
    with joined_world() as world:
        model = build_on_meta(spec, "sdpa")
        attach_loss(model, LossOptions())
        engine = parallelize(model, ParallelConfig(**options), world)
        engine.load_full(draw_weights(spec, seed=3) if world.is_main else {})
        weights = engine.gather_full(DTYPES[options["param_dtype"]])
        generators = (
            Generator.whole(build_with_weights(spec, weights, "sdpa")),
            Generator(engine.sharded_generation, is_sharded=True),
        )
        found = [
            summarize(generator, tokenizer, sources, settings_of(), world, Console(False))
            for generator in generators
        ]
        del model, engine
    return found


@pytest.mark.parametrize("world_size", [1, 2, pytest.param(4, marks=pytest.mark.long)])
@pytest.mark.parametrize("engine", ["fsdp2", "fsdp1"])
def test_sharded_weights_write_the_same_summaries(
    pools: Any, corpus: Path, engine: str, world_size: int
) -> None:
    # As many batches as do not divide evenly.
    sources, folder = random_sources(13), str(corpus / "tokenizer")
    expected = generate(tiny_model(), load_tokenizer(folder), sources, settings_of())
    for dtype, checkpointing in (("fp32", "full"), ("bf16", "none")):
        options = {"engine": engine, "param_dtype": dtype}
        options["activation_checkpointing"] = checkpointing
        if dtype == "bf16" and engine == "fsdp1" and world_size == 1:
            continue  # nothing is sharded there, and autocast rounds elsewhere than bf16 weights
        whole, sharded = pools(world_size).run(generate_sharded, options, sources, folder)[0]
        assert sharded == whole
        if dtype == "fp32":
            assert whole == [expected[position] for position in range(13)]


@pytest.mark.parametrize(
    ("name", "value"),
    [("length_penalty", 400.0), ("length_penalty", -400.0), ("temperature", 1e-40), ("top_p", 0.0)],
)
def test_numbers_that_overflow_are_refused(name: str, value: float) -> None:
    config = Config()
    config.model.name, config.evaluation.do_sample = "t5", True
    assert value_problems(config) == []
    setattr(config.evaluation, name, value)
    [problem] = value_problems(config)
    assert f"evaluation.{name} is {value}" in problem
