#!/bin/sh
# Call B of the kit: whole runs on one card, with kills, by CUDA IPC and by shm.  sh b.sh [OUT]
. "$(dirname "$0")/env.sh"
LIMIT_S=${LIMIT_S:-540} "$PYTHON" tests/gpu/kit/whole_runs.py "$OUT"
