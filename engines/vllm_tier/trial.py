"""vLLM on a machine without a GPU, with tiny random models: for the example, the bench and the tests.

    folder = write_model(Path("tiny"), Family.LLAMA)
    engine = Engine(folder, transfer_config("default"))      # in a process that is connected to Ray
    tokens = engine.generate([prompt])

A process holds one engine, best as a Ray actor (:func:`actor_on`): nobody else may have imported vLLM there before.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

BLOCK_TOKENS = 32
VOCABULARY = 1024
SETTLE_S = 60.0
CPU_BYTES = 64 << 20
WORDS = ["<pad>", "<s>", "</s>", *(f"w{token}" for token in range(3, VOCABULARY))]
"""By token id. No special one may be part of another: a tokenizer cuts those out first."""
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.content }} {% endfor %}{% if add_generation_prompt %}w3{% endif %}"
)
"""What a chat is to the tiny models: its messages, and a word that asks for an answer."""


class Family(StrEnum):
    """A plain model, and two whose layers are partly windows."""

    LLAMA = "llama"
    GEMMA3 = "gemma3"
    GPT_OSS = "gpt_oss"


def settings(kv_space_gib: int = 1) -> dict[str, str]:
    """Environment variables that vLLM reads when it is imported: no network, no statistics sent."""
    return {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": str(kv_space_gib),
        "VLLM_LOGGING_LEVEL": "WARNING",
    }


def environment(kv_space_gib: int = 1) -> None:
    """Put these settings in force, and all of vLLM in one process."""
    os.environ.update(settings(kv_space_gib), VLLM_ENABLE_V1_MULTIPROCESSING="0")


def write_model(folder: Path, family: Family, seed: int = 0) -> Path:
    """A model of some million random parameters, as a folder that vLLM reads. Equal arguments, equal weights."""
    import torch
    import transformers

    common: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "initializer_range": 0.1,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    layers = ["sliding_attention", "full_attention"] * 2
    kinds: dict[Family, tuple[str, str, dict[str, Any]]] = {
        Family.LLAMA: ("LlamaConfig", "LlamaForCausalLM", {"intermediate_size": 512}),
        Family.GEMMA3: (
            "Gemma3TextConfig",
            "Gemma3ForCausalLM",
            {"intermediate_size": 512, "sliding_window": 64, "layer_types": layers, "query_pre_attn_scalar": 64},
        ),
        Family.GPT_OSS: (
            "GptOssConfig",
            "GptOssForCausalLM",
            {
                "intermediate_size": 256,
                "sliding_window": 64,
                "layer_types": layers,
                "num_local_experts": 4,
                "num_experts_per_tok": 2,
            },
        ),
    }
    config_name, model_name, own = kinds[family]
    torch.manual_seed(seed)
    config = getattr(transformers, config_name)(**common, **own)
    model = getattr(transformers, model_name)(config).to(torch.bfloat16)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    return folder


def write_tokenizer(folder: Path) -> Path:
    """Beside a model, a tokenizer of :data:`WORDS`: what a server needs that takes and gives text."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    cut = Tokenizer(WordLevel({word: token for token, word in enumerate(WORDS)}, WORDS[0]))
    cut.pre_tokenizer = WhitespaceSplit()
    made: Any = PreTrainedTokenizerFast
    special = dict(zip(("pad_token", "bos_token", "eos_token"), WORDS, strict=False))
    made(tokenizer_object=cut, chat_template=CHAT_TEMPLATE, **special).save_pretrained(folder)
    return folder


def text_of(tokens: Sequence[int]) -> str:
    """These tokens as text."""
    return " ".join(WORDS[token] for token in tokens)


def tokens_of(text: str) -> list[int]:
    """The other way. Raises ValueError for what is no word."""
    return [WORDS.index(word) for word in text.split()]


def transfer_config(fabric: str, *, cpu_bytes: int = CPU_BYTES, **tier: Any) -> dict[str, Any]:
    """``kv_transfer_config`` of an engine whose offloaded blocks go to that fabric."""
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "HostTieringSpec",
            "spec_module_path": "kvfabric.engines.vllm_tier.host",
            "cpu_bytes_to_use": cpu_bytes,
            "secondary_tiers": [
                {"type": "KvFabricTier", "module_path": "kvfabric.engines.vllm_tier.tier", "fabric": fabric, **tier}
            ],
        },
    }


def connector_config(fabric: str, **extra: Any) -> dict[str, Any]:
    """``kv_transfer_config`` of an engine that saves and loads by the connector."""
    return {
        "kv_connector": "KvFabricConnector",
        "kv_connector_module_path": "kvfabric.engines.vllm_connector.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"fabric": fabric, **extra},
    }


def options() -> dict[str, Any]:
    """Arguments of vLLM's engine for these models.

    In float32: bfloat16 matrix products of 2 to 5 rows end vllm-cpu 0.32.0 with SIGILL on some machines.
    """
    return {
        "dtype": "float32",
        "enforce_eager": True,
        "block_size": BLOCK_TOKENS,
        "max_model_len": 1024,
        "max_num_seqs": 8,
        "enable_prefix_caching": True,
        "disable_log_stats": True,
    }


def start(folder: Path, transfer: dict[str, Any] | None = None, **more: Any) -> Any:
    """A vLLM engine in this process; ``transfer`` as :func:`transfer_config` makes it, None for none."""
    from vllm import LLM
    from vllm.config import KVTransferConfig

    given: dict[str, Any] = {"model": str(folder), "skip_tokenizer_init": True, **options(), **more}
    if transfer is not None:
        given["kv_transfer_config"] = KVTransferConfig(**transfer)
    return LLM(**given)


class Engine:
    """One vLLM engine in this process. What it returns is plain data, so that it can be a Ray actor."""

    def __init__(
        self, folder: str | Path, transfer: dict[str, Any] | None = None, options: dict[str, Any] | None = None
    ) -> None:
        environment()
        self.llm = start(Path(folder), transfer, **(options or {}))
        self.core.step_fn = _yielding(self.core.step_fn, self.core.scheduler)

    @property
    def core(self) -> Any:
        """vLLM's engine core: scheduler and executor."""
        return self.llm.llm_engine.engine_core.engine_core

    def generate(self, prompts: Sequence[Sequence[int]], tokens: int = 16, salt: str | None = None) -> list[list[int]]:
        """Greedy continuations of token ids; ``salt``: vLLM's ``cache_salt``."""
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, ignore_eos=True, detokenize=False, max_tokens=tokens)
        more = {} if salt is None else {"cache_salt": salt}
        asked = [{"prompt_token_ids": list(prompt), **more} for prompt in prompts]
        return [list(told.outputs[0].token_ids) for told in self.llm.generate(asked, sampling, use_tqdm=False)]

    def first_token_s(self, prompt: Sequence[int]) -> float:
        """How long the first token takes."""
        began = time.perf_counter()
        self.generate([prompt], 1)
        return time.perf_counter() - began

    def settle(self) -> None:
        """Step until nothing is under way between the engine's memory and the fabric."""
        manager = getattr(self.core.scheduler.connector, "connector_scheduler", None)
        deadline = time.monotonic() + SETTLE_S
        while self.llm.llm_engine.has_unfinished_requests() or (manager and manager.manager.has_pending_work()):
            if time.monotonic() > deadline:
                raise TimeoutError(f"the engine still moves blocks after {SETTLE_S:g} s")
            self.core.step_fn()
            time.sleep(0.002)

    def forget(self) -> None:
        """Forget what this engine has in its own device and host memory."""
        self.settle()
        if not self.llm.reset_prefix_cache(reset_connector=self.core.scheduler.connector is not None):
            raise RuntimeError("vLLM did not reset its prefix cache: requests are running")

    def close(self) -> None:
        """End it in order: every store ends first."""
        self.core.shutdown()


def _yielding(step: Callable[[], Any], scheduler: Any) -> Callable[[], Any]:
    """A step as vLLM's server makes it: with nothing to compute and requests that wait, it lets other threads have the GIL.

    Its engine within one's own process leaves that out, and spins: each answer that a transfer waits for costs 5 ms more.
    """

    def stepped() -> Any:
        outputs, executed = step()
        if not executed and scheduler.has_requests():
            time.sleep(0.001)
        return outputs, executed

    return stepped


def actor_on(node: int, cls: type = Engine) -> Any:
    """The class as a Ray actor on that node of an embedded cluster: call ``remote`` with its arguments."""
    import ray

    remote: Any = ray.remote(cls)
    return remote.options(num_cpus=0, resources={f"kvfabric_node_{node}": 0.01})
