"""Commands that need an engine: the CLI finds :func:`register` by entry point.

Importing this loads neither ray, torch nor transformers; running a command does.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer


class Family(StrEnum):
    """Model families of the demo."""

    DEEPSEEK_V4 = "deepseek_v4"
    GEMMA3 = "gemma3"
    GPT_OSS = "gpt_oss"
    DEEPSEEK_V3_2 = "deepseek_v3_2"
    QWEN3_NEXT = "qwen3_next"


DEFAULT = Family.DEEPSEEK_V4


def register(app: typer.Typer) -> None:
    """Add ``demo`` to the command line."""

    @app.command()
    def demo(
        model: Annotated[Family, typer.Option(help="The model family, tiny and with random weights.")] = DEFAULT,
        as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    ) -> None:
        """A hybrid-attention model resumes on another node under a lease; then one thing after the other is broken.

        Needs no GPU, no download and no running Ray: it starts two nodes on this machine and ends them.
        Exit status 1 if any logits differ from those of a run without a cache.
        """
        from .transformers.demo.command import run_and_show

        raise typer.Exit(0 if run_and_show(str(model), as_json=as_json) else 1)
