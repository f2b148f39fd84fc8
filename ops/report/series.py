"""The series file: what a replay or a fabric did over time, as one JSON object.

::

    {"schema": 1, "source": "replay" | "fabric", "title": "...", "clock": "simulated" | "real",
     "facts": {"requests a minute": 1234, "trace": "conversation.jsonl", ...},      shown as a table, any plain values
     "samples": [{"at_s": 0.0, "requests": 0, ...}, ...]}                           see fabric/series.py, by time

A replay collects samples with :class:`~kvfabric.fabric.series.Timeline` (bounded, whatever the
trace's length)::

    timeline = Timeline(every_s=10.0)
    if now_s - began_s >= timeline.due_s:
        timeline.add(Sample(at_s=now_s - began_s, requests=..., ...))       # totals so far
    ...
    Series(source="replay", clock="simulated", title="...", samples=timeline.samples).save(path)

or, where it drives real holder cores, sums each core's own: ``HolderCore.series`` and
:func:`~kvfabric.fabric.series.merged`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ...fabric.kinds import SpecError
from ...fabric.series import Sample, aligned, merged
from ...fabric.settings import describe

FILE_BYTES_MAX = 64 << 20


class Series(BaseModel):
    """A whole series. Raises ValidationError where samples are not in the order of their time."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_number: Literal[1] = Field(default=1, alias="schema")
    source: Literal["replay", "fabric"]
    title: str
    clock: Literal["simulated", "real"] = "real"
    facts: dict[str, str | int | float] = Field(default_factory=dict)
    samples: list[Sample]

    @model_validator(mode="after")
    def _by_time(self) -> Self:
        if any(a.at_s > b.at_s for a, b in zip(self.samples, self.samples[1:], strict=False)):
            raise ValueError("samples: they are not in the order of at_s")
        return self

    def save(self, path: Path) -> None:
        """Write the file. Raises OSError."""
        path.write_text(self.model_dump_json(by_alias=True, exclude_defaults=False) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read the file. Raises SpecError naming the file, the field and the reason."""
        try:
            if path.stat().st_size > FILE_BYTES_MAX:
                raise SpecError(f"{path}: larger than {FILE_BYTES_MAX} bytes: no series file")
            return cls.model_validate_json(path.read_bytes())
        except OSError as error:
            raise SpecError(f"{path}: {error.strerror}") from None
        except ValidationError as error:
            raise SpecError(describe(error, str(path))) from None


def of_fabric(name: str) -> Series:
    """The series of a running fabric's holders, as one. Raises FabricError where none of that name runs."""
    from ...actors.fabric import series

    told = series(name)
    asked = {address: samples for address, samples in told.items() if samples}
    facts: dict[str, str | int | float] = {"holders": len(told), "holders that answered": len(asked)}
    return Series(source="fabric", title=f"Fabric {name}", facts=facts, samples=merged(aligned(asked.values())))
