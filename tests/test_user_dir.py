"""fairseq's commands find the architectures, wherever and however the user directory is given.

Each case is a process of its own, as a user would start it; what differs is how the plugin gets
into it. `fairseq-validate` of a trained checkpoint is the command where the choice doesn't
matter: it needs the architecture, and takes the shortest.
"""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from conftest import PROJECT, Run, clean_environment

PLUGIN = PROJECT / "qknorm_fairseq"


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory that is not the project's."""
    return tmp_path_factory.mktemp("elsewhere")


@pytest.fixture(scope="module")
def link(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A symbolic link to the plugin, of the same name."""
    path = tmp_path_factory.mktemp("links") / "qknorm_fairseq"
    path.symlink_to(PLUGIN)
    return path


@pytest.fixture(scope="module")
def other_name(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A symbolic link to the plugin, of another name."""
    path = tmp_path_factory.mktemp("links") / "my_plugin"
    path.symlink_to(PLUGIN)
    return path


@pytest.fixture(scope="module")
def validations(
    run: Run, prepared: Path, checkpoint: Path, elsewhere: Path, link: Path, other_name: Path
) -> dict[str, subprocess.CompletedProcess[str]]:
    """The outcomes of fairseq-validate in each of this file's cases; two run at a time."""
    options = [prepared, "--path", checkpoint, "--task", "translation", "--cpu"]
    options += ["--valid-subset", "valid", "--batch-size", 8]

    def after(code: str, user_dir: Path) -> list[object]:
        call = f"{code}; from fairseq_cli.validate import cli_main; cli_main()"
        return ["python", "-c", call, *options, "--user-dir", user_dir]

    cases: dict[str, list[object]] = {
        "no user dir": ["fairseq-validate", *options],
        "a link": ["fairseq-validate", *options, "--user-dir", link],
        "a link of another name": ["fairseq-validate", *options, "--user-dir", other_name],
        "the package, before fairseq": after("import qknorm_fairseq", PLUGIN),
        "the package, after fairseq": after("import fairseq, qknorm_fairseq", PLUGIN),
        "the attention, then a link": after("import qknorm_fairseq.modules.attention", link),
    }
    with ThreadPoolExecutor(2) as pool:
        calls = pool.map(lambda command: run(*command, cwd=elsewhere), cases.values())
        return dict(zip(cases, calls, strict=True))


def assert_validated(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, done.stderr
    assert "valid on 'valid' subset | loss" in done.stdout


def test_without_the_user_dir_fairseq_cannot_build_the_model(
    validations: dict[str, subprocess.CompletedProcess[str]],
) -> None:
    assert validations["no user dir"].returncode != 0
    assert "in build_model" in validations["no user dir"].stderr


@pytest.mark.parametrize("case", ["a link", "a link of another name"])
def test_a_symbolic_link_is_a_user_dir(
    validations: dict[str, subprocess.CompletedProcess[str]], case: str
) -> None:
    assert_validated(validations[case])


@pytest.mark.parametrize(
    "case",
    [
        "the package, before fairseq",
        "the package, after fairseq",
        "the attention, then a link",
    ],
)
def test_the_user_dir_works_if_something_was_imported_before(
    validations: dict[str, subprocess.CompletedProcess[str]], case: str
) -> None:
    assert_validated(validations[case])


def test_interactive_with_the_path_that_the_command_prints(
    prepared: Path, checkpoint: Path, elsewhere: Path
) -> None:
    """--user-dir "$(qknorm user-dir)", as the README says."""
    bin_dir = Path(sys.executable).parent
    call = (
        'fairseq-interactive "$0" --path "$1" --user-dir "$(qknorm user-dir)" --cpu --beam 2 '
        '--bpe sentencepiece --sentencepiece-model "$0/sentencepiece.model"'
    )
    done = subprocess.run(
        ["bash", "-c", call, prepared, checkpoint],
        input="Kaka lolo.\nMimi.\n",
        cwd=elsewhere,
        env=clean_environment() | {"PATH": f"{bin_dir}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    translated = [line for line in done.stdout.splitlines() if line.startswith("H-")]
    assert [line.split("\t")[0] for line in translated] == ["H-0", "H-1"]


def test_train_help_shows_the_options(run: Run, elsewhere: Path) -> None:
    done = run(
        "fairseq-train",
        *("--help", "--user-dir", PLUGIN, "--arch", "transformer_qknorm"),
        cwd=elsewhere,
    )
    assert done.returncode == 0, done.stderr
    shown = " ".join(done.stdout.split())
    assert "--qknorm-g0 QKNORM_G0 start value of g" in shown
    assert "--qknorm-length QKNORM_LENGTH L, from which g starts" in shown
    assert "--encoder-normalize-before, --no-encoder-normalize-before" in shown
    assert "--encoder-layers ENCODER_LAYERS" in shown


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that the project's wheel is installed into, as pip does it: not the checkout."""
    folder = tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    for command in (
        ["wheel", "--no-build-isolation", "--wheel-dir", folder, PROJECT],
        ["install", "--target", folder / "site", "--find-links", folder, "qknorm-fairseq"],
    ):
        done = subprocess.run(
            [*pip, *command, "--no-index", "--no-deps"], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
    return folder / "site"


def test_an_installed_package_is_a_user_dir(
    run: Run, installed: Path, prepared: Path, elsewhere: Path, tmp_path: Path
) -> None:
    environment = {"PYTHONPATH": str(installed)}  # before the checkout, which is installed too
    user_dir = run(installed / "bin" / "qknorm", "user-dir", cwd=elsewhere, env=environment)
    assert user_dir.stdout == f"{installed / 'qknorm_fairseq'}\n"
    trained = run(
        "fairseq-train",
        *(prepared, "--user-dir", user_dir.stdout.strip(), "--arch", "transformer_qknorm_tiny"),
        *("--encoder-embed-dim", 32, "--decoder-embed-dim", 32, "--optimizer", "adam"),
        *("--max-tokens", 600, "--max-update", 1, "--save-dir", tmp_path, "--cpu"),
        *("--disable-validation", "--no-epoch-checkpoints"),
        cwd=elsewhere,
        env=environment,
    )
    assert trained.returncode == 0, trained.stderr
    assert (tmp_path / "checkpoint_last.pt").is_file()


def test_an_installed_package_brings_registry_and_configurations(
    run: Run, installed: Path, elsewhere: Path
) -> None:
    share = installed / "qknorm_fairseq" / "share"
    configs = sorted(path.relative_to(PROJECT) for path in PROJECT.glob("configs/**/*.yaml"))
    assert [path.relative_to(share) for path in sorted(share.glob("configs/**/*.yaml"))] == configs
    code = "from qknorm_fairseq.corpora import load_registry as load; print(load().path)"
    known = run("python", "-c", code, cwd=elsewhere, env={"PYTHONPATH": str(installed)})
    assert known.stdout.strip() == str(share / "data" / "corpora.yaml"), known.stderr


def test_importing_the_package_alone_loads_neither_torch_nor_fairseq(
    run: Run, elsewhere: Path
) -> None:
    code = "import sys, qknorm_fairseq.cli; print({'torch', 'fairseq', 'numpy'} & set(sys.modules))"
    done = run("python", "-c", code, cwd=elsewhere)
    assert done.stdout == "set()\n", done.stderr
