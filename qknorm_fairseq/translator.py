"""Text to text, or tokens to tokens, by a trained checkpoint: `qknorm translate`."""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from fairseq import checkpoint_utils, utils
from fairseq.data import data_utils
from fairseq.models import ARCH_MODEL_REGISTRY, MODEL_REGISTRY

import qknorm_fairseq
from qknorm_fairseq.checkpoints import load
from qknorm_fairseq.errors import QKNormError, printable
from qknorm_fairseq.prepared_data import DESCRIPTION, SUBWORDS, Description, locate
from qknorm_fairseq.subwords import Subwords
from qknorm_fairseq.text import portions
from qknorm_fairseq.tokenization import detokenize, tokenize, unescape
from qknorm_fairseq.vocabulary import fingerprint, of_folder

logger = logging.getLogger(__name__)

TASKS = ("translation", "translation_qknorm")
FAMILIES = ("fairseq.models.transformer.", "qknorm_fairseq.models.")
CHUNK, SEGMENTED = 4 << 20, 1 << 18  # characters read and segmented at a time
EXTRA_LENGTH = 50  # a hypothesis has at most so many subwords more than its source


class Translator:
    """A checkpoint of fairseq's Transformer or of ours, with the subwords it was trained on.

    The subwords and dictionaries are looked for beside the checkpoint (a run's folder holds
    them), then where the training data was.

    Args:
        data: the folder that `qknorm prepare` made, if it is in neither place.
        beam: hypotheses kept while searching.
        lenpen: strength of the length penalty: more favours long translations. A model of the
            task translation_qknorm has GNMT's, 0.6 unless it was trained with another; others
            have fairseq's power of the length, 1.
        max_sentences, max_tokens: the most of one batch; tokens include padding.
        cpu: use the CPU even where there is a GPU.
        tokenized: take and give Moses tokens as they are, with a model that was trained on such.
            Otherwise they are made of the text for it, and text of its translations.

    Raises:
        QKNormError: a file is missing, damaged, not a checkpoint, or does not fit the others; or
            tokens are wanted of a model that was trained on text.
    """

    def __init__(
        self,
        checkpoint: Path,
        *,
        data: Path | None = None,
        beam: int = 4,
        lenpen: float | None = None,
        max_sentences: int = 64,
        max_tokens: int = 6000,
        cpu: bool = False,
        tokenized: bool = False,
    ) -> None:
        qknorm_fairseq.register()
        self.max_sentences, self.max_tokens = max_sentences, max_tokens
        state = load(checkpoint)
        folder = _find_data(checkpoint, data, state)
        self.description = Description.load(folder)
        self.tokenized = tokenized
        if tokenized and not self.description.tokenized:
            raise QKNormError(
                f"{checkpoint}: trained on text, not on tokens (see {folder / DESCRIPTION}); "
                "give it text, without --tokenized"
            )
        self.subwords = Subwords(folder / SUBWORDS)
        # Where fairseq-train inferred the languages, the checkpoint doesn't tell them.
        overrides = {
            "data": str(folder),
            "source_lang": self.description.source_lang,
            "target_lang": self.description.target_lang,
        }
        try:
            loaded = checkpoint_utils.load_checkpoint_to_cpu(str(checkpoint), overrides)
            loaded["args"] = None  # of an old checkpoint; fairseq has made `cfg` of it
            _check_kind(checkpoint, loaded["cfg"])
            models, cfg, self.task = checkpoint_utils.load_model_ensemble_and_task(
                [str(checkpoint)], state=loaded
            )
        except QKNormError:
            raise
        except Exception as error:  # fairseq raises whatever comes, Exception itself among them
            reason = str(error).strip().splitlines() or [""]
            raise QKNormError(
                f"{checkpoint} does not fit the vocabulary in {folder}, or is of another model: "
                f"{type(error).__name__}: {shorten(reason[-1], 200)}"
            ) from None
        self._check_vocabulary(checkpoint, folder, state)
        self.device = torch.device("cuda" if torch.cuda.is_available() and not cpu else "cpu")
        for model in models:
            model.to(self.device).eval().prepare_for_inference_(cfg)
        self.models = models
        search: dict[str, float] = {"beam": beam, "max_len_a": 1, "max_len_b": EXTRA_LENGTH}
        if lenpen is not None:
            search["lenpen"] = lenpen
            if "gnmt_lenpen" in self.task.cfg:
                self.task.cfg.gnmt_lenpen = lenpen
        self.generator = self.task.build_generator(models, Namespace(**search))
        limits = (model.max_positions() for model in models)
        self.longest = min(utils.resolve_max_positions(self.task.max_positions(), *limits))

    def _check_vocabulary(self, checkpoint: Path, folder: Path, state: dict[str, Any]) -> None:
        """Refuse a vocabulary that is only as large as the model's: it would translate nonsense.

        Models of ours say what they were trained with. Others may lie beside their dictionaries,
        or those that they were trained with may still be where they were.
        """
        dictionaries = self.task.source_dictionary, self.task.target_dictionary
        for piece in self.subwords.vocabulary:
            if any(dictionary.index(piece) == dictionary.unk() for dictionary in dictionaries):
                raise QKNormError(
                    f"{folder}: {SUBWORDS} is not of the vocabulary of its dictionaries (they "
                    f"lack {piece!r}); prepare the data again"
                )
        here = f"{self.description.source_lang}-{self.description.target_lang}"
        trained = _options(state, "model")
        languages = trained.get("languages", here)
        if languages != here:
            raise QKNormError(f"{checkpoint}: translates {languages}, but {folder} is of {here}")
        known = trained.get("vocabulary")
        if known is None:
            others = (of_folder(place, *here.split("-")) for place in _places(checkpoint, state))
            known = next((other for other in others if other is not None), None)
        if known not in (None, fingerprint(*dictionaries)):
            raise QKNormError(
                f"{folder}: its vocabulary is as large as that which {checkpoint} was trained "
                "with, but another; name the folder of its own with --data"
            )

    def translate(self, lines: Sequence[str]) -> list[str]:
        """One translation a line, in the same order; an empty line stays empty."""
        return list(self.translate_in_chunks(lines, len(lines) or 1))

    def translate_in_chunks(self, lines: Iterable[str], size: int) -> Iterator[str]:
        """The same for a stream: reads `size` lines, yields their translations, and goes on.

        Long lines are fewer at a time, so that the memory does not grow with them.
        """
        for chunk in portions(lines, size, CHUNK):
            yield from self._translate(chunk)

    def _translate(self, lines: Sequence[str]) -> list[str]:
        """What the model reads and writes may be tokens where the caller has text."""
        if self.tokenized:
            return self._search(unescape(lines))
        if not self.description.tokenized:
            return self._search(lines)
        tokens = tokenize(lines, self.description.source_lang)
        return detokenize(self._search(tokens), self.description.target_lang)

    @torch.inference_mode()
    def _search(self, lines: Sequence[str]) -> list[str]:
        translations = [""] * len(lines)
        filled = [number for number, line in enumerate(lines) if line]
        if not filled:
            return translations
        tokens = []
        texts = (lines[number] for number in filled)
        # A long line's pieces take 20 times its memory, and most of them are cut off.
        segmented = map(self.subwords.encode, portions(texts, len(filled), SEGMENTED))
        for number, pieces in zip(filled, chain.from_iterable(segmented), strict=True):
            if len(pieces) >= self.longest:
                logger.warning(
                    f"a line of {len(pieces)} subwords is cut to the {self.longest - 1} that the "
                    f"model can read: {printable(lines[number][:40])}..."
                )
            tokens.append(self._indices(pieces[: self.longest - 1]))
        dataset = self.task.build_dataset_for_inference(tokens, [len(t) for t in tokens])
        by_length = sorted(range(len(tokens)), key=lambda index: len(tokens[index]))
        for indices in data_utils.batch_by_size(
            by_length,
            lambda index: len(tokens[index]),
            max_tokens=max(self.max_tokens, self.longest),
            max_sentences=self.max_sentences,
        ):
            batch = dataset.collater([dataset[index] for index in indices])
            if self.device.type == "cuda":
                batch = utils.move_to_cuda(batch)
            hypotheses = self.task.inference_step(self.generator, self.models, batch)
            for index, best in zip(batch["id"].tolist(), hypotheses, strict=True):
                translations[filled[index]] = self._text(best[0]["tokens"])
        return translations

    def _indices(self, pieces: Sequence[str]) -> torch.Tensor:
        dictionary = self.task.source_dictionary
        return torch.tensor([*map(dictionary.index, pieces), dictionary.eos()])

    def _text(self, tokens: torch.Tensor) -> str:
        dictionary = self.task.target_dictionary
        special = {dictionary.eos(), dictionary.pad(), dictionary.bos()}
        return self.subwords.decode([dictionary[t] for t in tokens.tolist() if t not in special])


def _check_kind(checkpoint: Path, cfg: Any) -> None:
    """Let no stranger's checkpoint choose which code of fairseq's builds it, but for a few.

    Other tasks and models evaluate options, or read files that the checkpoint names.
    """
    # As fairseq's setup_task and build_model choose.
    task = getattr(cfg.task, "task", None) or getattr(cfg.task, "_name", None)
    model = getattr(cfg.model, "_name", None) or getattr(cfg.model, "arch", None)
    kind = ARCH_MODEL_REGISTRY.get(model) or MODEL_REGISTRY.get(model)
    if task not in TASKS or kind is None or not kind.__module__.startswith(FAMILIES):
        raise QKNormError(
            f"{checkpoint}: is of another model or task ({shorten(str(model), 60)}, "
            f"{shorten(str(task), 60)}) than fairseq's transformer or this package's, for "
            "translation; use fairseq-generate, if you trust who made it"
        )


def _options(state: dict[str, Any], group: str) -> dict[str, Any]:
    """A group of the options that a checkpoint was trained with."""
    cfg = state.get("cfg")
    options = cfg.get(group) if isinstance(cfg, dict) else None
    options = vars(options) if isinstance(options, Namespace) else options
    return options if isinstance(options, dict) else {}


def _places(checkpoint: Path, state: dict[str, Any]) -> list[Path]:
    """Where a checkpoint's prepared folder may be."""
    places = [checkpoint.parent]
    if data := _options(state, "task").get("data"):
        trained_on = Path(str(data).split(":")[0])
        places.append(locate(trained_on, checkpoint) or trained_on)
    return places


def _find_data(checkpoint: Path, data: Path | None, state: dict[str, Any]) -> Path:
    """The prepared folder that belongs to a checkpoint."""
    if data is not None:
        return data
    places = _places(checkpoint, state)
    for place in places:
        if (place / DESCRIPTION).is_file():
            return place
    raise QKNormError(
        f"no {DESCRIPTION} in {' or '.join(map(str, places))}: say with --data where the folder is "
        "that `qknorm prepare` made"
    )
