"""Each promise stands on its page and has a test, which depends on neither time nor luck."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from promises import PROMISES, TESTS

CHECKOUT = Path(__file__).resolve().parents[2]


def words(text):
    """The text without marks of a quote or a comment, with one space between words."""
    return re.sub(r"\s+", " ", text)


@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise.sentence[:40])
def test_a_promise_stands_on_its_page_and_has_a_test(promise):
    assert words(promise.sentence) in words((CHECKOUT / promise.page).read_text("utf-8"))
    for test in promise.tests:
        path, _, name = test.partition("[")[0].partition("::")
        functions = ast.walk(ast.parse((CHECKOUT / path).read_text("utf-8")))
        names = {node.name for node in functions if isinstance(node, ast.FunctionDef)}
        assert not name or name in names, test


def quick_files():
    """What `tests/run.py` runs whole, the files of the tests for promises, the scripts that these
    run, and what all share.
    """
    paths = {CHECKOUT / test.partition("::")[0] for test in TESTS}
    for test in TESTS:
        path, _, name = test.partition("[")[0].partition("::")
        for node in ast.parse((CHECKOUT / path).read_text("utf-8")).body:
            if not isinstance(node, ast.FunctionDef) or node.name == name:
                named = re.findall(r"'(\w+\.py)'", ast.unparse(node))
                paths.update((CHECKOUT / path).with_name(script) for script in named)
    for folder in ("unit", "smoke", "support"):
        paths.update((CHECKOUT / "tests" / folder).rglob("*.py"))
    return sorted(path for path in paths - {Path(__file__)} if path.exists())


def is_quick(path, function):
    """Return whether a test is in the quick run; of a file of it, others may not be."""
    whole = path.relative_to(CHECKOUT / "tests").parts[0] in ("unit", "smoke")
    return whole or any(
        test.partition("[")[0].endswith(f"/{path.name}::{function}") for test in TESTS
    )


def is_short(node):
    return isinstance(node, ast.Constant) and type(node.value) in (int, float) and node.value < 600


def luck_in(path):
    """Yield each place that sleeps, waits for so many seconds, compares with the clock, or kills at
    random: the function around it, and the code.
    """
    text = path.read_text("utf-8")
    draws = bool(re.search(r"^import random$|default_rng", text, re.MULTILINE))
    todo = [(ast.parse(text), "")]
    while todo:
        node, function = todo.pop()
        if isinstance(node, ast.FunctionDef):
            function = node.name
        todo += [(child, function) for child in ast.iter_child_nodes(node)]
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            # A script in a string.
            for line in re.findall(r".*\bsleep\(.*", node.value):
                yield function, line.strip()
        elif isinstance(node, ast.Compare):
            code = ast.unparse(node)
            if re.search(r"monotonic\(|perf_counter\(", code):
                yield function, code
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            limits = [k.value for k in node.keywords if k.arg in ("timeout", "timeout_s")]
            if called.endswith((".join", ".wait", ".result", ".get", ".poll")):
                limits += node.args[:1]
            kills = called.endswith(("kill", "send_signal"))
            if called.endswith("sleep") or any(map(is_short, limits)) or (draws and kills):
                yield function, ast.unparse(node)


# Why such a place does not make a test depend on how fast a machine is, by file, function and code.
_POLLS = "polls for a file or a state, for as long as it takes"
_FOR_EVER = "stands for a process that does not end by itself"
_OF_OTHERS = "a test that is not in the quick run uses it"
REASONS = {
    "processes/restarted_training.py on_train_batch_end: time.sleep(0.01)": _POLLS,
    'processes/test_launch.py : while pathlib.Path(f"/proc/{pid}").exists(): time.sleep(0.01)': (
        _POLLS
    ),
    "processes/held_step.py kill_the_holder: time.sleep(0.01)": _POLLS,
    "processes/test_launch.py : time.sleep(0.01)": _POLLS,
    "processes/test_launch.py : time.sleep(float(sys.argv[2]))": _OF_OTHERS,
    "processes/test_launch.py : while not (here / 'evaluating').exists(): time.sleep(0.01)": _POLLS,
    "processes/test_restarts.py : time.sleep(0.01)": _POLLS,
    "processes/test_run.py : time.sleep(0.05)  # the other may be so late that all would be over": (
        _POLLS
    ),
    "processes/test_run.py : time.sleep(3600)": _FOR_EVER,
    'processes/test_run.py : while not os.path.exists("end"): time.sleep(0.05)': _POLLS,
    "support/batch_callbacks.py on_train_batch_end: time.sleep(self.seconds)": _OF_OTHERS,
    "support/killed_and_restarted.py run: self.is_over.wait(0.005)": _OF_OTHERS,
    "support/launched.py : time.sleep(0.01)": _POLLS,
    "support/process_checks.py wait_for: time.monotonic() > deadline": "ten minutes: it hangs",
    "support/process_checks.py wait_for: time.sleep(0.02)": _POLLS,
    "unit/test_cluster.py ask_servers: clock.sleep(2 * hang_limit())": "moves a clock of its own",
    "unit/test_evaluator.py test_it_ends_when_nothing_comes_in_time: sidecar(directory).start("
    "timeout=0.0)": "the limit is over at once",
    "unit/test_inbox.py handler: time.sleep(0.1)": "longer than the wait, which is 0.05 s",
    "unit/test_inbox.py test_a_signal_whose_handler_lasts_longer_than_the_wait_does_not_make_it_"
    "endless: inbox.get(0.05)": "nothing comes, and the handler lasts longer",
    "unit/test_inbox.py test_an_exception_of_a_signal_handler_leaves_the_inbox_usable: inbox.get("
    "1.0)": "the item is there",
    "unit/test_inbox.py test_items_come_in_their_order: inbox.get(1.0)": "the items are there",
    "unit/test_removals.py : time.sleep(3600)": _FOR_EVER,
    "unit/test_run_end.py test_a_task_gives_up_without_a_chief: RunEndWatch(chief, PS, port=port, "
    "timeout_s=0.2, say=said.append)": "nobody answers, whenever the limit is over",
    "unit/test_run_end.py test_who_has_not_asked_is_returned: announced('127.0.0.1', free_port(), "
    "0, [PS], timeout_s=0.1)": "nobody asks, whenever the limit is over",
    "unit/test_tracing.py time: self.closed.wait(0.5)": (
        "holds a thread until the channel is closed, and goes on if that waits for the thread"
    ),
    "unit/test_tracing.py test_a_channel_is_closed_when_nothing_watches_it: thread.join(2.0)": (
        "threads of gRPC that may stay; the one that is looked at has ended"
    ),
    "unit/test_supervision.py test_a_script_tells_its_supervisor: before < notice.time < "
    "time.monotonic()": "the order of three readings of a clock",
    **{
        f"unit/test_synchronous_admission.py {name}: admission.join({worker})": "no wait: a worker"
        for name in (
            "test_steps_are_dealt_out_evenly",
            "test_with_backups_nobody_waits_for_a_slow_worker_to_be_given_steps",
        )
        for worker in (0, 1)
    },
}


def test_no_test_of_the_quick_run_depends_on_time():
    found = {
        f"{path.relative_to(CHECKOUT / 'tests')} {function}: {code}"
        for path in quick_files()
        for function, code in luck_in(path)
        if not function.startswith("test_") or is_quick(path, function)
    }
    assert found == set(REASONS)
