"""Hugging Face transformers as an engine: a model's cache to the fabric's objects and back, bit for bit.

One noun a file:

    geometry    cache groups, their rules and their byte layout, read off a model
    capture     a cache's state as {group: {index: bytes}}
    restore     a fresh cache from such objects, checked first
    layers, static_layers, layer_classes   what each cache layer class holds, and which classes are known
    proof       that a model keeps all its state in its cache, shown by running it
    replay      windows computed again from leased history
    weights     a digest over a model's tensors
    passport    what decides whether these bytes mean the same to another reader
    generate    chunked prefill and greedy decoding with the logits of every step
    tiny_models random models of five hybrid families
    faults      state broken in one way at a time, and its reuse without any check
    adapter     publish to and resume from a running fabric
    demo        ``kvfabric demo``

Only the last two know the fabric's processes. Importing this package loads neither torch nor
transformers; its modules load torch, and transformers when first asked for a model or a cache.
"""
