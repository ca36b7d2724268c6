#!/usr/bin/env bash
# The study: heads, label noise, schedules and fine-tuning on minivox, three seeds; unattended.
set -euo pipefail

stage=1
stop_stage=7
data=                       # a folder; minivox beside the checkout
work=                       # where lists and experiments go
jobs=2
bootstrap=1000

usage() {
  cat << EOF
usage: bash recipes/mini/run_study.sh [--stage N] [--stop_stage N] [--option value]
       some hours on two CPU cores; what is finished is never done again

stages
  1  data: lists, copies with 5 % and 20 % wrong labels, far-field test utterances
  2  tune: every head at three learning rates, on held-out training speakers
  3  heads: every head, margins 0.1 and 0.2, three seeds; alpha from 1 to 1.5; four for longer
  4  noise: CosFace and Q-Margin with wrong labels; an audit, and without its suspects
  5  starts: two CosFace networks, and what the probe says of going on from them
  6  fine-tune both with CosFace and Q-Margin, one also against the probe's advice
  7  tables with intervals and figures

options (and their defaults)
  --data DIR          as run.sh takes it [minivox beside the checkout]
  --work DIR          [recipes/mini/exp/study]
  --jobs 2            trainings at a time
  --bootstrap 1000    replicates of the intervals
EOF
}

root=$(cd "$(dirname "$0")/../.." && pwd)
source "$root/tools/parse_options.sh"
log() { echo "[$(date '+%H:%M:%S')] $*" >&2; }
includes() { [ "$stage" -le "$1" ] && [ "$stop_stage" -ge "$1" ]; }

source "$root/tools/setup.sh"
local="$root/recipes/mini/local"
data=${data:-$root/../shared/minivox}
work=${work:-$root/recipes/mini/exp/study}
export PYTHONPATH="$local${PYTHONPATH:+:$PYTHONPATH}"
mkdir -p "$work"
work=$(cd "$work" && pwd)

if includes 1; then
  log "stage 1: data"
  if [ ! -f "$work/data/.done" ]; then
    python "$local/prepare_data.py" "$data" "$work/lists"
    python "$local/study_data.py" "$work/lists" "$work/data"
    touch "$work/data/.done"
  fi
fi

run_part() {
  python "$local/make_study.py" "$work" "$1"
  wespeaker-qmargin grid "$work/$1.yaml" --jobs "$jobs"
}

if includes 2; then log "stage 2: tune" && run_part tune; fi
if includes 3; then
  log "stage 3: heads"
  run_part heads
  run_part long
fi

if includes 4; then
  log "stage 4: noise"
  run_part noise
  for share in 5 20; do
    for seed in 0 1 2; do
      run="$work/noise/qmargin_a150_flip$share/seed_$seed"
      out="$work/data/train_cleaned${share}_seed$seed"
      if [ ! -f "$out/found.json" ]; then
        wespeaker-qmargin audit --exp_dir "$run" --top 5
        python "$local/remove_suspects.py" "$run/audit.tsv" "$work/data/train_flip$share" "$out" \
          --share "$(printf '0.%02d' "$share")" --truth "$work/data/train/utt2spk"
      fi
    done
  done
  run_part cleaned
fi

if includes 5; then
  log "stage 5: starts"
  run_part starts
  for start in "$work"/starts/cosface_*/seed_0; do
    out="$work/probe/$(basename "$(dirname "$start")")"
    if [ ! -f "$out/probe.json" ]; then
      wespeaker-qmargin probe --checkpoint "$start" --data "$work/data/train" \
        --config "$start/config.yaml" --out "$out" \
        --grid '32,1.1,0.2 20,1.25,0.2 10,1.5,0.2 5,2,0.2 10,2,0.05 20,2,0.02 32,2,0'
    fi
  done
fi

if includes 6; then
  log "stage 6: fine-tune"
  run_part finetune
  run_part advice
fi

if includes 7; then
  log "stage 7: tables"
  python "$local/study_results.py" "$work" --bootstrap "$bootstrap"
fi
