#!/usr/bin/env bash
# WavLM and MHFA on VoxCeleb, the whole network trained; then continued with another head.
set -euo pipefail

root=$(cd "$(dirname "$0")/../.." && pwd)
# shellcheck disable=SC1091
source "$root/recipes/voxceleb/local/stages.sh"
config="$root/conf/voxceleb/wavlm_mhfa/qmargin_a150.yaml"
extras="voxceleb ssl"
ft_prefix=continued
encoder=                      # WavLM's weights

usage() {
  cat << EOF
usage: bash recipes/voxceleb/run_wavlm.sh --stage N [--stop_stage N] [--option value]

WavLM Base+ and MHFA on VoxCeleb: one run of conf/voxceleb/wavlm_mhfa after the other. Stage 9 trains
on, with the head that --ft_config says.

$(stages_usage)

$(options_usage)
  --encoder PATH          folder with WavLM's weights, or a name on the hub [as the config says]
EOF
}
[ $# -gt 0 ] || set -- --help
# shellcheck disable=SC1091
source "$root/tools/parse_options.sh"
if [ -n "$encoder" ]; then
  model_options=(--dataset_args.wavlm_args.model_name "$encoder")
fi
run_stages
