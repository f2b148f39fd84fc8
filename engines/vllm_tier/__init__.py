"""kvfabric as a secondary tier of vLLM's OffloadingConnector.

    KVTransferConfig(kv_connector="OffloadingConnector", kv_role="kv_both", kv_connector_extra_config={
        "spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 8 << 30,
        "secondary_tiers": [{"type": "KvFabricTier", "module_path": "kvfabric.engines.vllm_tier.tier", "fabric": "default"}],
    })

One noun a file:

    described   what vLLM's block hash leaves out, as plain data
    tier        the SecondaryTierManager
    workers     the threads that its jobs run in
    host        a copier for machines whose device memory is host memory (vLLM's CPU backend)

Importing this package loads no vLLM; its modules do.
"""
