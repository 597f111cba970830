"""A frozen base network in 8 or 4 bits (`model.quantize`), for GPUs that cannot hold it in 16."""

from digenrl.extensions.quantized.settings import quantize_problems

RULES = (quantize_problems,)
