#!/usr/bin/env bash
# What CI does a few times, many times: kills at random moments, random files for every parser.
# usage: bash tools/soak.sh [KILLS [CASES]]     an hour or two; prints the counts
set -euo pipefail
cd "$(dirname "$0")/.."
source tools/setup.sh test
export QMARGIN_KILLS=${1:-200} QMARGIN_FUZZ=${2:-10000}
echo "commit $(git rev-parse --short HEAD), $(uname -sm), $(nproc) cores, $(date -u +%F)"
echo "$QMARGIN_KILLS kills of each command, $QMARGIN_FUZZ cases for each parser"
exec python -m pytest -s -v tests/test_kill.py tests/test_fuzz.py
