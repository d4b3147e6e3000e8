#!/usr/bin/env bash
# scripts/reproduce.sh for en-vi, with the same options.
exec "$(dirname -- "${BASH_SOURCE[0]}")/reproduce.sh" en-vi "$@"
