"""The tokenizer and the prepared data: compared with SentencePiece and with plain encoding."""

from __future__ import annotations

import json
import multiprocessing
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
import sentencepiece

from t5_fsdp.config import DataConfig, ModelConfig
from t5_fsdp.data import split_tokenization, tokenization
from t5_fsdp.data.preparation import prepare
from t5_fsdp.data.prepared import open_prepared
from t5_fsdp.data.tokenization import (
    Encoder,
    encode_sources,
    load_tokenizer,
    tokenizer_digest,
    train_tokenizer,
)
from t5_fsdp.data.tokenized import TokenizedSplit
from t5_fsdp.errors import UserError

WORDS = ["boil", "rinse", "cover", "simmer", "stir", "the", "a", "quick", "brown", "fox", "rice"]


def sentence(seed: int, num_words: int) -> str:
    picks = np.random.default_rng(seed).integers(len(WORDS), size=num_words)
    return " ".join(WORDS[i] for i in picks).capitalize() + "."


def corpus(num_rows: int = 40, seed: int = 0) -> list[dict[str, str]]:
    return [
        {
            "id": f"r{i}",
            "document": "\n".join(sentence(seed + 7 * i + k, 9) for k in range(1 + i % 4)),
            "summary": sentence(seed + 7 * i + 5, 4),
        }
        for i in range(num_rows)
    ]


def texts_of(rows: list[dict[str, str]]) -> list[str]:
    return [row[name] for row in rows for name in ("document", "summary")]


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer([*texts_of(corpus()), "summarize: Café — naïve"], 200, folder)
    return folder


@pytest.fixture
def files(tmp_path) -> DataConfig:
    paths = {}
    for split, num_rows in (("train", 40), ("validation", 5)):
        path = tmp_path / f"{split}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in corpus(num_rows)))
        paths[f"{split}_files"] = [str(path)]
    return DataConfig(source="files", max_source_tokens=24, max_target_tokens=9, **paths)


def silent(_: str) -> None:
    pass


# ---- tokenizers


def test_a_trained_tokenizer_encodes_as_sentencepiece_does(tokenizer_folder):
    tokenizer = load_tokenizer(str(tokenizer_folder))
    reference = sentencepiece.SentencePieceProcessor(
        model_file=str(tokenizer_folder / "spiece.model")
    )
    texts = [
        *texts_of(corpus(seed=1000)),
        "Café  \ufb01sh\t\uff21\nnaïve 漢字 boil",
        " x ",
        "",
        "ünïcode 🙂🙂 fox",
    ]
    for text in texts:
        assert tokenizer(text)["input_ids"] == [*reference.encode(text), 1], text


def test_a_trained_tokenizer_has_the_ids_of_a_t5(tokenizer_folder):
    tokenizer = load_tokenizer(str(tokenizer_folder))
    size = len(tokenizer)
    assert size <= 200
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (0, 1, 2)
    for i in (0, 1, 99):
        assert tokenizer(f"<extra_id_{i}>")["input_ids"] == [size - 1 - i, 1]


def test_ordinary_text_survives_a_round_trip(tokenizer_folder):
    tokenizer = load_tokenizer(str(tokenizer_folder))
    text = "Rinse the rice. Boil water over a brown fox."
    assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text


def test_training_a_tokenizer_again_gives_the_same_files(tokenizer_folder, tmp_path):
    train_tokenizer([*texts_of(corpus()), "summarize: Café — naïve"], 200, tmp_path)
    for name in ("tokenizer.json", "spiece.model"):
        assert (tmp_path / name).read_bytes() == (tokenizer_folder / name).read_bytes()


def test_long_lines_are_learned_from_too(tmp_path):
    long_line = " ".join(["zebra"] * 30_000)  # beyond what SentencePiece takes as one sentence
    train_tokenizer([*texts_of(corpus()), long_line, "the quick brown fox"], 200, tmp_path)
    assert 2 not in load_tokenizer(str(tmp_path))("zebra")["input_ids"]


def test_a_rare_capital_is_known(tmp_path):
    train_tokenizer([*texts_of(corpus(400)), "Zebra"], 200, tmp_path)  # 1 Z in 50,000 letters
    assert 2 not in load_tokenizer(str(tmp_path))("Zebra")["input_ids"]


@pytest.mark.parametrize(("texts", "size"), [(["abcdefghijklmnopqrst"], 110), ([], 200)])
def test_a_vocabulary_that_does_not_fit_names_its_option(tmp_path, texts, size):
    with pytest.raises(UserError, match=r"model\.tokenizer_vocab_size") as error:
        train_tokenizer(texts, size, tmp_path / "t")
    assert len(error.value.problems) == 1
    assert not (tmp_path / "t").exists()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("./no/such/folder", "does not exist"),
        ("/nosuchfolder", "does not exist"),
        ("google-t5/t5-nowhere", "check the name and the network"),
    ],
)
def test_a_missing_tokenizer_is_said_in_one_line(name, words):
    with pytest.raises(UserError, match=words) as error:
        load_tokenizer(name)
    [problem] = error.value.problems
    assert name in problem


def test_a_folder_without_or_with_damaged_files_is_refused(tokenizer_folder, tmp_path):
    with pytest.raises(UserError, match="no tokenizer files"):
        load_tokenizer(str(tmp_path))
    broken = shutil.copytree(tokenizer_folder, tmp_path / "broken")
    (broken / "tokenizer.json").write_text('{"version": ')
    with pytest.raises(UserError, match="cannot be loaded"):
        load_tokenizer(str(broken))


def test_a_checkpoint_folder_lends_its_tokenizer(tokenizer_folder, tmp_path):
    shutil.copytree(tokenizer_folder, tmp_path / "tokenizer")
    assert len(load_tokenizer(str(tmp_path))) == len(load_tokenizer(str(tokenizer_folder)))


def test_tokenizers_that_cannot_serve_are_refused(tokenizer_folder, tmp_path):
    from transformers import PreTrainedTokenizerFast, T5Tokenizer

    T5Tokenizer().save_pretrained(tmp_path / "unknown")
    with pytest.raises(UserError, match="knows no piece"):
        load_tokenizer(str(tmp_path / "unknown"))
    backend = load_tokenizer(str(tokenizer_folder)).backend_tokenizer
    no_pad = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>")
    no_pad.save_pretrained(tmp_path / "no_pad")
    with pytest.raises(UserError, match="no pad token"):
        load_tokenizer(str(tmp_path / "no_pad"))


def test_a_tokenizer_of_another_script_is_not_taken_for_a_broken_one(tmp_path):
    train_tokenizer(["把米洗干净 然后煮二十分钟", "把水烧开 放入米"], 130, tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    assert 2 in tokenizer("fox")["input_ids"] and 2 not in tokenizer("把水烧开")["input_ids"]


# ---- prepared data


def test_prepared_ids_are_prefix_document_and_end_mark_cut_to_length(
    files, tokenizer_folder, tmp_path
):
    model = ModelConfig(tokenizer=str(tokenizer_folder))
    split = prepare(files, model, tmp_path / "cache", silent).split("train")
    tokenizer = load_tokenizer(str(tokenizer_folder))
    rows = corpus()
    assert len(split) == len(rows)
    for i, row in enumerate(rows):
        for ids, text, limit in (
            (split.source(i), "summarize: " + row["document"], 24),
            (split.target(i), row["summary"], 9),
        ):
            expected = tokenizer(text, truncation=True, max_length=limit)["input_ids"]
            assert ids.dtype == np.int32
            assert ids.tolist() == expected
            assert ids[-1] == tokenizer.eos_token_id
        assert split.text(i) == row
    assert [split.text(i)["id"] for i in range(len(split))] == [row["id"] for row in rows]
    assert split.source_lengths.tolist() == [len(split.source(i)) for i in range(len(split))]
    assert split.target_lengths.tolist() == [len(split.target(i)) for i in range(len(split))]
    assert split.source_lengths.dtype == np.int32


def test_the_prefix_is_never_doubled(tokenizer_folder, tmp_path):
    path = tmp_path / "a.jsonl"
    rows = [{"document": d, "summary": "s"} for d in ("summarize: the fox", "the fox")]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = DataConfig(source="files", train_files=[str(path)])
    model = ModelConfig(tokenizer=str(tokenizer_folder))
    split = prepare(data, model, tmp_path / "cache", silent).split("train")
    assert split.source(0).tolist() == split.source(1).tolist()


def test_a_summary_without_a_known_piece_still_has_its_end_mark(tokenizer_folder, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"document": "fox", "summary": "\u200b\x01"}) + "\n")
    data = DataConfig(source="files", train_files=[str(path)], prefix="")
    model = ModelConfig(tokenizer=str(tokenizer_folder))
    split = prepare(data, model, tmp_path / "cache", silent).split("train")
    assert split.target(0)[-1] == 1


def test_the_audit_tells_lengths_truncation_and_unknown_tokens(files, tokenizer_folder, tmp_path):
    model = ModelConfig(tokenizer=str(tokenizer_folder))
    prepared = prepare(files, model, tmp_path / "cache", silent)
    tokenizer = load_tokenizer(str(tokenizer_folder))
    lengths = [len(tokenizer("summarize: " + row["document"])["input_ids"]) for row in corpus()]
    audit = prepared.audit["splits"]["train"]
    assert audit["kept"] == 40
    assert audit["source_tokens"]["mean"] == pytest.approx(np.mean(lengths))
    assert audit["source_tokens"]["median"] == np.median(lengths)
    assert audit["source_tokens"]["max"] == max(lengths)
    assert audit["source_truncated"] == np.mean([length > 24 for length in lengths])
    assert 0 < audit["source_truncated"] < 1
    split = prepared.split("train")
    ids = [*(split.source(i) for i in range(40)), *(split.target(i) for i in range(40))]
    assert audit["unknown_tokens"] == np.mean(np.concatenate(ids) == 2)
    assert prepared.split("test") is None


def test_the_same_content_is_prepared_once_and_any_change_anew(files, tokenizer_folder, tmp_path):
    model = ModelConfig(tokenizer=str(tokenizer_folder))
    cache = tmp_path / "cache"
    first = prepare(files, model, cache, silent)
    moved = shutil.copy(files.train_files[0], tmp_path / "moved.jsonl")
    again = prepare(
        DataConfig(**{**vars(files), "train_files": [str(moved)]}),
        ModelConfig(tokenizer=str(shutil.copytree(tokenizer_folder, tmp_path / "t"))),
        cache,
        silent,
    )
    assert not first.reused and again.reused
    assert again.directory == first.directory
    assert again.audit == first.audit
    for change in ({"prefix": "x: "}, {"max_source_tokens": 23}, {"max_train_examples": 39}):
        other = prepare(DataConfig(**{**vars(files), **change}), model, cache, silent)
        assert not other.reused
        assert other.content_hash["train"] != first.content_hash["train"]
    # Only the training split was limited, so the validation split is the same data.
    assert other.content_hash["validation"] == first.content_hash["validation"]


def test_no_texts_are_left_behind_and_open_prepared_equals(files, tokenizer_folder, tmp_path):
    model = ModelConfig(tokenizer=str(tokenizer_folder))
    made = prepare(files, model, tmp_path / "cache", silent)
    opened = open_prepared(made.directory)
    assert opened.content_hash == made.content_hash and opened.audit == made.audit
    assert {path.name for path in made.directory.iterdir()} == {
        "tokenizer",
        "train.arrow",
        "validation.arrow",
        "dropped.jsonl",
        "meta.json",
    }
    assert load_tokenizer(str(opened.tokenizer_directory))("fox")["input_ids"]


def test_what_a_killed_or_damaged_preparation_left_is_made_anew(files, tokenizer_folder, tmp_path):
    model = ModelConfig(tokenizer=str(tokenizer_folder))
    cache = tmp_path / "cache"
    first = prepare(files, model, cache, silent)
    partial = first.directory.with_suffix(".partial")
    partial.mkdir()
    (partial / "train.arrow").write_text("half")
    with (first.directory / "train.arrow").open("r+b") as file:
        file.truncate(100)
    with pytest.raises(UserError, match="not a complete folder"):
        open_prepared(first.directory)
    second = prepare(files, model, cache, silent)
    assert not second.reused and second.content_hash == first.content_hash
    assert not partial.exists()
    (second.directory / "meta.json").unlink()
    assert not prepare(files, model, cache, silent).reused


def test_an_error_leaves_no_folder(files, tokenizer_folder, tmp_path):
    Path(files.train_files[0]).write_text("{broken\n")
    with pytest.raises(UserError, match="row 1"):
        prepare(files, ModelConfig(tokenizer=str(tokenizer_folder)), tmp_path / "cache", silent)
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]


def test_a_cache_that_is_a_file_is_said(files, tokenizer_folder, tmp_path):
    (tmp_path / "cache").write_text("")
    with pytest.raises(UserError, match=r"data\.cache_dir"):
        prepare(files, ModelConfig(tokenizer=str(tokenizer_folder)), tmp_path / "cache", silent)


def test_a_tokenizer_learned_from_the_training_split(files, tmp_path):
    model = ModelConfig(name=None, init="random", tokenizer="train", tokenizer_vocab_size=180)
    lines: list[str] = []
    prepared = prepare(files, model, tmp_path / "cache", lines.append)
    tokenizer = load_tokenizer(str(prepared.tokenizer_directory))
    assert len(tokenizer) <= 180
    assert prepared.audit["splits"]["train"]["unknown_tokens"] == 0
    # The prefix was learned with the documents, so none of its characters is unknown.
    assert 2 not in tokenizer("summarize: ")["input_ids"]
    assert prepare(files, model, tmp_path / "cache", silent).reused
    model.tokenizer_vocab_size = 170
    assert not prepare(files, model, tmp_path / "cache", silent).reused


def test_a_byte_tokenizer_in_several_processes_gives_the_same(files, tmp_path, monkeypatch):
    from transformers import ByT5Tokenizer

    ByT5Tokenizer().save_pretrained(tmp_path / "byt5")
    model = ModelConfig(tokenizer=str(tmp_path / "byt5"))
    alone = prepare(files, model, tmp_path / "one", silent)
    monkeypatch.setattr(split_tokenization, "_ROWS_FOR_PROCESSES", 10)
    monkeypatch.setattr(split_tokenization.os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    together = prepare(files, model, tmp_path / "two", silent)
    assert together.content_hash == alone.content_hash
    ids = together.split("train").target(0)
    assert bytes(i - 3 for i in ids[:-1].tolist()).decode() == corpus()[0]["summary"][:8]


def _prepare_in_process(files: DataConfig, folder: str, cache: str, barrier, results) -> None:
    barrier.wait()
    prepared = prepare(files, ModelConfig(tokenizer=folder), Path(cache), silent)
    results.put((prepared.reused, prepared.content_hash["train"]))


def test_processes_that_start_at_once_share_one_preparation(files, tokenizer_folder, tmp_path):
    context = multiprocessing.get_context("fork")  # spawned ones would import everything anew
    barrier, results = context.Barrier(3), context.Queue()
    arguments = (files, str(tokenizer_folder), str(tmp_path / "cache"), barrier, results)
    processes = [context.Process(target=_prepare_in_process, args=arguments) for _ in range(3)]
    for process in processes:
        process.start()
    outcomes = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join(timeout=60)
    assert sorted(reused for reused, _ in outcomes) == [False, True, True]
    assert len({content for _, content in outcomes}) == 1


def _hold_lock(path: str, held) -> None:
    from filelock import FileLock

    with FileLock(path):
        held.set()
        time.sleep(60)


def test_a_killed_holder_of_the_lock_holds_up_nobody(files, tokenizer_folder, tmp_path):
    model = ModelConfig(tokenizer=str(tokenizer_folder))
    first = prepare(files, model, tmp_path / "cache", silent)
    shutil.rmtree(first.directory)
    context = multiprocessing.get_context("fork")
    held = context.Event()
    lock = str(first.directory.with_suffix(".lock"))
    holder = context.Process(target=_hold_lock, args=(lock, held))
    holder.start()
    assert held.wait(30)
    lines: list[str] = []

    def report(line: str) -> None:
        lines.append(line)
        if "waiting" in line:
            holder.kill()

    assert not prepare(files, model, tmp_path / "cache", report).reused
    assert sum("waiting" in line for line in lines) == 1
    holder.join(timeout=30)


# ---- splits


def test_rows_across_chunks_are_found_and_bounds_are_kept(tokenizer_folder, tmp_path, monkeypatch):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in corpus(23)))
    data = DataConfig(source="files", train_files=[str(path)])
    model = ModelConfig(tokenizer=str(tokenizer_folder))
    whole = prepare(data, model, tmp_path / "one", silent)
    monkeypatch.setattr(split_tokenization, "_ROWS_A_BATCH", 5)
    chunked = prepare(data, model, tmp_path / "two", silent)
    assert chunked.content_hash == whole.content_hash
    one, two = whole.split("train"), chunked.split("train")
    for i in [*range(23), -1, -23]:
        assert one.source(i).tolist() == two.source(i).tolist()
        assert one.target(i).tolist() == two.target(i).tolist()
        assert one.text(i) == two.text(i)
    for i in (23, -24):
        with pytest.raises(IndexError):
            two.source(i)


def test_random_access_is_fast(files, tokenizer_folder, tmp_path):
    model = ModelConfig(tokenizer=str(tokenizer_folder))
    split = prepare(files, model, tmp_path / "cache", silent).split("train")
    best = min(_seconds_for_rows(split, 2000) for _ in range(5))
    assert best / 2000 < 20e-6  # measured below 1 microsecond; the rest is for a busy machine


def _seconds_for_rows(split: TokenizedSplit, count: int) -> float:
    started = time.perf_counter()
    for i in range(count):
        split.source(i % len(split))
    return time.perf_counter() - started


def test_a_split_in_memory():
    texts = [
        {"id": "a", "document": "d", "summary": "s"},
        {"id": "b", "document": "e", "summary": ""},
    ]
    split = TokenizedSplit.from_ids([[3, 4, 1], [1]], [[5, 1], [6, 7, 1]], texts)
    assert [split.source(i).tolist() for i in range(2)] == [[3, 4, 1], [1]]
    assert [split.target(i).tolist() for i in range(2)] == [[5, 1], [6, 7, 1]]
    assert split.source_lengths.tolist() == [3, 1] and split.target_lengths.tolist() == [2, 3]
    assert split.text(1) == texts[1]
    bare = TokenizedSplit.from_ids([[1]], [[1]])
    with pytest.raises(ValueError):
        bare.text(0)
    assert len(TokenizedSplit.from_ids([], [])) == 0
    with pytest.raises(ValueError):
        TokenizedSplit.from_ids([[1]], [])


def test_a_large_corpus_gives_the_same_tokenizer_every_time(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenization, "_MAX_TRAINING_SENTENCES", 50)
    texts = [f"line {number} of water and rice\nand {number * 7}" for number in range(200)]
    lines = list(tokenization._training_lines(texts))
    assert len(lines) == 50 and lines[0] != lines[-1]
    for name in ("first", "second"):
        train_tokenizer(texts, 160, tmp_path / name)
    first, second = (
        (tmp_path / name / "spiece.model").read_bytes() for name in ("first", "second")
    )
    assert first == second


def test_a_tokenizer_is_known_by_its_vocabulary_not_its_files(tmp_path, monkeypatch):
    texts = ["water and rice and soil", "a lamp by the door"] * 9
    train_tokenizer(texts, 125, tmp_path / "one")
    train_tokenizer([*texts, "zebra quiz"], 130, tmp_path / "other")
    again = shutil.copytree(tmp_path / "one", tmp_path / "again")
    settings = json.loads((again / "tokenizer_config.json").read_text())
    (again / "tokenizer_config.json").write_text(json.dumps(settings | {"is_local": False}))
    digests = [
        tokenizer_digest(load_tokenizer(str(tmp_path / name))) for name in ("one", "again", "other")
    ]
    assert digests[0] == digests[1] != digests[2]


def test_half_a_character_is_one_that_the_vocabulary_lacks(corpus: Path) -> None:
    tokenizer = load_tokenizer(str(corpus / "tokenizer"))
    encoder = Encoder(tokenizer)
    assert encoder.is_unknown("\ud83d") and not encoder.is_unknown("r")
    broken, replaced = (
        encode_sources(tokenizer, [f"rice {character} soil"], "summarize: ", 64)[0].tolist()
        for character in ("\ud83d", "\ufffd")
    )
    assert broken == replaced and len(broken) > 4
