#!/bin/sh
# Everything for a GPU machine without a network, in one folder: `make gpu-kit`.
#
#   tests/gpu/kit/make.sh FOLDER
#
# The machine has a CUDA build of torch 2.11 to 2.13, transformers, pytest and hypothesis for
# KIT_PYTHON (3.12). FOLDER gets the tree of HEAD, wheels of what the machine may lack, and the
# calls a.sh, b.sh and c.sh, of ten minutes at most each. FAISS=1 adds faiss-cpu.
set -eu
cd "$(dirname "$0")/../../.."
FOLDER=$1
PYTHON=${PYTHON:-python3}
WHEELS="pyzmq msgspec omegaconf gymnasium farama-notifications uvicorn httptools"
[ -z "${FAISS:-}" ] || WHEELS="$WHEELS faiss-cpu"
rm -rf "$FOLDER"
mkdir -p "$FOLDER/tree" "$FOLDER/wheels"
git archive HEAD | tar -x -C "$FOLDER/tree"
PLATFORMS=$(for one in 2_28 2_27 2_24 2_17 2014 2_12 2010 2_5 1; do
    case $one in 2_*) echo "--platform manylinux_${one}_x86_64" ;; *) echo "--platform manylinux${one}_x86_64" ;; esac
done)
# shellcheck disable=SC2086
"$PYTHON" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
    --python-version "${KIT_PYTHON:-3.12}" --implementation cp $PLATFORMS \
    --constraint constraints-gpu.txt --dest "$FOLDER/wheels" $WHEELS
cp tests/gpu/kit/env.sh tests/gpu/kit/[abc].sh "$FOLDER"
SIZE=$(du -sm "$FOLDER" | cut -f1)
echo "$FOLDER: $SIZE MB, at $(git rev-parse --short HEAD)"
