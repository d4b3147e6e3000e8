#!/usr/bin/env bash
# Makes this checkout ready to use: a virtual environment with torch, fairseq and the project.
#
#   scripts/setup.sh          # from any folder, as often as you like
#
# - Uses the active virtual environment; without one, makes or reuses .venv in the checkout.
# - Every version comes from constraints.txt, so two machines get the same packages.
# - The first call takes minutes (torch is a download of gigabytes, fairseq compiles C++).
#   A later call with nothing changed only compares a stamp, in well under a second.
# - What pip and the compiler say goes to setup.log inside the environment.
#
# Variables:
#   QKNORM_PYTHON        the Python that makes .venv (default: 3.11, else 3.12, else 3.10)
#   QKNORM_MIN_DISK_GB   free space asked for before torch is installed (default: 8 on Linux,
#                        3 on macOS; 0 asks for nothing)
#   MAX_JOBS             compiler processes at a time (default: the number of cores)
# pip's own variables count as well. A smaller torch without CUDA, or one for another CUDA,
# comes from an index that has it (PIP_EXTRA_INDEX_URL) or a folder (PIP_FIND_LINKS).
set -euo pipefail

die() { # one line: what is wrong, and what to do
    printf 'setup: %s\n' "$*" >&2
    exit 1
}

case "${1-}" in
    "") ;;
    -h | --help)
        while IFS= read -r line && [[ $line != set\ * ]]; do
            case "$line" in '#!'*) ;; *) line="${line#\#}" && printf '%s\n' "${line# }" ;; esac
        done <"${BASH_SOURCE[0]}"
        exit 0
        ;;
    *)
        printf 'setup: unknown argument %s (try --help)\n' "$1" >&2
        exit 2
        ;;
esac

root="$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)"
# A relative path to the environment or the Python is meant from where the caller stands.
caller="$PWD"
absolute() { case "$1" in /*) printf '%s' "$1" ;; *) printf '%s/%s' "$caller" "$1" ;; esac; }

# pip takes packages on PYTHONPATH for installed ones, and refuses --user inside an environment.
unset PYTHONPATH PYTHONHOME
export PIP_USER=0 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1

venv="$root/.venv"
ours=1 # an environment of ours may be remade, somebody else's only filled
if [[ -n ${VIRTUAL_ENV-} && $(absolute "$VIRTUAL_ENV") != "$venv" ]]; then
    venv="$(absolute "$VIRTUAL_ENV")"
    ours=0
fi
if [[ -n ${QKNORM_PYTHON-} ]]; then
    case "$QKNORM_PYTHON" in
        /* | */*) chosen="$(absolute "$QKNORM_PYTHON")" ;;
        *) chosen="$(type -P "$QKNORM_PYTHON" || printf '%s' "$QKNORM_PYTHON")" ;;
    esac
fi
for name in pyproject.toml constraints.txt; do
    [[ -f $root/$name ]] || die "$root has no $name: the checkout is incomplete."
done
# From here on paths are relative to the checkout: pip splits PIP_CONSTRAINT at blanks, and the
# checkout's own path may have some.
cd -- "$root"
py="$venv/bin/python"
stamp="$venv/.qknorm-setup"
log="$venv/setup.log"
where="${venv#"$root"/}" # how messages name it

# ---------------------------------------------------------------------------------------------
# Is everything there already?
# ---------------------------------------------------------------------------------------------

fingerprint() { # what the installed state depends on; fails where the Python does not run
    # The checkout's path counts: an editable install points at it.
    "$py" -I -S -c '
import hashlib, platform, sys
state = hashlib.sha256(repr((sys.argv[1], sys.version)).encode())
for name in sys.argv[2:]:
    with open(name, "rb") as file:
        state.update(hashlib.sha256(file.read()).digest())
print(platform.python_version(), state.hexdigest(), sys.argv[1])
' "$root" pyproject.toml constraints.txt scripts/setup.sh 2>/dev/null
}

# Asks one Python about itself: four lines in $about, or failure. A name on PATH proves nothing:
# version managers put stand-ins there that only print an error.
ask() {
    about="$("$1" -c '
import importlib.util, platform, sys, sysconfig
print("%d.%d" % sys.version_info[:2])
print(platform.python_version())
print(sysconfig.get_paths()["include"])
print(all(importlib.util.find_spec(name) for name in ("venv", "ensurepip")))
' 2>/dev/null)" || return 1
    {
        IFS= read -r minor && IFS= read -r version && IFS= read -r include && IFS= read -r can_venv
    } <<<"$about"
}
supported() { case "$1" in 3.10 | 3.11 | 3.12) ;; *) return 1 ;; esac; }

if [[ $ours == 0 && ! -x $py ]]; then
    die "VIRTUAL_ENV names $venv, which has no bin/python." \
        "Run 'deactivate' or 'unset VIRTUAL_ENV' and call scripts/setup.sh again."
fi

state=""
if [[ -x $py ]]; then
    state="$(fingerprint || true)"
fi
if [[ $ours == 1 && -n ${QKNORM_PYTHON-} && -n $state ]]; then
    ask "$chosen" || die "QKNORM_PYTHON=$QKNORM_PYTHON does not run: name Python 3.11, 3.12 or 3.10."
    [[ $version == "${state%% *}" ]] || state="" # another Python is wanted now
fi
known=""
if [[ -f $stamp ]]; then
    IFS= read -r known <"$stamp" || true
fi
if [[ -n $state && $state == "$known" ]]; then
    printf 'setup: ready (%s, Python %s)\n' "$where" "${state%% *}"
    exit 0
fi
# The console scripts in bin/ hold the path they were made for, so a moved .venv is made again.
if [[ $ours == 1 && -n $known && ${known#* * } != "$root" ]]; then
    state=""
fi

# ---------------------------------------------------------------------------------------------
# What the machine must have. Each lack is one line, before anything is downloaded.
# ---------------------------------------------------------------------------------------------

remake=0
flaw=""
if [[ -n $state ]]; then # an environment that runs: take its Python
    ask "$py" || die "the Python in $where does not run: remove $where and try again."
    supported "$minor" || die "$where has Python $version, which fairseq does not support." \
        "Use 3.11, 3.12 or 3.10: deactivate it (or remove .venv) and call scripts/setup.sh again."
elif [[ $ours == 0 ]]; then
    die "the Python in $venv does not run." \
        "Run 'deactivate' or 'unset VIRTUAL_ENV' and call scripts/setup.sh again."
else
    remake=1
    python=""
    if [[ -n ${QKNORM_PYTHON-} ]]; then
        ask "$chosen" ||
            die "QKNORM_PYTHON=$QKNORM_PYTHON does not run: name Python 3.11, 3.12 or 3.10."
        supported "$minor" || die "QKNORM_PYTHON=$QKNORM_PYTHON is Python $version," \
            "which fairseq does not support: name 3.11, 3.12 or 3.10."
        python="$chosen"
    else
        # The first one that has everything; one without headers or venv only if none is better.
        for wanted in 3.11 3.12 3.10; do
            while IFS= read -r candidate; do
                if ! ask "$candidate" || [[ $minor != "$wanted" ]]; then continue; fi
                if [[ -f $include/Python.h && $can_venv == True ]]; then
                    python="$candidate"
                    break 2
                fi
                flaw="${flaw:-$candidate}"
            done < <(type -aP "python$wanted" python3 python || true)
        done
        python="${python:-$flaw}"
        [[ -n $python ]] || die "no supported Python found (3.11, 3.12 or 3.10)." \
            "Install one (Debian, Ubuntu: apt-get install python3.11-venv python3.11-dev)" \
            "or name one: QKNORM_PYTHON=/path/to/python3.11 scripts/setup.sh"
        ask "$python"
    fi
    [[ $can_venv == True ]] || die "Python $version ($python) lacks its venv module." \
        "Install it (Debian, Ubuntu: apt-get install python$minor-venv)" \
        "or name another Python in QKNORM_PYTHON."
fi

pin() { # the version that constraints.txt gives a package for this Python
    local name="$1" line
    while IFS= read -r line; do
        case "$line" in
            "$name=="*"python_version < '3.11'") [[ $minor == 3.10 ]] || continue ;;
            "$name=="*"python_version >= '3.11'") [[ $minor != 3.10 ]] || continue ;;
            "$name=="*) ;;
            *) continue ;;
        esac
        line="${line#*==}"
        printf '%s' "${line%%[ ;]*}"
        return
    done <constraints.txt
    die "constraints.txt has no version of $name for Python $minor."
}
fairseq="fairseq-fixed"
if [[ $minor == 3.10 ]]; then fairseq="fairseq"; fi
fairseq_version="$(pin "$fairseq")"
torch_version="$(pin torch)"

installed() { # NAME VERSION, whatever its local suffix (+cpu)
    [[ $remake == 0 ]] && "$py" -c '
import sys
from importlib.metadata import version
sys.exit(version(sys.argv[1]).split("+")[0] != sys.argv[2])
' "$@" 2>/dev/null
}

if installed "$fairseq" "$fairseq_version"; then
    fairseq_note="installed already"
else
    fairseq_note="compiling, about 5 minutes the first time"
    [[ $minor != 3.10 ]] || fairseq_note="compiling, about a minute the first time"
    # -fsyntax-only with a standard header: some systems have a c++ that only says "install me".
    "${CXX:-c++}" -std=c++17 -fsyntax-only -x c++ - 2>/dev/null <<<'#include <string>' ||
        die "no C++ compiler that works (tried ${CXX:-c++}); fairseq is compiled here." \
            "Install one (Debian, Ubuntu: apt-get install g++; Fedora: dnf install gcc-c++;" \
            "macOS: xcode-select --install)."
    [[ -f $include/Python.h ]] ||
        die "Python $version (${python:-$py}) has no headers ($include/Python.h)," \
            "and fairseq is compiled against them." \
            "Install them (Debian, Ubuntu: apt-get install python$minor-dev; Fedora: dnf install" \
            "python$minor-devel) or name another Python in QKNORM_PYTHON."
fi

# torch with its CUDA libraries takes 5 GB, its download another 3 GB while pip unpacks it. Which
# torch pip picks is known only after asking the index, so the larger one is assumed.
if installed torch "$torch_version"; then
    torch_note="installed already"
    need_gb=1
else
    torch_note="downloading, with CUDA about 3 GB"
    need_gb=8
    if [[ $OSTYPE == darwin* ]]; then need_gb=3; fi # no CUDA there
fi
need_gb="${QKNORM_MIN_DISK_GB:-$need_gb}"
[[ $need_gb =~ ^[0-9]+$ ]] || die "QKNORM_MIN_DISK_GB=$need_gb is not a whole number of GB."
disk="$venv"
[[ -d $disk ]] || disk="$root"
free_kb=""
if [[ $need_gb != 0 ]]; then
    # POSIX format: device, blocks, used, available, capacity, mount point; read from the
    # percentage backwards, for a device's name may hold blanks.
    [[ $(df -Pk -- "$disk") =~ ([0-9]+)[[:space:]]+[0-9]+%[[:space:]] ]] &&
        free_kb="${BASH_REMATCH[1]}"
fi
if [[ -n $free_kb ]] && ((free_kb < 10#$need_gb * 1024 * 1024)); then
    tenths=$((free_kb * 10 / 1024 / 1024))
    die "too little disk: $((tenths / 10)).$((tenths % 10)) GB free in $disk, $need_gb GB needed." \
        "Make room, or set QKNORM_MIN_DISK_GB lower if your torch is smaller (without CUDA: 3)."
fi

# ---------------------------------------------------------------------------------------------
# The work, a line a step.
# ---------------------------------------------------------------------------------------------

took() { # seconds
    if (($1 < 60)); then printf '%ds' "$1"; else printf '%dm%02ds' $(($1 / 60)) $(($1 % 60)); fi
}

no_network() {
    die "no network: pip cannot reach a package index. Check the connection, the proxy" \
        "(https_proxy) or PIP_INDEX_URL, then call scripts/setup.sh again (log: $log)."
}

count=0
step() { # TITLE COMMAND...
    local title="$1" start=$SECONDS before said
    shift
    count=$((count + 1))
    printf '[%d/5] %s ... ' "$count" "$title"
    before="$(wc -l <"$log")"
    if "$@" >>"$log" 2>&1; then
        printf 'done in %s\n' "$(took $((SECONDS - start)))"
        return
    fi
    printf 'failed after %s\n' "$(took $((SECONDS - start)))"
    said="$(tail -n "+$((before + 1))" "$log")"
    case "$said" in
        *"No space left on device"*)
            die "the disk filled up (pip also unpacks below TMPDIR, now ${TMPDIR:-/tmp})." \
                "Make room or point TMPDIR at a larger disk, then call scripts/setup.sh again."
            ;;
        *"Max retries exceeded"* | *NewConnectionError* | *NameResolutionError* | \
            *ReadTimeoutError* | *ProxyError* | *ConnectionResetError*) no_network ;;
        # pip says no more than this where it reaches no index: try whether it finds anything.
        *"from versions: none"* | *ResolutionImpossible*)
            "$py" -m pip download --quiet --no-deps --no-cache-dir --retries 0 --timeout 15 \
                --dest "$venv/probe" wheel >>"$log" 2>&1 || no_network
            rm -rf -- "$venv/probe"
            ;;
    esac
    tail -n 15 <<<"$said" >&2
    die "'${title%%:*}' failed, see above; the whole log is $log."
}
pip_install() { "$py" -m pip install --progress-bar off -c constraints.txt "$@"; }

environment() {
    if [[ $remake == 1 ]]; then "$python" -m venv -- "$venv" || return; fi
    # An interrupted call, or another tool, may have left an environment without pip.
    "$py" -m pip --version || "$py" -m ensurepip || return
    # The official fairseq needs an omegaconf whose metadata pip refuses from 24.1 on.
    if [[ $minor == 3.10 ]]; then pip_install pip || return; fi
    pip_install cython numpy setuptools wheel ninja hatchling editables
}

build_fairseq() {
    # CUDA_HOME: fairseq would compile CUDA sources that its package does not hold.
    if [[ $minor == 3.10 ]]; then
        # The opposite of below: this older package holds only part of the sources that it
        # compiles when it finds torch. Built in isolation it finds none, and leaves them out.
        # PIP_CONSTRAINT reaches into the isolation, -c does not.
        PIP_CONSTRAINT=constraints.txt pip_install "$fairseq"
    else
        # In isolation pip would download a second torch only to build this.
        pip_install --no-build-isolation "$fairseq"
    fi
}

compile() {
    local jobs="${MAX_JOBS:-$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)}"
    (unset CUDA_HOME && export MAX_JOBS="$jobs" && build_fairseq)
}

check() {
    "$py" -c 'import fairseq, torch' && "$py" -m pip check
}

exec 3>&2 # the trap may run while stderr goes to the log
trap '{ printf "\n"; die "interrupted; call scripts/setup.sh again to go on."; } 2>&3 >&2' INT

begin=$SECONDS
if [[ $remake == 1 ]]; then
    # Only ever .venv of this checkout: half-made, made for another Python, or moved.
    rm -rf -- "$venv"
    mkdir -- "$venv"
fi
rm -f -- "$stamp" # an interrupted call must not pass for a finished one
: >"$log"
step "Python $version in $where: environment and build tools" environment
step "torch $torch_version: $torch_note" pip_install torch
step "$fairseq $fairseq_version: $fairseq_note" compile
# Without isolation: the build back end is pinned and there already.
step "qknorm-fairseq: the project (editable), its libraries and tools" \
    pip_install --no-build-isolation -e '.[cluster,tensorboard,dev]'
step "check: the imports work, the versions agree" check

fingerprint >"$stamp.new" && mv -f -- "$stamp.new" "$stamp"
printf 'Ready in %s.' "$(took $((SECONDS - begin)))"
if [[ $ours == 1 ]]; then
    printf ' To activate: source %s/bin/activate' "$(printf '%q' "$venv")"
fi
printf '\n'
