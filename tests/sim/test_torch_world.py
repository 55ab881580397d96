"""The public functions of `torch.distributed`, unmodified, on simulated ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from shardwise.mesh.world import current_world
from shardwise.sim import run

SIZE = 4


def whole(shape: int = 3) -> list[torch.Tensor]:
    return [torch.arange(float(shape)) + 10 * rank for rank in range(SIZE)]


def test_who_am_i() -> None:
    def program() -> tuple[object, ...]:
        dist.init_process_group("gloo", init_method="env://")
        return dist.is_initialized(), dist.get_rank(), dist.get_world_size(), dist.get_backend()

    assert run(program, SIZE) == [(True, rank, SIZE, "gloo") for rank in range(SIZE)]
    assert not dist.is_initialized()


def test_groups_end_and_begin_again() -> None:
    def program() -> list[object]:
        dist.init_process_group()
        dist.destroy_process_group(dist.new_group([0, dist.get_world_size() - 1]))
        dist.destroy_process_group()
        ended = dist.is_initialized()
        dist.init_process_group()
        x = torch.ones(1)
        dist.all_reduce(x)
        return [ended, x.item()]

    assert run(program, SIZE) == [[False, 4.0]] * SIZE


def test_new_groups() -> None:
    def program() -> list[object]:
        odd = dist.new_group([3, 1])
        alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        x = torch.tensor([float(dist.get_rank())])
        if dist.get_rank() in (1, 3):
            dist.all_reduce(x, group=odd)
        dist.all_reduce(x, group=alone)
        return [x.item(), dist.get_rank(odd), dist.get_world_size(odd), dist.get_world_size(alone)]

    assert run(program, SIZE) == [[0, -1, -1, 1], [4, 0, 2, 1], [2, -1, -1, 1], [4, 1, 2, 1]]


def test_subgroups() -> None:
    def program() -> float:
        mine, _ = dist.new_subgroups(2)
        x = torch.tensor([float(dist.get_rank())])
        dist.all_reduce(x, group=mine)
        return x.item()

    assert run(program, SIZE) == [1, 1, 5, 5]


def test_a_worlds_groups_are_known_to_torch() -> None:
    def program() -> float:
        group = current_world().group((1, 3) if dist.get_rank() % 2 else (0, 2)).process_group
        x = torch.tensor([float(dist.get_rank())])
        dist.broadcast(x, src=dist.get_global_rank(group, 1), group=group)
        return x.item()

    assert run(program, SIZE) == [2, 3, 2, 3]


def test_gather_and_scatter() -> None:
    inputs = whole()

    def program() -> list[torch.Tensor]:
        rank = dist.get_rank()
        gathered = [torch.zeros(3) for _ in range(SIZE)] if rank == 1 else None
        dist.gather(inputs[rank], gathered, dst=1)
        scattered = torch.zeros(3)
        dist.scatter(scattered, gathered, src=1)
        return [scattered, *(gathered or [])]

    results = run(program, SIZE)
    assert [len(result) for result in results] == [1, 1 + SIZE, 1, 1]
    assert torch.equal(torch.stack(results[1][1:]), torch.stack(inputs))
    assert torch.equal(torch.stack([result[0] for result in results]), torch.stack(inputs))


def test_lists_of_tensors() -> None:
    inputs = whole(SIZE)

    def program() -> tuple[torch.Tensor, ...]:
        x = inputs[dist.get_rank()]
        gathered = [torch.zeros(SIZE) for _ in range(SIZE)]
        dist.all_gather(gathered, x)
        exchanged = [torch.zeros(()) for _ in range(SIZE)]
        dist.all_to_all(exchanged, list(x.unbind()))
        part = torch.zeros(())
        dist.reduce_scatter(part, list(x.unbind()))
        return torch.stack(gathered), torch.stack(exchanged), part

    table = torch.stack(inputs)
    for rank, (gathered, exchanged, part) in enumerate(run(program, SIZE)):
        assert torch.equal(gathered, table)
        assert torch.equal(exchanged, table[:, rank])
        assert torch.equal(part, table.sum(0)[rank])


@pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")
def test_single_tensors() -> None:
    inputs = whole(SIZE)

    def program() -> tuple[torch.Tensor, ...]:
        x = inputs[dist.get_rank()]
        gathered, part, exchanged, reduced = torch.zeros(16), torch.zeros(1), torch.zeros(SIZE), x.clone()
        dist.all_gather_into_tensor(gathered, x)
        dist.reduce_scatter_tensor(part, x, op=dist.ReduceOp.AVG)
        dist.all_to_all_single(exchanged, x)
        dist.reduce(reduced, dst=2, op=dist.ReduceOp.MAX)
        return gathered, part, exchanged, reduced

    table = torch.stack(inputs)
    for rank, (gathered, part, exchanged, reduced) in enumerate(run(program, SIZE)):
        assert torch.equal(gathered, table.view(-1))
        assert torch.equal(part, table.mean(0)[rank : rank + 1])
        assert torch.equal(exchanged, table[:, rank])
        assert torch.equal(reduced, table.amax(0) if rank == 2 else inputs[rank])


def test_complex_numbers() -> None:
    def program() -> torch.Tensor:
        x = torch.complex(torch.ones(2), torch.full((2,), float(dist.get_rank())))
        dist.all_reduce(x)
        return x

    assert all(torch.equal(x, torch.complex(torch.full((2,), 4.0), torch.full((2,), 6.0))) for x in run(program, SIZE))


def test_messages() -> None:
    def ring() -> list[float]:
        rank, x, y = dist.get_rank(), torch.tensor([float(dist.get_rank())]), torch.zeros(1)
        sending = dist.isend(x, (rank + 1) % SIZE)
        dist.recv(y, (rank - 1) % SIZE)
        assert sending is not None
        sending.wait()
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.irecv, x, (rank + 1) % SIZE), dist.P2POp(dist.isend, y, (rank - 1) % SIZE)]
        )
        for work in works:
            work.wait()
        return [y.item(), x.item()]

    assert run(ring, SIZE) == [[3, 0], [0, 1], [1, 2], [2, 3]]


def test_messages_from_anybody_and_by_tag() -> None:
    def program() -> list[float]:
        rank, x = dist.get_rank(), torch.zeros(1)
        if rank:
            works = [dist.isend(torch.tensor([10.0 * rank + tag]), 0, tag=tag) for tag in (0, 1)]
            return [] if all(work.wait() for work in works if work is not None) else [x.item()]
        senders: list[float] = [dist.recv(x), dist.recv(x)]
        dist.recv(x, src=2, tag=1)
        late = x.item()
        dist.recv(x, src=1, tag=1)
        return [*sorted(senders), late, x.item()]

    assert run(program, 3) == [[1, 2, 21, 11], [], []]


def test_objects() -> None:
    def program() -> list[object]:
        rank = dist.get_rank()
        everything: list[object] = [None] * SIZE
        dist.all_gather_object(everything, {"rank": rank, "text": "x" * rank})
        shared: list[object] = ["from rank 2" if rank == 2 else None]
        dist.broadcast_object_list(shared, src=2)
        return [everything, shared]

    expected = [[{"rank": rank, "text": "x" * rank} for rank in range(SIZE)], ["from rank 2"]]
    assert run(program, SIZE) == [expected] * SIZE


def test_barriers_and_futures() -> None:
    def program() -> float:
        dist.barrier()
        dist.monitored_barrier()
        x = torch.ones(1)
        future = dist.all_reduce(x, async_op=True).get_future()
        return future.then(lambda done: done.value()[0].item()).wait()

    assert run(program, SIZE) == [4.0] * SIZE


def test_distributed_data_parallel() -> None:
    data = [torch.arange(6.0).view(2, 3) + rank for rank in range(2)]

    def program() -> list[torch.Tensor]:
        torch.manual_seed(dist.get_rank())  # the wrapper makes the ranks agree
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2))
        model(data[dist.get_rank()]).square().mean().backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    torch.manual_seed(0)
    plain = torch.nn.Linear(3, 2)
    plain(torch.cat(data)).square().mean().backward()
    for gradients in run(program, 2):
        torch.testing.assert_close(gradients, [parameter.grad for parameter in plain.parameters()])


def test_no_process_group_outside() -> None:
    run(dist.get_rank, 2)
    with pytest.raises(ValueError, match="has not been initialized"):
        dist.get_rank()
