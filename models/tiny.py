"""A LLaMA of two narrow layers: the same operators at sizes that a CPU runs in Triton's interpreter.

    uv run profile.py --model models/tiny.py --class-name TinyLlama --input-shape 1,24
"""

from llama_7b import LlamaModel


class TinyLlama(LlamaModel):
    """(batch, seq) tokens below 512 -> (batch, seq, 512) logits; grouped-query attention, head_dim 32."""

    def __init__(self):
        super().__init__(vocab=512, length=128, dim=128, layers=2, heads=4, kv_heads=2, hidden=320)
