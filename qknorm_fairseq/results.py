"""What the folders of runs hold: `runs/<corpus>/<pair>/<model>/seed<N>/`, finished or not."""

from __future__ import annotations

import json
import os
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from qknorm_fairseq.errors import QKNormError
from qknorm_fairseq.reading import Unreadable, read_object, read_yaml
from qknorm_fairseq.runs import CONFIG, LAST, SCORE, read_score
from qknorm_fairseq.training import DONE

# What experiment.py and training.py call a run's files, beside the names that can be imported.
ENVIRONMENT, RECORDS = "environment.json", "train.jsonl"


@dataclass(frozen=True)
class Result:
    """A run's folder as it stands.

    Attributes:
        model: the folder's name, the ablation with it: `transformer_qknorm+fixed_g`.
        score: `score.json`, None for a run that has not been scored.
    """

    folder: Path
    corpus: str
    pair: str
    model: str
    seed: int
    score: Mapping[str, Any] | None

    @property
    def title(self) -> str:
        return f"{self.corpus} {self.pair} {self.model} seed {self.seed}"

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """The resolved configuration; empty where there is none.

        Raises:
            QKNormError: it is not YAML.
        """
        file = self.folder / CONFIG
        if not file.is_file():
            return {}
        try:
            content = read_yaml(file)
        except Unreadable as error:
            raise QKNormError(f"{file}: {error}") from None
        groups = ("common", "model", "optimization", "task")
        if not isinstance(content, dict) or not all(
            isinstance(content.get(group, {}), dict) for group in groups
        ):
            raise QKNormError(f"{file}: no configuration of a run")
        return content

    @cached_property
    def environment(self) -> Mapping[str, Any]:
        return read_object(self.folder / ENVIRONMENT)

    @property
    def command(self) -> str | None:
        command = self.environment.get("command")
        return str(command) if command else None

    @cached_property
    def history(self) -> list[dict[str, Any]]:
        """The training's records, in order, each update once.

        A training that was stopped goes on from its last checkpoint and repeats what came after
        it: what was recorded last counts. Stopped in the middle of a line, it leaves half of one.
        """
        file = self.folder / RECORDS
        if not file.is_file():
            return []
        records = []
        for line in file.read_text("utf-8", errors="replace").splitlines():
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(record, dict) and isinstance(record.get("num_updates"), int | float):
                records.append(record)
        kept, least = [], dict[Any, float]()
        for record in reversed(records):
            kind, updates = record.get("kind"), float(record["num_updates"])
            if updates < least.get(kind, float("inf")):
                kept.append(record)
                least[kind] = updates
        return kept[::-1]

    @property
    def updates(self) -> int:
        """Updates done, as far as they were recorded."""
        return max((int(record["num_updates"]) for record in self.history), default=0)

    @property
    def state(self) -> str:
        """How far a run without a score is."""
        if not (self.folder / CONFIG).is_file():
            return "no config.yaml: not begun, or not a run's folder"
        if (self.folder / DONE).is_file():
            return f"trained ({self.updates:,} updates), not scored"
        most = self.config.get("optimization", {}).get("max_update") or 0
        of = f" of at most {most:,}" if most else ""
        begun = self.updates or (self.folder / LAST).is_file()
        return f"training: {self.updates:,} updates{of}" if begun else "no update done"

    @property
    def data(self) -> Path:
        """The prepared folder that it was trained on, as seen from where it was trained."""
        return Path(str(self.config.get("task", {}).get("data", "")))


def find(runs: Path) -> tuple[list[Result], list[str]]:
    """All runs below a folder, and what else there looks like one.

    Args:
        runs: a folder of corpora, of one corpus or of one pair.

    Returns:
        the runs in order of corpus, pair, model and seed; a line for each folder that is left
        out: with checkpoints, but not named as a run's is (what fairseq-train was told to write
        there, say), the second of a run, or a link, which is not followed.

    Raises:
        QKNormError: there is no such folder, or no run in it, or a `score.json` is damaged.
    """
    if runs.is_file():
        raise QKNormError(f"{runs}: a file, where a folder of runs is needed")
    if not runs.is_dir():
        raise QKNormError(
            f"{runs}: no such folder; scripts/reproduce.sh and scripts/demo.sh make it"
        )
    found: dict[tuple[str, str, str, int], list[Result]] = defaultdict(list)
    left_out = []
    for name, folders, files in os.walk(runs):
        folder = Path(name)
        folders.sort()
        left_out += [
            f"{link.relative_to(runs)}: a link to {link.readlink()}, not followed; left out"
            for link in (folder / each for each in folders)
            if link.is_symlink()
        ]
        parts = folder.resolve().parts  # `runs` itself may be one of them
        seed = re.fullmatch(r"seed(\d+)", parts[-1])
        if seed and len(parts) > 4:
            corpus, pair, model = parts[-4:-1]
            result = Result(folder, corpus, pair, model, int(seed[1]), _score(folder))
            found[corpus, pair, model, result.seed].append(result)
            folders.clear()
        elif any(re.fullmatch(r"checkpoint.*\.pt", file) for file in files):
            left_out.append(
                f"{folder.relative_to(runs)}: checkpoints, but no run's folder; left out"
            )
    if not found:
        links = f"; {left_out[0]}" if left_out else ""
        raise QKNormError(f"{runs}: no runs in it (<corpus>/<pair>/<model>/seed<N>){links}")
    results = []
    for _, (first, *others) in sorted(found.items()):
        # A finished one counts, the first by name among several.
        kept = next((run for run in (first, *others) if run.score is not None), first)
        results.append(kept)
        left_out += [
            f"{run.folder.relative_to(runs)}: the same pair, model and seed as "
            f"{kept.folder.relative_to(runs)}; left out"
            for run in (first, *others)
            if run is not kept
        ]
    return results, sorted(left_out)


def _score(folder: Path) -> Mapping[str, Any] | None:
    return read_score(folder) if (folder / SCORE).is_file() else None
