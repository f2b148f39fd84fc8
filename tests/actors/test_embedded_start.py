"""What a user sees where Ray does not bring an embedded cluster up."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import ray.cluster_utils
from kvfabric.actors.embedded import EmbeddedCluster
from kvfabric.fabric.kinds import FabricError

def too_slow(self, **options):
    raise Exception("The current node timed out during startup.\\nIts log says more.")

ray.cluster_utils.Cluster.add_node = too_slow
try:
    EmbeddedCluster.start(1)
except FabricError as error:
    print(error, EmbeddedCluster.current)
"""


def test_a_cluster_that_does_not_come_up_is_one_clear_line_and_leaves_nothing_current() -> None:
    # In a process of its own: closing it ends the process's connection to Ray.
    ran = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120)
    said = "the embedded cluster did not start: The current node timed out during startup."
    assert ran.stdout == f"{said} None\n", ran.stderr
