#!/bin/sh
# Call A of the kit: the machine, NCCL, doctor, and every test that needs a GPU.  sh a.sh [OUT]
. "$(dirname "$0")/env.sh"
"$PYTHON" tests/gpu/kit/machine.py "$OUT" || exit $?
"$PYTHON" -m evolver_async.cli doctor >"$OUT/doctor.txt" 2>&1
echo "doctor: exit code $?" && cat "$OUT/doctor.txt"
LIMIT_S=${LIMIT_S:-480} tests/gpu/run.sh "$OUT"
