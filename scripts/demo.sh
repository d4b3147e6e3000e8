#!/usr/bin/env bash
# From a fresh clone to a BLEU comparison: trains transformer_qknorm_tiny and fairseq's own
# transformer of the same size on real Galician-English text, translates the test set with both,
# and prints one table. On 2 cores, after set-up: about 10 minutes.
#
#   scripts/demo.sh           # the comparison
#   scripts/demo.sh --quick   # the same path on little text, in under 3 minutes (scores mean nothing)
#
# What is done is not done again; after an interruption the same command goes on.
set -euo pipefail

quick=0
case "${1-}" in
    "") ;;
    --quick) quick=1 ;;
    -h | --help)
        sed -n '2,9s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
        exit 0
        ;;
    *)
        printf 'demo: unknown argument %s (try --help)\n' "$1" >&2
        exit 2
        ;;
esac

cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
scripts/setup.sh
PATH="${VIRTUAL_ENV:-$PWD/.venv}/bin:$PATH"
unset QKNORM_DATA # the configurations name the folder data/

qknorm fetch catalogues --pair gl-en
settings=(model=transformer_qknorm_tiny,transformer)
if [[ $quick == 1 ]]; then
    qknorm prepare --corpus catalogues --pair gl-en --vocab-size 2000 --limit 2000 \
        --out data/prepared/catalogues_quick/gl-en
    settings+=(corpus=catalogues_quick optimization.max_update=60)
else
    qknorm prepare --corpus catalogues --pair gl-en --vocab-size 4000
fi
exec python -m qknorm_fairseq.experiment demo "${settings[@]}"
