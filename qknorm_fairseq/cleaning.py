"""What a pair of texts from a message catalogue must go through to become a sentence pair.

First each text is made plain (`tidy`, `without_accelerator`), then `refusal` says whether the
pair is worth having, and `key` says which texts count as the same sentence.
"""

from __future__ import annotations

import html
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Container, Iterable

from qknorm_fairseq.text import one_spaced

VERSION = 1  # to be raised when a change here, or in what is selected, changes the corpora

MIN_ENGLISH_WORDS = 2
MAX_WORDS = 80
# What the languages need to be told: how Unicode names their letters where these aren't Latin,
# and how many characters a translation has for one of English where that isn't about one (the
# median over the texts of 40 characters and more).
SCRIPTS = {"ar": "ARABIC", "he": "HEBREW"}
LENGTHS = {"ar": 0.86, "he": 0.73}

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
# &quot; and &#8217; stand for ordinary characters; &lt; and &gt; keep text from being markup.
REFERENCE = re.compile(r"&(?!lt;|gt;)#?\w+;")
# Between two sentences, that is: not after "e.g." (a single letter) nor "excl." (a small letter
# follows).
SENTENCE_END = re.compile(r"(?<!\b\w)[.!?؟]\W*\s+(?=\w)(?![a-z])")
# UTF-8 read as Latin-1 or Windows-1252, and the mark of what couldn't be read.
MISREAD = re.compile("[ÂÃ][\u0080-\u00bf]|â€|\ufffd")
# Common in English, and no common words of the languages at hand.
ENGLISH = frozenset(["and", "are", "for", "is", "must", "of", "that", "the", "this", "with"])

# Marks that steer the display of right-to-left text, and spaces and hyphens of no width. They
# come and go at a translator's whim. The joiners U+200C and U+200D are spelling, and stay.
INVISIBLE = re.compile("[\u00ad\u061c\u200b\u200e\u200f\u202a-\u202e\u2060\u2066-\u2069\ufeff]")


def tidy(text: str) -> str:
    """The text composed (NFC), on one line, with plain characters, without invisible marks."""
    text = REFERENCE.sub(lambda found: html.unescape(found[0]), text)
    return one_spaced(INVISIBLE.sub("", unicodedata.normalize("NFC", text)))


def plain(text: str) -> str:
    """The text without markup and placeholders."""
    return one_spaced(PLACEHOLDER.sub(" ", TAG.sub(" ", text)))


def key(text: str) -> str:
    """What is left of a text for saying that two are the same: its letters and digits.

    Case, markup, placeholders, punctuation, symbols (accelerators among them) and spacing don't
    count, so that `_Delete "%s"` and `delete` are one.
    """
    text = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", plain(text)).casefold())
    return "".join(c for c in text if unicodedata.category(c)[0] in "LMN")


def placeholders(text: str) -> Counter[str]:
    """How often each placeholder stands in the text, whatever its inner spacing."""
    return Counter("".join(found.split()) for found in PLACEHOLDER.findall(text))


def words(text: str) -> list[str]:
    """The words proper: what holds a letter, apart from markup and placeholders."""
    return [word for word in plain(text).split() if any(c.isalpha() for c in word)]


# --- accelerators ---------------------------------------------------------------------------


def vocabulary(texts: Iterable[str]) -> frozenset[str]:
    """The keys of all words without an underscore: ordinary words."""
    tokens = {token for text in texts for token in text.split()}
    return frozenset(key(token) for token in tokens if "_" not in token)


def marked(text: str) -> list[re.Match[str]]:
    """The words with an underscore before a letter, outside markup, placeholders, addresses."""
    for pattern in (TAG, PLACEHOLDER, ADDRESS):  # blanks in their place keep the positions right
        text = pattern.sub(lambda found: " " * len(found[0]), text)
    return list(re.finditer(r"\S*(?<!_)_(?=[^\W_])\S*", text))


def without_accelerator(text: str, ordinary: Container[str]) -> str:
    """The text without the mark of its keyboard shortcut: `_File`, `Fi_lters`, `Save _As`.

    A text has one shortcut at most, so several marks are none. A mark inside a word is one only
    if the word is an `ordinary` one without it: `Fi_lters`, but not `date_format`.
    """
    found = marked(text)
    if len(found) != 1:
        return text
    word, start, end = found[0][0], found[0].start(), found[0].end()
    if re.search(r"\w_", word) and key(word) not in ordinary:
        return text
    return text[:start] + word.replace("_", "") + text[end:]


def without_accelerators(
    english: str, foreign: str, ordinary: tuple[Container[str], Container[str]]
) -> tuple[str, str] | None:
    """Both texts without their shortcuts' marks; None if one keeps a mark that the other lacks.

    Such a one can't be told from an identifier. (Some Vietnamese translators also put the mark
    in the place of a space.)
    """
    english = without_accelerator(english, ordinary[0])
    foreign = without_accelerator(foreign, ordinary[1])
    if [word[0] for word in marked(english)] != [word[0] for word in marked(foreign)]:
        return None
    return english, foreign


# --- what is refused ------------------------------------------------------------------------


def is_empty(english: str, foreign: str, language: str) -> bool:
    """Not translated: a side has nothing in it."""
    return not english or not foreign


def is_damaged(english: str, foreign: str, language: str) -> bool:
    """Control or private characters, or the signs of a wrong encoding."""
    both = english + foreign
    return bool(MISREAD.search(both)) or any(
        unicodedata.category(c) in ("Cc", "Co", "Cs") for c in both
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


def is_wordless(english: str, foreign: str, language: str) -> bool:
    """No letter in the translation."""
    return not words(foreign)


def is_other_script(english: str, foreign: str, language: str) -> bool:
    """No letter of the language's script, where that isn't Latin."""
    script = SCRIPTS.get(language)
    return script is not None and not any(
        c.isalpha() and unicodedata.name(c, "").startswith(script) for c in foreign
    )


def is_english(english: str, foreign: str, language: str) -> bool:
    """Another English text: over a fifth of its words are among the commonest English ones."""
    found = [key(word) for word in words(foreign)]
    return 5 * sum(word in ENGLISH for word in found) > len(found)


def has_other_placeholders(english: str, foreign: str, language: str) -> bool:
    """A placeholder got lost, changed, or added."""
    return placeholders(english) != placeholders(foreign)


def is_lopsided(english: str, foreign: str, language: str) -> bool:
    """Half or twice as long as a translation usually is, give or take ten characters."""
    usual, actual = _lengths(english, foreign, language)
    return max(usual, actual) > 2 * min(usual, actual) + 10


def is_cut(english: str, foreign: str, language: str) -> bool:
    """Fewer sentences, and so much shorter than usual that some are likely to be missing."""
    usual, actual = _lengths(english, foreign, language)
    fewer = len(SENTENCE_END.findall(plain(foreign))) < len(SENTENCE_END.findall(plain(english)))
    return fewer and actual < 0.8 * usual


def _lengths(english: str, foreign: str, language: str) -> tuple[float, int]:
    return len(plain(english)) * LENGTHS.get(language, 1.0), len(plain(foreign))


REFUSALS: dict[str, Callable[[str, str, str], bool]] = {
    "empty": is_empty,
    "damaged": is_damaged,
    "short": is_short,
    "long": is_long,
    "copy": is_copy,
    "wordless": is_wordless,
    "other script": is_other_script,
    "english": is_english,
    "placeholders": has_other_placeholders,
    "lopsided": is_lopsided,
    "cut": is_cut,
}


def refusal(english: str, foreign: str, language: str) -> str | None:
    """Why the tidy pair isn't wanted: the first of REFUSALS that says so, or None."""
    for name, refuses in REFUSALS.items():
        if refuses(english, foreign, language):
            return name
    return None
