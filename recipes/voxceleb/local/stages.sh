# Options and stages that the VoxCeleb recipes share.  A recipe sets `root`, sources this, changes
# defaults, sources tools/parse_options.sh and calls run_stages.

stage=1
stop_stage=8
data="$root/recipes/voxceleb/data"
download_dir=
prepare_args=
data_type=shard
train_set=vox2_dev
trials=
config=
exp_dir=
train_args=
ft_config=
ft_dir=
ft_args=
gpus=
nnodes=1
node_rank=0
master=localhost:29500
num_workers=4
top_n=300
bootstrap=1000

# a recipe's own: extras of setup.py that it needs, what its fine-tuning configs begin with, words of
# the trainer for all its runs
extras=voxceleb
ft_prefix=lm
model_options=()

stages_usage() {
  cat << EOF
stages
  1  data: from the archives to Kaldi folders (local/downloads.py says what to download)
  2  lists: shards or a raw list of the training set
  3  train (goes on where it was interrupted)
  4  average the last checkpoints; extract embeddings of the training and test sets
  5  score the trials by cosine after subtracting the training mean
  6  score norm: AS-Norm with the training speakers as cohort
  7  metrics with 95 % speaker-bootstrap intervals, and the report
  8  export: a folder with avg_model.pt and config.yaml, as WeSpeaker loads it
  9  fine-tune the averaged model by --ft_config, prototypes kept; then 4 to 8 for that
EOF
}

options_usage() {
  cat << EOF
options (and their defaults)
  --stage $stage --stop_stage $stop_stage
  --data DIR              Kaldi folders and lists [recipes/voxceleb/data]
  --download_dir DIR      archives and trial lists, as downloaded [DATA/download_data]
  --prepare_args "..."    more options of local/prepare_voxceleb.py: "--vox1 DIR --jobs 16"
  --data_type shard       of the training set: shard, or raw (nothing is copied)
  --train_set vox2_dev    or vox1_dev
  --trials "O E H"        lists of VoxCeleb1; O alone for vox1_dev, whose speakers are in E and H
  --config FILE           the run
                          [$config]
  --exp_dir DIR           where it goes [recipes/voxceleb/exp/..., after the config's name]
  --train_args "..."      more options of the trainer: "--num_epochs 2 --seed 1"
  --ft_config FILE        the run of stage 9 [${ft_prefix}_*.yaml beside the config]
  --ft_dir DIR            where that goes [EXP_DIR_..., after the config's name]
  --ft_args "..."         more options of its trainer
  --gpus "[0,1]"          or cpu [every GPU there is, else the CPU]
  --nnodes 1 --node_rank 0 --master HOST:PORT   to train on nodes that share a disk
  --num_workers 4         processes a GPU that read audio for extraction
  --top_n 300             cohort scores that AS-Norm uses
  --bootstrap 1000        replicates of the intervals; 0: none
EOF
}

log() { echo "[$(date '+%H:%M:%S')] $*" >&2; }
fail() {
  echo "$(basename "$0"): error: $*" >&2
  exit 1
}
finished() { [ -f "$1" ] && log "done before: $1 (remove it to do it again)"; }
includes() { [ "$stage" -le "$1" ] && [ "$stop_stage" -ge "$1" ]; }

check_options() {  # the last stage
  local number
  for number in "$stage" "$stop_stage"; do
    [[ "$number" =~ ^[1-9]$ ]] && [ "$number" -le "$1" ] ||
      fail "no stage $number: they are 1 to $1 (--help says what they do)"
  done
  case $data_type in
    shard | raw) ;;
    *) fail "--data_type $data_type: expected shard or raw" ;;
  esac
  [ "$node_rank" -lt "$nnodes" ] || fail "--node_rank $node_rank: expected less than $nnodes"
  [ "$node_rank" -eq 0 ] || [ "$stage" -eq 3 ] || [ "$stage" -eq 9 ] ||
    fail "node $node_rank only trains: start it with --stage 3 (or 9) once node 0 is there"
  check_trials
}

check_trials() {  # and sets eval_set, the test utterances
  local name
  case $train_set in
    vox2_dev) trials=${trials:-O E H} ;;
    vox1_dev) trials=${trials:-O} ;;
    *) fail "--train_set $train_set: expected vox2_dev or vox1_dev" ;;
  esac
  eval_set=vox1_test
  for name in $trials; do
    case $train_set,$name in
      *,O) ;;
      vox2_dev,[EH]) eval_set=vox1 ;;
      vox1_dev,[EH]) fail "--trials $name: the speakers of Vox1-$name are those of vox1_dev, which" \
        "this system was trained on: its error rates would mean nothing. Only Vox1-O has others:" \
        "--trials O, or train on vox2_dev" ;;
      *) fail "--trials $name: expected some of O E H" ;;
    esac
  done
}

require_file() {  # file, option
  [ -f "$1" ] || fail "$2 $1: no such file; the runs there are lie in $root/conf/voxceleb"
}

set_paths() {
  local name suffix=
  require_file "$config" --config
  name=$(basename "$config" .yaml)
  if [ "$train_set" != vox2_dev ]; then suffix="_$train_set"; fi
  exp_dir=${exp_dir:-$root/recipes/voxceleb/exp/$(basename "$(dirname "$config")")_$name$suffix}
  ft_config=${ft_config:-$(dirname "$config")/${ft_prefix}_${name%_m0[12]}.yaml}
  if includes 9; then require_file "$ft_config" --ft_config; fi
  ft_dir=${ft_dir:-${exp_dir}_$(basename "$ft_config" .yaml)}
}

set_gpus() {
  case $gpus in
    cpu) export CUDA_VISIBLE_DEVICES= ;;
    ?*) CUDA_VISIBLE_DEVICES=$(tr -d '[] ' <<< "$gpus") && export CUDA_VISIBLE_DEVICES ;;
  esac
  if [ -n "${CUDA_VISIBLE_DEVICES+set}" ]; then
    num_gpus=$(tr ',' '\n' <<< "$CUDA_VISIBLE_DEVICES" | grep -c . || true)
  else
    num_gpus=$(nvidia-smi -L 2> /dev/null | grep -c . || true)
  fi
}

set_up() {
  # shellcheck disable=SC1091
  source "$root/recipes/voxceleb/path.sh" "$extras"
  scripts="$root/recipes/voxceleb/local"
  set_gpus
}

prepare() {
  local sets="$train_set" marker="$data/.prepared_$train_set" name
  if [ "$eval_set,$train_set" = vox1,vox2_dev ]; then sets+=" vox1_dev"; fi
  sets+=" vox1_test musan rirs"
  for name in $trials; do
    sets+=" vox1_$name"
    marker+="_$name"
  done
  if finished "$marker"; then return; fi
  # shellcheck disable=SC2086
  python "$scripts/prepare_voxceleb.py" "$data" ${download_dir:+--download_dir "$download_dir"} \
    $prepare_args --sets $sets
  touch "$marker"
}

make_lists() {
  local set="$data/$train_set"
  if finished "$set/$data_type.list"; then return; fi
  [ -f "$set/wav.scp" ] || fail "$set/wav.scp: no such file; stage 1 writes it"
  case $data_type in
    shard)
      python "$root/tools/make_shards.py" --shuffle "$set/wav.scp" "$set/utt2spk" \
        "$set/shards" "$set/shard.list"
      ;;
    raw) python "$root/tools/make_raw_list.py" "$set/wav.scp" "$set/utt2spk" "$set/raw.list" ;;
  esac
}

# A command of wespeaker-qmargin, a process a GPU: on this node (here), or on all (nodes).
launch() {
  local where=(--standalone)
  if [ "$1" = nodes ] && [ "$nnodes" -gt 1 ]; then
    where=(--nnodes "$nnodes" --node_rank "$node_rank" --master_addr "${master%:*}"
      --master_port "${master#*:}")
  elif [ "$num_gpus" -le 1 ]; then
    wespeaker-qmargin "${@:2}"
    return
  fi
  torchrun "${where[@]}" --nproc_per_node "$((num_gpus > 1 ? num_gpus : 1))" \
    -m wespeaker_qmargin.cli "${@:2}"
}

train() {  # config, folder, more words of the trainer
  local list="$data/$train_set/$data_type.list"
  if ! finished "$2/.trained"; then
    [ -f "$list" ] || fail "$list: no such file; stage 2 writes it"
    log "training $(basename "$1") into $2"
    launch nodes train --config "$1" --resume --exp_dir "$2" --data_type "$data_type" \
      --train_data "$list" --train_label "$data/$train_set/utt2spk" \
      --noise_data "$data/musan/wav.scp" --reverb_data "$data/rirs/wav.scp" "${@:3}"
  fi
  if [ "$node_rank" -gt 0 ]; then
    log "node $node_rank is done with $2; node 0 goes on"
    exit 0
  fi
  touch "$2/.trained"
}

average() {  # folder
  [ -f "$1/.trained" ] || fail "$1 holds no finished training; stage 3 trains"
  wespeaker-qmargin average --exp_dir "$1" --num "$(sed -n 's/^num_avg: //p' "$1/config.yaml")"
}

extract() {  # folder
  local set
  if finished "$1/.extracted"; then return; fi
  average "$1"
  for set in "$train_set" "$eval_set"; do
    launch here extract --exp_dir "$1" --data_type kaldi --data "$data/$set" \
      --out "$1/embeddings/$set" --num_workers "$num_workers"
  done
  touch "$1/.extracted"
}

score() {  # folder, more words of the command
  local name lists=()
  for name in $trials; do lists+=("$data/trials/vox1_$name.trials"); done
  wespeaker-qmargin score --embeddings "$1/embeddings/$eval_set/xvector.scp" \
    --mean "$1/embeddings/$train_set/xvector.scp" --trials "${lists[@]}" --out "$1/scores" "${@:2}"
}

normalise() {  # folder
  score "$1" --norm asnorm --top_n "$top_n" --cohort "$1/embeddings/$train_set/xvector.scp" \
    --cohort_utt2spk "$data/$train_set/utt2spk"
}

measure() {  # folder
  wespeaker-qmargin metrics "$1"/scores/*.score --utt2spk "$data/$eval_set/utt2spk" \
    --bootstrap "$bootstrap" --out "$1/scores/results.json" > "$1/scores/results.txt"
}

report() {  # folder
  wespeaker-qmargin report --systems "$(basename "$1")=$1" --out "$1/report.html" \
    --title "VoxCeleb, trained on $train_set"
}

export_model() { python "$scripts/export_model.py" "$1" "$1/export"; }  # folder

# Stage 3; a recipe may do more here.
train_system() {
  # shellcheck disable=SC2086
  train "$config" "$exp_dir" "${model_options[@]}" $train_args
}

fine_tune() {
  local start="$exp_dir/models/avg_model.pt"
  [ -f "$start" ] || fail "stage 9 starts from $start, which stage 4 writes"
  # shellcheck disable=SC2086
  train "$ft_config" "$ft_dir" --checkpoint "$start" "${model_options[@]}" $ft_args
}

run_stage() {  # number, what it is, function, its argument
  if ! includes "$1"; then return; fi
  log "stage $1: $2"
  "${@:3}"
}

check_configs() {  # before hours of data preparation
  local configs=()
  if includes 3; then configs+=("$config"); fi
  if includes 9; then configs+=("$ft_config"); fi
  if [ "$stage" -gt 2 ] || [ ${#configs[@]} -eq 0 ]; then return; fi
  python "$scripts/check_configs.py" "${configs[@]}"
}

run_stages() {
  local function
  check_options 9
  set_paths
  set_up
  log "$config on $train_set, $num_gpus GPUs; everything goes to $exp_dir"
  check_configs
  run_stage 1 "data" prepare
  run_stage 2 "lists" make_lists
  run_stage 3 "train" train_system
  run_stage 4 "average and extract" extract "$exp_dir"
  run_stage 5 "cosine scores" score "$exp_dir"
  run_stage 6 "AS-Norm" normalise "$exp_dir"
  run_stage 7 "metrics" measure "$exp_dir"
  run_stage 7 "report" report "$exp_dir"
  run_stage 8 "export" export_model "$exp_dir"
  run_stage 9 "fine-tune with $(basename "$ft_config")" fine_tune
  for function in extract score normalise measure report export_model; do
    run_stage 9 "$function" "$function" "$ft_dir"
  done
}
