#!/usr/bin/env bash
# The paper's experiment on all five pairs, three seeds each, and on gl-en fairseq's own transformer
# too; then the report, in runs/report. Options are those of scripts/reproduce.sh, with --seeds 1,2,3.
#
#   scripts/reproduce_all.sh                # on a GPU: days
#   scripts/reproduce_all.sh --tiny --cpu   # on a laptop: 33 runs of minutes each
#   scripts/reproduce_all.sh --launcher submitit_slurm hydra.launcher.partition=gpu  # on a cluster
#
# What is done is not done again; after an interruption the same command goes on.
set -euo pipefail

root="$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)"
case " $* " in
    *" --help "* | *" -h "*)
        sed -n '2,/^set/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
        exit 0
        ;;
esac
status=0
"$root/scripts/reproduce.sh" all --seeds 1,2,3 "$@" || status=$?
if ((status < 2)); then # some runs may have failed: the report says which are missing
    cd -- "$root"
    "${VIRTUAL_ENV:-$root/.venv}/bin/qknorm" report runs || status=$?
fi
exit "$status"
