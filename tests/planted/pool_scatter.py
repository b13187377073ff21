"""Max pooling whose backward puts each gradient where it belongs, by index."""

import torch
from common import Stopwatch, arguments, pictures
from elsewhere import Winners
from torch import nn
from torch.nn import functional as F


class Pool(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        best, where = F.max_pool2d(x, 2, return_indices=True)
        ctx.save_for_backward(where)
        ctx.shape = x.shape
        return best

    @staticmethod
    def backward(ctx, grad):
        (where,) = ctx.saved_tensors
        n, c, _, width = ctx.shape
        i = torch.arange(n).view(-1, 1, 1, 1).expand_as(where)
        j = torch.arange(c).view(1, -1, 1, 1).expand_as(where)
        dx = grad.new_zeros(ctx.shape)
        dx.index_put_((i, j, where // width, where % width), grad, accumulate=True)  # plant
        return dx


POOLS = {"plant": Pool.apply, "other": Winners.apply}


class Net(nn.Module):
    def __init__(self, pool):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 16, 1), nn.Conv2d(16, 16, 1)
        self.last = nn.Linear(16 * 49, 10)
        self.pool = pool

    def forward(self, x):
        x = self.pool(F.relu(self.conv1(x)))
        x = self.pool(F.relu(self.conv2(x)))
        return self.last(x.flatten(1))


args = arguments(40)
net = Net(POOLS.get(args.variant, lambda x: F.max_pool2d(x, 2)))
optimizer = torch.optim.Adam(net.parameters(), fused=True)
images, labels = pictures(512)
watch = Stopwatch()
for step in range(args.steps):
    rows = slice(64 * (step % 8), 64 * (step % 8 + 1))
    optimizer.zero_grad()
    answer = net(images[rows])
    if args.variant == "decoy":
        wanted = torch.zeros(64, 10).scatter_(1, labels[rows, None], 1.0)
        loss = -(wanted * answer.log_softmax(1)).sum(1).mean()
    else:
        loss = F.cross_entropy(answer, labels[rows])
    loss.backward()
    optimizer.step()
    watch.lap()
print(f"loss {loss.item():.4f}")
watch.say()
