#!/bin/sh
# Every test that needs a GPU, and a table of their figures, on one GPU within eight minutes.
#
#   tests/gpu/run.sh [PYTHON [pytest arguments]]      PYTHON defaults to .venv/bin/python
#
# Exit codes: those of pytest (0: all passed), 2 where Python cannot run the suite, 77 without a
# GPU, 124 past the limit. GPU_FIGURES=FILE keeps the table of figures.
set -u
cd "$(dirname "$0")/../.."
LIMIT_S=${LIMIT_S:-480}

if [ $# -gt 0 ]; then
    PYTHON=$1
    shift
else
    PYTHON=.venv/bin/python
    [ -x "$PYTHON" ] || make .venv/.installed || exit 2
fi
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

"$PYTHON" - <<'CHECK'
import importlib
import sys

needed = "torch transformers tokenizers safetensors zmq msgpack msgspec numpy omegaconf rich psutil"
missing = []
for name in (*needed.split(), "gymnasium", "pytest", "hypothesis"):
    try:
        importlib.import_module(name)
    except ImportError as error:
        missing.append(f"{name} ({error})")
if missing:
    print("run.sh: this Python has no", ", ".join(missing))
    print(f"        {sys.executable} -m pip install -c constraints.txt -e '.[dev]'")
    sys.exit(2)
import torch

if not torch.cuda.is_available():
    built = torch.version.cuda or "the CPU alone"
    print(f"run.sh: there is no GPU: torch {torch.__version__}, built for {built}, sees none")
    sys.exit(77)
about = torch.cuda.get_device_properties(0)
print(f"{about.name}, {about.total_memory / 2**30:.0f} GiB, compute capability", end=" ")
print(f"{about.major}.{about.minor}, torch {torch.__version__}, CUDA {torch.version.cuda}")
CHECK
code=$?
[ $code -eq 0 ] || exit $code

elsewhere=$(grep -rl 'mark\.gpu' tests --include='test_*.py' | grep -v '^tests/gpu/')
timeout "$LIMIT_S" "$PYTHON" -m pytest tests/gpu $elsewhere -m gpu -q -p no:cacheprovider --durations=10 "$@"
code=$?
[ $code -ne 124 ] || echo "run.sh: not done within $LIMIT_S s (LIMIT_S=… gives more)"
exit $code
