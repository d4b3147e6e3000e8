"""A very small data folder, and models and criteria built from it as fairseq-train builds them.

Nothing here runs a command: `build` parses a command line with fairseq's own parser and returns
what `fairseq-train` would train, within a fraction of a second.
"""

from __future__ import annotations

import random
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch
from fairseq import options, tasks
from fairseq.data import Dictionary, indexed_dataset
from fairseq.dataclass.utils import convert_namespace_to_omegaconf

USER_DIR = Path(__file__).resolve().parent.parent / "qknorm_fairseq"

# The dictionary is joint: <s> <pad> </s> <unk>, then a ... n. The target side of the training
# text has neither a, b, c (source only) nor n (nowhere); d and e stand on both sides.
WORDS = "abcdefghijklmn"
Text = dict[str, list[tuple[str, str]]]
TEXT: Text = {
    "train": [
        ("a b c d e", "f g"),
        ("b a", "h i j k l m d e f"),
        ("e d c b a c d", "g h i"),
        ("a", "m l k"),
    ],
    "valid": [("a b", "f n g"), ("c d e", "h a")],
}
SIZES = {"layers": 2, "attention-heads": 2, "embed-dim": 8, "ffn-embed-dim": 12}


class Built(NamedTuple):
    model: Any
    criterion: Any
    task: Any


def write_data(folder: Path, text: Text | None = None) -> Path:
    """A text of `WORDS` (TEXT, if none is given) as fairseq-preprocess would leave it."""
    folder.mkdir(parents=True, exist_ok=True)
    dictionary = Dictionary()
    for word in WORDS:
        dictionary.add_symbol(word)
    for split, pairs in (text or TEXT).items():
        for side, language in enumerate(("xx", "yy")):
            dictionary.save(str(folder / f"dict.{language}.txt"))
            name = str(folder / f"{split}.xx-yy.{language}")
            builder = indexed_dataset.make_builder(
                f"{name}.bin", impl="mmap", vocab_size=len(dictionary)
            )
            for pair in pairs:
                builder.add_item(dictionary.encode_line(pair[side], add_if_not_exist=False))
            builder.finalize(f"{name}.idx")
    return folder


def larger_text(**sentences: int) -> Text:
    """So many sentence pairs in each split: a ... g is said h ... n, word for word."""
    numbers = random.Random(1)
    meaning = dict(zip(WORDS[:7], WORDS[7:], strict=True))
    text: Text = {}
    for split, count in sentences.items():
        sources = [numbers.choices(WORDS[:7], k=numbers.randint(2, 9)) for _ in range(count)]
        text[split] = [(" ".join(s), " ".join(meaning[word] for word in s)) for s in sources]
    return text


def build(
    data: Path, *arguments: object, arch: str = "transformer_qknorm", sizes: bool = True
) -> Built:
    """What `fairseq-train DATA --arch ARCH ARGUMENTS` would train, with dropout off.

    Arguments given here win over those set here. Without `sizes` the architecture's own hold.
    """
    shape = [
        part
        for side in ("encoder", "decoder")
        for name, size in SIZES.items()
        for part in (f"--{side}-{name}", str(size))
    ]
    line = [
        str(data),
        *("--user-dir", str(USER_DIR), "--arch", arch),
        *(shape if sizes else []),
        *("--dropout", "0", "--attention-dropout", "0", "--activation-dropout", "0"),
        *("--criterion", "label_smoothed_cross_entropy_allowed", "--label-smoothing", "0.1"),
        *("--optimizer", "adam", "--lr", "0.001", "--cpu", "--max-tokens", "100"),
        *(["--qknorm-length", "72"] if arch.startswith("transformer_qknorm") else []),
        *([] if arch == "transformer" else ["--logit-mask"]),  # as the recipe has it
        *map(str, arguments),
    ]
    args = options.parse_args_and_arch(options.get_training_parser(), input_args=line)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Hydra's, about the way fairseq calls it
        cfg = convert_namespace_to_omegaconf(args)
    torch.manual_seed(1)
    task = tasks.setup_task(cfg.task)
    return Built(task.build_model(cfg.model), task.build_criterion(cfg.criterion), task)


def batch(task: Any, split: str = "train", numbers: list[int] | None = None) -> dict[str, Any]:
    """Sentence pairs of a split in one batch; all of them, if none are named."""
    task.load_dataset(split)
    dataset = task.dataset(split)
    chosen = range(len(dataset)) if numbers is None else numbers
    sample: dict[str, Any] = dataset.collater([dataset[number] for number in chosen])
    return sample


def randomize(model: torch.nn.Module, size: float = 0.4) -> None:
    """Make every parameter random, so that none is 0 or 1 or like another; padding stays zero."""
    torch.manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(size * torch.randn(parameter.shape) + (1 if name[-2:] == ".g" else 0))
        for name, parameter in model.named_parameters():
            if name.endswith("embed_tokens.weight"):
                parameter[model.encoder.padding_idx] = 0
