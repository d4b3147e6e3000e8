#!/usr/bin/env bash
# scripts/reproduce.sh for ar-en, with the same options.
exec "$(dirname -- "${BASH_SOURCE[0]}")/reproduce.sh" ar-en "$@"
