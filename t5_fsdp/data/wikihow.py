"""WikiHow (the 2018 release): reading, cleaning and splitting wikihowAll.csv.

The rules are those of the authors' own processing script and of the loaders that published
results rest on, so that numbers compare: fields are stripped, `keep_row` filters, the two `clean_`
functions mend the joints between lines, and `split_of` follows the official title lists.
"""

from __future__ import annotations

import csv
import hashlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from t5_fsdp.errors import UserError

CSV_NAME = "wikihowAll.csv"
LIST_NAMES = {"train": "all_train.txt", "validation": "all_val.txt", "test": "all_test.txt"}
COLUMNS = ("headline", "title", "text")
WRONG_FIELD_COUNT = "wrong number of fields"
MAX_HEADLINE_SHARE = 0.75  # of the text's characters; the authors' filter
HELD_OUT_SHARE = 0.025  # each of validation and test, where there are no official lists

_LINE_JOINT = re.compile(r"[.]+[\n]+[,]")
_END_OF_FILE = "\x00end of file"  # no record can contain it: NUL bytes are refused


def csv_records(path: Path) -> Iterator[tuple[int, list[str]]]:
    """The records of a CSV file, header included, with their row number (the header is row 1).

    Quoted fields may hold newlines and be of any length; empty lines are left out. A byte-order
    mark is removed.

    Raises:
        UserError: text that is not UTF-8, a NUL byte, a quote that is never closed, or a file
            that cannot be read; with file and row.
    """
    csv.field_size_limit(sys.maxsize)
    row = 0
    try:
        with path.open("rb") as file:
            for record in csv.reader(_text_lines(file)):
                if record == [_END_OF_FILE]:
                    return
                row += 1
                if record and record[-1].endswith(_END_OF_FILE):
                    raise UserError(
                        f"{path}, row {row}: a quote is opened and never closed; close it, or "
                        "fetch the file again if it was cut off"
                    )
                if record:
                    yield row, record
    except UnicodeDecodeError as error:
        bad_byte = error.object[error.start]
        raise UserError(
            f"{path}, row {row + 1}: byte 0x{bad_byte:02x} is not UTF-8; save the file as UTF-8"
        ) from None
    except _NulByte:
        raise UserError(
            f"{path}, row {row + 1}: contains a NUL byte; the file is damaged or not CSV, "
            "replace it"
        ) from None
    except csv.Error as error:
        raise UserError(f"{path}, row {row + 1}: not valid CSV ({error}); mend the row") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); check the file") from None


class _NulByte(Exception):
    pass


def _text_lines(file: Iterator[bytes]) -> Iterator[str]:
    """Decoded lines and then an end mark: inside an open quote it becomes part of the field.

    csv.reader takes the end of the file for a closing quote (its strict mode would also refuse
    harmless quotes), and decoding line by line keeps the row number of bad bytes exact.
    """
    encoding = "utf-8-sig"
    for line in file:
        text = line.decode(encoding)
        encoding = "utf-8"
        if "\x00" in text:
            raise _NulByte
        yield text
    yield _END_OF_FILE


def read_rows(path: Path) -> Iterator[tuple[int, dict[str, str] | None]]:
    """Rows of wikihowAll.csv as (row number, {headline, title, text}), fields stripped.

    The row is None where its number of fields is not three: such rows occur in the released file
    and the published loaders skip them; the caller counts them.

    Raises:
        UserError: as `csv_records`, or for another header.
    """
    records = csv_records(path)
    _, header = next(records, (1, []))
    if sorted(header) != sorted(COLUMNS):
        raise UserError(
            f"{path}, row 1: the header is {','.join(header)!r} instead of "
            f"{','.join(COLUMNS)!r}; use {CSV_NAME} as released (not wikihowSep.csv), or "
            "data.source: files for your own data"
        )
    for number, record in records:
        if len(record) != len(COLUMNS):
            yield number, None
        else:
            yield number, {k: v.strip() for k, v in zip(header, record, strict=True)}


def clean_headline(headline: str) -> str:
    """The summary: bold lines joined by `.,` and a newline become sentences, one a line."""
    return headline.replace(".,", ".").strip()


def clean_text(text: str) -> str:
    """The article: paragraph joints (full stops, newlines, a comma) become `.` and a newline."""
    return _LINE_JOINT.sub(".\n", text).strip()


def keep_row(headline: str, text: str) -> bool:
    """The authors' filter: the headline is shorter than 0.75 of the text, in characters.

    Both are stripped but not yet cleaned.
    """
    return len(headline) < MAX_HEADLINE_SHARE * len(text)


def title_key(title: str) -> str:
    """A title as the official lists spell it: only the spaces are removed."""
    return title.replace(" ", "")


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


def read_lists(folder: Path) -> dict[str, set[str]]:
    """The official title lists in `folder`: all three, only validation and test, or none.

    Raises:
        UserError: another choice of lists, or one that is empty or not UTF-8 text.
    """
    problem = list_problem(folder)
    if problem:
        raise UserError(problem)
    lists = {}
    for split in present_lists(folder):
        path = folder / LIST_NAMES[split]
        try:
            lines = path.read_text(encoding="utf-8-sig").split("\n")
        except (UnicodeDecodeError, OSError) as error:
            raise UserError(f"{path} cannot be read as UTF-8 text ({error})") from None
        lists[split] = {key for line in lines if (key := title_key(line.strip()))}
        if not lists[split]:
            raise UserError(f"{path} lists no titles; fetch it again (see data/README.md)")
    return lists


def split_of(title: str, lists: dict[str, set[str]]) -> str | None:
    """The split of a row: train, validation or test; None where it is in no list.

    * three lists: the one that holds the title (test before validation before train, so that a
      title listed twice never leaks into training);
    * validation and test alone: everything else is training;
    * none: a hash of the title without its trailing digits, so that the parts of one article
      (Artist1, Artist2) stay together; 2.5 % validation, 2.5 % test, the same on every machine.
    """
    if not lists:
        return _hashed_split(title)
    key = title_key(title)
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
