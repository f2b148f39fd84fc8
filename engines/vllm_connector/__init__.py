"""kvfabric as a KV connector of vLLM: prefill in one engine, decode in another, or one pool of prefixes for all.

    KVTransferConfig(kv_connector="KvFabricConnector", kv_role="kv_both", kv_load_failure_policy="recompute",
        kv_connector_module_path="kvfabric.engines.vllm_connector.connector",
        kv_connector_extra_config={"fabric": "default", "launch": {"memory_bytes": 8 << 30}})

Unlike the tier, it speaks the fabric's own language: token chains, and vLLM's cache groups as groups with their rules, so
that a resume is where every group can go on. One noun a file:

    groups     vLLM's cache groups as a fabric's model
    steps      what one scheduler step asks of the workers, as plain data
    asking     the scheduler's half: what is there, what to load and to save
    moving     a worker's half: blocks out of and into the device's memory
    connector  the two halves under vLLM's interface

Importing this package loads no vLLM; its modules do.
"""
