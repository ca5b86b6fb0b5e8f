"""A machine whose tables follow simple laws, and the times of a model on it."""

from meshwright.run import bench
from meshwright.run.bench import operators as bench_operators
from meshwright.spec.dimensions import transformer
from meshwright.spec.workload import Train

FLOPS, BYTES = 5e10, 8e9
#: How many times an operator's own bytes its kernels move.
COPIES = 4.0
OPERATORS = [f"{name}{way}" for name in bench_operators.OPERATORS for way in ("", " backward")]
MODEL = transformer(layers=4, hidden=64, heads=4, vocab=128, ffn=128, gated=True)
TRAIN = Train(global_batch=8, seq_len=64, dtype="fp32")


def timed(seconds):
    return bench.TimedRepeats(seconds, 0.0)


def machine(passes=()):
    """A machine whose tables follow simple laws."""
    shapes = [(m, n, k) for m in bench.FULL.gemm_m for n in bench.FULL.gemm_nk for k in bench.FULL.gemm_nk]
    cores = [
        (h, s, d) for h in bench.FULL.attention[0] for s in bench.FULL.attention[1] for d in bench.FULL.attention[2]
    ]
    return bench.Machine(
        kind="cpu",
        cores=2,
        memory_bytes=2**34,
        name="test",
        dtypes=("fp32",),
        gemm={"fp32": [timed(2 * m * n * k / FLOPS) for m, n, k in shapes]},
        attention={"fp32": [timed(2 * h * s * s * d / FLOPS) for h, s, d in cores]},
        attention_backward={"fp32": [timed(5 * h * s * s * d / FLOPS) for h, s, d in cores]},
        elementwise=[timed(1e-6 + size / BYTES) for size in bench.FULL.elementwise],
        operators={
            name: [timed(1e-5 + COPIES * size / BYTES) for size in bench_operators.sizes(name, 4, bench.FULL)]
            for name in OPERATORS
        },
        collectives={
            f"{op} {n}": [timed(1e-4 + size / 1e9) for size in bench.FULL.collective_bytes]
            for op in bench.OPS
            for n in (2, 4)
        },
        staging={what: [timed(1e-5 + size / 4e9) for size in bench.FULL.staged_bytes] for what in ("gather", "reduce")},
        passes=list(passes),
        comm_slowdown=0.5,
        base_bytes=3e8,
        seconds=1.0,
    )


def pass_of(layer, forward=1.0, backward=2.0, step=12.0, kept_bytes=0.0, optimizer=0.1):
    return bench.ModelTimes(
        layer=layer,
        forward=timed(forward),
        backward=timed(backward),
        optimizer=timed(optimizer),
        step=timed(step),
        between=timed(max(step - bench.MICROBATCHES * (forward + backward) - optimizer, 1e-9)),
        kept_bytes=kept_bytes,
    )
