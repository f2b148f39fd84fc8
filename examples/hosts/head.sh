#!/usr/bin/env bash
# The first host: `head.sh [OPTIONS OF ray start]`. Then, here or by a job: `kvfabric up ../fabric.yaml`.
set -euo pipefail
. "$(dirname "$0")/environment.sh"
# --block: SIGTERM is passed on, and the fabric has 30 s to move what is worth most off this host.
exec ray start --head --block --port="${RAY_PORT:-6379}" --resources='{"kvfabric": 1}' "$@"
