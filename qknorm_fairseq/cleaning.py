"""What a pair of texts from a message catalogue must go through to become a sentence pair.

First each text is made plain (`tidy`, `without_accelerator`), then `refusal` says whether the
pair is worth having, and `key` says which texts count as the same sentence.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Collection

from qknorm_fairseq.text import one_spaced

VERSION = 1  # to be raised when a change here, or in what is selected, changes the corpora

MIN_ENGLISH_WORDS = 2
MAX_WORDS = 80
SCRIPTS = {"ar": "ARABIC", "he": "HEBREW"}  # as Unicode names its letters; the others are Latin

# The forms of the packages at hand: %(name)s, %s, %1$d, %.2f, %%; {name}, {0:.1f}, {{ name }},
# ${name}, %{name}.
PLACEHOLDER = re.compile(
    r"%\([^()]*\)[-+#0]*\d*(?:\.\d+)?[a-zA-Z]"
    r"|%(?:\d+\$)?[-+#0]*\d*(?:\.\d+)?[sdrifgxX%]"
    r"|\{\{[^{}]*\}\}"
    r"|[$%]?\{[^{}]*\}"
)
TAG = re.compile(r"</?[A-Za-z][^<>]*>")
ADDRESS = re.compile(r"\b(?:https?|ftp)://\S+")

# Marks that steer the display of right-to-left text, and spaces and hyphens of no width. They
# come and go at a translator's whim. The joiners U+200C and U+200D are spelling, and stay.
INVISIBLE = re.compile("[\u00ad\u061c\u200b\u200e\u200f\u202a-\u202e\u2060\u2066-\u2069\ufeff]")


def tidy(text: str) -> str:
    """The text composed (NFC), on one line, without invisible marks."""
    return one_spaced(INVISIBLE.sub("", unicodedata.normalize("NFC", text)))


def key(text: str) -> str:
    """What is left of a text for saying that two are the same: its letters and digits.

    Case, markup, placeholders, punctuation, symbols (accelerators among them) and spacing don't
    count, so that `_Delete "%s"` and `delete` are one.
    """
    text = PLACEHOLDER.sub(" ", TAG.sub(" ", text))
    text = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    return "".join(c for c in text if unicodedata.category(c)[0] in "LMN")


def placeholders(text: str) -> Counter[str]:
    """How often each placeholder stands in the text, whatever its inner spacing."""
    return Counter("".join(found.split()) for found in PLACEHOLDER.findall(text))


def words(text: str) -> list[str]:
    """The words proper: what holds a letter, apart from markup and placeholders."""
    plain = PLACEHOLDER.sub(" ", TAG.sub(" ", text))
    return [word for word in plain.split() if any(c.isalpha() for c in word)]


# --- accelerators ---------------------------------------------------------------------------


def vocabulary(texts: Collection[str]) -> frozenset[str]:
    """The keys of all words that hold no underscore or ampersand: ordinary words."""
    tokens = {token for text in texts for token in text.split()}
    return frozenset(key(token) for token in tokens if "_" not in token and "&" not in token)


def accelerators(text: str, mark: str) -> list[re.Match[str]]:
    """The words, outside placeholders, markup and addresses, with a `mark` before a letter."""
    # As many blanks as there were characters keep the positions right.
    for pattern in (TAG, PLACEHOLDER, ADDRESS):
        text = pattern.sub(lambda found: " " * len(found[0]), text)
    found = list(re.finditer(rf"\S*(?<!{mark}){mark}(?=[^\W_])\S*", text))
    if mark == "&":  # of HTML's &amp; and &#39;
        found = [word for word in found if not re.search(r"&#?\w+;", word[0])]
    return found


def without_accelerator(text: str, mark: str, ordinary: Collection[str]) -> str:
    """The text without the mark of its keyboard shortcut: `_File`, `Fi_lters`, `Save _As`.

    A text has one shortcut at most, so several marks are none. A mark inside a word is one only
    if the word is an `ordinary` one without it: `Fi_lters`, but not `date_format`.
    """
    found = accelerators(text, mark)
    if len(found) != 1:
        return text
    word = found[0][0]
    begins = not re.search(rf"\w{mark}", word)
    if not begins and key(word) not in ordinary:
        return text
    return text[: found[0].start()] + word.replace(mark, "") + text[found[0].end() :]


# --- what is refused ------------------------------------------------------------------------


def is_empty(english: str, foreign: str, language: str) -> bool:
    """A side has nothing in it: not translated."""
    return not english.strip() or not foreign.strip()


def is_damaged(english: str, foreign: str, language: str) -> bool:
    """Control characters other than white space, or signs of a wrong encoding."""
    return any(
        c == "\ufffd" or (unicodedata.category(c) in ("Cc", "Co", "Cs") and not c.isspace())
        for c in english + foreign
    )


def is_short(english: str, foreign: str, language: str) -> bool:
    """A label rather than a sentence, on the English side."""
    return len(words(english)) < MIN_ENGLISH_WORDS


def is_long(english: str, foreign: str, language: str) -> bool:
    """A page rather than a sentence, on either side."""
    return max(len(english.split()), len(foreign.split())) > MAX_WORDS


def is_copy(english: str, foreign: str, language: str) -> bool:
    """The English text again."""
    return key(english) == key(foreign)


def lacks_letters(english: str, foreign: str, language: str) -> bool:
    """No word in the translation."""
    return not words(foreign)


def is_other_script(english: str, foreign: str, language: str) -> bool:
    """No letter of the language's script, where that isn't Latin."""
    script = SCRIPTS.get(language)
    return script is not None and not any(
        c.isalpha() and unicodedata.name(c, "").startswith(script) for c in foreign
    )


def has_other_placeholders(english: str, foreign: str, language: str) -> bool:
    """A placeholder got lost, changed, or added."""
    return placeholders(english) != placeholders(foreign)


def is_lopsided(english: str, foreign: str, language: str) -> bool:
    """One side is over three times as long as the other (ten characters are free)."""
    shorter, longer = sorted((len(english), len(foreign)))
    return longer > 3 * shorter + 10


REFUSALS: dict[str, Callable[[str, str, str], bool]] = {
    "empty": is_empty,
    "damaged": is_damaged,
    "short": is_short,
    "long": is_long,
    "copy": is_copy,
    "no letters": lacks_letters,
    "other script": is_other_script,
    "placeholders": has_other_placeholders,
    "lopsided": is_lopsided,
}


def refusal(english: str, foreign: str, language: str) -> str | None:
    """Why the pair isn't wanted, as the first of REFUSALS that is so; None if it is wanted."""
    for name, refuses in REFUSALS.items():
        if refuses(english, foreign, language):
            return name
    return None
