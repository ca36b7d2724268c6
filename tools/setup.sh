# Makes a Python environment with everything the project needs, and makes it the current one.
#
#   source tools/setup.sh [EXTRAS]        EXTRAS: test, demo, lmdb, ssl, voxceleb (comma separated)
#
# An active virtual or conda environment is used as it is: what is installed there stays, only what
# is missing is added. Otherwise .venv is made; it sees the system's packages if the system's Python
# has a torch of its own (--system-site-packages). A torch >= 2.6 that is there is never replaced.
# PYTHON=... chooses the interpreter, WESPEAKER_ROOT=... a WeSpeaker checkout instead of the package.
# A second call takes a second or two.

_qm_log() { echo "[setup] $*" >&2; }

_qm_find_python() {
  local candidate
  for candidate in "${PYTHON:-}" python3 python3.13 python3.12 python3.11 python3.10 python; do
    [ -n "$candidate" ] && command -v "$candidate" > /dev/null || continue
    "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2> /dev/null || continue
    command -v "$candidate"
    return 0
  done
  _qm_log "no Python >= 3.10 found: install one, or name it with PYTHON=/path/to/python3"
  return 1
}

# uv reads none of pip's settings: hand over the ones that decide where packages come from.
_qm_pip_setting() { "$1" -m pip config get "global.$2" 2> /dev/null || true; }
_qm_uv_settings() {
  local python=$1
  export UV_FIND_LINKS="${UV_FIND_LINKS:-${PIP_FIND_LINKS:-$(_qm_pip_setting "$python" find-links)}}"
  export UV_DEFAULT_INDEX="${UV_DEFAULT_INDEX:-${PIP_INDEX_URL:-$(_qm_pip_setting "$python" index-url)}}"
  export UV_CONSTRAINT="${UV_CONSTRAINT:-${PIP_CONSTRAINT:-$(_qm_pip_setting "$python" constraint)}}"
  [ -n "$UV_FIND_LINKS" ] || unset UV_FIND_LINKS
  [ -n "$UV_DEFAULT_INDEX" ] || unset UV_DEFAULT_INDEX
  [ -n "$UV_CONSTRAINT" ] || unset UV_CONSTRAINT
}

_qm_make_venv() {
  local root=$1 python=$2 system=()
  if "$python" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("torch") is None)'; then
    system=(--system-site-packages)
    _qm_log "$python has torch: .venv will use it"
  fi
  _qm_log "making $root/.venv with $python"
  if command -v uv > /dev/null; then
    uv venv --quiet --python "$python" "${system[@]}" "$root/.venv"
  else
    "$python" -m venv "${system[@]}" "$root/.venv" || {
      _qm_log "python -m venv failed: install uv, or your system's python3-venv package"
      rm -rf "$root/.venv"
      return 1
    }
  fi
}

_qm_install() {
  if command -v uv > /dev/null; then
    uv pip install --quiet --python "$(command -v python)" "$@"
  else
    python -m pip install --quiet --disable-pip-version-check "$@"
  fi
}

# The constraints, with every package that must stay pinned to the version that is installed.
_qm_constraints() {  # root, "all" or "torch"
  python - "$1/constraints.txt" "$2" << 'PY'
import re, sys
from importlib.metadata import PackageNotFoundError, version

for line in open(sys.argv[1]):
    name = re.match(r"[A-Za-z0-9_.-]*", line).group()
    if name and (sys.argv[2] == "all" or name == "torch"):
        try:
            line = f"{name}=={version(name)}\n"
        except PackageNotFoundError:
            pass
    sys.stdout.write(line)
PY
}

_qm_check_torch() {
  python - << 'PY'
import sys
from importlib.metadata import PackageNotFoundError, version

try:
    found = version("torch")
except PackageNotFoundError:
    sys.exit(0)
if tuple(map(int, found.split("+")[0].split(".")[:2])) < (2, 6):
    sys.exit(f"[setup] this environment has torch {found}; torch >= 2.6 is needed. It is not replaced: "
             "upgrade it yourself, or run without an active environment.")
PY
}

_qm_has_wespeaker() {
  [ -n "${WESPEAKER_ROOT:-}" ] && return 0
  python -c 'import importlib.util as u, sys; sys.exit(u.find_spec("wespeaker") is None)'
}

qmargin_setup() {
  local root extras=${1:-} keep=all python stamp want constraints
  root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd) || return 1
  if [ -n "${WESPEAKER_ROOT:-}" ] && [ ! -d "$WESPEAKER_ROOT/wespeaker/models" ]; then
    _qm_log "WESPEAKER_ROOT=$WESPEAKER_ROOT is no WeSpeaker checkout: it has no wespeaker/models"
    return 1
  fi
  if [ -z "${VIRTUAL_ENV:-}${CONDA_PREFIX:-}" ]; then
    python=$(_qm_find_python) || return 1
    [ -x "$root/.venv/bin/python" ] || _qm_make_venv "$root" "$python" || return 1
    # shellcheck disable=SC1091
    source "$root/.venv/bin/activate" || return 1
  fi
  if [ "${VIRTUAL_ENV:-}" = "$root/.venv" ] && ! grep -qi 'system-site-packages = true' "$root/.venv/pyvenv.cfg"; then
    keep=torch
  fi

  stamp=$(python -c 'import sys; print(sys.prefix)')/.wespeaker_qmargin-${extras:-none}
  want=$(cat "$root/constraints.txt" "$root/setup.py" "$root/tools/setup.sh" | cksum)" $root ${WESPEAKER_ROOT:-}"
  if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$want" ]; then
    return 0
  fi

  _qm_check_torch || return 1
  if command -v uv > /dev/null; then _qm_uv_settings "$(_qm_find_python)"; fi
  constraints=$(mktemp) || return 1
  _qm_constraints "$root" "$keep" > "$constraints" || return 1
  _qm_log "installing (the first time takes a minute or two: torch is large)"
  # torch first and pinned: an unpinned requirement would fetch the newest CUDA build
  _qm_install -c "$constraints" torch || return 1
  _qm_install -c "$constraints" -e "$root${extras:+[$extras]}" || return 1
  if ! _qm_has_wespeaker; then
    # its declared dependencies are 1.8 GB that nothing here needs
    _qm_install --no-deps -c "$constraints" wespeaker-unofficial || return 1
  fi
  rm -f "$constraints"
  echo "$want" | tee "$stamp" > "${stamp%-*}-none"
  # the test extra holds the others
  if [ "$extras" = test ]; then echo "$want" | tee "${stamp%-*}-"{demo,lmdb,ssl} > "${stamp%-*}-voxceleb"; fi
  _qm_log "done: $(python -c 'import sys; print(sys.prefix)')"
}

qmargin_setup "$@"
