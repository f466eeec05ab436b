"""WikiHow (the 2018 release): reading, cleaning and splitting wikihowAll.csv and wikihowSep.csv.

The official rules are those of the authors' own processing script and of the loaders that published
results rest on, so that numbers compare: fields are stripped, `keep_row` filters, the two `clean_`
functions mend the joints between lines, and `split_of` follows the official title lists. The
`repair_` functions mend what these rules miss; results with them compare with nobody's.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from t5_fsdp.data.readers import BadRow, csv_records
from t5_fsdp.errors import UserError

# One row an article (its bold lines are the summary), or one row a step (its bold line is).
CSV_NAMES = {"all": "wikihowAll.csv", "sep": "wikihowSep.csv"}
COLUMNS = {
    "all": ("headline", "title", "text"),
    "sep": ("overview", "headline", "text", "sectionLabel", "title"),
}
LIST_NAMES = {"train": "all_train.txt", "validation": "all_val.txt", "test": "all_test.txt"}
WRONG_FIELD_COUNT = "wrong number of fields"
MAX_HEADLINE_SHARE = 0.75  # of the text's characters; the authors' filter
HELD_OUT_SHARE = 0.025  # each of validation and test, where there are no official lists

_LINE_JOINT = re.compile(r"[.]+[\n]+[,]")
# What the official pattern leaves: joints after another mark than a full stop, and the `.;` behind
# the first paragraph. No sentence begins with a comma, so a comma after newlines is always a joint.
_ANY_JOINT = re.compile(r"[ ]*;?[ ]*\n\s*,[ ]*|(?<=[.!?:]);[ ]*(?:\n\s*|$)")
# A full stop and a comma inside a line: a joint before a capital, unless it ends an abbreviation.
_ABBREVIATIONS = (
    "etc",
    r"e\.g",
    r"i\.e",
    "vs",
    "Inc",
    "Ltd",
    "Co",
    "Jr",
    "Sr",
    "St",
    "Dr",
    "[A-Z]",
)
_INLINE_JOINT = re.compile(
    "".join(rf"(?<!\b{word})" for word in _ABBREVIATIONS) + r"[.]+,[ ]*(?=[A-Z])"
)
_LEADING_JOINT = re.compile(r"^[\s,;]+")
_HEADLINE_JOINT = re.compile(r"[ ]*[,;]+[ ]*(?=\n|$)")


def read_rows(
    path: Path, version: str = "all"
) -> Iterator[tuple[int, dict[str, str] | BadRow | None]]:
    """Rows as (row number, fields by column, stripped); the header is row 1.

    The row is None where its number of fields is not the header's: such rows occur in the released
    files and the published loaders skip them; the caller counts them.

    Args:
        path: of the CSV file.
        version: "all" or "sep", which decides the columns.

    Raises:
        UserError: as `csv_records`, or for another header.
    """
    columns = COLUMNS[version]
    records = csv_records(path, strict=False)
    _, header = next(records, (1, []))
    if isinstance(header, BadRow) or sorted(header) != sorted(columns):
        found = "damaged" if isinstance(header, BadRow) else repr(",".join(header))
        raise UserError(
            f"{path}, row 1: the header is {found} instead of {','.join(columns)!r}; use "
            f"{CSV_NAMES[version]} as released (data.wikihow_version: {version}), or "
            "data.source: files for your own data"
        )
    for number, record in records:
        if isinstance(record, BadRow):
            yield number, record
        elif len(record) != len(columns):
            yield number, None
        else:
            yield number, {k: v.strip() for k, v in zip(header, record, strict=True)}


def clean_headline(headline: str) -> str:
    """The summary: bold lines joined by `.,` and a newline become sentences, one a line."""
    return headline.replace(".,", ".").strip()


def clean_text(text: str) -> str:
    """The article: paragraph joints (full stops, newlines, a comma) become `.` and a newline."""
    return _LINE_JOINT.sub(".\n", text).strip()


def repair_headline(headline: str) -> str:
    """As `clean_headline`, and lines that end in another mark than a full stop lose their comma."""
    return _HEADLINE_JOINT.sub("", clean_headline(headline)).strip()


def repair_text(text: str) -> str:
    """As `clean_text`, and the joints that the official pattern misses become newlines as well.

    These are the `.;` behind the first paragraph, joints after another mark than a full stop, a
    full stop with a comma inside a line, and a comma that begins the text.
    """
    text = _LEADING_JOINT.sub("", clean_text(text))
    text = _INLINE_JOINT.sub(".\n", _ANY_JOINT.sub("\n", text))
    return re.sub(r"\n[ \t]+", "\n", text).strip()


def keep_row(headline: str, text: str) -> bool:
    """The authors' filter: the headline is shorter than 0.75 of the text, in characters.

    Both are stripped but not yet cleaned.
    """
    return len(headline) < MAX_HEADLINE_SHARE * len(text)


def title_key(title: str) -> str:
    """A title as the published loaders look it up: only the spaces are removed."""
    return title.replace(" ", "")


def repair_title_key(title: str) -> str:
    """A title by its letters and digits, as the lists spell all of theirs.

    With `title_key` a title with an apostrophe or a hyphen is in no list.
    """
    return "".join(character for character in title if character.isalnum())


def present_lists(folder: Path) -> list[str]:
    """The splits whose official title list lies in `folder`."""
    return [split for split, name in LIST_NAMES.items() if (folder / name).is_file()]


def list_problem(folder: Path) -> str | None:
    """What is wrong with the choice of lists in `folder`: all three, validation + test, or none."""
    present = present_lists(folder)
    if present in ([], ["validation", "test"], ["train", "validation", "test"]):
        return None
    missing = [LIST_NAMES[split] for split in LIST_NAMES if split not in present]
    return (
        f"data.path {folder} has only some of the official split lists: "
        f"{' and '.join(missing)} missing; add {'it' if len(missing) == 1 else 'them'} "
        "(see data/README.md) or remove all of them for a split by title"
    )


def list_notes(lists: dict[str, set[str]]) -> list[str]:
    """What the user should know about the lists that are there."""
    if not lists:
        return [
            "no official split lists: split by a hash of the title, about 2.5 % each for "
            "validation and test; results do not compare with published ones"
        ]
    if "train" not in lists:
        return [
            "all_train.txt is missing: training is every row in neither all_val.txt nor "
            "all_test.txt (published results use the list)"
        ]
    return []


def read_lists(folder: Path, key_of: Callable[[str], str] | None = None) -> dict[str, set[str]]:
    """The official title lists in `folder`: all three, only validation and test, or none.

    Args:
        folder: where they lie.
        key_of: `title_key` (the default) or `repair_title_key`, as for `split_of`.

    Raises:
        UserError: another choice of lists, or one that is empty or not UTF-8 text.
    """
    problem = list_problem(folder)
    if problem:
        raise UserError(problem)
    key_of = key_of or title_key
    lists = {}
    for split in present_lists(folder):
        path = folder / LIST_NAMES[split]
        try:
            lines = path.read_text(encoding="utf-8-sig").split("\n")
        except (UnicodeDecodeError, OSError) as error:
            raise UserError(f"{path} cannot be read as UTF-8 text ({error})") from None
        lists[split] = {key for line in lines if (key := key_of(line.strip()))}
        if not lists[split]:
            raise UserError(f"{path} lists no titles; fetch it again (see data/README.md)")
    return lists


def split_of(
    title: str, lists: dict[str, set[str]], key_of: Callable[[str], str] = title_key
) -> str | None:
    """The split of a row: train, validation or test; None where it is in no list.

    * three lists: the one that holds the title (test before validation before train, so that a
      title listed twice never leaks into training);
    * validation and test alone: everything else is training;
    * none: a hash of the title without its trailing digits, so that the parts of one article
      (Artist1, Artist2) stay together; 2.5 % validation, 2.5 % test, the same on every machine.

    Args:
        title: as in the CSV file.
        lists: from `read_lists`.
        key_of: `title_key` (official) or `repair_title_key`.
    """
    if not lists:
        return _hashed_split(title)
    key = key_of(title)
    for split in ("test", "validation", "train"):
        if key in lists.get(split, ()):
            return split
    return None if "train" in lists else "train"


def _hashed_split(title: str) -> str:
    article = title_key(title).rstrip("0123456789")
    digest = hashlib.blake2b(article.encode("utf-8", "replace"), digest_size=8).digest()
    position = int.from_bytes(digest, "big") / 2**64
    if position < HELD_OUT_SHARE:
        return "validation"
    return "test" if position < 2 * HELD_OUT_SHARE else "train"
