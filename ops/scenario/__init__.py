"""Scenarios: stories about cache state written as data, run on the pure core or on a real cluster.

    source.py    YAML with line numbers          story.py    what a file says, verb by verb
    checks.py    what a file may not say         objects.py  which objects a verb is about
    content.py   tokens, bytes, passports        ledger.py   what was stored, and what a lease shows of it
    verbs.py     the verbs, whatever the world   world.py    what a verb needs of the world below it
    pure.py      the world with a virtual clock  machine.py, faults.py    its machines, links and disks
    cluster.py   the world of real processes     processes.py, extents.py    their doors and disks
    runner.py    one story, step by step         command.py  ``kvfabric scenario run`` and ``check``

The answers come from the protocol cores in ``fabric/``; nothing here decides what may be reused.
"""
