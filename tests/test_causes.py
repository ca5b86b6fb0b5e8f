"""The one table of causes, and that everything which lists causes reads it."""

import meshwright
from meshwright import causes
from meshwright.answer.intervals import class_sigma
from meshwright.cost import standard_on
from meshwright.graph import QUEUES
from meshwright.simulate.attribute import NAMES
from meshwright.simulate.step import simulate
from tests.sources import FILES, SOURCE, facts


def test_no_file_besides_the_table_lists_causes():
    listed = {"elementwise", "recompute"}
    lists = {
        file.relative_to(SOURCE).as_posix() for file in FILES if any(listed <= words for words in facts(file).words)
    }
    assert lists == set()


def test_causes_have_names_of_their_own_and_errors_that_something_can_measure():
    names = [cause.name for cause in (*causes.STEP, *causes.JOB)]
    assert len(names) == len(set(names))
    assert set(causes.ERROR_CLASS.values()) == set(causes.ERROR_CLASSES)


def test_exposed_communication_is_named_as_its_queue():
    stems = {queue.split("_")[0] for queue in QUEUES}
    # what is moved between tiers is on queues of its own
    assert set(causes.of_kind("exchange")) - {"offload"} <= stems
    assert {"h2d", "d2h", "nvme"} <= set(QUEUES)


def test_an_attribution_and_the_errors_of_a_step_have_the_entries_of_the_table():
    model, cluster = meshwright.load_model("llama3-8b"), meshwright.load_cluster("8xh100")
    train, plan = meshwright.parse_train("batch=16,seq=4096"), meshwright.parse_plan("tp2 pp2")
    found = meshwright.predict(model, cluster, train, plan, detail=False)
    # in the table's order; work is equal here, and nobody waits for what is not
    assert (
        tuple(found.attribution)
        == NAMES
        == tuple(name for name in causes.WORDS if name not in ("unequal", "stragglers", "data"))
    )
    run = simulate(plan.on(cluster.num_devices), model, cluster, train, standard_on(cluster))
    assert set(class_sigma(run)) == set(causes.ERROR_CLASSES)
