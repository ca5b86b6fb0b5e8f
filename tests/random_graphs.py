"""Random task graphs for property tests."""

from hypothesis import strategies as st

from meshwright.graph import QUEUES, GraphBuilder, RankClass

#: Binary fractions, so that sums are exact and ties are ties.
DURATIONS = st.integers(0, 12).map(lambda n: n / 4)


@st.composite
def graphs(draw, *, lags=False, max_tasks=14):
    """A graph of up to `max_tasks` tasks on 3 ranks, with collectives and edges, and its durations [num_keys]."""
    builder = GraphBuilder([RankClass(label=name, multiplicity=count) for name, count in zip("abc", (1, 2, 3))])
    n = draw(st.integers(1, max_tasks))
    streams = [builder.stream(rank, queue) for rank in range(3) for queue in QUEUES[:2]]
    for i in range(n):
        members = draw(st.lists(st.sampled_from(streams), min_size=1, max_size=3, unique=True))
        after = draw(st.lists(st.integers(0, i - 1), max_size=3, unique=True)) if i else []
        task = builder.add("op", f"key {draw(st.integers(0, 5))}", members, after, microbatch=i)
        if lags and draw(st.booleans()):
            builder.depend([task], [draw(st.integers(0, n - 1))], draw(st.integers(1, 2)))
    graph = builder.build()
    durations = draw(st.lists(DURATIONS, min_size=len(graph.keys), max_size=len(graph.keys)))
    return graph, durations
