#!/bin/sh
# Call A of the kit: the machine, NCCL, doctor, and every test that needs a GPU.  sh a.sh [OUT]
# Where there is no GPU: the same tests in small on the CPU, and exit code 77 if they pass.
. "$(dirname "$0")/env.sh"
"$PYTHON" tests/gpu/kit/machine.py "$OUT"
CODE=$?
if [ $CODE -eq 77 ]; then
    "$PYTHON" -m pytest tests/gpu -m "not gpu" -q -p no:cacheprovider || exit 1
    exit 77
fi
[ $CODE -eq 0 ] || exit $CODE
"$PYTHON" -m evolver_async.cli doctor >"$OUT/doctor.txt" 2>&1
echo "doctor: exit code $?"
cat "$OUT/doctor.txt"
LIMIT_S=${LIMIT_S:-480} tests/gpu/run.sh "$OUT"
