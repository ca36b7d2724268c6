# Kaldi-style options: source this after declaring the options as variables and a function `usage`.
#
#   stage=1
#   usage() { echo "usage: ..."; }
#   source tools/parse_options.sh
#
# --stop_stage 3, --stop-stage 3 and --stop_stage=3 set stop_stage; a name that the script has not
# declared (in lower case) is an error; --help prints usage.

while [ $# -gt 0 ]; do
  case "$1" in
    -h | --help)
      usage
      exit 0
      ;;
    --*=*) set -- "${1%%=*}" "${1#*=}" "${@:2}" ;;
    --*)
      _name=${1#--}
      _name=${_name//-/_}
      if ! [[ "$_name" =~ ^[a-z][a-z0-9_]*$ ]] || [ -z "${!_name+declared}" ]; then
        echo "$0: unknown option $1 (try --help)" >&2
        exit 2
      fi
      if [ $# -lt 2 ]; then
        echo "$0: option $1 needs a value" >&2
        exit 2
      fi
      printf -v "$_name" '%s' "$2"
      shift 2
      ;;
    *)
      echo "$0: unexpected argument $1 (try --help)" >&2
      exit 2
      ;;
  esac
done
unset _name
