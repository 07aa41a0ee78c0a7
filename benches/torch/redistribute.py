#!/usr/bin/env python3
"""What PyTorch's DTensor receives per rank for every pair of layouts on a 2x4 mesh, as JSON.

    python3 benches/torch/redistribute.py > benches/torch/redistribute.json

Layouts are R, S(0), S(1) on each axis, with P(sum) in the source too. No rank is started: the planner is asked for its
steps, which are counted. A tensor of N bytes that a rank holds whole before an all-gather's end brings it n - 1 parts of n,
and so on as collectives do; everything is in units of N, of a tensor whose sizes divide. `default` is the plan of
`redistribute`, `graph` that under `use_min_cost_redistribution_plan`, for a tensor of 256 MiB, and `graph_small` for one of
16 KiB.
"""

import itertools
import json
from fractions import Fraction

import torch
import torch.distributed as dist
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor import _redistribute as r
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

MESH = (2, 4)
LETTERS = {"R": Replicate(), "S0": Shard(0), "S1": Shard(1), "P": Partial("sum")}


def spec(mesh, names, size):
    meta = TensorMeta(torch.Size((size, size)), (size, 1), torch.float32)
    return DTensorSpec(mesh, tuple(LETTERS[n] for n in names), tensor_meta=meta)


def received(infos, src):
    """Bytes that a rank receives in these steps, in units of the whole, and their number."""
    held = Fraction(1)
    for n, name in zip(MESH, src):
        held /= n if name.startswith("S") else 1
    total, calls = Fraction(0), 0
    for info in infos:
        old, new = info.src_dst_placements
        dims = getattr(info, "original_mesh_dims", (info.mesh_dim,))
        n = 1
        for d in dims:
            n *= MESH[d]
        calls += not old.is_replicate()
        if old.is_partial() and new.is_replicate():
            total += 2 * held * (n - 1) / n
        elif old.is_partial() and new.is_shard():
            total += held * (n - 1) / n
            held /= n
        elif old.is_shard() and new.is_replicate():
            held *= n
            total += held * (n - 1) / n
        elif old.is_shard() and new.is_shard():
            total += held * (n - 1) / n
        elif old.is_replicate() and new.is_shard():
            held /= n
        else:
            raise AssertionError(f"{old} to {new}")
    return total, calls


def main():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    mesh = init_device_mesh("cpu", MESH, mesh_dim_names=("a", "b"))
    rows, totals = [], {}
    for src in itertools.product(LETTERS, repeat=2):
        for dst in itertools.product([n for n in LETTERS if n != "P"], repeat=2):
            if src == dst:
                continue
            row = {"from": list(src), "to": list(dst)}
            for name, size, graph in [
                ("default", 8192, False),
                ("graph", 8192, True),
                ("graph_small", 64, True),
            ]:
                infos = r._gen_transform_infos_non_cached(spec(mesh, src, size), spec(mesh, dst, size), graph)
                bytes_, calls = received(infos, src)
                row[name] = [float(bytes_), calls]
                key = f"{name}, {'with' if 'P' in src else 'without'} P"
                totals[key] = totals.get(key, 0) + bytes_
            rows.append(row)
    result = {
        "torch": torch.__version__,
        "mesh": MESH,
        "totals": {k: float(v) for k, v in totals.items()},
        "pairs": rows,
    }
    text = json.dumps(result["pairs"]).replace("}, ", "},\n")
    head = {k: v for k, v in result.items() if k != "pairs"}
    print(json.dumps(head, indent=1)[:-2] + ',\n "pairs": ' + text + "\n}")


if __name__ == "__main__":
    main()
