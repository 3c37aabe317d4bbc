"""What the catalogue holds of one architecture: a tiny configuration and what is special in it. Pure data.

The sizes are small enough for seconds and large enough to cut: 8 heads over 4 kv-heads of 16, so that 2, 3 (unevenly)
and 4 ranks each get whole kv-groups; a feed-forward of 192 units, six quantisation groups of 32; 7 layers, which
neither 2 nor 3 stages divide; an odd vocabulary. A sliding window of 8 is shorter than any prompt the tests use.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Draw = tuple[str, float, float]
"""A regular expression over the names of weights, and the mean and standard deviation of those that it finds."""

LAYERS = 7
WINDOW = 8

SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "num_hidden_layers": LAYERS,
    "intermediate_size": 192,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-5,
    "vocab_size": 257,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
}
"""By the names that most architectures use."""

EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 96}

ADDS_ONE: Draw = (r"norm\w*\.weight$", 0.0, 0.1)
"""For norms that multiply by one more than their weight."""


@dataclass(frozen=True)
class Entry:
    """One architecture.

    Args:
        name: of mlx-lm's module, e.g. "qwen3_moe".
        config: what a config.json would hold. Not to be changed; `copy.deepcopy` it.
        features: what is special in it, in a few words each.
        note: what a reader of a result should know, e.g. how far it can be cut.
        fails: why mlx-lm's own single process cannot run it on a CPU; the beginning of the error's text.
        batches: mlx-lm itself takes more than one sequence at a time.
        needs_cache: without a cache mlx-lm computes something else, so a reference needs a fresh one.
        drifts: why mlx-lm's own decoding, a token at a time, gives other logits than the tokens read at once.
        absent: weights that published files leave out and `sanitize` reacts to, such as a head that is tied.
        draws: the weights that need other figures than `weights.draw` gives them.
    """

    name: str
    config: dict[str, Any]
    features: tuple[str, ...]
    note: str = ""
    fails: str = ""
    batches: bool = True
    needs_cache: bool = False
    drifts: str = ""
    absent: tuple[str, ...] = ()
    draws: tuple[Draw, ...] = ()

    @property
    def n_layers(self) -> int:
        """Layers as the config counts them, whatever its key is called."""
        inner = self.config.get("text_config")
        for config in (self.config, inner if isinstance(inner, dict) else {}):
            for key in ("num_hidden_layers", "num_layers", "n_layers", "n_layer", "num_transformer_layers"):
                if isinstance(config.get(key), int):
                    return int(config[key])
        return len(self.config["layer_types"])


def sized(model_type: str, *absent: str, **changes: Any) -> dict[str, Any]:
    """A config of the usual sizes, without the keys in `absent`."""
    config = {"model_type": model_type, **SIZES, **changes}
    return {key: value for key, value in config.items() if key not in absent}


def pattern(text: str, **kinds: str) -> list[str]:
    """Layer types spelled with a letter each: `pattern("SSF", S="sliding_attention", F="full_attention")`."""
    names = {"S": "sliding_attention", "F": "full_attention", "L": "linear_attention", **kinds}
    return [names[letter] for letter in text]
