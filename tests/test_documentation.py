"""The pages of the documentation: links, anchors and paths that they name are there."""

from __future__ import annotations

import ast
import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest
import yaml

import t5_fsdp
from t5_fsdp.config import Config, leaves, to_dict
from tests.conftest import ROOT

PAGES = sorted(
    [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "data/README.md", *ROOT.glob("docs/*.md")]
)
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))

FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`[^`\n]+`")
LINK = re.compile(r"\]\(([^()\s]+)\)")
HEADING = re.compile(r"^#{1,6} +(.+?) *$", re.MULTILINE)
# Files are named from the root of the repository; a page by its name alone.
NAMED = re.compile(
    r"(?<![\w./<{-])((?:t5_fsdp|tests|scripts|configs|examples|docs)/[\w./-]+\w/?)(?![\w<{*/])"
)
MODULE = re.compile(r"python -m ((?:t5_fsdp|tests)[\w.]*)")


def prose(page: Path) -> str:
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def anchors(page: Path) -> set[str]:
    """Those that GitHub gives the headings: letters, digits, - and _, numbered when repeated."""
    found: set[str] = set()
    seen: Counter[str] = Counter()
    for heading in HEADING.findall(prose(page)):
        text = LINK.sub("]", heading).replace("[", "").replace("]", "")
        slug = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
        found.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return found


def broken_links(page: Path) -> list[str]:
    broken = []
    for link in LINK.findall(CODE.sub("", prose(page))):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    return broken


def tracked() -> set[str]:
    """Files of the repository and their folders; those of a run are not among them."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    return {str(part) for name in listed for part in (Path(name), *Path(name).parents)}


def test_anchors_are_githubs(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# `t5-fsdp`: a (b), c_d\n```\n# no heading\n```\n## [A](b.md)\n## A\n")
    assert anchors(page) == {"t5-fsdp-a-b-c_d", "a", "a-1"}
    page.write_text("# One\n[good](#one) [bad](#two) [none](none.md) [web](https://x.y/#z)\n")
    assert broken_links(page) == ["#two", "none.md"]


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    assert broken_links(page) == []


def absent_files(page: Path, there: set[str]) -> list[str]:
    """Files, folders and modules of ours that code on the page names, and that are not there."""
    text = page.read_text(encoding="utf-8")
    code = "\n".join([*FENCE.findall(text), *CODE.findall(prose(page))])
    named = {path.rstrip("/") for path in NAMED.findall(code)}
    modules = {name.replace(".", "/") for name in MODULE.findall(code)}
    absent = [path for path in named if path not in there]
    return absent + [path for path in modules if not {path, f"{path}.py"} & there]


def test_absent_files_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "`scripts/train.py` scripts/no.py `scripts/none.py --x` `docs/`\n"
        "```bash\npython -m tests.none --config configs/none.yaml\n```\n"
        "`configs/<name>.yaml` `runs/docs/a.md` `configs/wikihow_*.yaml`\n"
    )
    absent = absent_files(page, tracked())
    assert sorted(absent) == ["configs/none.yaml", "scripts/none.py", "tests/none"]


@each_page
def test_files_that_are_named_are_there(page: Path) -> None:
    assert absent_files(page, tracked()) == []


def test_version_and_licence_are_said_alike() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    assert citation["version"] == t5_fsdp.__version__
    assert f'\nlicense = "{citation["license"]}"\n' in project
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"\n## {t5_fsdp.__version__} - " in changes
    assert (ROOT / "LICENSE").read_text().split()[:4] == ["Apache", "License", "Version", "2.0,"]


def test_the_hooks_before_a_commit_are_the_checks_of_make_lint() -> None:
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    [repository] = config["repos"]
    assert repository["repo"] == "local"
    hooks = {hook["id"]: hook for hook in repository["hooks"]}
    assert all(hook["language"] == "system" for hook in hooks.values())
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    lint = re.search(r"^lint:.*?\n\n", makefile, re.MULTILINE | re.DOTALL)
    assert lint is not None
    programs = re.findall(r"\$\(BIN\)/(.+)", lint[0])
    entries = [hook["entry"] for hook in hooks.values()]
    for program in programs:
        words = program.replace(" --check", "").removesuffix(" .")
        assert any(entry.startswith(f".venv/bin/{words}") for entry in entries), program
    assert hooks["docs"]["entry"] == "make docs" and re.search(r"^docs:", makefile, re.MULTILINE)


def test_the_index_has_every_page() -> None:
    index = ROOT / "docs/README.md"
    linked = {link.partition("#")[0] for link in LINK.findall(prose(index))}
    pages = {page.name for page in ROOT.glob("docs/*.md")} - {index.name}
    assert pages - linked == set()
    assert "docs/README.md" in LINK.findall(prose(ROOT / "README.md"))


NAMED_IN = re.compile(r"`(\w+)`\s+in\s+`([\w./]+\.py)`")


def defined_names(path: Path) -> set[str]:
    """Functions, classes and constants of a module; a branch's as well."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


@pytest.mark.parametrize(("page", "at_least"), [("architecture.md", 20), ("contributing.md", 25)])
def test_functions_that_are_named_are_in_their_files(page: str, at_least: int) -> None:
    named = NAMED_IN.findall((ROOT / "docs" / page).read_text(encoding="utf-8"))
    assert len(named) >= at_least
    absent = [(name, path) for name, path in named if name not in defined_names(ROOT / path)]
    assert absent == []


def layers() -> list[list[str]]:
    """The package's layers as import-linter holds them, the highest first."""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    block = re.search(r"^layers = \[\n(.*?)^\]", project, re.MULTILINE | re.DOTALL)
    assert block is not None
    rows = re.findall(r'^ +"(.+)",$', block[1], re.MULTILINE)
    return [re.findall(r"\w+", row) for row in rows]


def test_the_page_of_the_architecture_has_the_layers_of_the_contract() -> None:
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    table = page.partition("| layer |")[2].partition("\n\n")[0]
    rows = [re.findall(r"`(\w+)`", cell) for cell in re.findall(r"^\| (`.*?) \|", table, re.M)]
    contract = layers()
    base = next(number for number, layer in enumerate(contract) if "distributed" in layer)
    # Of the modules that all use the page may leave out a small one.
    assert {"distributed", "files"} <= set(rows[base]) <= set(contract[base])
    assert rows[:base] + rows[base + 1 :] == contract[:base] + contract[base + 1 :]
    modules = {path.stem for path in (ROOT / "t5_fsdp").glob("*.py")} - {"__init__"}
    folders = {path.parent.name for path in (ROOT / "t5_fsdp").glob("*/__init__.py")}
    assert {name for layer in contract for name in layer} == modules | folders


def test_the_picture_of_a_run_has_folders_that_are_there() -> None:
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    picture = page.partition("```mermaid\n")[2].partition("```")[0]
    boxes = dict(re.findall(r'^ +(\w+)\["(\w+): ', picture, re.MULTILINE))
    folders = {path.parent.name for path in (ROOT / "t5_fsdp").glob("*/__init__.py")}
    # These two are beside a run, not in it.
    assert set(boxes) == set(boxes.values()) == folders - {"benchmark", "integrations"}
    arrows = re.findall(r"^ +(\w+) -\.?->(?:\|[^|]+\|)? (\w+)$", picture, re.MULTILINE)
    assert len(arrows) == picture.count(">") - picture.count("([") and len(arrows) >= 12
    assert {name for arrow in arrows for name in arrow} <= {*boxes, "user"}


OWN_OPTION = re.compile(r'Extra\(\s*"(\w+)"|add_argument\(\s*"--([\w-]+)"')


def test_every_option_of_a_command_is_on_a_page() -> None:
    pages = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    options = {
        name
        for path in (ROOT / "t5_fsdp").rglob("*.py")
        for found in OWN_OPTION.findall(path.read_text(encoding="utf-8"))
        for name in found
        if name
    }
    assert len(options) > 30
    assert [name for name in options if not re.search(rf"--{name}\b|`{name}`", pages)] == []


@each_page
def test_options_of_a_run_that_are_named_exist(page: Path) -> None:
    """Those with their section: `train.epochs`, `--train.epochs 2`."""
    known = set(leaves(to_dict(Config())))
    sections = "|".join({name.partition(".")[0] for name in known if "." in name})
    named = re.findall(
        rf"(?<![\w./])(?:--)?((?:{sections})\.[a-z_0-9]+)(?![\w/(.])",
        "\n".join(CODE.findall(page.read_text(encoding="utf-8"))),
    )
    wrong = {name for name in named if name not in known and not name.endswith((".py", ".md"))}
    assert wrong == set()
