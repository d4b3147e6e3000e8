"""scripts/setup.sh as a user meets it: what it does, and what it says when something is missing.

Every test calls the real script in a small copy of the checkout, with a PATH that holds only what
the test gives it. Installing for real takes minutes, so where a test needs an installation that
goes well it uses `PRETEND_PYTHON`, which notes down what pip was asked for.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ["scripts/setup.sh", "scripts/test.sh", ".ci/run"]
# What scripts/setup.sh may expect of any machine, beside Python and a compiler.
TOOLS = ["bash", "df", "dirname", "env", "getconf", "mkdir", "mv", "rm", "tail", "wc"]

# The interpreter below the environment that runs the tests: it makes environments, has no torch.
REAL_PYTHON = next(
    path
    for name in (f"python3.{sys.version_info.minor}", "python3", "python")
    if (path := Path(sys.base_prefix) / "bin" / name).exists()
)

# A Python that answers questions truthfully, but only writes down calls of pip (to pip.txt beside
# the checkout), and whose environments are copies of itself.
PRETEND_PYTHON = f"""#!/usr/bin/env bash
case "$*" in
    # other answers go here
    "-m venv "*)
        target="${{@: -1}}"
        mkdir -p "$target/bin" && cp "$0" "$target/bin/python"
        ;;
    "-m pip install "*)
        echo "CUDA_HOME=${{CUDA_HOME-unset}} jobs=${{MAX_JOBS-unset}} $*" >>../pip.txt
        if [[ "$*" == *"${{FAIL_AT-no such package}}" ]]; then
            echo "${{FAIL_WITH-}}"
            exit 1
        fi
        ;;
    "-m "* | *"import fairseq, torch"*) ;;
    *) exec "{REAL_PYTHON}" "$@" ;;
esac
"""


def answering(minor: str, version: str, include: str, can_venv: bool = True) -> str:
    """A Python that says this of itself, and no more."""
    return f"#!/usr/bin/env bash\nprintf '%s\\n' {minor} {version} {include} {can_venv}\n"


class Checkout:
    """A copy of what the script needs, a folder of programs as PATH, and a way to call it."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "checkout"
        self.programs = folder / "programs"
        self.programs.mkdir()
        (self.root / "scripts").mkdir(parents=True)
        for name in ("scripts/setup.sh", "pyproject.toml", "constraints.txt"):
            shutil.copy(ROOT / name, self.root / name)
        for tool in TOOLS:
            self.link(tool)
        self.stamp = self.root / ".venv/.qknorm-setup"

    def link(self, name: str, target: Path | None = None) -> None:
        found = target or shutil.which(name)
        assert found, f"this machine has no {name}"
        (self.programs / name).unlink(missing_ok=True)
        (self.programs / name).symlink_to(found)

    def write(self, name: str, text: str) -> Path:
        path = self.programs / name
        path.unlink(missing_ok=True)
        path.write_text(text)
        path.chmod(0o755)
        return path

    def pretend(self) -> None:
        """A machine on which everything goes well."""
        self.link("cp")
        self.link("cat")
        self.write("python3", PRETEND_PYTHON)
        self.write("c++", "#!/usr/bin/env bash\ncat >/dev/null\n")

    def setup(self, cwd: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
        # A new environment, not a copy of this one: VIRTUAL_ENV or pip's variables of the machine
        # that runs the tests would lead the script to another place.
        return subprocess.run(
            [self.root / "scripts/setup.sh"],
            cwd=cwd or self.root,
            env={"PATH": str(self.programs), "HOME": str(self.root), **variables},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=50,
        )

    def pip_calls(self) -> list[str]:
        notes = self.root.parent / "pip.txt"
        return notes.read_text().splitlines() if notes.exists() else []


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def assert_one_line(result: subprocess.CompletedProcess[str], *parts: str) -> None:
    """It failed with one line on stderr that holds these parts, and nothing else there."""
    assert result.returncode == 1, result
    assert result.stderr.startswith("setup: "), result.stderr
    assert result.stderr.count("\n") == 1, result.stderr
    for part in parts:
        assert part in result.stderr


# --- what it says when the machine lacks something -------------------------------------------


def test_without_any_python(checkout: Checkout) -> None:
    result = checkout.setup()
    assert_one_line(result, "no supported Python", "3.11, 3.12 or 3.10", "QKNORM_PYTHON=")
    assert not (checkout.root / ".venv").exists()


def test_a_name_that_does_not_run_is_no_python(checkout: Checkout) -> None:
    # What a version manager's stand-in does when that version is not selected.
    checkout.write("python3.11", "#!/usr/bin/env bash\necho 'command not found' >&2\nexit 127\n")
    assert_one_line(checkout.setup(), "no supported Python")


def test_an_unsupported_python_is_not_taken(checkout: Checkout) -> None:
    checkout.write("python3", answering("3.9", "3.9.18", "/usr/include/python3.9"))
    assert_one_line(checkout.setup(), "no supported Python")
    named = checkout.setup(QKNORM_PYTHON="python3")
    assert_one_line(named, "QKNORM_PYTHON=python3 is Python 3.9.18", "3.11, 3.12 or 3.10")


def test_a_named_python_that_is_not_there(checkout: Checkout) -> None:
    assert_one_line(checkout.setup(QKNORM_PYTHON="/nowhere/python"), "does not run")


def test_without_the_venv_module(checkout: Checkout) -> None:
    # Debian ships it as a package of its own.
    checkout.write("python3", answering("3.11", "3.11.2", "/usr/include", can_venv=False))
    assert_one_line(checkout.setup(), "lacks its venv module", "apt-get install python3.11-venv")


def test_without_a_compiler(checkout: Checkout) -> None:
    checkout.link("python3", REAL_PYTHON)
    assert_one_line(checkout.setup(), "no C++ compiler", "apt-get install g++")
    assert not (checkout.root / ".venv").exists()


def test_without_python_headers(checkout: Checkout) -> None:
    checkout.pretend()
    checkout.write("python3", answering("3.12", "3.12.9", "/nowhere/include"))
    result = checkout.setup()
    assert_one_line(result, "no headers", "/nowhere/include/Python.h", "python3.12-dev")


def test_a_complete_python_goes_before_a_preferred_one_without_headers(
    checkout: Checkout, tmp_path: Path
) -> None:
    checkout.pretend()
    (checkout.programs / "python3").unlink()
    checkout.write("python3.11", answering("3.11", "3.11.2", "/nowhere/include"))
    (tmp_path / "Python.h").touch()
    about = f'*"import importlib.util"*) printf "%s\\n" 3.12 3.12.9 "{tmp_path}" True ;;'
    checkout.write("python3.12", PRETEND_PYTHON.replace("# other answers go here", about))
    assert "Python 3.12.9 in .venv" in checkout.setup().stdout


def test_too_little_disk(checkout: Checkout) -> None:
    checkout.pretend()
    checkout.write(
        "df",
        "#!/usr/bin/env bash\n"
        "echo 'Filesystem 1024-blocks Used Available Capacity Mounted on'\n"
        "echo '/dev/some disk 104857600 101711872 3145728 98% /'\n",
    )
    result = checkout.setup(QKNORM_MIN_DISK_GB="8")
    assert_one_line(result, "too little disk", "3.0 GB free", "8 GB needed", "QKNORM_MIN_DISK_GB")
    assert not (checkout.root / ".venv").exists()
    # A torch without CUDA fits, and the user may say so.
    assert checkout.setup(QKNORM_MIN_DISK_GB="3").returncode == 0


def test_without_network(checkout: Checkout) -> None:
    # The real pip in a real new environment, and an index where nobody listens.
    checkout.link("python3", REAL_PYTHON)
    checkout.write("c++", "#!/usr/bin/env bash\nexit 0\n")
    start = time.monotonic()
    result = checkout.setup(
        PIP_INDEX_URL="http://127.0.0.1:9/simple",
        PIP_CONFIG_FILE="/dev/null",
        PIP_NO_CACHE_DIR="1",
        PIP_RETRIES="0",
        QKNORM_MIN_DISK_GB="0",
    )
    assert_one_line(result, "no network", "https_proxy", "PIP_INDEX_URL")
    assert time.monotonic() - start < 40
    assert not checkout.stamp.exists()


def test_an_environment_that_is_gone(checkout: Checkout) -> None:
    result = checkout.setup(VIRTUAL_ENV="/nowhere/env")
    assert_one_line(result, "VIRTUAL_ENV names /nowhere/env", "unset VIRTUAL_ENV")


# --- what it does when all goes well ---------------------------------------------------------


def test_installs_torch_then_fairseq_then_the_project(checkout: Checkout) -> None:
    checkout.pretend()
    result = checkout.setup(CUDA_HOME="/usr/local/cuda", MAX_JOBS="3")
    assert result.returncode == 0, result.stderr
    assert [line[:5] for line in result.stdout.splitlines()[:5]] == [
        f"[{number}/5]" for number in range(1, 6)
    ]
    assert "source " in result.stdout.splitlines()[-1]
    calls = checkout.pip_calls()
    assert all("-c constraints.txt" in call for call in calls)
    torch, fairseq, project = calls[-3:]
    assert torch.endswith(" torch")
    assert "fairseq" in fairseq.split()[-1]
    assert "CUDA_HOME=unset jobs=3" in fairseq  # its package lacks the CUDA sources
    assert project.endswith("--no-build-isolation -e .[cluster,tensorboard,dev]")


def test_a_second_call_does_nothing(checkout: Checkout) -> None:
    checkout.pretend()
    assert checkout.setup().returncode == 0
    before = checkout.pip_calls()
    second = checkout.setup()
    assert second.returncode == 0
    assert second.stdout.startswith("setup: ready")
    assert (second.stdout + second.stderr).count("\n") == 1
    assert checkout.pip_calls() == before


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt", "scripts/setup.sh"])
def test_a_changed_file_installs_again(checkout: Checkout, name: str) -> None:
    checkout.pretend()
    checkout.setup()
    before = len(checkout.pip_calls())
    with (checkout.root / name).open("a") as file:
        file.write("# changed\n")
    assert checkout.setup().returncode == 0
    assert len(checkout.pip_calls()) == 2 * before


def test_called_from_another_folder(checkout: Checkout, tmp_path: Path) -> None:
    checkout.pretend()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    assert checkout.setup(cwd=elsewhere).returncode == 0
    assert checkout.stamp.exists()
    assert list(elsewhere.iterdir()) == []


def test_a_failed_call_goes_on_where_it_stopped(checkout: Checkout) -> None:
    checkout.pretend()
    failed = checkout.setup(FAIL_AT=" torch", FAIL_WITH="\n".join(f"line {n}." for n in range(40)))
    assert failed.returncode == 1
    *shown, last = failed.stderr.splitlines()
    assert shown == [f"line {n}." for n in range(25, 40)]  # the end of the log
    assert "setup.log" in last
    assert not checkout.stamp.exists()
    again = checkout.setup()
    assert again.returncode == 0
    assert checkout.stamp.exists()


def test_a_full_disk_is_one_line(checkout: Checkout) -> None:
    checkout.pretend()
    result = checkout.setup(FAIL_AT=" torch", FAIL_WITH="[Errno 28] No space left on device")
    assert_one_line(result, "the disk filled up", "TMPDIR")


def test_a_half_made_environment_is_made_again(checkout: Checkout) -> None:
    checkout.pretend()
    (checkout.root / ".venv/lib").mkdir(parents=True)
    assert checkout.setup().returncode == 0
    assert (checkout.root / ".venv/bin/python").exists()
    assert not (checkout.root / ".venv/lib").exists()


def test_a_moved_checkout_gets_a_new_environment(checkout: Checkout, tmp_path: Path) -> None:
    # The commands in .venv/bin hold the path that they were made for.
    checkout.pretend()
    checkout.setup()
    (checkout.root / ".venv/old").touch()
    checkout.root = checkout.root.rename(tmp_path / "moved")
    assert checkout.setup().returncode == 0
    assert not (checkout.root / ".venv/old").exists()


def test_the_active_environment_is_filled_and_not_remade(
    checkout: Checkout, tmp_path: Path
) -> None:
    checkout.pretend()
    active = tmp_path / "active"
    (active / "bin").mkdir(parents=True)
    (active / "mine").touch()
    shutil.copy(checkout.programs / "python3", active / "bin/python")
    result = checkout.setup(VIRTUAL_ENV=str(active))
    assert result.returncode == 0, result.stderr
    assert (active / ".qknorm-setup").exists()
    assert (active / "mine").exists()
    assert not (checkout.root / ".venv").exists()


# --- the environment that these tests run in, and the scripts themselves ----------------------


def test_the_environment_in_use_is_ready_at_once() -> None:
    if not (Path(sys.prefix) / ".qknorm-setup").exists():
        pytest.skip("this environment was not made by scripts/setup.sh")
    start = time.monotonic()
    result = subprocess.run(
        [ROOT / "scripts/setup.sh"],
        env={**os.environ, "VIRTUAL_ENV": sys.prefix},
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert result.stdout.startswith("setup: ready"), result
    assert time.monotonic() - start < 1


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_are_executable_and_parse(name: str) -> None:
    assert os.access(ROOT / name, os.X_OK)
    subprocess.run(["bash", "-n", ROOT / name], check=True)


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_are_clean_for_shellcheck(name: str) -> None:
    if not shutil.which("shellcheck"):
        pytest.skip("shellcheck is not installed")
    subprocess.run(["shellcheck", ROOT / name], check=True)


def test_constraints_agree_with_pyproject() -> None:
    # A pin outside pyproject.toml's range would only be noticed on the Python that it is for.
    from packaging.requirements import Requirement

    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    wanted = [Requirement(text) for text in project["dependencies"]]
    wanted += [Requirement(text) for text in project["optional-dependencies"]["dev"]]
    for python in ("3.10", "3.11", "3.12"):
        there = {"python_version": python}
        versions = {
            pin.name.lower(): str(pin.specifier).removeprefix("==")
            for pin in pins
            if not pin.marker or pin.marker.evaluate(there)
        }
        for need in wanted:
            if not need.marker or need.marker.evaluate(there):
                version = versions[need.name.lower()]
                assert version in need.specifier, f"{need} on {python}: pinned {version}"
