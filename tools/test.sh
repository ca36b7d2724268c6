#!/usr/bin/env bash
# Sets up the environment, then runs lint and every test.  Arguments go to pytest: tools/test.sh -k head
set -euo pipefail
cd "$(dirname "$0")/.."
source tools/setup.sh test

ruff check .
ruff format --check .
for script in tools/*.sh recipes/*/*.sh; do bash -n "$script"; done
exec python -m pytest -n 2 --dist loadfile "$@"
