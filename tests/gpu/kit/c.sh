#!/bin/sh
# Call C of the kit: what steps, memory and publishing cost, as JSON lines.  sh c.sh [OUT]
. "$(dirname "$0")/env.sh"
LIMIT_S=${LIMIT_S:-540} "$PYTHON" tests/gpu/kit/costs.py "$OUT"
