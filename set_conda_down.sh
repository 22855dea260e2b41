#!/usr/bin/env bash
# Creates or updates a conda environment with CUDA-aware Open MPI, NCCL, cupy, torch and asyncddp.
#
# conda-forge builds Open MPI with CUDA and UCX and switches both off; the settings below, set when the
# environment is activated, switch them on. They are kept in a script of the environment's, since mamba
# has no `env config vars`. (Open MPI 5.0.8 had builds without CUDA.)
set -euo pipefail

repo=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
settings=(
    OMPI_MCA_opal_cuda_support=true UCX_MEMTYPE_CACHE=n
    # without the last two, Open MPI refuses UCX where it finds neither InfiniBand nor CUDA
    OMPI_MCA_pml=ucx OMPI_MCA_opal_common_ucx_tls=any OMPI_MCA_opal_common_ucx_devices=any
)
name=asyncddp python=3.12 cuda="" cpu="" dry_run=""

usage() {
    cat <<'TEXT'
Usage: ./set_conda_down.sh [--name NAME] [--python 3.X] [--cuda VERSION | --cpu] [--dry-run]

Creates the conda environment, or brings an existing one of that name up to date, installs this
clone into it (editable) and ends with `asyncddp doctor --check` inside it, which starts ranks and has
them call every verb over every wire. Can be run again at any time.

  --name NAME     the environment's name                        (asyncddp)
  --python 3.X    its Python, 3.10 or newer                     (3.12)
  --cuda VERSION  the CUDA version to build on, such as 12.9    (what the driver can; 12.9 without one)
  --cpu           no CUDA, NCCL and cupy; Open MPI as it comes
  --dry-run       print the commands and run none of them
  -h, --help      this text

Uses CONDA_CMD where set, else CONDA_EXE, conda, mamba, MAMBA_EXE or micromamba, whichever is found first.
On a login node without a GPU the CUDA packages are installed all the same.
TEXT
}

die() {
    printf 'set_conda_down.sh: %s\n' "$*" >&2
    exit 1
}

parse() {
    while (($#)); do
        case $1 in
            -h | --help) usage; exit ;;
            --cpu) cpu=yes && shift ;;
            --dry-run) dry_run=yes && shift ;;
            --name | --python | --cuda)
                (($# > 1)) || die "$1 needs a value; see --help"
                printf -v "${1#--}" %s "$2"
                shift 2
                ;;
            *) die "unknown argument '$1'; see --help" ;;
        esac
    done
    [[ $name =~ ^[A-Za-z0-9_][A-Za-z0-9_.-]*$ ]] ||
        die "--name: letters, digits, '_', '.' and '-' make a name, got '$name'"
    [[ $name != base && $name != root ]] || die "--name: '$name' is conda's own environment; give another name"
    [[ $python =~ ^3\.[1-9][0-9]$ ]] || die "--python: expected 3.10 or newer, such as 3.12, got '$python'"
    [[ -z $cuda || $cuda =~ ^1[2-9](\.[0-9]+)?$ ]] || die "--cuda: expected 12 or newer, such as 12.9, got '$cuda'"
    [[ -z $cuda || -z $cpu ]] || die "--cuda and --cpu exclude each other; give one of them"
}

find_conda() {
    local candidate
    for candidate in "${CONDA_CMD:-}" "${CONDA_EXE:-}" conda mamba "${MAMBA_EXE:-}" micromamba; do
        [[ -n $candidate ]] && conda=$(type -P -- "$candidate") && return
        [[ -z ${CONDA_CMD:-} ]] || die "CONDA_CMD=$CONDA_CMD is not a program that can be run"
    done
    [[ -n $dry_run ]] || die "no conda, mamba or micromamba found: install Miniforge (conda-forge's installer), or give CONDA_CMD=/path/to/conda"
    conda=conda
}

# show COMMAND…: one line that can be pasted into a shell.
show() {
    local word line=""
    for word in ${CONDA_OVERRIDE_CUDA:+"CONDA_OVERRIDE_CUDA=$CONDA_OVERRIDE_CUDA"} "$@"; do
        [[ $word =~ ^[A-Za-z0-9_./=:+-]+$ ]] || word=${word@Q}
        line+="$word "
    done
    printf '%s\n' "${line% }"
}

# run WHAT COMMAND…: the command, or in a dry run its text; its failure is a sentence.
run() {
    local what=$1 status=0
    shift
    if [[ -n $dry_run ]]; then
        show "$@"
        return
    fi
    printf '== %s\n' "$what"
    "$@" || status=$?
    ((status == 0)) || die "$what failed (exit code $status), and nothing was done after it: mend what the lines above name, then run this again"
}

choose_packages() {
    packages=(
        "python=$python" pip hatchling "openmpi>=5.0.7,!=5.0.8,<6" "mpi4py>=4.1" "msgspec>=0.19" "numpy>=1.24" "networkx>=3.1"
        "click>=8.1" "rich>=14.0" "lazy-loader>=0.4" "scipy>=1.10" "matplotlib-base>=3.8" "scikit-learn>=1.3"
        "typing-extensions>=4.10"
    )
    if [[ -n $cpu ]]; then
        packages+=("pytorch=2.*=cpu*")
        return
    fi
    [[ $(uname -s) == Linux ]] || die "CUDA is for Linux; give --cpu here"
    if [[ ! -e /dev/nvidiactl ]] && ! nvidia-smi -L >/dev/null 2>&1; then
        cuda=${cuda:-12.9}
        # Without a driver conda would take the CUDA packages for impossible.
        export CONDA_OVERRIDE_CUDA=${CONDA_OVERRIDE_CUDA:-$cuda}
        printf 'No NVIDIA driver here: installing for CUDA %s all the same (--cpu leaves it out).\n' "$CONDA_OVERRIDE_CUDA" >&2
    fi
    packages+=("cuda-version${cuda:+=}${cuda:->=12}" "pytorch=2.*=cuda*" cuda-cudart ucx nccl "cupy>=13.6")
}

exists() {
    local listing
    listing=$("$conda" env list) || die "'$conda env list' failed: mend this conda, or give another one, CONDA_CMD=/path/to/conda"
    awk -v name="$name" '$1 == name { found = 1 } END { exit !found }' <<<"$listing"
}

# script_of KIND: the path of our script among those that are run when the environment is `activate`d
# or `deactivate`d.
script_of() { printf '%s/etc/conda/%s.d/asyncddp.sh\n' "$prefix" "$1"; }

# store_settings: what the user has set already stays, also when the environment is left: only what
# activation has set is unset again, which a variable for each notes.
store_settings() {
    local setting name
    mkdir -p -- "$prefix/etc/conda/activate.d" "$prefix/etc/conda/deactivate.d"
    for setting in "${settings[@]}"; do
        name=${setting%%=*}
        printf "[ -n \"\${%s+x}\" ] || export %s _ASYNCDDP_SET_%s=1\n" "$name" "$setting" "$name"
    done >"$(script_of activate)"
    for name in "${settings[@]%%=*}"; do
        printf "[ -z \"\${_ASYNCDDP_SET_%s+x}\" ] || unset %s _ASYNCDDP_SET_%s\n" "$name" "$name" "$name"
    done >"$(script_of deactivate)"
}

forget_settings() { rm -f -- "$(script_of activate)" "$(script_of deactivate)"; }

# look_for_cuda_in_ucx: says whether UCX takes GPU memory here; that it does not is no failure.
look_for_cuda_in_ucx() {
    local found
    found=$("$conda" run --name "$name" ucx_info -d) || {
        printf 'ucx_info -d does not run in %s: it is not known whether UCX takes GPU memory\n' "$name"
        return
    }
    found=$(sed -n 's/^.*Transport: *\(cuda[a-z_]*\).*$/\1/p; s/^.*Transport: *\(gdr_copy\).*$/\1/p' <<<"$found" | sort -u | tr '\n' ' ')
    if [[ $found == *cuda* ]]; then
        printf 'UCX takes GPU memory, by %s\n' "${found% }"
    else
        printf 'ucx_info -d shows no transport for CUDA. Without a GPU that is so everywhere: ask again on a machine with one. '
        printf 'There it means that messages out of GPU memory cannot go by UCX: leave mpi_cuda out of ASYNCDDP_DEVICE_TRANSPORTS\n'
    fi
}

parse "$@"
find_conda
choose_packages
from=(--yes --name "$name" --override-channels --channel conda-forge)
if [[ -n $dry_run ]]; then
    printf "# 'install' in place of 'create' where the environment exists\n"
    run "" "$conda" create "${from[@]}" "${packages[@]}"
    [[ -n $cpu ]] || printf '# then %s are stored in etc/conda/activate.d of the environment\n' "${settings[*]}"
else
    if exists; then
        run "updating the environment $name" "$conda" install "${from[@]}" "${packages[@]}"
    else
        run "creating the environment $name" "$conda" create "${from[@]}" "${packages[@]}"
    fi
    prefix=$("$conda" run --name "$name" python -c 'import sys; print(sys.prefix)' | tail -n 1) && [[ -d $prefix ]] ||
        die "the Python of the environment $name does not run: remove it ($conda env remove --name $name), then run this again"
    if [[ -n $cpu ]]; then
        run "forgetting CUDA settings" forget_settings
    else
        run "storing ${settings[*]}" store_settings
    fi
fi
run "installing asyncddp from $repo" "$conda" run --name "$name" \
    python -m pip install --no-deps --no-build-isolation --editable "$repo"
if [[ -n $dry_run && -z $cpu ]]; then
    show "$conda" run --name "$name" ucx_info -d
elif [[ -z $cpu ]]; then
    run "looking for CUDA in UCX: ucx_info -d" look_for_cuda_in_ucx
fi
run "self-test: asyncddp doctor --check" "$conda" run --name "$name" asyncddp doctor --check
[[ -n $dry_run ]] || printf '\nReady. Now: %s activate %s\n' "$(basename -- "$conda")" "$name"
