# What Ray's processes need set before they start, on every host; sourced by the two scripts beside it.

# Without RDMA devices the verbs library that NIXL bundles crashes at exit; with them, leave this unset.
if [ -z "$(ls /sys/class/infiniband 2>/dev/null)" ]; then
    export UCX_MODULES="${UCX_MODULES:-^ib}"
fi
export NIXL_LOG_LEVEL="${NIXL_LOG_LEVEL:-ERROR}"
# Ray runs its workers at nice 15: on a busy host the holders would lose to everything else.
export RAY_worker_niceness="${RAY_worker_niceness:-0}"
# On an untrusted network: RAY_AUTH_MODE=token on every host, and TLS (docs/security.md).
