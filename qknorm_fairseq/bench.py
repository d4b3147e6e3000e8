"""`qknorm bench`: the plugin's speed against fairseq's own Transformer, side by side.

Each variant lives in a process of its own (`python -m qknorm_fairseq.bench`), which builds its
model by fairseq's code and waits. The parent lets one work at a time, in turns, so that what the
machine does besides falls on all alike; the ratios of each turn are what counts.
"""

from __future__ import annotations

import json
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from qknorm_fairseq.errors import QKNormError

LANGUAGES = ("xx", "yy")
SENTENCES = 2000
MATRIX_PRODUCTS = (  # torch's names of them
    *("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "mkldnn::_linear_pointwise"),
    *("aten::_scaled_dot_product_flash_attention_for_cpu", "aten::mkldnn_linear"),
)
DECODED = 20  # subwords of each translation: the same work for every model


@dataclass(frozen=True)
class Size:
    """A model and its batches.

    Attributes:
        words: median length of a sentence; lengths are log-normal, about as TED's are.
        alike: each sentence has exactly so many words instead.
        batches: how many make up one turn of training.
        decoded: sentences of a turn of decoding, in two batches at least.
    """

    layers: int
    dim: int
    ffn_dim: int
    heads: int
    vocabulary: int
    dropout: tuple[float, float, float]  # of the residuals, the attention, the activation
    max_tokens: int
    words: int
    batches: int
    decoded: int
    alike: bool = False


SIZES = {
    "tiny": Size(2, 256, 512, 4, 4000, (0.3, 0.1, 0.1), 1000, 8, 4, 32),
    "full": Size(6, 512, 2048, 8, 8000, (0.3, 0.3, 0.3), 1120, 16, 3, 10),
}
FAIRSEQ, PLAIN, FAST, BF16 = "fairseq transformer", "plugin, plain", "plugin", "plugin, bf16"


def variants(kind: str, device: str) -> dict[str, list[str]]:
    """Command lines of fairseq-train that are compared, each with its :func:`baseline`.

    The attention is all that differs: the paper's other blocks are off.
    """
    blocks_off = ["--no-fixnorm", "--no-output-bias", "--no-small-init", "--word-dropout", "0"]
    ours = ["--arch", "transformer_qknorm", "--qknorm-length", "72", *blocks_off]
    own = ["--arch", "transformer", "--optimizer", "adam"]
    plain = [*ours, "--no-fast", "--optimizer", "adam"]
    fused = ["--criterion", "label_smoothed_cross_entropy_fused"]
    fast = [*ours, "--optimizer", "adam_fused", *fused]
    if kind == "decode":
        return {FAIRSEQ: own, PLAIN: plain, FAST: fast}
    if device == "cpu":
        bf16 = {BF16: [*fast, "--bf16-autocast"]} if has_bf16() else {}
        return {FAIRSEQ: own, PLAIN: plain, FAST: fast, **bf16}
    return {
        f"{name}, {precision}": [*arguments, f"--{precision}"]
        for precision in ("fp16", "bf16")
        for name, arguments in ((FAIRSEQ, own), (PLAIN, plain), (FAST, fast))
    }


def baseline(variant: str, compared: Iterable[str]) -> str:
    """What a variant is compared with: fairseq's transformer, on a GPU in the same precision."""
    of_precision = f"{FAIRSEQ}, {variant.rpartition(', ')[2]}"
    return of_precision if of_precision in compared else FAIRSEQ


def arguments_of(size: Size, data: Any, arguments: Sequence[str], *, device: str) -> list[str]:
    """The command line of fairseq-train for a variant at a size."""
    shape = {
        "layers": size.layers,
        "embed-dim": size.dim,
        "ffn-embed-dim": size.ffn_dim,
        "attention-heads": size.heads,
    }
    line = [str(data), "--user-dir", str(Path(__file__).resolve().parent)]
    for side in ("encoder", "decoder"):
        line += [part for name, n in shape.items() for part in (f"--{side}-{name}", str(n))]
        line += [f"--{side}-normalize-before"]
    for kind, p in zip(("", "attention-", "activation-"), size.dropout, strict=True):
        line += [f"--{kind}dropout", str(p)]
    line += ["--share-all-embeddings", "--max-tokens", str(size.max_tokens), "--lr", "1e-4"]
    line += ["--criterion", "label_smoothed_cross_entropy", "--label-smoothing", "0.1"]
    line += ["--clip-norm", "1.0", *arguments]
    return [*line, "--cpu"] if device == "cpu" else line


def has_bf16() -> bool:
    """Whether this CPU multiplies bfloat16 itself; where it doesn't, that is the slowest way."""
    try:
        processor = Path("/proc/cpuinfo").read_text("utf-8")
    except OSError:
        return False
    return re.search(r"\b(amx_bf16|avx512_bf16|bf16)\b", processor) is not None


@dataclass(frozen=True)
class Result:
    """One variant.

    Attributes:
        per_second: target tokens in training, sentences in decoding; median of the turns.
        ratio: to the baseline in the same turn; median, least, most.
        peak_mb: most memory of its process (on a GPU: of its tensors).
        products: share of the time that goes into matrix products, by torch's profiler (CPU).
        bound: the ratio if all but its matrix products took no time at all.
    """

    variant: str
    per_second: float
    ratio: tuple[float, float, float]
    peak_mb: float
    products: float | None
    bound: float | None


def bench(
    kind: str, *, size: str, device: str, turns: int, batch_size: int = 32, say: Any = None
) -> dict[str, Any]:
    """Measure all variants.

    Args:
        kind: "train" or "decode".
        size: a name in `SIZES`.
        turns: how often each variant works; the medians are over these.
        batch_size: sentences at a time, in decoding.
        say: receives one line for each turn.

    Raises:
        QKNormError: a variant failed.
    """
    compared = variants(kind, device)
    seconds: dict[str, list[float]] = {name: [] for name in compared}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        write_text(folder, SIZES[size])
        task = {"kind": kind, "size": size, "device": device, "batch_size": batch_size}
        given = task | {"size": asdict(SIZES[size]), "data": str(folder)}
        workers = {
            name: stack.enter_context(Worker(name, given | {"arguments": arguments}))
            for name, arguments in compared.items()
        }
        for turn in range(turns):
            for name, worker in workers.items():
                seconds[name].append(worker.ask("work")["seconds"])
            if say:
                times = ", ".join(f"{name} {all_[-1]:.2f} s" for name, all_ in seconds.items())
                say(f"turn {turn + 1} of {turns}: {times}")
        done = {name: worker.ask("finish") for name, worker in workers.items()}
    results = []
    for name in compared:
        base = seconds[baseline(name, compared)]
        ratios = [theirs / ours for theirs, ours in zip(base, seconds[name], strict=True)]
        ratio, products = statistics.median(ratios), done[name]["products"]
        results.append(
            Result(
                name,
                done[name]["items"] / statistics.median(seconds[name]),
                (ratio, min(ratios), max(ratios)),
                done[name]["peak_mb"],
                products,
                ratio / products if products else None,
            )
        )
    return {
        **task,
        "unit": "target tokens/s" if kind == "train" else "sentences/s",
        "turns": turns,
        "padding": next(iter(done.values()))["padding"],
        "results": results,
    }


class Worker:
    """A process that does one turn of work whenever it is told to.

    Args:
        given: kind, device, batch size, data folder, a :class:`Size` as a dictionary, and
            arguments for fairseq-train.
    """

    def __init__(self, name: str, given: Mapping[str, Any]) -> None:
        self.name = name
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed on exit
        self.process = subprocess.Popen(
            [sys.executable, "-m", "qknorm_fairseq.bench", json.dumps(given)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
        )
        self._answer()  # it is ready

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.errors.seek(0)
            lines = self.errors.read().strip().splitlines() or ["it said nothing"]
            raise QKNormError(f"{self.name}: {lines[-1]}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, what: str) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{what}\n")
        self.process.stdin.flush()
        return self._answer()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *exception: object) -> None:
        self.process.kill()
        self.process.wait()
        self.errors.close()


def write_text(folder: Path, size: Size) -> None:
    """Invented parallel text with the lengths of real text, as fairseq-preprocess leaves it."""
    import numpy as np
    import torch
    from fairseq.data import Dictionary, indexed_dataset

    dictionary = Dictionary()
    for number in range(size.vocabulary - dictionary.nspecial):
        dictionary.add_symbol(f"w{number}")
    numbers = np.random.default_rng(1)
    if size.alike:
        lengths = others = np.full(size.max_tokens // (size.words + 1), size.words)
    else:
        lengths = np.clip(size.words * numbers.lognormal(0, 0.6, SENTENCES), 2, 100).astype(int)
        others = np.clip(lengths * numbers.lognormal(0.05, 0.2, SENTENCES), 2, 120).astype(int)
    for language, side in zip(LANGUAGES, (lengths, others), strict=True):
        dictionary.save(str(folder / f"dict.{language}.txt"))
        name = str(folder / f"train.{'-'.join(LANGUAGES)}.{language}")
        builder = indexed_dataset.make_builder(
            f"{name}.bin", impl="mmap", vocab_size=len(dictionary)
        )
        for length in side:
            words = numbers.integers(dictionary.nspecial, len(dictionary), length)
            builder.add_item(torch.from_numpy(np.append(words, dictionary.eos())))
        builder.finalize(f"{name}.idx")


# ---------------------------------------------------------------------------------------------
# The worker's side
# ---------------------------------------------------------------------------------------------


def serve(given: dict[str, Any], requests: IO[str], answers: IO[str]) -> None:
    """Build what `given` says, then do a turn for each line "work"."""
    import torch

    size = Size(**given["size"])
    cfg = _configuration(given, size)
    prepare = _trainer if given["kind"] == "train" else _searcher
    work, items, padding = prepare(cfg, size, given)
    work()  # the first time allocates and compiles
    _reply(answers, ready=True)
    for request in requests:
        if request.strip() == "finish":
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            if given["device"] != "cpu":
                peak = torch.cuda.max_memory_allocated() / 2**20
            products = _share_of_products(work) if given["device"] == "cpu" else None
            _reply(answers, items=items, padding=padding, peak_mb=round(peak), products=products)
            return
        started = time.perf_counter()
        work()
        if given["device"] != "cpu":
            torch.cuda.synchronize()
        _reply(answers, seconds=time.perf_counter() - started)


def _share_of_products(work: Callable[[], None]) -> float:
    """How much of a turn's time is matrix products, which no other way of writing it saves."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        work()
    seconds = {each.key: each.self_cpu_time_total for each in profiled.key_averages()}
    products = sum(seconds.get(name, 0) for name in MATRIX_PRODUCTS)
    return float(round(products / sum(seconds.values()), 3))


def _reply(answers: IO[str], **content: Any) -> None:
    print(json.dumps(content), file=answers, flush=True)


def _configuration(given: dict[str, Any], size: Size) -> Any:
    from fairseq import options, utils
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf

    line = arguments_of(size, given["data"], given["arguments"], device=given["device"])
    line += ["--source-lang", LANGUAGES[0], "--target-lang", LANGUAGES[1]]
    arguments = options.parse_args_and_arch(options.get_training_parser(), input_args=line)
    cfg = convert_namespace_to_omegaconf(arguments)
    utils.import_user_module(cfg.common)
    return cfg


def _batches(task: Any, **limits: Any) -> list[Any]:
    task.load_dataset("train")
    iterator = task.get_batch_iterator(
        task.dataset("train"), seed=1, required_batch_size_multiple=1, **limits
    )
    return list(iterator.next_epoch_itr(shuffle=True))


def _trainer(cfg: Any, size: Size, given: dict[str, Any]) -> tuple[Any, int, float]:
    """Whole updates by fairseq's trainer: forward, backward, clipping, optimizer."""
    import torch
    from fairseq import tasks
    from fairseq.logging import metrics
    from fairseq.trainer import Trainer

    torch.manual_seed(1)
    task = tasks.setup_task(cfg.task)
    batches = _batches(task, max_tokens=size.max_tokens)[: size.batches]
    model = task.build_model(cfg.model)
    trainer = Trainer(cfg, task, model, task.build_criterion(cfg.criterion))

    def work() -> None:
        with metrics.aggregate("train"):
            for batch in batches:
                trainer.train_step([batch])

    pad = task.target_dictionary.pad()
    texts = [(batch["net_input"]["src_tokens"], batch["target"]) for batch in batches]
    real = sum(int(side.ne(pad).sum()) for sides in texts for side in sides)
    everything = sum(side.numel() for sides in texts for side in sides)
    tokens = sum(int(target.ne(pad).sum()) for _, target in texts)
    return work, tokens, round(1 - real / everything, 3)


def _searcher(cfg: Any, size: Size, given: dict[str, Any]) -> tuple[Any, int, float]:
    """Beam search by fairseq's generator, each translation of the same length."""
    from argparse import Namespace

    import torch
    from fairseq import tasks, utils

    torch.manual_seed(1)
    task = tasks.setup_task(cfg.task)
    batches = _batches(task, max_sentences=given["batch_size"])
    batches = batches[: max(2, size.decoded // given["batch_size"])]
    model = task.build_model(cfg.model).eval()
    model.prepare_for_inference_(cfg)
    if given["device"] != "cpu":
        model.cuda()
        batches = utils.move_to_cuda(batches)
    limits = {"max_len_a": 0, "max_len_b": DECODED, "min_len": DECODED - 1}
    generator = task.build_generator([model], Namespace(beam=4, **limits))

    @torch.inference_mode()
    def work() -> None:
        for batch in batches:
            task.inference_step(generator, [model], batch)

    tokens = [batch["net_input"]["src_tokens"] for batch in batches]
    pads = sum(int(each.eq(task.source_dictionary.pad()).sum()) for each in tokens)
    padding = pads / sum(each.numel() for each in tokens)
    return work, sum(len(each) for each in tokens), round(padding, 3)


def main(arguments: Sequence[str]) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever fairseq prints is not an answer
    serve(json.loads(arguments[0]), sys.stdin, answers)


if __name__ == "__main__":
    main(sys.argv[1:])
