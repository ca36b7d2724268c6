# The environment of the recipes, which tools/setup.sh makes where none is active.  Sourced with a
# list of extras: voxceleb, ssl.

for extra in $1; do
  # shellcheck disable=SC1091
  source "$root/tools/setup.sh" "$extra"
done
unset extra
