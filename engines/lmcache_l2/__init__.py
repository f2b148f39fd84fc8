"""kvfabric as an L2 adapter plugin of LMCache: the tier below the memory of its multiprocess server.

    --l2-adapter '{"type": "plugin", "module_path": "kvfabric.engines.lmcache_l2.adapter", "class_name": "KvFabricL2",
                   "adapter_params": {"fabric": "default", "weights": "REVISION"}}'

Importing this package loads no LMCache; ``adapter`` does.
"""
