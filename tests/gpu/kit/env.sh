# Read by the calls of the kit: sets KIT, OUT, PYTHON, and PYTHONPATH with the tree and with those
# wheels that this Python lacks. Nothing is installed.
KIT=$(cd "$(dirname "$0")" && pwd)
OUT=${1:-${OUT:-$KIT/out}}
mkdir -p "$OUT"
OUT=$(cd "$OUT" && pwd)
PYTHON=${PYTHON:-python3}
SITE=$(mktemp -d)
trap 'rm -rf "$SITE"' EXIT
"$PYTHON" "$KIT/tree/tests/gpu/kit/unpack.py" "$SITE" "$KIT"/wheels/*.whl || exit 2
export KIT OUT PYTHON PYTHONPATH="$KIT/tree:$KIT/tree/tests/support:$SITE" PYTHONUNBUFFERED=1
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
cd "$KIT/tree" || exit 2
