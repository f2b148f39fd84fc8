"""Threads of the vLLM tier's jobs: everything that was submitted is done, and whoever waits knows when."""

from __future__ import annotations

import subprocess
import sys
import threading
from functools import partial

import pytest

from kvfabric.engines.vllm_tier.workers import Workers


def test_a_drain_waits_for_everything_submitted_and_a_shutdown_does_what_is_queued() -> None:
    workers, gate = Workers(2, "test"), threading.Event()
    done: list[int] = []

    def after_the_gate(number: int) -> None:
        gate.wait(10)
        done.append(number)

    for number in range(5):
        workers.submit(partial(after_the_gate, number))
    assert len(workers) == 5
    threading.Timer(0.05, gate.set).start()
    workers.drain()
    assert (sorted(done), len(workers)) == ([0, 1, 2, 3, 4], 0)
    for number in range(5, 9):
        workers.submit(partial(done.append, number))
    workers.shutdown()
    workers.shutdown()
    assert sorted(done) == list(range(9))


def test_one_thread_keeps_the_order() -> None:
    workers = Workers(1, "test")
    done: list[int] = []
    for number in range(100):
        workers.submit(partial(done.append, number))
    workers.shutdown()
    assert done == list(range(100))


def test_work_that_raises_is_told_and_the_next_is_done(caplog: pytest.LogCaptureFixture) -> None:
    def work() -> None:
        raise RuntimeError("a bug")

    workers = Workers(1, "test")
    done: list[int] = []
    workers.submit(work)
    workers.drain()
    workers.submit(partial(done.append, 1))
    workers.shutdown()
    assert done == [1]
    assert "a bug" in caplog.text


def test_a_process_that_ends_without_a_word_loses_nothing() -> None:
    program = (
        "import time; from kvfabric.engines.vllm_tier.workers import Workers\n"
        "workers = Workers(1, 'test')\n"
        "for number in range(3): workers.submit(lambda number=number: (time.sleep(0.05), print(number, flush=True)))\n"
    )
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert told.stdout.split() == ["0", "1", "2"]
