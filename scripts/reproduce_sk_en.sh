#!/usr/bin/env bash
# scripts/reproduce.sh for sk-en, with the same options.
exec "$(dirname -- "${BASH_SOURCE[0]}")/reproduce.sh" sk-en "$@"
