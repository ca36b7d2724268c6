#!/usr/bin/env bash
# From wav to EER on two CPU cores: CosFace and Q-Margin, the same backbone, data and schedule.
set -euo pipefail

stage=1
stop_stage=7
data=                       # a folder, or minivox | demo | minilibrispeech
backbone=xvec               # xvec | resnet34
systems="cosface qmargin"
work=                       # where data lists and experiments go
top_n=300
train_args=                 # more options of wespeaker-qmargin train, as in the config
bootstrap=1000

usage() {
  cat << EOF
usage: bash recipes/mini/run.sh [--stage N] [--stop_stage N] [--option value]

stages
  1  data: check the corpus, write lists with absolute paths
  2  lists: raw lists (JSON lines), as WeSpeaker's own
  3  train one network a system (continues where it was interrupted)
  4  average the last checkpoints; extract embeddings, also of the untrained network
  5  score the trials by cosine after subtracting the training mean
  6  score norm: AS-Norm with the training speakers as cohort
  7  metrics with 95 % speaker-bootstrap intervals, and the report

options (and their defaults)
  --data DIR          folder with train/, test/ and test/trials (Kaldi style), or minivox, demo,
                      minilibrispeech (downloads 0.5 GB). Default: minivox beside the checkout if it is
                      there, else demo: synthetic voices, smoke data only
  --backbone xvec     conf/mini_<backbone>_<system>.yaml are trained: xvec or resnet34
  --systems "cosface qmargin"
  --work DIR          recipes/mini/exp/<data>_<backbone>
  --train_args "..."  passed to training, e.g. "--num_epochs 2 --seed 1"
  --top_n 300         cohort scores that AS-Norm uses
  --bootstrap 1000    replicates of the intervals
EOF
}

root=$(cd "$(dirname "$0")/../.." && pwd)
source "$root/tools/parse_options.sh"
log() { echo "[$(date '+%H:%M:%S')] $*" >&2; }
finished() { [ -f "$1" ] && log "done before: $1 (remove it to do it again)"; }

data=${data:-$([ -d "$root/../shared/minivox" ] && echo minivox || echo demo)}
source "$root/tools/setup.sh" "$([ "$data" = demo ] && echo demo || true)"
local="$root/recipes/mini/local"
name=$(basename "$data")
work=${work:-$root/recipes/mini/exp/${name}_$backbone}
lists="$work/data"
mkdir -p "$work"
log "data $data, backbone $backbone, everything goes to $work"

if [ "$stage" -le 1 ] && [ "$stop_stage" -ge 1 ]; then
  log "stage 1: data"
  if ! finished "$lists/.done"; then
    case $data in
      minivox) corpus="$root/../shared/minivox" ;;
      demo)
        corpus="$root/recipes/mini/exp/demo_corpus"
        python "$local/make_demo.py" "$corpus"
        ;;
      minilibrispeech)
        corpus="$root/recipes/mini/exp/minilibrispeech"
        python "$local/prepare_minilibrispeech.py" "$corpus"
        ;;
      *) corpus=$data ;;
    esac
    python "$local/prepare_data.py" "$corpus" "$lists"
    touch "$lists/.done"
  fi
fi

if [ "$stage" -le 2 ] && [ "$stop_stage" -ge 2 ]; then
  log "stage 2: raw lists"
  for part in train test; do
    python "$root/tools/make_raw_list.py" "$lists/$part/wav.scp" "$lists/$part/utt2spk" \
      "$lists/$part/raw.list"
  done
fi

if [ "$stage" -le 3 ] && [ "$stop_stage" -ge 3 ]; then
  sources=()
  if [ -f "$lists/musan/wav.scp" ]; then sources+=(--noise_data "$lists/musan/wav.scp"); fi
  if [ -f "$lists/rirs/wav.scp" ]; then sources+=(--reverb_data "$lists/rirs/wav.scp"); fi
  for system in $systems; do
    log "stage 3: train $system"
    exp="$work/$system"
    if ! finished "$exp/.trained"; then
      # shellcheck disable=SC2086
      wespeaker-qmargin train --config "$root/conf/mini_${backbone}_$system.yaml" --resume \
        --exp_dir "$exp" --data_type raw --train_data "$lists/train/raw.list" \
        --train_label "$lists/train/utt2spk" "${sources[@]}" $train_args
      touch "$exp/.trained"
    fi
  done
fi

# the untrained network is read from the first system's config
first=${systems%% *}
extract() {  # system, checkpoint
  local out="$work/$1/embeddings" exp="$work/$1" part
  [ "$2" = untrained ] && exp="$work/$first"
  for part in train test; do
    wespeaker-qmargin extract --exp_dir "$exp" --model "$2" --data_type raw \
      --data "$lists/$part/raw.list" --out "$out/$part"
  done
}

if [ "$stage" -le 4 ] && [ "$stop_stage" -ge 4 ]; then
  log "stage 4: average and extract"
  for system in $systems; do
    if ! finished "$work/$system/.extracted"; then
      num_avg=$(python -c 'import sys, yaml; print(yaml.safe_load(open(sys.argv[1]))["num_avg"])' \
        "$work/$system/config.yaml")
      wespeaker-qmargin average --exp_dir "$work/$system" --num "$num_avg"
      extract "$system" avg
      touch "$work/$system/.extracted"
    fi
  done
  if ! finished "$work/untrained/.extracted"; then
    extract untrained untrained
    touch "$work/untrained/.extracted"
  fi
fi

if [ "$stage" -le 5 ] && [ "$stop_stage" -ge 5 ]; then
  log "stage 5: cosine scores"
  for system in untrained $systems; do
    wespeaker-qmargin score --embeddings "$work/$system/embeddings/test/xvector.scp" \
      --mean "$work/$system/embeddings/train/xvector.scp" \
      --trials "$lists"/test/trials/*.trials --out "$work/$system/scores"
  done
fi

if [ "$stage" -le 6 ] && [ "$stop_stage" -ge 6 ]; then
  log "stage 6: AS-Norm"
  for system in $systems; do
    wespeaker-qmargin score --embeddings "$work/$system/embeddings/test/xvector.scp" \
      --mean "$work/$system/embeddings/train/xvector.scp" \
      --norm asnorm --top_n "$top_n" --cohort "$work/$system/embeddings/train/xvector.scp" \
      --cohort_utt2spk "$lists/train/utt2spk" \
      --trials "$lists"/test/trials/*.trials --out "$work/$system/scores"
  done
fi

if [ "$stage" -le 7 ] && [ "$stop_stage" -ge 7 ]; then
  log "stage 7: metrics and report"
  described=()
  for system in untrained $systems; do
    wespeaker-qmargin metrics "$work/$system"/scores/*.score --utt2spk "$lists/test/utt2spk" \
      --bootstrap "$bootstrap" --out "$work/$system/scores/results.json" \
      > "$work/$system/scores/results.txt"
    described+=("$system=$work/$system")
  done
  note=
  if [ -f "$lists/NOTE" ]; then note=$(cat "$lists/NOTE"); fi
  wespeaker-qmargin report --systems "${described[@]}" --out "$work/report.html" \
    --title "Mini recipe: $name, $backbone" --note "$note"
fi
