#!/usr/bin/env bash
# scripts/reproduce.sh for gl-en, with the same options.
exec "$(dirname -- "${BASH_SOURCE[0]}")/reproduce.sh" gl-en "$@"
