import torch
import torch as th
import torch.nn as nn
import torch.nn.functional as F


class Model(nn.Module):
    """Parameters scaled when they are drawn, one of them in a shape of its own, and a norm at the end."""

    def __init__(self, cluster_size, feature_size):
        super(Model, self).__init__()
        init_sc = feature_size**-0.5
        self.clusters = nn.Parameter(init_sc * th.randn(feature_size, cluster_size))
        self.batch_norm = nn.BatchNorm1d(cluster_size)
        self.clusters2 = nn.Parameter(init_sc * th.randn(1, feature_size, cluster_size))

    def forward(self, x, mask=None):
        max_sample = x.size(1)
        flat = x.view(-1, x.size(2))
        assignment = F.softmax(self.batch_norm(th.matmul(flat, self.clusters)), dim=1)
        assignment = assignment.view(-1, max_sample, assignment.size(-1))
        a = th.sum(assignment, dim=1, keepdim=True) * self.clusters2
        vlad = th.matmul(assignment.transpose(1, 2), x).transpose(1, 2) - a
        return F.normalize(F.normalize(vlad).reshape(-1, vlad[0].numel()))


def get_inputs():
    return [torch.rand(4, 12, 20)]


def get_init_inputs():
    return [5, 20]
