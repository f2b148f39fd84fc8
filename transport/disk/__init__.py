"""The local disk tier: extent files, their catalogue, and the process that reads and writes them.

::

    DiskTier (in the holder)  --records-->  child process  -->  ExtentStore
      effects in, events out                two I/O threads       extent files, catalogue

Payload goes between the arena's memory and the disk in the child, which maps the arena's memfd: no
byte of it passes through the holder's process. The core decides what is written and read; nothing
here does.
"""
