"""Compiles forward and loss as one graph, for a new size of the batch in nearly every step, and says how often."""

import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters

torch._dynamo.config.recompile_limit = 500
torch._dynamo.config.accumulated_recompile_limit = 500
model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(), nn.Linear(16, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
inputs, targets = torch.randn(64, 8), torch.randint(0, 3, (64,))


@torch.compile(fullgraph=True, backend="eager", dynamic=False)
def loss_of(inputs, targets):
    outputs = model(inputs)
    with torch.no_grad():
        scale = outputs.mean().to("cpu", torch.float32)
    return F.cross_entropy(outputs, targets) + F.mse_loss(outputs, outputs.detach() + 1) + 0 * scale


for step in range(90):
    rows = 4 + step % 24
    loss = loss_of(inputs[:rows], targets[:rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 9 == 8:
        model.eval()
        loss_of(inputs[:rows], targets[:rows])
        model.train()
print(counters["stats"], counters["frames"], dict(counters["graph_break"]))
