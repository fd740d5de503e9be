#!/usr/bin/env bash
# Builds a container image that runs hpc_train, as an OCI archive. It needs neither root nor a container engine.
#
#   deploy/image/build.sh [--lock FILE] [--wheels PLACE] [--fabric NAME] [--mirror URL] [--output FILE]
#
#   --lock FILE     the Python packages with their hashes (default: cpu.lock beside this script); lock.py writes others
#   --wheels PLACE  where pip finds wheels that PyPI does not have: a directory, or a page of links (default: PyTorch's
#                   builds for CPUs; https://download.pytorch.org/whl/cu130/torch/ for those with CUDA 13.0)
#   --fabric NAME   infiniband, efa or slingshot: the libraries and variables of fabric/NAME
#   --mirror URL    a mirror of Debian (default: deb.debian.org with the security updates)
#   --output FILE   the archive (default: build/image/hpc_train-LOCK[-FABRIC].tar)
#
# mmdebstrap unpacks a small Debian, buildah adds the packages and hpc_train of this clone. Each step is kept, and the
# next call repeats only those whose input has changed: the Debian in build/image, the others in buildah's storage.
# PIP_CERT, the certificates of a proxy, holds inside as well.
set -euo pipefail

suite=bookworm # its Python is 3.11, for which the lock files are
packages=(ca-certificates g++ python3-dev python3-venv) # torch.compile and Triton need a compiler and Python's headers
environment=()
here=$(cd "$(dirname "$0")" && pwd)
repository=$(cd "$here/../.." && pwd)
work=$repository/build/image

lock=$here/cpu.lock wheels=https://download.pytorch.org/whl/cpu/torch/ fabric= mirror= output=
while (($#)); do
    case $1 in
        --lock | --wheels | --fabric | --mirror | --output) declare "${1#--}=${2:?"$1 needs a value"}" && shift 2 ;;
        *) echo "build.sh: unknown argument $1; the options are at the top of $0" >&2 && exit 2 ;;
    esac
done
if [[ -n $fabric && ! -f $here/fabric/$fabric ]]; then
    echo "build.sh: --fabric $fabric is unknown; there are: $(ls "$here/fabric" | xargs)" >&2
    exit 2
fi
missing=()
for tool in mmdebstrap buildah newuidmap; do command -v $tool >/dev/null || missing+=("$tool"); done
if ((${#missing[@]})); then
    echo "build.sh: ${missing[*]} not found. On Debian: apt-get install mmdebstrap buildah uidmap" >&2
    exit 2
fi
[[ -z $fabric ]] || source "$here/fabric/$fabric" # adds to packages and environment

name=$(basename "$lock" .lock)${fabric:+-$fabric}
output=$(realpath -m "${output:-$work/hpc_train-$name.tar}")
mkdir -p "$work" "$(dirname "$output")"

debian=$work/debian-$(printf '%s\n' "$suite" "$mirror" "${packages[@]}" | sha256sum | head -c 12).tar
if [[ ! -f $debian ]]; then
    echo "build.sh: 1/3 Debian $suite with ${packages[*]}"
    mmdebstrap --quiet --variant=apt --format=tar --include="${packages[*]}" \
        --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' \
        --dpkgopt='path-exclude=/usr/share/locale/*' --dpkgopt='path-include=/usr/share/doc/*/copyright' \
        "$suite" "$debian.part" ${mirror:+"$mirror"}
    mv "$debian.part" "$debian"
fi

echo "build.sh: 2/3 the packages of $lock, and hpc_train"
context=$(mktemp -d "$work/context.XXXXXX")
trap 'rm -rf "$context"' EXIT
ln "$debian" "$context/debian.tar"
cp "$lock" "$context/lock.txt"
mkdir "$context/source"
tar -C "$repository" -c --exclude=__pycache__ pyproject.toml README.md LICENSE hpc_train hydra_plugins conf |
    tar -C "$context/source" -x
options=(--layers --isolation "${BUILDAH_ISOLATION:-chroot}" --tag "localhost/hpc_train:$name")
if [[ -d $wheels ]]; then
    options+=(--volume "$(realpath "$wheels"):/wheels:ro")
    wheels=/wheels
fi
if [[ -n ${PIP_CERT:-} ]]; then
    options+=(--volume "$PIP_CERT:/pip.crt:ro" --build-arg PIP_CERT=/pip.crt)
fi
for setting in ${environment[@]+"${environment[@]}"}; do options+=(--env "$setting"); done
buildah build "${options[@]}" --build-arg "PIP_FIND_LINKS=$wheels" --file "$here/Containerfile" "$context"

echo "build.sh: 3/3 $output"
rm -f "$output.part"
buildah push --quiet "localhost/hpc_train:$name" "oci-archive:$output.part"
mv "$output.part" "$output"
du -h "$output"
