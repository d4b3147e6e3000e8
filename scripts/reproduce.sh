#!/usr/bin/env bash
# The paper's experiment on a language pair, with its baseline: fetches the corpus, prepares it,
# trains each model with each seed, translates the test set, scores, and prints one table.
#
#   scripts/reproduce.sh PAIR [options] [Hydra settings]
#   scripts/reproduce.sh gl-en                                    # on a GPU; hours
#   scripts/reproduce.sh gl-en --corpus catalogues --tiny --cpu   # on a laptop; minutes
#   scripts/reproduce.sh gl-en ablation=none,fixed_g              # see configs/ablation/
#
#   PAIR             en-vi, ar-en, en-he, gl-en, sk-en, or all
#   --corpus NAME    ted (for en-vi: iwslt15), the default but with --tiny, or catalogues
#   --models A,B     default: transformer_scalenorm,transformer_qknorm
#   --seeds 1,2,3    a run for each; default: 1
#   --tiny           2+2 layers and few updates; the default models are then the ..._tiny ones
#   --cpu            without a GPU
#   --fp16           half precision, on a GPU
#   --bf16           bfloat16, on a GPU or a CPU (quick on those that have it: AMX, AVX-512 BF16)
#   --gpus N         share each batch among N GPUs
#   --launcher NAME  each run as a job: submitit_slurm, or submitit_local for this machine; what
#                    jobs are given: configs/hydra/launcher/, or hydra.launcher.partition=gpu
#   --from DIR       the corpus's published files are in this folder; no download
#   --mirror URL     download them from there
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
"$root/scripts/setup.sh"
exec "${VIRTUAL_ENV:-$root/.venv}/bin/python" -m qknorm_fairseq.reproduction --in "$root" "$@"
