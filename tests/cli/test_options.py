"""Configuration from command line and files: precedence, types, and every problem at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from t5_fsdp.cli.options import Extra, Layers, dump_yaml, parse_layers, resolve
from t5_fsdp.config import Config, leaves, to_dict
from t5_fsdp.errors import UserError

EXTRA = [
    Extra("checkpoint", "A checkpoint.", type=str | None, metavar="DIR"),
    Extra("split", "Which split.", type=Literal["validation", "test"], default="test"),
    Extra("check", "Only check.", type=bool, default=False),
]


def parse(*argv: str, **options: Any) -> Layers:
    return parse_layers(argv, command="train", description="Train a T5.", **options)


def config_of(*argv: str, base: dict[str, Any] | None = None, **options: Any) -> Config:
    return resolve(parse(*argv, **options), base)


def problems_of(
    *argv: str, base: dict[str, Any] | None = None, check_data: Any = None, **options: Any
) -> list[str]:
    with pytest.raises(UserError) as caught:
        resolve(parse(*argv, **options), base, check_data)
    return list(caught.value.problems)


def only_problem(*argv: str, **options: Any) -> str:
    (problem,) = problems_of(*argv, **options)
    return problem


@pytest.fixture
def write(tmp_path: Path):
    def write_file(text: str | bytes, name: str = "c.yaml") -> str:
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return str(path)

    return write_file


# ---------------------------------------------------------------- layers and precedence


def test_nothing_given_is_the_default_configuration() -> None:
    assert config_of() == Config()


def test_layers_are_sparse() -> None:
    layers = parse("--optimizer.lr", "3e-4", "--seed=7")
    assert layers.flags == {"optimizer": {"lr": 0.0003}, "seed": 7}
    assert layers.files == {}


def test_precedence_base_files_flags(write) -> None:
    first = write("seed: 2\noptimizer: {lr: 0.2, weight_decay: 0.2, grad_clip_norm: 2}\n", "a.yaml")
    second = write("optimizer: {lr: 0.3, weight_decay: 0.3}\n", "b.yaml")
    base = {"seed": 9, "optimizer": {"name": "adamw", "lr": 0.1}, "schedule": {"warmup_steps": 5}}
    config = config_of("--config", first, f"--config={second}", "--optimizer.lr", "0.4", base=base)
    assert (config.seed, config.schedule.warmup_steps) == (2, 5)
    assert config.optimizer.lr == 0.4
    assert config.optimizer.weight_decay == 0.3
    assert config.optimizer.grad_clip_norm == 2.0


def test_a_mapping_valued_option_is_replaced_whole(write) -> None:
    path = write("model: {config: {d_ff: 8, d_kv: 4}}\n")
    base = {"model": {"config": {"num_layers": 2}}}
    assert config_of("--config", path, base=base).model.config == {"d_ff": 8, "d_kv": 4}
    flag = '{"dropout_rate": 0.0}'
    config = config_of("--config", path, "--model.config", flag, base=base)
    assert config.model.config == {"dropout_rate": 0.0}


def test_entries_of_a_mapping_go_into_what_the_layers_below_say(write) -> None:
    path = write("model: {config: {d_ff: 8, d_kv: 4}}\n")
    argv = ["--config", path, "--model.config.d_ff", "16", "--model.config.feed_forward_proj=relu"]
    expected = {"d_ff": 16, "d_kv": 4, "feed_forward_proj": "relu"}
    assert config_of(*argv).model.config == expected
    whole = ["--model.config", '{"d_ff": 1, "num_layers": 2}']  # wherever it stands
    found = config_of(*argv, *whole).model.config
    assert found == {"d_ff": 16, "num_layers": 2, "feed_forward_proj": "relu"}
    alone = config_of("--model.config.dropout_rate", "0.0")
    assert alone.model.config == {"dropout_rate": 0.0}
    assert "dropout_rate: 0.0" in dump_yaml(alone)
    assert config_of(*argv[2:], base={"model": {"config": {"d_kv": 2}}}).model.config["d_kv"] == 2
    assert "model.config is 3" in only_problem("--config", write("model: {config: 3}\n"), *argv[2:])


def test_resolve_changes_none_of_its_layers(write) -> None:
    path = write("optimizer: {lr: 0.3}\n")
    base = {"optimizer": {"lr": 0.1}, "data": {"train_files": "a"}}
    layers = parse("--config", path, "--optimizer.weight_decay", "1")
    assert resolve(layers, base) == resolve(layers, base)
    assert layers.files == {"optimizer": {"lr": 0.3}}
    assert base == {"optimizer": {"lr": 0.1}, "data": {"train_files": "a"}}


def test_a_flag_given_twice_counts_once_the_later() -> None:
    assert config_of("--seed", "3", "--seed", "4").seed == 4


# ---------------------------------------------------------------- values


@pytest.mark.parametrize(
    ("option", "text", "value"),
    [
        ("optimizer.lr", "3e-4", 0.0003),
        ("train.epochs", "2", 2.0),
        ("optimizer.grad_clip_norm", "null", None),
        ("train.max_steps", "20", 20),
        ("model.revision", "null", None),
        ("model.revision", "1234567", "1234567"),
        ("run_dir", "null", "null"),
        ("data.prefix", "a: b", "a: b"),
        ("data.prefix", "", ""),
        ("data.prefix", "true ", "true "),
        ("model.config", '{"d_ff": 8, "dropout_rate": 1e-1}', {"d_ff": 8, "dropout_rate": 0.1}),
        ("data.train_files", "one, file.csv", ["one, file.csv"]),
        ("data.train_files", '["a.csv", "b.csv"]', ["a.csv", "b.csv"]),
        ("data.train_files", "[]", []),
        ("logging.tensorboard", "false", False),
        ("evaluation.length_penalty", "-1", -1.0),
    ],
)
@pytest.mark.parametrize("equals", [True, False])
def test_values_on_the_command_line(option: str, text: str, value: Any, equals: bool) -> None:
    argv = [f"--{option}={text}"] if equals else [f"--{option}", text]
    got = leaves(to_dict(config_of(*argv, base={"model": {"config": {}}})))
    if option == "model.config":
        assert config_of(*argv).model.config == value
    else:
        assert got[option] == value
        assert type(got[option]) is type(value)


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("optimizer: {lr: 3e-4}", "lr", 0.0003),
        ("optimizer: {lr: 1}", "lr", 1.0),
        ("optimizer: {lr: 1.e-3}", "lr", 0.001),
        ("optimizer: {grad_clip_norm: null}", "grad_clip_norm", None),
        ("optimizer: {grad_clip_norm: }", "grad_clip_norm", None),
    ],
)
def test_numbers_in_yaml(write, line: str, name: str, value: Any) -> None:
    got = getattr(config_of("--config", write(line)).optimizer, name)
    assert got == value
    assert type(got) is type(value)


def test_text_in_yaml_is_taken_as_it_stands(write) -> None:
    text = "model: {revision: 'null', name: '[a]'}\ndata: {train_files: '[x]', path: 2020-01-01}\n"
    config = config_of("--config", write(text))
    assert (config.model.revision, config.model.name) == ("null", "[a]")
    assert (config.data.train_files, config.data.path) == (["[x]"], "2020-01-01")


@pytest.mark.parametrize(
    ("option", "yaml_value", "words"),
    [
        ("seed", "x", "is 'x'; give a whole number"),
        ("seed", "1.5", "is 1.5; give a whole number"),
        ("seed", "true", "is true; give a whole number"),
        ("seed", "null", "is null; give a whole number"),
        ("run_dir", "null", "is null; give text"),
        ("run_dir", "5", 'is 5; give text, in quotes: "5"'),
        ("optimizer.lr", "fast", "is 'fast'; give a number"),
        ("train.max_steps", "[1]", "is [1]; give a whole number or null"),
        ("optimizer.name", "adamv", "give one of adamw, adafactor; did you mean adamw?"),
        ("logging.tensorboard", "2", "is 2; give true or false"),
        ("data.train_files", "[1, a]", 'is [1, "a"]; give a list or text'),
        ("data.train_files", "null", "is null; give a list or text"),
        ("model.config", "[]", "is []; give a mapping"),
        ("model.config", "{1: 2}", "give a mapping with text keys"),
    ],
)
def test_wrong_types_name_option_value_and_type(write, option, yaml_value, words) -> None:
    section, dot, name = option.partition(".")
    text = f"{section}:\n  {name}: {yaml_value}\n" if dot else f"{section}: {yaml_value}\n"
    path = write(text)
    problem = only_problem("--config", path)
    assert problem.startswith(f"{option} is ")
    assert words in problem
    assert problem.endswith(f"({path}, line {2 if dot else 1})")


def test_a_long_value_is_cut() -> None:
    assert len(only_problem("--seed", "9x" * 5000)) < 150


# ---------------------------------------------------------------- problems, all at once


def test_all_problems_come_in_one_error(write) -> None:
    path = write("optimizer:\n  lr: fast\n  lrr: 1\ntrain: 3\nschedule:\n  warmup_steps: -1\n")
    problems = problems_of("--config", path, "--seed", "-4", "--logging.every_steps", "x")
    assert problems == [
        f"section train is 3; give its options indented below it, e.g. train.epochs "
        f"({path}, line 4)",
        f"unknown option optimizer.lrr; did you mean optimizer.lr? ({path}, line 3)",
        f"optimizer.lr is 'fast'; give a number ({path}, line 2)",
        "logging.every_steps is 'x'; give a whole number",
        "seed is -4; the smallest allowed value is 0",
        f"schedule.warmup_steps is -1; the smallest allowed value is 0 ({path}, line 6)",
    ]


def test_command_line_problems_come_with_those_of_the_file(write) -> None:
    path = write("optimizer: {lr: fast}\nseed: -1\n")
    problems = problems_of("--config", path, "--trian.epochs", "3", config_required=True)
    assert [text.split(";")[0] for text in problems] == [
        "unknown option --trian.epochs",
        "optimizer.lr is 'fast'",
        "seed is -1",
    ]


def test_no_complaint_follows_from_a_value_that_was_not_read() -> None:
    argv = ["--data.source", "files", "--data.train_files", "[1"]
    assert config_of(*argv).data.train_files == ["[1"]
    layers = Layers(files={"data": {"source": "files", "train_files": 5}})
    with pytest.raises(UserError) as caught:
        resolve(layers)
    assert caught.value.problems == ('data.train_files is 5; give a list or text, in quotes: "5"',)
    misspelt = Layers(files={"data": {"source": "files", "train_file": "a"}})
    with pytest.raises(UserError) as caught:
        resolve(misspelt)
    assert caught.value.problems == (
        "unknown option data.train_file; did you mean data.train_files?",
    )


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("train: {epoch: 3}\n", 1),
        ("train: {epoch: 3}\ndata: {path: x}\n", 2),
        ("train: {epochs: x}\n", 2),
    ],
)
def test_files_that_nobody_named_are_not_missed_with_an_unknown_option(
    write, text: str, count: int
) -> None:
    found = problems_of("--config", write(text), check_data=lambda data: ["data.path is wrong"])
    assert len(found) == count and ("data.path" in found[-1]) == (count == 2)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("dta: {source: files, path: x}\n", "unknown section dta; did you mean data?"),
        ("eval: {every_steps: 3}\n", "unknown section eval; did you mean evaluation?"),
        ("tokens: {micro_batch_tokens: 3}\n", "unknown section tokens; did you mean train?"),
        ("zzz: {y: 3}\n", "unknown section zzz; the sections are model, data, parallel,"),
    ],
)
def test_a_misspelt_section_is_one_problem(write, text: str, words: str) -> None:
    # Nor is WikiHow asked for, which is the default of the section that is not there.
    problem = only_problem("--config", write(text), check_data=lambda data: ["data.path is wrong"])
    assert problem.startswith(words)


def test_usage_names_the_command_as_it_was_called(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for called, usage in (
        (["scripts/train.py", "--help"], "usage: train --config"),
        (["/bin/t5-fsdp", "train", "--help"], "usage: t5-fsdp train --config"),
        (["/x/t5_fsdp/__main__.py", "train", "--help"], "usage: t5-fsdp train --config"),
    ):
        monkeypatch.setattr("sys.argv", called)
        with pytest.raises(SystemExit):
            parse("--help", config_required=True)
        assert capsys.readouterr().out.startswith(usage)


def test_a_switch_alone_is_true() -> None:
    assert parse("--check", extra=EXTRA).own["check"] is True
    assert config_of("--parallel.explain", "--seed", "3").parallel.explain is True


def test_a_flag_mends_the_value_of_a_file_and_hides_its_place(write) -> None:
    path = write("optimizer: {lr: fast}\n")
    assert config_of("--config", path, "--optimizer.lr", "1").optimizer.lr == 1.0
    assert path not in only_problem("--config", path, "--optimizer.lr", "slow")


def test_a_problem_of_the_base_says_so() -> None:
    problem = only_problem(base={"optimizer": {"lr": "x"}})
    assert problem == "optimizer.lr is 'x'; give a number (the checkpoint's configuration)"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--config"], "--config needs a value"),
        (["--config="], "--config needs a value"),
        (["--config", "--seed", "1"], "--config needs a value"),
        (["--seed"], "--seed needs a value: a whole number"),
        (["--seed", "--optimizer.lr", "1"], "--seed needs a value"),
        (["--check="], "--check is ''; give true or false"),
        (["--check", "perhaps"], "--check is 'perhaps'; give true or false"),
        (["--split", "tset"], "give one of validation, test; did you mean test?"),
        (["--epochs", "3"], "unknown option --epochs; did you mean --train.epochs?"),
        (["--every_steps", "3"], "did you mean --checkpoint.every_steps or --evaluation.every_st"),
        (["--optimizer.beta", "3"], "section optimizer has name, lr, moments_dtype, weight_decay"),
        (["--chekpoint", "x"], "did you mean --checkpoint?"),
        (["--data.max-source-tokens", "5"], "did you mean --data.max_source_tokens?"),
        (["--zzzzzz", "x"], "unknown option --zzzzzz; --help lists all options"),
        (["--optimizer", "{}"], "optimizer is a section; give its options"),
        (["--model.config.d_ff"], "--model.config.d_ff needs a value"),
        (["-x"], "unknown option -x"),
        (["stray"], "'stray' belongs to no option"),
        (["--seed", "1", "2"], "'2' belongs to no option"),
        (["--", "stray"], "'stray' belongs to no option"),
        (["--print_config=yes"], "--print_config takes no value"),
    ],
)
def test_a_bad_command_line_is_one_line(argv: list[str], words: str) -> None:
    with pytest.raises(UserError) as caught:
        parse(*argv, extra=EXTRA)  # refused before a command does anything
    (problem,) = caught.value.problems
    assert words in problem
    assert "\n" not in problem


def test_a_required_configuration_file() -> None:
    expected = "train needs --config FILE.yaml, e.g. --config configs/demo.yaml"
    assert only_problem(config_required=True) == expected
    assert "needs a value" in only_problem("--config", config_required=True)


# ---------------------------------------------------------------- files that cannot be used


def _aliases(form: str) -> str:
    """Ten lines, of which each repeats the one before ten times."""
    lines = ["a0: &a0 " + form % ",".join(["{x: 1}"] * 10)]
    lines += [f"a{n}: &a{n} " + form % ",".join([f"*a{n - 1}"] * 10) for n in range(1, 10)]
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is empty"),
        ("# nothing\n", "is empty"),
        ("- a\n", "is not a mapping"),
        ("just text\n", "is not a mapping"),
        ("seed: 1\nmodel: {a\n", "line 3: not valid YAML"),
        ("seed: 1\nmodel:\n\tname: x\n", "line 3: not valid YAML"),
        ("seed: 1\n---\nseed: 2\n", "line 2: not valid YAML"),
        ("seed: !!python/object/apply:os.getcwd []\n", "line 1: not valid YAML"),
        ("seed: 1\nrun_dir: a\nseed: 2\n", "line 3: seed is given twice (first on line 1)"),
        ("optimizer:\n  lr: 1\n  lr: 1\n", "line 3: lr is given twice (first on line 2)"),
        ("optimizer: {lr: 1, lr: 1}\n", "line 1: lr is given twice"),
        ("model: {config: {a: 1, a: 2}}\n", "line 1: a is given twice"),
        (b"run_dir: \xff\n", "not UTF-8"),
        ("run_dir: \x00\n", "not valid YAML"),
        ("seed: " + "[" * 5000, "nested too deeply"),
        ("seed: 0b_\n", "cannot be read"),
        (_aliases("[%s]"), "not valid YAML: aliases (*) of aliases make 3.46e+10 values"),
        (_aliases("{<<: [%s]}"), "not valid YAML: aliases (*) of aliases make "),
        ("optimizer:\n", "section optimizer is empty"),
        ("optimizer: 3\n", "section optimizer is 3"),
        ("optimizer: [lr]\n", 'section optimizer is ["lr"]'),
        ("seed: 1\noptimzer: {lr: 1}\n", "line 2"),
        ("optimizer.lr: 3\n", "unknown option optimizer.lr"),
        ("1: 2\n", "unknown option 1"),
    ],
)
def test_a_bad_file_is_one_line_that_names_it(write, text: str | bytes, words: str) -> None:
    path = write(text)
    problem = only_problem("--config", path, config_required=True)
    assert path in problem
    assert words in problem


def test_files_that_cannot_be_opened(tmp_path: Path, write) -> None:
    write("seed: 1\n", "demo.yaml")
    missing = str(tmp_path / "demoo.yaml")
    assert only_problem("--config", missing).endswith(f"did you mean {tmp_path}/demo.yaml?")
    assert "folder" in only_problem("--config", str(tmp_path))
    assert "no such file" in only_problem("--config", str(tmp_path / "no" / "c.yaml"))
    problems = problems_of("--config", missing, "--seed", "x", config_required=True)
    assert [text.split(":")[0] for text in problems][1:] == ["seed is 'x'; give a whole number"]


def test_a_dotted_key_in_a_file_is_told_how_to_write_it(write) -> None:
    problem = only_problem("--config", write("optimizer.lr: 3\n"))
    assert "optimizer: {lr: ...}" in problem


def test_a_byte_order_mark_is_no_part_of_the_first_key(write) -> None:
    assert config_of("--config", write(b"\xef\xbb\xbfseed: 5\n")).seed == 5


def test_yaml_anchors_and_merge_keys_work(write) -> None:
    text = "train: &t {max_steps: 3}\nschedule: {warmup_steps: &w 2}\nseed: *w\n"
    config = config_of("--config", write(text))
    assert (config.train.max_steps, config.seed) == (3, 2)


def test_a_yaml_alias_into_itself_is_refused(write) -> None:
    problem = only_problem("--config", write("model:\n  config: &a {dropout_rate: [*a]}\n"))
    assert "has a value that cannot be read: Circular" in problem


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("optimizer.lr", ".nan", "is nan; give a finite number"),
        ("train.epochs", ".inf", "is inf; give a finite number"),
        ("model.config", '{"dropout_rate": .nan}', "holds nan; give finite numbers"),
        ("model.config", '{"a": [{"b": -.inf}]}', "holds -inf; give finite numbers"),
        ("model.config", '{"a": ["\\u0000"]}', "holds a NUL or half a character"),
    ],
)
def test_what_is_no_number_or_text_is_refused_however_deep(
    option: str, value: str, words: str
) -> None:
    assert words in only_problem(f"--{option}", value)


# ---------------------------------------------------------------- the command's own options


def test_own_options_have_types_and_defaults() -> None:
    layers = parse("--check", "true", "--seed", "2", extra=EXTRA)
    assert layers.own == {"checkpoint": None, "split": "test", "check": True}
    assert layers.flags == {"seed": 2}


def test_a_required_own_option() -> None:
    extra = [Extra("output", "Where to write.", required=True, metavar="DIR")]
    assert only_problem(extra=extra) == "--output DIR is required: Where to write."
    assert only_problem("--output", extra=extra) == "--output needs a value: text"
    assert parse("--output", "x", extra=extra).own == {"output": "x"}


def test_file_arguments() -> None:
    layers = parse("a", "--seed", "1", "-", "--", "--b", positionals_help="Files.")
    assert layers.positionals == ["a", "-", "--b"]


# ---------------------------------------------------------------- printing


def test_print_config_prints_what_config_reads_back(write, capsys) -> None:
    argv = ["--optimizer.lr", "3e-5", "--print_config", "--data.train_files", "a"]
    with pytest.raises(SystemExit) as ended:
        config_of(*argv)
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    config = config_of("--config", write(printed))
    assert config.optimizer.lr == 3e-5
    assert config.data.train_files == ["a"]
    assert dump_yaml(config) == printed


def test_print_config_comes_after_the_problems(capsys) -> None:
    assert "seed is -1" in only_problem("--print_config", "--seed", "-1")
    assert capsys.readouterr().out == ""


def test_print_config_on_one_rank_only(capsys, monkeypatch) -> None:
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit):
        config_of("--print_config")
    assert capsys.readouterr().out == ""


_TEXT = st.one_of(
    st.sampled_from(
        [
            "3e-4",
            "1.5",
            "null",
            "true",
            "~",
            "",
            " x ",
            "a: b",
            "[a]",
            "2020-01-01",
            "0x1",
            "1:30",
            "\x85",
            "a\u2028b",
        ]
    ),
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00")),
)


@settings(deadline=None)  # the machine may be busy
@given(
    prefix=_TEXT,
    revision=st.none() | _TEXT.filter(bool),
    files=st.lists(_TEXT),
    lr=st.floats(0, 1e300),
    override=st.dictionaries(_TEXT, _TEXT | st.integers() | st.booleans() | st.none(), max_size=3),
)
def test_dump_and_load_agree(tmp_path_factory, prefix, revision, files, lr, override) -> None:
    config = Config()
    config.data.prefix, config.data.train_files = prefix, files
    config.model.revision, config.model.config = revision, override
    config.optimizer.lr = lr
    path = tmp_path_factory.mktemp("dump") / "config.yaml"
    path.write_bytes(dump_yaml(config).encode())
    assert config_of("--config", str(path)) == config


def test_the_dump_is_plain_yaml() -> None:
    assert yaml.safe_load(dump_yaml(Config())) == to_dict(Config())


def test_help_lists_every_option_with_meaning_and_default(capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        parse("--seed", "x", "--help", extra=EXTRA, positionals_help="Text files.")
    assert ended.value.code == 0
    words = " ".join(capsys.readouterr().out.split())
    for name in leaves(to_dict(Config())):
        # An empty mapping has no leaves; its option is checked below.
        assert f"--{name} " in words
    for expected in (
        "Train a T5.",
        "--model.config CONFIG T5 configuration values to override",
        "Peak learning rate. (type: float, default: 0.0001)",
        "--split {validation,test} Which split.",
        "--checkpoint DIR A checkpoint. (type: str | null, default: null)",
        "Text files.",
        "--config FILE.yaml",
        "--print_config",
    ):
        assert expected in words
    for noise in ("Path to a configuration file", "_files+", "--model CONFIG"):
        assert noise not in words


def test_every_option_has_a_meaning(capsys) -> None:
    with pytest.raises(SystemExit):
        parse("--help")
    entries = " ".join(capsys.readouterr().out.split()).split(" --")[4:]
    assert len(entries) >= len(leaves(to_dict(Config())))
    assert all(len(entry.split("(type:")[0].split()) >= 4 for entry in entries)
