"""kvfabric as a dynamic HiCache storage backend of SGLang: a tier below its host memory, shared by a cluster.

    --enable-hierarchical-cache --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{
        "backend_name": "kvfabric", "module_path": "kvfabric.engines.sglang_hicache.backend",
        "class_name": "KvFabricHiCache", "interface_v1": 1, "fabric": "default", "model_path": "/models/..."}'

One noun a file:

    hits        HiCache's hit policies as the fabric's kinds, solved by its rule engine
    pages       a page's bytes where SGLang's host pool holds them, cut into the fabric's blocks
    described   what HiCache's page hash leaves out, as plain data
    backend     the HiCacheStorage

Importing this package loads no SGLang; ``backend`` does.
"""
