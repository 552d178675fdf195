# Sourced by scripts/run and scripts/test. `setup [EXTRA]...` brings .venv to what the requirements files say, those of
# the named extras and of the ones installed before included. Sets $root and $python.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=$root/.venv/bin/python

say() { echo "set-up: $*" >&2; }
die() {
  echo "error: $*" >&2
  exit 2
}

is_extra() { [[ $1 != */* && -f $root/scripts/extras/$1.txt ]]; }

# Sets $sets (the requirements files to install) and $digest (of their names and contents); true if .venv holds them.
is_fresh() {
  local extra
  extras=$({ printf '%s\n' "$@"; cat "$root/.venv/.extras" 2>/dev/null || true; } | sort -u)
  sets=(requirements.txt)
  for extra in $extras; do
    if is_extra "$extra"; then sets+=("scripts/extras/$extra.txt"); fi
  done
  digest=$(cd "$root" && sha256sum "${sets[@]}" scripts/requirements-nodeps.txt | sha256sum)
  [[ -x $python && -f $root/.venv/.stamp && $(<"$root/.venv/.stamp") == "$digest" ]]
}

fits='import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))'

find_python() {
  local candidate
  while read -r candidate; do
    if "$candidate" -c "import ensurepip, venv; $fits" 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done < <(type -aP python3.11 python3.12 python3.13 python3 python)
  die "Python 3.11 with its venv module is needed, and PATH has $(python3 --version 2>/dev/null || echo none):" \
    "install it (Debian: apt-get install python3.11-venv; 3.12 and 3.13 do, too) and run the same command again"
}

pip_install() { "$python" -m pip install -qq --disable-pip-version-check --no-warn-conflicts "$@"; }

install() {
  local base torch file files=()
  for file in "${sets[@]}"; do files+=("-r$root/$file"); done
  rm -f "$root/.venv/.stamp" # so that an interrupted installation is never taken for a finished one
  if ! "$python" -c "import pip; $fits" 2>/dev/null; then
    base=$(find_python)
    say "making .venv with $base"
    rm -rf "$root"/.venv/* # all but the dot files: the lock is held
    "$base" -m venv "$root/.venv"
  fi
  torch=$(grep -m1 -o '^torch==[^ ]*' "$root/requirements.txt")
  say "1/3 $torch"
  pip_install "$torch" # by itself and first, so that pip's configuration alone chooses its build
  say "2/3 ${sets[*]} (some minutes and 3 GB the first time)"
  pip_install "${files[@]}"
  if "$python" -c 'import sys; sys.exit(sys.version_info >= (3, 13))'; then
    say "3/3 scripts/requirements-nodeps.txt"
    pip_install --no-deps -r "$root/scripts/requirements-nodeps.txt"
  else
    say "3/3 left out: Procgen has no wheel for Python 3.13; its scripts (ppo_plr.py, impala_popart_procgen.py) need 3.11"
  fi
  echo "$extras" >"$root/.venv/.extras"
  echo "$digest" >"$root/.venv/.stamp"
  say "done"
}

setup() {
  local extra
  for extra; do
    is_extra "$extra" ||
      die "there is no extra '$extra'; choose from: $(cd "$root/scripts/extras" && printf '%s ' *.txt | sed 's/\.txt//g')"
  done
  if is_fresh "$@"; then return; fi
  mkdir -p "$root/.venv"
  {
    flock -n 9 || { say "waiting for another set-up of .venv" && flock 9; }
    if ! is_fresh "$@"; then install; fi # another process may have done it meanwhile
  } 9>"$root/.venv/.lock"
}
