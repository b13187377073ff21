"""What can't be captured of cuDNN's recurrent layers."""

from __future__ import annotations

import torch
from torch import nn
from torch.fx import GraphModule

from hotloop.lowering.side_effects import refused


def check_recurrent(model: nn.Module, device: torch.device) -> None:
    """cuDNN reads the weights of a recurrent layer as one piece of memory, which is no operation on them.

    Raises:
        PlanError: the model has such a layer there.
    """
    used = device.type == "cuda" and torch.backends.cudnn.enabled
    layer = next((name for name, module in model.named_modules() if isinstance(module, nn.RNNBase)), None)
    if used and layer is not None:
        raise refused(
            f"{layer or 'the model'} is one of torch's recurrent layers, whose weights cuDNN reads as one piece of memory",
            "layers made of tensor operations alone",
            fix="choose compile=none and graphs=none",
        )


def check_draws(graph: GraphModule) -> None:
    """cuDNN's recurrent layers draw from a state of their own, which would not follow from the step's seed.

    Raises:
        PlanError: a captured step has such draws.
    """
    for node in graph.graph.find_nodes(op="call_function", target=torch.ops.aten._cudnn_rnn.default):
        if node.args[_DROPOUT]:
            raise refused("cuDNN's recurrent layers with dropout draw from a state of their own", "dropout as a layer")


_DROPOUT = [one.name for one in torch.ops.aten._cudnn_rnn.default._schema.arguments].index("dropout")
