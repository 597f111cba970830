"""Whether Adam's eps, and not the gradient, decides how far an update goes."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor
from torch.optim import Optimizer


def small_gradient(optimizer: Optimizer, parameters: Sequence[Tensor], norm: float) -> str | None:
    """Return a warning if Adam's eps is larger than the gradient's root mean square. An update g /
    (|g| + eps) is then less than half of the learning rate. None: eps is small enough, or the
    optimizer has none.

    Means over a latent give such gradients. With eps 1e-8 and a root mean square of 5e-9 a
    published run moved at a third of its learning rate. Its remedy was eps 1e-15
    (Tencent-Hunyuan/UniRL#407).

    Args:
        parameters: those that have a gradient; `norm` is theirs, as the optimizer sees it.
    """
    eps = optimizer.param_groups[0].get("eps")
    if not isinstance(eps, float) or norm <= 0:
        return None
    size = norm / math.sqrt(sum(parameter.numel() for parameter in parameters))  # root mean square
    if size >= eps:
        return None
    return (
        f"algorithm.optimizer.eps = {eps:g} is {eps / size:.3g} times the gradient's root mean "
        f"square, {size:.2g}: updates are {size / (size + eps):.2g} of the learning rate; set "
        f"algorithm.optimizer.eps to {10 ** math.floor(math.log10(size) - 2):.0e} or less"
    )
