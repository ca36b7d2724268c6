#!/usr/bin/env bash
# Small-data ablation: Q-Margin's scale, margin and alpha on Vox1-dev, measured on Vox1-O.
set -euo pipefail

root=$(cd "$(dirname "$0")/../.." && pwd)
# shellcheck disable=SC1091
source "$root/recipes/voxceleb/local/stages.sh"
stop_stage=4
train_set=vox1_dev
config="$root/conf/voxceleb/resnet34/base.yaml"
encoder=                      # WavLM's weights
scales="5 10 20 32"
margins="0.1 0.2 0.3"
alphas="1 1.25 1.5 2"         # 1: CosFace
task=

usage() {
  cat << EOF
usage: bash recipes/voxceleb/run_ablation.sh --stage N [--stop_stage N] [--option value]

Every scale x margin x alpha is a job: ${scales// /, } x ${margins// /, } x ${alphas// /, }
stages
  1  data: from the archives to Kaldi folders (local/downloads.py says what to download)
  2  lists: shards or a raw list of the training set
  3  the jobs, one after the other, or job --task alone: training to metrics
  4  one table (Markdown, CSV), and heat maps of EER and FNR, of all jobs that are finished

As an array job of SLURM (--array=1-48):
  bash recipes/voxceleb/run_ablation.sh --stage 3 --stop_stage 3 --task \$SLURM_ARRAY_TASK_ID

$(options_usage | grep -v -e '--ft_' -e '--train_set' -e '--trials')
  --task N                one job, from 1; EXP_DIR/jobs.txt lists them
  --scales "..." --margins "..." --alphas "..."   another grid
  --encoder PATH          folder with WavLM's weights, or a name on the hub [as the config says]
EOF
}
[ $# -gt 0 ] || set -- --help
# shellcheck disable=SC1091
source "$root/tools/parse_options.sh"
if [ -n "$encoder" ]; then
  extras="voxceleb ssl"
  model_options=(--dataset_args.wavlm_args.model_name "$encoder")
fi

list_jobs() {  # the grid, one line a job: number, folder, alpha, scale, margin
  local alpha scale margin number=0
  for alpha in $alphas; do
    for scale in $scales; do
      for margin in $margins; do
        number=$((number + 1))
        echo "$number alpha${alpha}_scale${scale}_margin$margin $alpha $scale $margin"
      done
    done
  done
}

run_jobs() {
  local number folder alpha scale margin exp
  while read -r number folder alpha scale margin <&3; do
    if [ -n "$task" ] && [ "$task" != "$number" ]; then continue; fi
    exp="$exp_dir/$folder"
    if finished "$exp/.measured"; then continue; fi
    log "job $number: alpha $alpha, scale $scale, margin $margin"
    # shellcheck disable=SC2086
    train "$config" "$exp" --projection_args.project_type q_margin \
      --projection_args.alpha "$alpha" --projection_args.scale "$scale" \
      --margin_update.final_margin "$margin" "${model_options[@]}" $train_args
    extract "$exp"
    normalise "$exp"  # scores without it too
    measure "$exp"
    touch "$exp/.measured"
  done 3<<< "$list"
}

check_options 4
exp_dir=${exp_dir:-$root/recipes/voxceleb/exp/ablation_$(basename "$(dirname "$config")")}
set_paths
list=$(list_jobs)
if [ -n "$task" ]; then
  grep -q "^$task " <<< "$list" || fail "--task $task: the grid has the jobs 1 to $(wc -l <<< "$list")"
fi
set_up
mkdir -p "$exp_dir"
echo "$list" > "$exp_dir/.jobs.$$" && mv "$exp_dir/.jobs.$$" "$exp_dir/jobs.txt"
log "$config on $train_set, $num_gpus GPUs; everything goes to $exp_dir"
check_configs
run_stage 1 "data" prepare
run_stage 2 "lists" make_lists
run_stage 3 "jobs" run_jobs
run_stage 4 "table and heat maps" python "$scripts/collect_ablation.py" "$exp_dir"
