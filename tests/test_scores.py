"""`qknorm score`: against sacreBLEU's own command, and against multi-bleu.perl's definition."""

from __future__ import annotations

import json
import math
import random
import time
from pathlib import Path

import pytest
from conftest import Run
from faults import Fault

from qknorm_fairseq.errors import QKNormError
from qknorm_fairseq.scores import detokenize, score, tokenize

NAMES = ["bleu_tok", "bleu", "chrf", "ter"]
REFERENCES = [
    'The "old" house, built in 1923, isn\'t for sale.',
    "She said: don't open the door!",
    "It costs $3.50 (about 3 euros) in the well-known shop.",
    "Save the file as %s & close it.",
    "Yes.",
    "What time does the train from Košice arrive, Mr. Novák?",
]
HYPOTHESES = [
    'The "old" house, built 1923, is not for sale.',
    "She said: do not open that door!",
    "It costs $3.50 (about 3 euros) in a well-known shop.",
    "Save file as %s & close it.",
    "Yes.",
    "At what time does the train from Košice arrive, Mr. Novák?",
]
REFERENCE_TOKENS = [
    'The " old " house , built in 1923 , is n\'t for sale .',
    "She said : don 't open the door !",
    "It costs $ 3.50 ( about 3 euros ) in the well-known shop .",
]
HYPOTHESIS_TOKENS = [
    'The " old " house , built 1923 , is not for sale .',
    "She said : do not open that door !",
    "It costs $ 3.50 ( about 3 euros ) in a well-known shop .",
]


def multi_bleu(hypotheses: list[str], references: list[str]) -> float:
    """BLEU in percent as Moses' multi-bleu.perl defines it, for one reference.

    Over the whole text, for n = 1 to 4: of the hypotheses' n-grams, the share that their
    references hold too, each n-gram at most as often as in the reference. The geometric mean of
    the four shares, times exp(1 - reference tokens / hypothesis tokens) if that is under 1.
    Nothing is smoothed.
    """
    correct, total = [0] * 5, [0] * 5
    hypothesis_length = reference_length = 0
    for hypothesis, reference in zip(hypotheses, references, strict=True):
        left, right = hypothesis.split(), reference.split()
        hypothesis_length += len(left)
        reference_length += len(right)
        for n in range(1, 5):
            left_ngrams = [tuple(left[start : start + n]) for start in range(len(left) - n + 1)]
            right_ngrams = [tuple(right[start : start + n]) for start in range(len(right) - n + 1)]
            total[n] += len(left_ngrams)
            for ngram in set(left_ngrams):
                correct[n] += min(left_ngrams.count(ngram), right_ngrams.count(ngram))
    if 0 in correct[1:]:
        return 0.0
    mean = math.exp(sum(math.log(correct[n] / total[n]) for n in range(1, 5)) / 4)
    brevity = min(1.0, math.exp(1 - reference_length / hypothesis_length))
    return 100 * brevity * mean


def write(folder: Path, hypotheses: list[str], references: list[str]) -> tuple[Path, Path]:
    files = (folder / "hyp", folder / "ref")
    for file, lines in zip(files, (hypotheses, references), strict=True):
        file.write_bytes("".join(f"{line}\n" for line in lines).encode())
    return files


def sacrebleu(run: Run, hyp: Path, ref: Path) -> dict[str, tuple[float, str]]:
    """{metric: (score, signature)} by sacreBLEU's own command."""
    done = run(
        *(
            "sacrebleu",
            ref,
            "-i",
            hyp,
            "-m",
            "bleu",
            "chrf",
            "ter",
            "--width",
            8,
            "--format",
            "json",
        )
    )
    assert done.returncode == 0, done.stderr
    metrics = zip(("bleu", "chrf", "ter"), json.loads(done.stdout), strict=True)
    return {name: (metric["score"], metric["signature"]) for name, metric in metrics}


def test_scores_of_text_are_those_of_the_sacrebleu_command(run: Run, tmp_path: Path) -> None:
    hyp, ref = write(tmp_path, HYPOTHESES, REFERENCES)
    done = run("qknorm", "score", hyp, ref, "--json")
    assert done.returncode == 0, done.stderr
    scores = json.loads(done.stdout)
    assert list(scores) == [*NAMES, "signatures"]
    assert list(scores["signatures"]) == NAMES
    for name, (value, signature) in sacrebleu(run, hyp, ref).items():
        assert 0 < value < 100
        assert scores[name] == pytest.approx(value, abs=1e-6)
        assert scores["signatures"][name] == signature
    assert scores["bleu_tok"] == pytest.approx(
        multi_bleu(tokenize(HYPOTHESES, "en"), tokenize(REFERENCES, "en")), abs=0.01
    )


def test_scores_of_tokens_are_those_of_the_text_they_stand_for(run: Run, tmp_path: Path) -> None:
    (tmp_path / "tokens").mkdir()
    hyp, ref = write(tmp_path / "tokens", HYPOTHESIS_TOKENS, REFERENCE_TOKENS)
    done = run("qknorm", "score", hyp, ref, "--json", "--tokenized")
    assert done.returncode == 0, done.stderr
    scores = json.loads(done.stdout)
    assert scores["bleu_tok"] == pytest.approx(
        multi_bleu(HYPOTHESIS_TOKENS, REFERENCE_TOKENS), abs=0.01
    )
    text = write(tmp_path, detokenize(HYPOTHESIS_TOKENS, "en"), detokenize(REFERENCE_TOKENS, "en"))
    assert text[1].read_text().splitlines()[2] == (
        "It costs $3.50 (about 3 euros) in the well-known shop."
    )
    for name, (value, signature) in sacrebleu(run, *text).items():
        assert scores[name] == pytest.approx(value, abs=1e-6)
        assert scores["signatures"][name] == signature


def test_the_readable_output_has_a_line_and_a_signature_for_each_score(
    run: Run, tmp_path: Path
) -> None:
    files = write(tmp_path, HYPOTHESES, REFERENCES)
    readable = run("qknorm", "score", *files).stdout.splitlines()
    scores = score(HYPOTHESES, REFERENCES, tokenized=False)
    assert len(readable) == len(NAMES)
    for line, name in zip(readable, NAMES, strict=True):
        assert f" {getattr(scores, name):.2f} " in line
        assert line.endswith(scores.signatures[name])


@pytest.mark.parametrize("seed", range(20))
def test_tokenized_bleu_is_multi_bleus(seed: int) -> None:
    """Random sentences from few words: repeated n-grams, and all lengths from none to 30."""
    random_numbers = random.Random(seed)
    references, hypotheses = [], []
    for _ in range(random_numbers.randint(1, 12)):
        words = random_numbers.choices(
            ["a", "b", "c", "d", "E", ",", "."], k=random_numbers.randint(1, 30)
        )
        references.append(" ".join(words))
        kept = [word for word in words if random_numbers.random() < 0.85]
        hypotheses.append(" ".join(kept + random_numbers.choices("ab", k=seed % 4)))
    scores = score(hypotheses, references, tokenized=True)
    assert scores.bleu_tok == pytest.approx(multi_bleu(hypotheses, references), abs=0.01)


def test_without_a_common_4_gram_tokenized_bleu_is_0_as_in_multi_bleu() -> None:
    hypotheses, references = ["a b c x y z w"], ["a b c d e f g"]
    assert multi_bleu(hypotheses, references) == 0
    assert score(hypotheses, references, tokenized=True).bleu_tok == 0


@pytest.mark.parametrize("tokenized", [False, True])
def test_the_reference_itself_is_perfect(tokenized: bool) -> None:
    lines = REFERENCE_TOKENS if tokenized else REFERENCES
    scores = score(lines, lines, tokenized=tokenized)
    assert scores.bleu_tok == pytest.approx(100)
    assert scores.bleu == pytest.approx(100)
    assert scores.chrf == pytest.approx(100)
    assert scores.ter == 0


def test_tokenized_bleu_of_text_counts_moses_tokens() -> None:
    assert tokenize(['Mr. Novák isn\'t "in" (today) & costs $3.50.'], "en") == [
        'Mr. Novák isn \'t " in " ( today ) & costs $ 3.50 .'
    ]
    assert tokenize(["l'été n'est pas là."], "fr") == ["l' été n' est pas là ."]


def test_chinese_is_counted_by_characters() -> None:
    """Without spaces, BLEU over words would see a sentence as one word."""
    scores = score(["我今天早上吃了面包。"], ["我今天早上吃了米饭。"], lang="zh", tokenized=False)
    assert 0 < scores.bleu < 100
    assert "tok:zh" in scores.signatures["bleu"]


def test_separators_within_lines_do_not_shift_the_lines(run: Run, tmp_path: Path) -> None:
    """What Python's str.splitlines would take for more lines."""
    references = ["one\u2028two three four five", "six\u0085seven\x0ceight nine ten", *REFERENCES]
    hyp, ref = write(tmp_path, references, references)
    hyp.write_bytes(b"\xef\xbb\xbf" + hyp.read_bytes().replace(b"\n", b"\r\n"))
    done = run("qknorm", "score", hyp, ref, "--json")
    assert done.returncode == 0, done.stderr
    scores = json.loads(done.stdout)
    assert scores["bleu_tok"] == pytest.approx(100)
    assert scores["ter"] == 0


def test_empty_hypotheses_count_as_bad_ones() -> None:
    scores = score(["", *REFERENCES[1:]], REFERENCES, tokenized=False)
    assert 0 < scores.bleu < 100
    nothing = score(["", ""], REFERENCES[:2], tokenized=False)
    assert (nothing.bleu_tok, nothing.bleu, nothing.chrf) == (0, 0, 0)
    assert nothing.ter == 100


def test_different_numbers_of_lines_are_an_error_that_names_both(
    run: Run, tmp_path: Path, fault: Fault
) -> None:
    hyp, ref = write(tmp_path, HYPOTHESES[:4], REFERENCES)
    done = run("qknorm", "score", hyp, ref)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert f"{hyp} has 4 lines" in done.stderr
    assert f"{ref} has 6" in done.stderr
    fault("score", "different numbers of lines", done.stderr)
    with pytest.raises(QKNormError, match="4 hypotheses, but 6 references"):
        score(HYPOTHESES[:4], REFERENCES, tokenized=False)


def test_unreadable_files_are_an_error(run: Run, tmp_path: Path, fault: Fault) -> None:
    good, empty = write(tmp_path, REFERENCES, [])
    (tmp_path / "latin1").write_bytes("été\nça\n".encode("latin-1"))
    (tmp_path / "nul").write_bytes(b"one\na\0b\n")
    for hyp, ref, expected in (
        (empty, empty, "no lines"),
        (tmp_path / "nul", good, f"{tmp_path / 'nul'}, line 2: not text (byte 2 is a NUL)"),
        (tmp_path / "missing", good, f"{tmp_path / 'missing'}: no such file"),
        (good, tmp_path, f"{tmp_path}: a folder, where a file is needed"),
        (tmp_path / "latin1", good, f"{tmp_path / 'latin1'}, line 1: not valid UTF-8"),
    ):
        done = run("qknorm", "score", hyp, ref)
        assert done.returncode == 1
        assert done.stderr.count("\n") == 1
        assert expected in done.stderr
        fault("score", "no text: " + expected.rpartition(": ")[2], done.stderr)


WORDS = [f"w{n % 17}" for n in range(301)]
LONG, OTHER = " ".join(WORDS), " ".join(WORDS[::-1])


@pytest.mark.parametrize("long", ["hypothesis", "reference"])
def test_a_line_too_long_for_ter_is_named_and_has_the_other_scores(
    long: str, run: Run, tmp_path: Path, fault: Fault
) -> None:
    """TER would take minutes over a text of such lines."""
    sides = [["Yes.", LONG] * 10, ["Yes.", "w1 w2 w3"] * 10]
    hyp, ref = write(tmp_path, *(sides if long == "hypothesis" else sides[::-1]))
    done = run("qknorm", "score", hyp, ref)
    assert done.returncode == 0
    file = hyp if long == "hypothesis" else ref
    assert done.stderr == (
        f"qknorm: no TER: {file}, line 2: 301 words, and TER takes too long over more than 300; "
        "write one sentence a line\n"
    )
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["BLEU", "BLEU", "chrF"]
    scores = json.loads(run("qknorm", "score", hyp, ref, "--json").stdout)
    assert scores["ter"] is None
    assert set(scores["signatures"]) == {"bleu_tok", "bleu", "chrf"}
    fault("score", f"a {long} of 301 words", done.stderr)


def test_long_lines_do_not_take_long() -> None:
    said: list[str] = []
    started = time.process_time()
    scores = score([OTHER] * 200, [LONG] * 200, tokenized=False, say=said.append)
    assert time.process_time() - started < 10
    assert scores.ter is None
    assert len(said) == 1


@pytest.mark.parametrize(
    ("hypothesis", "reference", "edits"),
    [(LONG, LONG, 0), (" ".join(WORDS[:300]), " ".join([*WORDS[:299], "end"]), 1)],
    ids=["the reference itself", "300 words"],
)
def test_lines_that_are_not_too_long_for_ter(hypothesis: str, reference: str, edits: int) -> None:
    said: list[str] = []
    scores = score([hypothesis], [reference], tokenized=False, say=said.append)
    assert scores.ter == pytest.approx(100 * edits / len(reference.split()))
    assert not said


def test_wrong_use_exits_2(run: Run) -> None:
    done = run("qknorm", "score", "only-one-file")
    assert done.returncode == 2
    assert "ref" in done.stderr.lower()
