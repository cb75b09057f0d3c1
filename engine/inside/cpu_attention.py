"""A plugin for vLLM on CPUs: attention in bfloat16 without AMX tiles.

In vLLM 0.32 for CPUs the attention kernel for AMX tiles gives wrong text for prompts of more than a few tokens, while the
one for vector registers gives the right text at the same speed. vLLM chooses by what the processor offers and has no
setting for it, so this plugin, which vLLM loads in each of its processes, turns the one choice into the other.
`engine install --cpu` puts it into the engine's environment; a vLLM without it is run in float32.
"""

from typing import Any

ENTRY_POINTS = "[vllm.general_plugins]\novernight_cpu_attention = overnight_cpu_attention:register\n"
METADATA = "Metadata-Version: 2.1\nName: overnight-cpu-attention\nVersion: 1\n"


def without_tiles(chosen: str) -> str:
    """The kernel to use instead of the one vLLM chose."""
    return "vec" if chosen == "amx" else chosen


def register() -> None:
    """Called by vLLM at the start of each of its processes."""
    from vllm.v1.attention.backends import cpu_attn  # type: ignore[import-not-found,unused-ignore]

    choose = cpu_attn._get_attn_isa

    def choose_without_tiles(*args: Any, **kwargs: Any) -> str:
        return without_tiles(choose(*args, **kwargs))

    cpu_attn._get_attn_isa = choose_without_tiles
