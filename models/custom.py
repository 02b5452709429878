"""A template: copy this file, put your model in it, and run the three commands below. Nothing else has to change.

    uv run profile.py --model models/custom.py --class-name CustomModel --dtype float16
    uv run extract.py --top 5
    uv run verify.py --starters

Without a GPU give the first one --input-shape 1,8,512 as well: Triton's interpreter is slow.

The model is built as `CustomModel(**model_kwargs)`, put into eval mode, cast to --dtype and run without gradients.
Files beside this one can be imported as usual. Weights: load them at the end of __init__; without, they are seeded
random values, which take exactly as long.
"""

import torch
import torch.nn as nn

# Optional: what __init__ is called with. Leave it out if the defaults will do.
model_kwargs = {"dim": 512, "hidden": 2048}


class CustomModel(nn.Module):
    def __init__(self, dim=512, hidden=2048, layers=4):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))
            for _ in range(layers)
        )

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


# Optional: what forward is called with: a tensor, a tuple of tensors (positional) or a dict (by name). Leave it out for
# models that take one tensor of tokens, floats or images: --input-shape is enough there. Floating-point tensors are
# cast to --dtype and everything is moved to the device for you.
def example_inputs():
    return torch.randn(8, 256, 512)
