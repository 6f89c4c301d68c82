"""Cut the demo's texts out of the King James Bible that Debian's package bible-kjv prints.

    apt-get install bible-kjv
    bible -f 'Gen1:1-Rev22:21' > kjv.txt
    python scripts/make_demo_text.py kjv.txt --full kjv_full_train.txt

One verse a line without its number, chapters apart by a blank line. Writes kvjax/data/kjv_train.txt
and kvjax/data/kjv_heldout.txt; with --full also the text that the demo's checkpoint was trained on:
everything but the held-out books.
"""

import argparse
import re
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

DATA = Path(__file__).resolve().parents[1] / "kvjax" / "data"
TRAIN = ("Ge", "Exo", "Lev", "Num")
# Narrative, like most of the text, but with few passages that another book repeats: of their runs
# of 8 words 0.2 to 1.7 % stand elsewhere too, against 14 % in 2 Kings and 9 % in Matthew.
HELD_OUT = ("Jdgs", "Ruth", "Dan")
VERSES_IN_ALL = 31_102
VERSE = re.compile(r"(\d?[A-Za-z]+)(\d+):(\d+) (\S.*)")  # "1Sm17:4 And there went out a champion"


class Verse(NamedTuple):
    book: str
    chapter: int
    text: str


def read_verses(path: Path) -> list[Verse]:
    """The verses of `bible -f`'s output, one a line, in their order.

    Raises:
      ValueError: a line is not a verse, or the number of verses is not the whole Bible's.
    """
    verses = []
    for number, line in enumerate(path.read_text("ascii").splitlines(), start=1):
        match = VERSE.fullmatch(line)
        if match is None:
            raise ValueError(f"{path}, line {number}: expected 'Ge1:1 text', got {line[:40]!r}")
        verses.append(Verse(match[1], int(match[2]), match[4]))
    if len(verses) != VERSES_IN_ALL:
        raise ValueError(f"{path}: {len(verses)} verses; the whole Bible has {VERSES_IN_ALL}")
    return verses


def chapters_of(verses: list[Verse], wanted: Callable[[str], bool]) -> str:
    """The chapters of the wanted books: one verse a line, a blank line between chapters."""
    chapters = groupby((v for v in verses if wanted(v.book)), key=lambda v: (v.book, v.chapter))
    return "\n".join("".join(f"{verse.text}\n" for verse in chapter) for _, chapter in chapters)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path, help="output of: bible -f 'Gen1:1-Rev22:21'")
    parser.add_argument("--full", type=Path, help="where to write all but the held-out books")
    arguments = parser.parse_args()

    verses = read_verses(arguments.source)
    texts = {
        DATA / "kjv_train.txt": chapters_of(verses, lambda book: book in TRAIN),
        DATA / "kjv_heldout.txt": chapters_of(verses, lambda book: book in HELD_OUT),
    }
    if arguments.full is not None:
        texts[arguments.full] = chapters_of(verses, lambda book: book not in HELD_OUT)
    for path, text in texts.items():
        path.write_text(text, "ascii")
        print(f"{path}: {len(text):,} bytes")


if __name__ == "__main__":
    main()
