#!/bin/sh
# Every test that needs a GPU, and what they measure, on one GPU within ten minutes.
#
#   tests/gpu/run.sh [FOLDER [FILE ...] [pytest options]]
#
# FOLDER (default: $OUT, else runs/gpu) receives figures, outcomes and exit codes as they come; see
# suite.py. PYTHON defaults to .venv/bin/python. A test has TEST_S (90) seconds, all of them LIMIT_S
# (560). Exit codes: 0 all passed, 1 a test failed or took too long, 2 Python cannot run the suite,
# 77 there is no GPU, 124 past the limit.
set -u
cd "$(dirname "$0")/../.."
FOLDER=${1:-${OUT:-runs/gpu}}
[ $# -eq 0 ] || shift
if [ -z "${PYTHON:-}" ]; then
    PYTHON=.venv/bin/python
    [ -x "$PYTHON" ] || make .venv/.installed || exit 2
fi
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

"$PYTHON" - <<'CHECK'
import importlib
import sys

needed = "torch transformers tokenizers safetensors zmq msgpack msgspec numpy omegaconf rich psutil"
missing = []
for name in (*needed.split(), "gymnasium", "uvicorn", "httptools", "pytest", "hypothesis"):
    try:
        importlib.import_module(name)
    except ImportError as error:
        missing.append(f"{name} ({error})")
if missing:
    print("run.sh: this Python has no", ", ".join(missing))
    print(f"        {sys.executable} -m pip install -c constraints-gpu.txt -e '.[gpu,dev]'")
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
exec "$PYTHON" tests/gpu/suite.py "$FOLDER" "$@"
