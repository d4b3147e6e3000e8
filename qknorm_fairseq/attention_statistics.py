"""How sharp the attention of a trained model is: entropy and saturation over the test set.

A row of an attention is what one query gives to its keys: weights w_1 ... w_n that add up to 1, n
being the keys it may see (no padding, nothing that comes later). Its entropy -sum w_i log w_i is
log n where all keys get alike, and 0 where one gets everything; it is *saturated* where one weight
is over SATURATED. Rows of a single visible key can be nothing else and are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from fairseq import utils
from fairseq.data import data_utils
from omegaconf import OmegaConf
from rich.progress import Progress
from torch import Tensor, nn

from qknorm_fairseq.attention_weights import AttentionRecorder, pair_dataset
from qknorm_fairseq.errors import QKNormError
from qknorm_fairseq.files import sha256, write_json
from qknorm_fairseq.prepared_data import Description, locate
from qknorm_fairseq.reading import Unreadable, read_json
from qknorm_fairseq.runs import BEST, CONFIG
from qknorm_fairseq.text import read_lines
from qknorm_fairseq.training import console
from qknorm_fairseq.translator import Translator

SATURATED = 0.99
CACHE = "attention.json"
MAX_TOKENS = 2000  # of one batch: all heads of all layers are kept at once


def of_run(
    folder: Path, *, cpu: bool, not_kept: Callable[[OSError], None] = lambda error: None
) -> dict[str, dict[str, float]]:
    """Entropy and saturation of each attention of a run's best checkpoint, over its test set.

    The decoder reads the reference (teacher forcing). The result is kept in the folder
    (`attention.json`) and valid as long as the checkpoint and the test set are the same; where
    the test set is not here (a run carried elsewhere), for the one that it was computed on.

    Args:
        folder: a run's; where its data is, its configuration says.
        cpu: use the CPU even where there is a GPU.
        not_kept: hears why the result could not be written into the folder.

    Returns:
        for each module (`encoder_1_self`, `decoder_1_self`, `decoder_1_cross`, ...) the mean over
        all heads and rows of `entropy`, as a share of its maximum log n, and the share of rows
        that are `saturated`: numbers from 0 to 1.

    Raises:
        QKNormError: the checkpoint, the configuration or the test set is missing or damaged.
    """
    checkpoint, cache = folder / BEST, folder / CACHE
    if not checkpoint.is_file():
        raise QKNormError(f"{checkpoint}: no such checkpoint")
    known = _read(cache)
    files = _test_files(folder)
    here = all(file.is_file() for file in files)
    key = {
        "checkpoint_sha256": sha256(checkpoint),
        "test_sha256": list(map(sha256, files)) if here else known.get("test_sha256"),
        "saturated": SATURATED,
    }
    if key["test_sha256"] and all(known.get(name) == value for name, value in key.items()):
        return known["modules"]  # type: ignore[no-any-return]
    translator = Translator(checkpoint, data=folder, cpu=cpu)
    batches = list(_batches(translator, *_read_test_set(files)))
    with Progress(console=console, disable=not console.is_terminal, transient=True) as progress:
        task = progress.add_task(f"{folder}: attention", total=len(batches))
        if not console.is_terminal:
            console.print(f"{folder}: attention over the test set")
        on_device = (
            utils.move_to_cuda(batch) if translator.device.type == "cuda" else batch
            for batch in progress.track(batches, task_id=task)
        )
        modules = statistics(translator.models[0], on_device)
    try:
        write_json(cache, {**key, "modules": modules})
    except OSError as error:
        not_kept(error)
    return modules


def statistics(
    model: nn.Module, batches: Iterable[Mapping[str, Any]]
) -> dict[str, dict[str, float]]:
    """The same for a model in eval mode and batches as fairseq makes them.

    Raises:
        QKNormError: the model has no attention of the known kinds.
    """
    sums: dict[str, Tensor] = {}
    pad: int = model.encoder.padding_idx  # type: ignore[union-attr, assignment]
    with torch.inference_mode(), AttentionRecorder(model) as recorder:
        for batch in batches:
            given = batch["net_input"]
            model(**given, features_only=True)
            source = given["src_tokens"].ne(pad)
            target = given["prev_output_tokens"].ne(pad)
            for name, weights in recorder.weights.items():
                queries = source if name.startswith("encoder") else target
                keys = target if name.startswith("decoder") and name.endswith("self") else source
                visible = keys.unsqueeze(1) & queries.unsqueeze(2)
                if keys is target:
                    visible = visible.tril()
                found = _sums(weights, visible.sum(-1))
                sums[name] = sums[name] + found if name in sums else found
    result = {}
    for name in recorder.modules:
        rows, entropy, saturated = sums[name].tolist() if name in sums else (0.0, 0.0, 0.0)
        if rows:
            result[name] = {"entropy": entropy / rows, "saturated": saturated / rows}
    return result


def _sums(weights: Tensor, visible: Tensor) -> Tensor:
    """Number of rows, sum of their entropies' shares, and number of saturated rows.

    Args:
        weights: H x B x T x S.
        visible: B x T, how many keys each query may see; 0 for a query that is padding.
    """
    counted = visible > 1
    rows = weights[:, counted]  # H x N x S
    entropy = torch.special.entr(rows).sum(-1) / visible[counted].log()
    saturated = rows.amax(-1) > SATURATED
    sums = [entropy.new_tensor(entropy.numel()), entropy.double().sum(), saturated.sum()]
    return torch.stack([value.double() for value in sums]).cpu()


def _read(cache: Path) -> dict[str, Any]:
    try:
        content = read_json(cache)
    except (OSError, Unreadable):
        return {}
    return content if isinstance(content, dict) and "modules" in content else {}


def _test_files(folder: Path) -> list[Path]:
    """The test text of a run, source and target, as the model is used to it: text or tokens."""
    file = folder / CONFIG
    try:
        data = Path(OmegaConf.load(file).task.data)
    except FileNotFoundError:
        raise QKNormError(f"{file}: no such file; is {folder} the folder of a run?") from None
    except Exception as error:  # yaml's and omegaconf's are many
        raise QKNormError(f"{file}: no configuration of a run ({type(error).__name__})") from None
    description = Description.load(folder)
    data = locate(data, folder) or data
    return [data / f"test.{lang}" for lang in (description.source_lang, description.target_lang)]


def _read_test_set(files: list[Path]) -> tuple[list[str], list[str]]:
    source, target = (read_lines(each) for each in files)
    if len(source) != len(target) or not source:
        raise QKNormError(
            f"{files[0]} has {len(source)} lines and {files[1]} has {len(target)}: no test set"
        )
    return source, target


def _batches(
    translator: Translator, source: list[str], target: list[str]
) -> Iterator[dict[str, Any]]:
    """Batches of similar length; what is longer than the model can read is cut."""
    sides = []
    for lines, dictionary in (
        (source, translator.task.source_dictionary),
        (target, translator.task.target_dictionary),
    ):
        pieces = translator.subwords.encode(lines)
        cut = [line[: translator.longest - 1] for line in pieces]
        sides.append(
            [torch.tensor([*map(dictionary.index, line), dictionary.eos()]) for line in cut]
        )
    dataset = pair_dataset(translator.task, *sides)
    lengths = [max(len(left), len(right)) for left, right in zip(*sides, strict=True)]
    for numbers in data_utils.batch_by_size(
        sorted(range(len(lengths)), key=lengths.__getitem__),
        lengths.__getitem__,
        max_tokens=max(MAX_TOKENS, translator.longest),
    ):
        yield dataset.collater([dataset[number] for number in numbers])
