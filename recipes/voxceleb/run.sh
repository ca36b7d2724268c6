#!/usr/bin/env bash
# ResNet34 on VoxCeleb: from scratch, then large-margin or other fine-tuning.
set -euo pipefail

root=$(cd "$(dirname "$0")/../.." && pwd)
# shellcheck disable=SC1091
source "$root/recipes/voxceleb/local/stages.sh"
config="$root/conf/voxceleb/resnet34/qmargin_a150_m02.yaml"

usage() {
  cat << EOF
usage: bash recipes/voxceleb/run.sh --stage N [--stop_stage N] [--option value]

ResNet34, or any other model that a config describes, on VoxCeleb: one run of conf/voxceleb/resnet34
after the other. Stage 9 is large-margin fine-tuning, or what else --ft_config says.

$(stages_usage)

$(options_usage)
EOF
}
[ $# -gt 0 ] || set -- --help
# shellcheck disable=SC1091
source "$root/tools/parse_options.sh"
run_stages
