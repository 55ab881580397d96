"""Functional collectives: asynchronous, differentiable, with the signatures of PyTorch's own."""

from shardwise._faces import expose
from shardwise.comm.async_tensor import AsyncCollectiveTensor
from shardwise.comm.functional import (
    all_gather_into_tensor_coalesced,
    all_gather_single,
    all_gather_single_autograd,
    all_gather_single_coalesced,
    all_gather_tensor,
    all_gather_tensor_autograd,
    all_reduce,
    all_reduce_coalesced,
    all_to_all_single,
    all_to_all_single_autograd,
    broadcast,
    permute_tensor,
    reduce_scatter_single,
    reduce_scatter_single_autograd,
    reduce_scatter_single_coalesced,
    reduce_scatter_tensor,
    reduce_scatter_tensor_autograd,
    reduce_scatter_tensor_coalesced,
    sum_backward,
    sum_forward,
    wait_tensor,
)

__all__ = [
    "AsyncCollectiveTensor",
    "all_gather_into_tensor_coalesced",
    "all_gather_single",
    "all_gather_single_autograd",
    "all_gather_single_coalesced",
    "all_gather_tensor",
    "all_gather_tensor_autograd",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all_single",
    "all_to_all_single_autograd",
    "broadcast",
    "permute_tensor",
    "reduce_scatter_single",
    "reduce_scatter_single_autograd",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor",
    "reduce_scatter_tensor_autograd",
    "reduce_scatter_tensor_coalesced",
    "sum_backward",
    "sum_forward",
    "wait_tensor",
]

expose(__name__, globals(), __all__)
