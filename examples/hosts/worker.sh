#!/usr/bin/env bash
# Every further host: `worker.sh HEAD:PORT [OPTIONS OF ray start]`. Its holder is up within seconds.
set -euo pipefail
. "$(dirname "$0")/environment.sh"
address=${1:?usage: worker.sh HEAD:PORT [OPTIONS OF ray start]}
shift
exec ray start --address="$address" --block --resources='{"kvfabric": 1}' "$@"
