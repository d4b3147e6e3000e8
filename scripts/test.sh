#!/usr/bin/env bash
# Sets up the environment if need be, then runs all tests.
#
#   scripts/test.sh                      # everything
#   scripts/test.sh tests/test_setup.py  # arguments go to pytest
set -euo pipefail

root="$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)"
"$root/scripts/setup.sh"
python="${VIRTUAL_ENV:-$root/.venv}/bin/python"
if [[ $# == 0 ]]; then
    cd -- "$root" # with arguments, paths are meant from where the caller stands
fi
exec "$python" -m pytest "$@"
