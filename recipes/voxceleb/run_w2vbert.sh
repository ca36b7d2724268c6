#!/usr/bin/env bash
# w2v-BERT 2.0, adapters and MFA on VoxCeleb: the whole network fine-tuned, then with a large margin.
set -euo pipefail

root=$(cd "$(dirname "$0")/../.." && pwd)
# shellcheck disable=SC1091
source "$root/recipes/voxceleb/local/stages.sh"
config="$root/conf/voxceleb/w2vbert_mfa/qmargin_a150.yaml"
extras="voxceleb ssl"
encoder=                      # w2v-BERT's weights
from=                         # a released checkpoint of the whole network
lora_config="$root/conf/voxceleb/w2vbert_mfa/lora.yaml"
lora_dir=
lora_args=

usage() {
  cat << EOF
usage: bash recipes/voxceleb/run_w2vbert.sh --stage N [--stop_stage N] [--option value]

w2v-BERT 2.0, adapters and MFA on VoxCeleb: one run of conf/voxceleb/w2vbert_mfa after the other.
Stage 3 starts from a released checkpoint (--from), or first trains low-rank updates of the frozen
encoder by --lora_config and adds them to its weights; the prototypes are new. Stage 9 is large-margin
fine-tuning.

$(stages_usage)

$(options_usage)
  --encoder PATH          folder with w2v-BERT's weights, or a name on the hub [as the config says]
  --from PATH             checkpoint to start from, or a folder with avg_model.pt [none: LoRA first]
  --lora_config FILE      [conf/voxceleb/w2vbert_mfa/lora.yaml]
  --lora_dir DIR          [recipes/voxceleb/exp/..., after the config's name]
  --lora_args "..."       more options of its trainer
EOF
}
[ $# -gt 0 ] || set -- --help
# shellcheck disable=SC1091
source "$root/tools/parse_options.sh"
if [ -n "$encoder" ]; then
  model_options=(--dataset_args.w2vbert_args.model_name "$encoder")
fi

train_lora() {
  if finished "$lora_dir/export/avg_model.pt"; then return; fi
  # shellcheck disable=SC2086
  train "$lora_config" "$lora_dir" "${model_options[@]}" $lora_args
  average "$lora_dir"
  export_model "$lora_dir"
}

train_system() {
  if [ -z "$from" ]; then
    require_file "$lora_config" --lora_config
    lora_dir=${lora_dir:-$(dirname "$exp_dir")/w2vbert_mfa_$(basename "$lora_config" .yaml)}
    train_lora
    from="$lora_dir/export"
  fi
  if [ -d "$from" ]; then from="$from/avg_model.pt"; fi
  [ -f "$from" ] || fail "--from $from: no such checkpoint"
  # shellcheck disable=SC2086
  train "$config" "$exp_dir" --model_init "$from" "${model_options[@]}" $train_args
}
run_stages
