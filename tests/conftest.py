"""What several tests share: two invented languages, their prepared folder, a trained checkpoint.

Everything is made here, by code, in a folder of pytest's. The second language is the first one
word for word; 200 updates of a very small model learn that well enough for most of the test set.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

import pytest
from faults import FaultsTable, fault  # noqa: F401  (a fixture)
from forks import MOST_INPUT, Forks, forking
from publisher import Publisher, publishing

# Several processes share few cores here: threads that wait by spinning would slow all of them.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

PROJECT = Path(__file__).resolve().parent.parent
SYLLABLES_XX = ("ka", "lo", "mi", "tu", "ne")
SYLLABLES_YY = ("sha", "dor", "gwe", "çe", "ôt")
SENTENCES = {"train": 400, "valid": 40, "test": 30}

# A shell that starts the tests in the background has them, and so the commands, ignore Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)

Files = dict[str, tuple[Path, Path]]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--faults", type=Path, help="write the table of faults tried to this file")
    parser.addoption("--kills", type=int, default=20, help="how often trainings are killed")


def pytest_configure(config: pytest.Config) -> None:
    file = config.getoption("--faults")
    if file and not hasattr(config, "workerinput"):  # with xdist: once, where all reports arrive
        config.pluginmanager.register(FaultsTable(file))


class Run(Protocol):
    """`run("qknorm", "score", hyp, ref)`: the command's exit status, output and errors."""

    def __call__(
        self,
        command: str,
        *arguments: object,
        input: str | bytes | None = None,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]: ...


@pytest.fixture(scope="session")
def commands() -> Iterator[Forks]:
    """Installed commands in real processes that have imported torch and fairseq already."""
    with forking("commands", clean_environment()) as server:
        yield server


@pytest.fixture(scope="session")
def run(commands: Forks) -> Run:
    """Run an installed command as a user does. Line ends are left as the command wrote them.

    With an environment of its own, or while another command runs, it is a process of its own from
    the start.
    """
    forking_one = threading.Lock()

    def run_command(
        command: str,
        *arguments: object,
        input: str | bytes | None = None,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        content = input.encode() if isinstance(input, str) else input or b""
        words = [command, *map(str, arguments)]
        alone = env or command == "python" or len(content) > MOST_INPUT
        if alone or not forking_one.acquire(blocking=False):
            done = subprocess.run(
                [Path(sys.executable).parent / command, *words[1:]],
                input=content,
                capture_output=True,
                cwd=cwd,
                env=clean_environment() | dict(env or {}),
                timeout=300,
                check=False,
            )
        else:
            try:
                done = commands.command(words, input=content, cwd=cwd)
            finally:
                forking_one.release()
        return subprocess.CompletedProcess(
            done.args, done.returncode, done.stdout.decode(), done.stderr.decode()
        )

    return run_command


def clean_environment() -> dict[str, str]:
    """The environment without what changes the commands' behaviour.

    One thread: for models this small, several only wait for each other.
    """
    changing = ("QKNORM_", "COLUMNS", "LINES")
    ours = {name: value for name, value in os.environ.items() if not name.startswith(changing)}
    return ours | {"OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="session")
def parallel_files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """{split: (source, target)}: short sentences in the invented languages xx and yy."""
    random_numbers = random.Random(1)
    words_xx = [first + second for first in SYLLABLES_XX for second in SYLLABLES_XX]
    words_yy = [first + second for first in SYLLABLES_YY for second in SYLLABLES_YY]
    random_numbers.shuffle(words_yy)
    meaning = dict(zip(words_xx, words_yy, strict=True))
    folder = tmp_path_factory.mktemp("parallel")
    files = {}
    for split, count in SENTENCES.items():
        source = [
            random_numbers.choices(words_xx, k=random_numbers.randint(2, 7)) for _ in range(count)
        ]
        target = [[meaning[word] for word in words] for words in source]
        files[split] = (folder / f"{split}.xx", folder / f"{split}.yy")
        for file, sentences in zip(files[split], (source, target), strict=True):
            text = "".join(f"{' '.join(words).capitalize()}.\n" for words in sentences)
            file.write_text(text, encoding="utf-8")
    return files


@pytest.fixture(scope="session")
def prepared(parallel_files: Files, run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`parallel_files` after `qknorm prepare`. Don't write into it."""
    out = tmp_path_factory.mktemp("prepared") / "xx-yy"
    splits = [
        part for split, both in parallel_files.items() for part in (f"--{split}", *map(str, both))
    ]
    done = run("qknorm", "prepare", *splits, "--vocab-size", "160", "--out", out)
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture(scope="session")
def checkpoint(prepared: Path, run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """checkpoint_best.pt of a small transformer_qknorm_tiny. Don't write into its folder."""
    save_dir = tmp_path_factory.mktemp("trained")
    train(run, prepared, save_dir, "--arch", "transformer_qknorm_tiny", updates=200)
    return save_dir / "checkpoint_best.pt"


def train(run: Run, data: Path, save_dir: Path, *options: object, updates: int = 100) -> str:
    """A short fairseq-train of a 1+1 layer model of 32 dimensions; what it logged."""
    done = run(
        "fairseq-train",
        data,
        *("--user-dir", PROJECT / "qknorm_fairseq", "--save-dir", save_dir),
        *("--encoder-layers", 1, "--decoder-layers", 1),
        *("--encoder-embed-dim", 32, "--decoder-embed-dim", 32),
        *("--encoder-ffn-embed-dim", 64, "--decoder-ffn-embed-dim", 64),
        *("--encoder-attention-heads", 2, "--decoder-attention-heads", 2),
        *("--dropout", 0, "--attention-dropout", 0, "--activation-dropout", 0),
        *("--optimizer", "adam", "--lr", 0.01),
        *("--lr-scheduler", "inverse_sqrt", "--warmup-updates", 20),
        *("--max-source-positions", 200, "--max-target-positions", 200),
        *("--max-tokens", 600, "--max-update", updates),
        *("--validate-interval", 1000, "--validate-interval-updates", 50),
        *("--no-epoch-checkpoints", "--seed", 1, "--cpu"),
        *options,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    """Real processes of fairseq-train that start within a moment."""
    with forking("trainings", clean_environment()) as server:
        yield server


@pytest.fixture
def publisher(monkeypatch: pytest.MonkeyPatch) -> Iterator[Publisher]:
    """A web server of files on this machine."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with publishing() as server:
        yield server


@pytest.fixture(scope="session")
def transformer_checkpoint(
    prepared: Path, run: Run, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """fairseq's own transformer, in the sizes of `checkpoint`: no plugin in it."""
    save_dir = tmp_path_factory.mktemp("transformer")
    same = ("--share-all-embeddings", "--encoder-normalize-before", "--decoder-normalize-before")
    train(run, prepared, save_dir, "--arch", "transformer", *same, updates=200)
    return save_dir / "checkpoint_best.pt"
