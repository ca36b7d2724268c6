#!/usr/bin/env bash
# The study of experts: a small encoder, trained on clean speech, adapted to degraded speech with
# mixtures of experts and with what they are compared with; three seeds; unattended.
set -euo pipefail

stage=1
stop_stage=5
data=                       # a folder; minivox beside the checkout
work=                       # where data and experiments go
jobs=2
bootstrap=1000

usage() {
  cat << EOF
usage: bash recipes/moe/run_study.sh [--stage N] [--stop_stage N] [--option value]
       some hours on two CPU cores; what is finished is never done again

stages
  1  data: lists, degraded speech, an untrained encoder
  2  base: the encoder on clean speech, dense and with experts
  3  adapt: to degraded speech, every comparator and mixture, at two rates, then three seeds;
     some of them to far speech alone
  4  experts: similarity before and after, drift, usage by kind, segment and language
  5  tables with intervals and figures

options (and their defaults)
  --data DIR          as recipes/mini/run.sh takes it [minivox beside the checkout]
  --work DIR          [recipes/moe/exp/study]
  --jobs 2            trainings at a time
  --bootstrap 1000    replicates of the intervals
EOF
}

root=$(cd "$(dirname "$0")/../.." && pwd)
source "$root/tools/parse_options.sh"
log() { echo "[$(date '+%H:%M:%S')] $*" >&2; }
includes() { [ "$stage" -le "$1" ] && [ "$stop_stage" -ge "$1" ]; }

source "$root/tools/setup.sh" ssl
local="$root/recipes/moe/local"
data=${data:-$root/../shared/minivox}
work=${work:-$root/recipes/moe/exp/study}
# far_field and the cells of tables are the other study's
export PYTHONPATH="$local:$root/recipes/mini/local${PYTHONPATH:+:$PYTHONPATH}"
mkdir -p "$work"
work=$(cd "$work" && pwd)

if includes 1; then
  log "stage 1: data"
  if [ ! -f "$work/data/.done" ]; then
    python "$root/recipes/mini/local/prepare_data.py" "$data" "$work/lists"
    python "$local/degrade.py" "$work/lists" "$work/data"
    python "$local/make_encoder.py" "$work/encoder"
    touch "$work/data/.done"
  fi
fi

run_part() {
  python "$local/moe_study.py" "$work" "$1"
  wespeaker-qmargin grid "$work/$1.yaml" --jobs "$jobs"
}

if includes 2; then log "stage 2: base" && run_part base; fi
if includes 3; then
  log "stage 3: adapt"
  run_part tune
  run_part adapt
  run_part far
fi

analyse() {  # RUN START PART OUT OPTIONS: what RUN changed and hears, on each set of a part
  local sets=() folder
  for folder in "$work/data/$3"/*; do sets+=("$(basename "$folder")=$folder"); done
  [ -f "$4/experts.json" ] || wespeaker-qmargin experts --exp_dir "$1" --from "$2" \
    --data "${sets[@]}" --out "$4" "${@:5}"
}

if includes 4; then
  log "stage 4: experts"
  for run in "$work"/{adapt,far}/{full,wide,experts_n3k2,experts_reinit,experts_from_start}/seed_*; do
    start="$work/base/dense/$(basename "$run")"
    case $run in *from_start*) start="$work/base/experts/$(basename "$run")" ;; esac
    analyse "$run" "$start" by_language "$run/languages" --drop 0
    analyse "$run" "$start" by_kind "$run" --sample 60 --drop 10
  done
fi

if includes 5; then
  log "stage 5: tables"
  python "$local/moe_results.py" "$work" --bootstrap "$bootstrap"
fi
