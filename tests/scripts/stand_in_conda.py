"""A conda in bash that keeps environments as folders and is as strict as conda and mamba are.

It knows the commands that conda and mamba 2 share, and refuses all others: an environment is
created once, updated and run in only where it is there, and its packages must be match specs.
What runs in an environment runs with its activation scripts.
"""

from __future__ import annotations

__all__ = ["CONDA"]

CONDA = r"""
root=${CONDA_ROOT:?}
refuse() { echo "conda: $*" >&2; exit 2; }
[[ -z ${FAKE_FAILS:-} || "$*" != *"$FAKE_FAILS"* ]] || exit 1

verb=$1 && shift
if [[ $verb == env ]]; then
    [[ "$*" == list ]] || refuse "env $*: mamba has no such command"
    printf '# conda environments:\n#\nbase  *  %s\n' "$root"
    for folder in "$root"/envs/*/; do
        [[ -d $folder ]] && printf '%s     %s\n' "$(basename "$folder")" "${folder%/}"
    done
    exit 0
fi

name=""
channels=()
specs=()
case $verb in
    create | install)
        while (($#)); do
            case $1 in
                --yes | --override-channels) shift ;;
                --name) name=$2 && shift 2 ;;
                --channel) channels+=("$2") && shift 2 ;;
                -*) refuse "$verb: unknown option $1" ;;
                *) specs+=("$1") && shift ;;
            esac
        done
        ;;
    run)
        [[ $1 == --name ]] || refuse "run: unknown option $1"
        name=$2 && shift 2
        ;;
    *) refuse "unknown command $verb" ;;
esac
[[ -n $name ]] || refuse "$verb: no environment named"
prefix=$root/envs/$name

if [[ $verb == create ]]; then
    [[ ! -e $prefix ]] || refuse "create: $prefix exists already"
    mkdir -p "$prefix/bin"
fi
[[ -d $prefix ]] || refuse "$verb: there is no environment $name"

if [[ $verb == run ]]; then
    export CONDA_PREFIX=$prefix PATH=$prefix/bin:$PATH
    for script in "$prefix"/etc/conda/activate.d/*.sh; do
        [[ ! -e $script ]] || . "$script"
    done
    exec "$@"
fi

[[ "${channels[*]}" == conda-forge ]] || refuse "$verb: channels ${channels[*]}"
((${#specs[@]})) || refuse "$verb: no packages"
name_and_build='^[a-z0-9-]+(=[0-9][0-9.]*|=[0-9.*]+=[a-z*]+)?$'
with_bounds='^[a-z0-9-]+((>=|<|!=)[0-9.]+)(,(>=|<|!=)[0-9.]+)*$'
for spec in "${specs[@]}"; do
    [[ $spec =~ $name_and_build || $spec =~ $with_bounds ]] ||
        refuse "$verb: '$spec' is no match spec"
done
[[ -z ${CONDA_OVERRIDE_CUDA:-} ]] || echo "__cuda is $CONDA_OVERRIDE_CUDA"
python() {
    case "$*" in
        "-c import sys; print(sys.prefix)") echo "$CONDA_PREFIX" ;;
        "-m pip install --no-deps --no-build-isolation --editable "/*) echo "installed ${*: -1}" ;;
        *) echo "python: unexpected $*" >&2; exit 2 ;;
    esac
}
asyncddp() {
    [[ "$*" == "doctor --check" ]] || { echo "asyncddp: unexpected $*" >&2; exit 2; }
    echo "doctor: OMPI_MCA_opal_cuda_support=${OMPI_MCA_opal_cuda_support-unset}"
    echo "doctor: OMPI_MCA_pml=${OMPI_MCA_pml-unset} UCX_MEMTYPE_CACHE=${UCX_MEMTYPE_CACHE-unset}"
}
ucx_info() {
    [[ "$*" == -d ]] || { echo "ucx_info: unexpected $*" >&2; exit 2; }
    for transport in ${UCX_HAS-cuda_copy cuda_ipc cuda_copy tcp}; do
        printf '#      Transport: %s\n#         Device: memory\n' "$transport"
    done
}
for program in python asyncddp ucx_info; do
    { echo "#!$BASH"; declare -f "$program"; echo "$program \"\$@\""; } >"$prefix/bin/$program"
    chmod +x "$prefix/bin/$program"
done
"""
