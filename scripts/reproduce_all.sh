#!/usr/bin/env bash
# The paper's experiment on all five pairs, three seeds each, and on gl-en fairseq's own transformer
# too; then the report. Options are those of scripts/reproduce.sh; --seeds is 1,2,3 here.
#
#   scripts/reproduce_all.sh                # on a GPU: days
#   scripts/reproduce_all.sh --tiny --cpu   # on a laptop: 33 runs, 2 hours
#
# What is done is not done again; after an interruption the same command goes on.
set -euo pipefail

root="$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)"
exec "$root/scripts/reproduce.sh" all --seeds 1,2,3 "$@"
