"""``kvfabric demo``: a hybrid model resumes on another node under a lease, then meets broken state.

One noun a file:

    story    the prompts, the positions, the faults that are shown
    records  what the processes tell each other
    worker   a model's process: what the writer and the reader have in common
    writer   prefills, publishes, and breaks one thing at a time
    reader   resumes under a lease, and compares with runs that never used a cache
    run      the cluster, the fabric, the two workers, in order
    words    causes in words
    report   the JSON object and the tables

Only the workers' processes load torch and transformers.
"""
