"""A test for each promise of the README and of "What equals plain Keras".

`tests/run.py` runs these tests beside the unit and smoke tests. `tests/unit/test_promises.py` holds
that each sentence stands on its page, and that each test exists.
"""

from __future__ import annotations

from dataclasses import dataclass

README, HOW_IT_WORKS = "README.md", "docs/how_it_works.md"

ONE_WORKER, TWO_WORKERS = "tests/cluster/one_worker/", "tests/cluster/two_workers/"
PROCESSES, SMOKE, UNIT = "tests/processes/", "tests/smoke/", "tests/unit/"


@dataclass(frozen=True)
class Promise:
    """A sentence of a page, or a part of one, and the tests that show it."""

    page: str
    sentence: str
    tests: tuple[str, ...]


PROMISES = (
    Promise(
        README,
        "It does not work with `tf_keras`, nor with Keras on JAX or PyTorch.",
        (
            f"{SMOKE}test_keras_2.py::test_a_variable_of_keras_2_is_refused_in_the_scope",
            f"{UNIT}test_other_keras.py",
        ),
    ),
    Promise(
        README,
        "This trains a rating model on the 100,004 MovieLens ratings, with two workers and one "
        "parameter server (ps) on your machine, and prints its test error.",
        (f"{PROCESSES}test_examples.py::test_movielens_beats_the_mean_rating",),
    ),
    Promise(
        README,
        "Examples, each a script that runs as it is: [ratings](examples/movielens.py), [wide and "
        "deep](examples/wide_and_deep.py)",
        (f"{PROCESSES}test_examples.py::test_wide_and_deep_beats_the_mean_rating",),
    ),
    Promise(
        README,
        "Three lines of this script are kerasps's, each below its comment:",
        (f"{PROCESSES}test_documentation.py::test_every_example_runs",),
    ),
    Promise(
        README,
        "`fit`, `evaluate` and `predict` run on the workers.",
        (
            f"{TWO_WORKERS}test_other_methods.py::test_evaluate_equals_plain_keras",
            f"{TWO_WORKERS}test_other_methods.py::test_predict_equals_plain_keras",
            f"{TWO_WORKERS}test_fit.py::test_two_workers_learn",
        ),
    ),
    Promise(
        README,
        "They take arrays, `tf.data` datasets, generators, and "
        "`kerasps.DatasetCreator(dataset_fn)`, with which each worker reads its own files.",
        (f"{TWO_WORKERS}test_inputs.py::test_an_epoch_is_one_pass",),
    ),
    Promise(
        README,
        "`steps_per_epoch` counts the steps of all workers.",
        (f"{TWO_WORKERS}test_inputs.py::test_steps_per_epoch_beyond_one_workers_share",),
    ),
    Promise(
        README,
        "# Says how much memory and network it needs.",
        (f"{PROCESSES}test_plan.py::test_a_plan_is_what_a_run_does",),
    ),
    Promise(
        README,
        "# One machine: starts workers and ps, sets TF_CONFIG, runs the script, restarts what "
        "dies.",
        (
            f"{PROCESSES}test_launch.py::test_the_script_gets_its_arguments_and_the_cluster",
            f"{PROCESSES}test_restarts.py::test_a_training_goes_on_by_itself_whatever_is_killed",
        ),
    ),
    Promise(
        README,
        "# Several machines: the same command on each.",
        (f"{PROCESSES}test_run.py::test_all_end_with_the_exit_code_of_the_script",),
    ),
    Promise(
        README,
        "A step reads and updates only the rows that its batch looks up",
        (f"{ONE_WORKER}test_tables.py::test_load_report_counts_the_rows_of_each_ps",),
    ),
    Promise(
        README,
        "`kerasps.layers.DynamicEmbedding` is an embedding of any integers or strings",
        (
            f"{ONE_WORKER}test_dynamic.py::test_a_table_equals_a_fixed_one[Adagrad]",
            f"{ONE_WORKER}test_dynamic.py::test_only_training_makes_rows",
        ),
    ),
    Promise(
        README,
        "a partitioner spreads a table over several ps",
        (f"{TWO_WORKERS}test_fit.py::test_placement_is_balanced_and_prints",),
    ),
    Promise(
        README,
        "| steps lost | a loop by hand loses some: workers overwrite each other's counters | none "
        "| none |",
        (f"{TWO_WORKERS}test_fit.py::test_counts_are_exact_in_every_epoch",),
    ),
    Promise(
        README,
        "the others continue; each update is applied once, and History is exact",
        (f"{PROCESSES}test_promises.py::test_a_step_whose_worker_dies_is_done_once",),
    ),
    Promise(
        README,
        "The run resumes at its last backup",
        (f"{PROCESSES}test_restarts.py::test_a_training_goes_on_by_itself_whatever_is_killed",),
    ),
    Promise(
        README,
        "rows only; the optimizer sees the touched rows only, or all",
        (
            f"{ONE_WORKER}test_tables.py::test_lazy_update_equals_its_reference",
            f"{PROCESSES}test_other_clusters.py::test_the_same_holds_on_another_cluster"
            "[dense updates on one ps]",
        ),
    ),
    Promise(
        README,
        "With one worker, training gives the weights, the optimizer state and the History of plain "
        "Keras; tests show it.",
        (
            f"{ONE_WORKER}test_optimizers.py::test_optimizer_equals_plain_keras",
            f"{ONE_WORKER}test_optimizers.py::test_history_equals_plain_keras",
        ),
    ),
    Promise(
        README,
        "On embedding tables this holds with SGD without momentum or Adagrad, and with "
        '`sparse_updates="dense"` for every optimizer that Keras ships',
        (
            f"{ONE_WORKER}test_tables.py::test_table_is_bit_equal_to_plain_keras",
            f"{PROCESSES}test_other_clusters.py::test_the_same_holds_on_another_cluster"
            "[dense updates on one ps]",
        ),
    ),
    Promise(
        README,
        "`train_on_batch`, `test_on_batch` and `predict_on_batch`, and models compiled with "
        "`run_eagerly=True`, compute in the coordinator's process.",
        (
            f"{ONE_WORKER}test_eager.py"
            "::test_a_step_runs_as_python_here_and_its_variables_are_on_ps",
            f"{TWO_WORKERS}test_other_methods.py::test_train_on_batch_equals_plain_keras",
        ),
    ),
    Promise(
        README,
        '`update_mode="sync"` makes them synchronous.',
        (
            f"{PROCESSES}test_sync.py"
            "::test_two_workers_equal_one_process_on_batches_of_twice_the_size",
        ),
    ),
    Promise(
        HOW_IT_WORKS,
        "One worker equals plain Keras in weights, slots, counters, seeds and History, for every "
        "optimizer that Keras ships and every option that they share",
        (
            f"{ONE_WORKER}test_optimizers.py::test_optimizer_equals_plain_keras",
            f"{ONE_WORKER}test_optimizers.py::test_option_equals_plain_keras",
            f"{ONE_WORKER}test_models.py::test_layer_equals_plain_keras[dropout]",
        ),
    ),
    Promise(
        HOW_IT_WORKS,
        "By default [tables are updated lazily]",
        (f"{ONE_WORKER}test_tables.py::test_lazy_update_equals_its_reference",),
    ),
    Promise(
        HOW_IT_WORKS,
        "kerasps sums them first, as Keras does on its other backends.",
        (f"{ONE_WORKER}test_tables.py::test_table_is_bit_equal_to_plain_keras",),
    ),
)
# Those that are not in a folder which is run whole.
TESTS = sorted(
    {test for promise in PROMISES for test in promise.tests if not test.startswith((UNIT, SMOKE))}
)
